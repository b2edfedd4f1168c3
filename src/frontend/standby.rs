//! The process of the standby session: started, told what to keep, and started again when it ends.
//!
//! Nothing depends on it. While it is away, deleted files in use are what they are without one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::FrontendConfig;
use super::supervisor::{SEND_LIMIT, START_LIMIT, UNPIN_MAX, backoff, spawn};
use crate::control::blob;
use crate::control::message::{
    Attachment, BackendMessage, FrontendMessage, PROTOCOL, Restore, SessionNames, common_protocol,
};
use crate::control::socket::{Conn, Received};
use crate::region::Identity;

/// See the module.
#[derive(Default)]
pub struct Standby {
    process: Option<Process>,
    /// When to start the next one.
    start_at: Option<Instant>,
    /// Starts that came to nothing since the last that kept something.
    failures: u32,
}

struct Process {
    child: Child,
    pidfd: OwnedFd,
    conn: Conn,
    keeps: bool,
    /// It is killed then.
    kill_at: Option<Instant>,
    failed: Option<String>,
}

/// What has happened to it.
pub enum Event {
    /// It wants to know what to do.
    Hello,
    /// It keeps everything it was told to.
    Keeps,
    /// It has ended.
    Ended,
}

impl Standby {
    /// Starts one as soon as the supervisor has time.
    pub fn wanted(&mut self) {
        if self.process.is_none() {
            self.start_at = Some(Instant::now());
        }
    }

    /// It keeps what it was told to.
    pub fn keeps(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.keeps)
    }

    /// Its process, while it keeps something.
    pub fn pid(&self) -> Option<u32> {
        let process = self.process.as_ref().filter(|process| process.keeps);
        process.map(|process| process.child.id())
    }

    /// What to wait for.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let process = self.process.iter();
        process
            .flat_map(|p| [p.pidfd.as_fd(), p.conn.as_fd()])
            .collect()
    }

    /// When to look again although nothing has happened.
    pub fn due(&self) -> Option<Instant> {
        let kill_at = self.process.as_ref().and_then(|process| process.kill_at);
        [self.start_at, kill_at].into_iter().flatten().min()
    }

    /// Starts it if it is time to.
    pub fn look_after(&mut self) {
        let now = Instant::now();
        if self.start_at.is_some_and(|at| at <= now) {
            self.start_at = None;
            match spawn() {
                Ok((child, pidfd, conn)) => {
                    self.process = Some(Process {
                        child,
                        pidfd,
                        conn,
                        keeps: false,
                        kill_at: Some(now + START_LIMIT),
                        failed: None,
                    });
                }
                Err(e) => self.failed(&format!("cannot start a process: {e}")),
            }
        }
        if let Some(process) = &mut self.process
            && process.kill_at.is_some_and(|at| at <= now)
        {
            process.kill_at = None;
            let _ = process.child.kill();
        }
    }

    fn failed(&mut self, reason: &str) {
        tracing::warn!("the standby session has ended: {reason}");
        self.failures += 1;
        self.start_at = Some(Instant::now() + backoff(self.failures));
    }

    /// What it says, or that it has ended. None: nothing more at the moment.
    pub fn hear(&mut self) -> Option<Event> {
        let process = self.process.as_mut()?;
        loop {
            match process.conn.try_recv::<BackendMessage>() {
                Ok(Received::Message(BackendMessage::Hello { protocol, .. }, _)) => {
                    // It is this very program.
                    if common_protocol(PROTOCOL, protocol).is_some() {
                        return Some(Event::Hello);
                    }
                    process.kill_at = Some(Instant::now());
                }
                Ok(Received::Message(BackendMessage::Keeping, _)) => {
                    process.keeps = true;
                    process.kill_at = None;
                    self.failures = 0;
                    return Some(Event::Keeps);
                }
                Ok(Received::Message(BackendMessage::Failed { reason }, _)) => {
                    process.failed = Some(reason);
                }
                Ok(Received::Message(..)) => {}
                Ok(Received::Nothing) => return None,
                Ok(Received::Closed) | Err(_) => break,
            }
        }
        // It has no other reason to end the conversation. Should it live, it keeps nothing more.
        let _ = process.child.kill();
        let ended = process.child.wait();
        let reason = process.failed.take().unwrap_or_else(|| match ended {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        });
        self.process = None;
        self.failed(&reason);
        Some(Event::Ended)
    }

    /// Tells it what to be and what to keep.
    pub fn attach(
        &mut self,
        config: &FrontendConfig,
        secrets: Option<&OwnedFd>,
        session: SessionNames,
        restore: &Restore,
    ) {
        let Some(process) = &mut self.process else {
            return;
        };
        let text = serde_json::to_vec(restore).map_err(std::io::Error::from);
        let sealed = match text.and_then(|text| blob::seal("evermount-restore", &text)) {
            Ok(sealed) => sealed,
            Err(e) => {
                process.failed = Some(format!("cannot tell it what to keep: {e}"));
                process.kill_at = Some(Instant::now());
                return;
            }
        };
        let mut attachments = vec![Attachment::Restore];
        let mut fds = vec![sealed.as_fd()];
        if let Some(secrets) = secrets {
            attachments.push(Attachment::Secrets);
            fds.push(secrets.as_fd());
        }
        let keep = FrontendMessage::Keep {
            protocol: PROTOCOL.1,
            source: config.source.clone(),
            options: Box::new(config.backend.clone()),
            session,
            attachments,
        };
        process.send(&keep, &fds);
    }

    /// Tells it of changes.
    pub fn tell(&mut self, unpin: &[Identity], pin: &[Identity]) {
        let Some(process) = &mut self.process else {
            return;
        };
        for part in unpin.chunks(UNPIN_MAX) {
            let identities = part.to_vec();
            process.send(&FrontendMessage::Unpin { identities }, &[]);
        }
        for part in pin.chunks(UNPIN_MAX) {
            let identities = part.to_vec();
            process.send(&FrontendMessage::Pin { identities }, &[]);
        }
    }

    /// Asks it to end, and waits for that. True if it ended in order, and its session with it.
    pub fn end(&mut self, limit: Duration) -> bool {
        self.start_at = None;
        let Some(mut process) = self.process.take() else {
            return false;
        };
        process.send(&FrontendMessage::Retire, &[]);
        let mut fds = [PollFd::new(process.pidfd.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO);
        let _ = poll(&mut fds, limit);
        let _ = process.child.kill();
        match process.child.wait() {
            Ok(status) if status.success() => true,
            ended => {
                let ended = ended.map_or_else(|e| e.to_string(), |status| status.to_string());
                tracing::warn!("the standby session has not ended in order: {ended}");
                false
            }
        }
    }
}

impl Process {
    fn send(&mut self, message: &FrontendMessage, fds: &[BorrowedFd<'_>]) {
        if let Err(e) = self.conn.send(message, fds) {
            // It is dead, or hangs and keeps nothing new.
            self.failed = Some(format!(
                "it does not listen for {} s: {e}",
                SEND_LIMIT.as_secs()
            ));
            self.kill_at = Some(Instant::now());
        }
    }
}
