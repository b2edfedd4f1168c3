//! The third thread: starts and watches the backend, keeps the vault's door, answers `status`, and
//! looks after what depends on time.
//!
//! Only the exit of the backend's process (its pidfd) makes it dead: nothing it held is touched
//! before. The end of its socket is a hint.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command as Process, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::FrontendConfig;
use super::callers::{Fate, fate};
use super::core::Service;
use super::kernel::Shared;
use super::mount::unmount;
use super::notify::Stale;
use super::sessions::Sessions;
use super::standby::{self, Standby};
use crate::backend::VaultKey;
use crate::backend::server::EXIT_LOST;
use crate::control::blob;
use crate::control::message::{
    Attachment, LostLock, PROTOCOL, SessionNames, Writes, common_protocol,
};
use crate::control::socket::Received;
use crate::control::{
    BackendMessage, Command, CommandAnswer, Conn, ControlError, FrontendMessage, Listener, State,
    Status,
};
use crate::region::Identity;
use crate::region::retained::Retained;
use crate::sys;
use crate::wire::Errno;

/// How often callers and deadlines are looked at while something is held.
const TICK: Duration = Duration::from_millis(250);
/// A backend that is not ready by then is killed and tried again.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);
/// Longest time between two starts.
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A backend that was told to retire, or that closed its socket, has this long to exit.
const EXIT_LIMIT: Duration = Duration::from_millis(500);
/// Messages of a backend that are dealt with before anything else has its turn.
const MESSAGES_PER_STEP: usize = 64;
/// A backend that does not take an answer for this long is not worth waiting for.
pub(super) const SEND_LIMIT: Duration = Duration::from_secs(1);
/// Generations in a row that died over their first request, after which the next one has to wait.
const FRUITLESS_MAX: u32 = 5;
/// Objects in one message.
pub(super) const UNPIN_MAX: usize = 256;
/// Clients that may be connected at a time.
const CLIENTS_MAX: usize = 32;

struct Backend {
    child: Child,
    pidfd: OwnedFd,
    conn: Conn,
    /// The socket has ended; the process has not.
    hung_up: bool,
    ready: bool,
    generation: u32,
    kill_at: Option<Instant>,
    failed: Option<String>,
}

/// See the module.
pub struct Supervisor {
    shared: Arc<Shared>,
    config: FrontendConfig,
    mountpoint: PathBuf,
    signals: SignalFd,
    listener: Option<Listener>,
    clients: Vec<Conn>,
    backend: Option<Backend>,
    /// When to start the next one.
    start_at: Option<Instant>,
    generation: u32,
    /// Starts that came to nothing since the last that served.
    failures: u32,
    /// Generations in a row that served and died without having answered anything.
    fruitless: u32,
    takeovers: u64,
    backend_version: Option<String>,
    root: Option<Identity>,
    /// Configuration and key for the backend, sealed.
    secrets: Option<OwnedFd>,
    /// Of a store that acknowledges before it is done.
    retained: Option<Retained>,
    /// Of a store that has them.
    sessions: Option<Sessions>,
    /// If one is wanted.
    standby: Option<Standby>,
    reason: Option<String>,
    last_tick: Instant,
    requests_seen: u64,
}

impl Supervisor {
    /// Watches over a front-end. SIGTERM and SIGINT must be blocked in every thread
    /// ([`block_signals`]).
    pub fn new(
        shared: Arc<Shared>,
        config: FrontendConfig,
        secrets: Option<OwnedFd>,
        sessions: Option<Sessions>,
    ) -> std::io::Result<Supervisor> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let retained = match config.backend.ceph.writes {
            Writes::Retained => Some(Retained::create()?),
            Writes::Stored => None,
        };
        Ok(Supervisor {
            mountpoint: config.mount.mountpoint.clone(),
            standby: (config.standby && sessions.is_some()).then(Standby::default),
            signals: SignalFd::with_flags(&end_signals(), flags)?,
            shared,
            config,
            listener: None,
            clients: Vec::new(),
            backend: None,
            start_at: Some(Instant::now()),
            generation: 0,
            failures: 0,
            fruitless: 0,
            takeovers: 0,
            backend_version: None,
            root: None,
            secrets,
            retained,
            sessions,
            reason: None,
            last_tick: Instant::now(),
            requests_seen: 0,
        })
    }

    /// Listens to clients from now on.
    pub fn listen(&mut self, listener: Listener, mountpoint: PathBuf) {
        self.listener = Some(listener);
        self.mountpoint = mountpoint;
    }

    /// A backend serves.
    pub fn is_ready(&self) -> bool {
        self.backend.as_ref().is_some_and(|b| b.ready)
    }

    /// Why the last start came to nothing, if one did.
    pub fn failure(&self) -> Option<&str> {
        self.reason.as_deref().filter(|_| self.failures > 0)
    }

    /// Supervises until the mount is gone.
    pub fn run(&mut self) {
        while !self.shared.ended.load(Ordering::Acquire) {
            self.step(None);
        }
        self.stop();
    }

    /// Ends backend and standby: gently, then not.
    pub fn stop(&mut self) {
        let deadline = Instant::now() + self.config.backend.retire_limit();
        self.end_standby(deadline);
        // The session of a backend that died would keep other clients waiting, so the next one ends it,
        // and then its own. That it was killed a moment ago may only be seen when it ends.
        let ended = loop {
            let left = self.sessions.as_ref().is_some_and(Sessions::are_left);
            let left = left && self.root.is_some();
            while left && !self.is_ready() && Instant::now() < deadline {
                self.step(Some(TICK));
            }
            let ended = self.end_backend();
            if ended || !left || Instant::now() >= deadline {
                break ended;
            }
            self.backend_exited();
        };
        self.start_at = None;
        if self.unflushed() > 0 {
            tracing::error!(
                "{} acknowledged bytes were not written: the store did not take them in time",
                self.unflushed()
            );
        }
        if let Some(sessions) = self.sessions.take() {
            sessions.finish(ended);
        }
    }

    /// Acknowledged bytes that are not with the store.
    fn unflushed(&self) -> u64 {
        let retained = self.retained.as_ref();
        retained.map_or(0, |retained| retained.bytes().load(Ordering::Relaxed))
    }

    /// True if it ended in order, and its session with it.
    fn end_backend(&mut self) -> bool {
        let Some(backend) = &mut self.backend else {
            return false;
        };
        if backend.conn.send(&FrontendMessage::Retire, &[]).is_ok() {
            let limit = if self.config.source.has_sessions() {
                self.config.backend.retire_limit()
            } else {
                EXIT_LIMIT
            };
            let mut fds = [PollFd::new(backend.pidfd.as_fd(), PollFlags::POLLIN)];
            let _ = poll(
                &mut fds,
                PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO),
            );
        }
        let _ = backend.child.kill();
        let status = backend.child.wait();
        let ended = status.is_ok_and(|status| status.success());
        if ended {
            self.backend = None;
        }
        ended
    }

    /// Waits for something to happen, at most `limit`, and deals with it.
    pub fn step(&mut self, limit: Option<Duration>) {
        let now = Instant::now();
        if self.start_at.is_some_and(|at| at <= now) {
            self.start_backend();
        }
        let timeout = self.timeout(limit);
        let woken = self.wait(timeout);
        if woken.bell {
            let _ = self.shared.bell.read();
            self.unpin();
        }
        if woken.signal {
            self.end_signal();
        }
        if woken.conn {
            // Bounded: a backend that talks without end must not keep everything else waiting.
            self.hear_backend(MESSAGES_PER_STEP);
        }
        if woken.exited {
            // All it said before it died, which is no more than a socket buffer holds.
            self.hear_backend(usize::MAX);
            self.backend_exited();
        }
        if let Some(standby) = &mut self.standby {
            standby.look_after();
        }
        if woken.standby {
            self.hear_standby();
        }
        self.tell_standby();
        if woken.listener {
            self.accept();
        }
        if woken.clients {
            self.hear_clients();
        }
        self.kill_overdue();
        if self.last_tick.elapsed() >= TICK {
            self.last_tick = Instant::now();
            self.tick();
        }
    }

    /// How long to sleep. Without anything held and without traffic: until something happens.
    fn timeout(&mut self, limit: Option<Duration>) -> Option<Duration> {
        let now = Instant::now();
        let until = |at: Instant| at.saturating_duration_since(now);
        let mut timeouts: Vec<Duration> = limit.into_iter().collect();
        timeouts.extend(self.start_at.map(until));
        timeouts.extend(self.backend.as_ref().and_then(|b| b.kill_at).map(until));
        timeouts.extend(self.standby.as_ref().and_then(Standby::due).map(until));
        let busy = {
            let core = self.shared.core.lock();
            timeouts.extend(core.standby_due().map(|at| {
                let left = at.saturating_sub(sys::monotonic_ns());
                Duration::from_nanos(left)
            }));
            let requests = core.counters.requests;
            let traffic = std::mem::replace(&mut self.requests_seen, requests) != requests;
            // SYNC: the reader clears this after it has put a request into the core; set under
            // the core's lock, so either we see the request or it sees the flag.
            let busy = traffic || core.needs_ticks();
            self.shared
                .supervisor_sleeps
                .store(!busy, Ordering::Release);
            busy
        };
        if busy {
            timeouts.push(until(self.last_tick + TICK));
        }
        timeouts.into_iter().min()
    }

    fn wait(&self, timeout: Option<Duration>) -> Woken {
        let mut fds: Vec<BorrowedFd<'_>> = vec![self.shared.bell.as_fd(), self.signals.as_fd()];
        let backend = self.backend.as_ref();
        let pidfd_at = backend.map(|b| {
            fds.push(b.pidfd.as_fd());
            fds.len() - 1
        });
        let conn_at = backend.filter(|b| !b.hung_up).map(|b| {
            fds.push(b.conn.as_fd());
            fds.len() - 1
        });
        let standby_from = fds.len();
        fds.extend(self.standby.iter().flat_map(Standby::fds));
        let standby = standby_from..fds.len();
        let listener_at = self.listener.as_ref().map(|l| {
            fds.push(l.as_fd());
            fds.len() - 1
        });
        let clients_from = fds.len();
        fds.extend(self.clients.iter().map(AsFd::as_fd));
        let mut fds: Vec<PollFd<'_>> = fds
            .into_iter()
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
            .collect();
        // Rounded up: a timeout of 0.4 ms must not become a busy loop.
        let timeout = timeout.map_or(PollTimeout::NONE, |t| {
            let ms = t.as_micros().div_ceil(1000);
            PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
        });
        if poll(&mut fds, timeout).is_err() {
            return Woken::default(); // EINTR
        }
        let happened = |at: usize| fds[at].any().unwrap_or(true);
        Woken {
            bell: happened(0),
            signal: happened(1),
            exited: pidfd_at.is_some_and(happened),
            conn: conn_at.is_some_and(happened),
            standby: standby.clone().any(happened),
            listener: listener_at.is_some_and(happened),
            clients: (clients_from..fds.len()).any(happened),
        }
    }

    // ---- the backend -------------------------------------------------------------------------

    fn start_backend(&mut self) {
        self.start_at = None;
        self.generation += 1;
        match spawn() {
            Ok((child, pidfd, conn)) => {
                self.backend = Some(Backend {
                    child,
                    pidfd,
                    conn,
                    hung_up: false,
                    ready: false,
                    generation: self.generation,
                    kill_at: Some(Instant::now() + START_LIMIT),
                    failed: None,
                });
            }
            Err(e) => self.start_failed(format!("cannot start a backend process: {e}")),
        }
    }

    fn start_failed(&mut self, reason: String) {
        tracing::error!("{reason}");
        self.failures += 1;
        self.reason = Some(reason);
        self.start_at = Some(Instant::now() + backoff(self.failures));
    }

    fn hear_backend(&mut self, messages: usize) {
        for _ in 0..messages {
            let Some(backend) = &mut self.backend else {
                return;
            };
            match backend.conn.try_recv::<BackendMessage>() {
                Ok(Received::Message(message, fds)) => self.backend_says(message, fds),
                Ok(Received::Nothing) => return,
                Ok(Received::Closed) => {
                    backend.hung_up = true;
                    backend.kill_at = Some(Instant::now() + EXIT_LIMIT);
                    return;
                }
                Err(e) => {
                    backend.failed = Some(format!("backend broke the control protocol: {e}"));
                    backend.hung_up = true;
                    backend.kill_at = Some(Instant::now());
                    return;
                }
            }
        }
    }

    fn backend_says(&mut self, message: BackendMessage, fds: Vec<OwnedFd>) {
        let Some(backend) = &mut self.backend else {
            return;
        };
        let core = &self.shared.core;
        let sent = match message {
            BackendMessage::Hello {
                protocol, version, ..
            } => {
                let Some(common) = common_protocol(PROTOCOL, protocol) else {
                    backend.failed = Some(format!(
                        "backend {version} speaks control protocol {}..{}, this front-end {} speaks {}..{}; install releases that overlap",
                        protocol.0,
                        protocol.1,
                        env!("CARGO_PKG_VERSION"),
                        PROTOCOL.0,
                        PROTOCOL.1
                    ));
                    backend.kill_at = Some(Instant::now());
                    return;
                };
                self.backend_version = Some(version);
                return self.attach(common);
            }
            BackendMessage::Ready {
                root,
                needs_paths,
                lost_locks,
                ended,
            } => {
                self.backend_ready(root, needs_paths, &lost_locks);
                if self.is_ready()
                    && let Some(sessions) = &mut self.sessions
                {
                    sessions.ready(&ended);
                }
                return;
            }
            BackendMessage::Gone { identities } => {
                core.lock().lose_files(&identities);
                Ok(())
            }
            // Said by a standby.
            BackendMessage::Keeping => Ok(()),
            BackendMessage::Stale { ranges } => {
                let core = core.lock();
                let stale = ranges.iter().filter_map(|range| {
                    Some(Stale {
                        nodeid: core.tables.find(&range.identity)?,
                        off: range.off,
                        len: range.len,
                    })
                });
                self.shared.notifier.push(stale);
                Ok(())
            }
            BackendMessage::Deposit { id, key } => {
                let mut core = core.lock();
                let known = match key {
                    VaultKey::Inode(identity) => match core.tables.find(&identity) {
                        Some(nodeid) => {
                            core.tables.set_vaulted(nodeid, true);
                            true
                        }
                        None => false,
                    },
                    VaultKey::Root | VaultKey::Lock { .. } => true,
                };
                let kept = match fds.into_iter().next() {
                    // The root is the first generation's; no later one may change what is served.
                    Some(_) if key == VaultKey::Root && core.vault.has(&key) => Err(Errno::EBUSY),
                    Some(fd) => core.vault.deposit(key, fd, known),
                    None => Err(Errno::EBADF),
                };
                drop(core);
                let errno = kept.err().map_or(0, Errno::raw);
                answer(&backend.conn, id, errno, None)
            }
            BackendMessage::Withdraw { id, key } => {
                let withdrawn = core.lock().vault.withdraw(&key);
                match withdrawn {
                    Ok(fd) => answer(&backend.conn, id, 0, fd),
                    Err(errno) => answer(&backend.conn, id, errno.raw(), None),
                }
            }
            BackendMessage::Discard { key } => {
                let mut core = core.lock();
                core.vault.discard(&key);
                if let VaultKey::Inode(identity) = key
                    && let Some(nodeid) = core.tables.find(&identity)
                {
                    core.tables.set_vaulted(nodeid, false);
                }
                Ok(())
            }
            BackendMessage::Failed { reason } => {
                backend.failed = Some(reason);
                Ok(())
            }
        };
        if let Err(e) = sent {
            tracing::warn!("answer to the backend: {e}");
            // It does not listen, so it would wait for ever.
            backend.kill_at = Some(Instant::now());
        }
    }

    /// Gives the backend everything it needs to serve.
    fn attach(&mut self, protocol: u32) {
        let Some(backend) = &mut self.backend else {
            return;
        };
        let mut session = SessionNames::default();
        let mut attachments = Vec::new();
        let mut sealed = Vec::new();
        if let Some(sessions) = &mut self.sessions {
            session = sessions.next(backend.generation);
            let restore = self.shared.core.lock().restore(&self.shared.io);
            let text = serde_json::to_vec(&restore).map_err(std::io::Error::from);
            match text.and_then(|text| blob::seal("evermount-restore", &text)) {
                Ok(fd) => {
                    attachments.push(Attachment::Restore);
                    sealed.push(fd);
                }
                Err(e) => {
                    backend.failed = Some(format!("cannot tell the backend what is open: {e}"));
                    backend.kill_at = Some(Instant::now());
                    return;
                }
            }
        }
        let mut fds = vec![self.shared.io.region.as_fd()];
        fds.extend(sealed.iter().map(AsFd::as_fd));
        if let Some(secrets) = &self.secrets {
            attachments.push(Attachment::Secrets);
            fds.push(secrets.as_fd());
        }
        if let Some(retained) = &self.retained {
            attachments.push(Attachment::Retained);
            fds.push(retained.as_fd());
        }
        let attach = FrontendMessage::Attach {
            protocol,
            generation: backend.generation,
            source: self.config.source.clone(),
            options: Box::new(self.config.backend.clone()),
            session,
            attachments,
        };
        if let Err(e) = backend.conn.send(&attach, &fds) {
            tracing::warn!("attach: {e}");
            backend.kill_at = Some(Instant::now());
        }
    }

    /// Tells the backend which objects without a name nobody knows any more.
    fn unpin(&mut self) {
        // One that is not ready yet, or not there, learns it when it is: it may just be told of them.
        let Some(backend) = self.backend.as_ref().filter(|b| b.ready) else {
            return;
        };
        let identities = std::mem::take(&mut self.shared.core.lock().unpin);
        for part in identities.chunks(UNPIN_MAX) {
            let identities = part.to_vec();
            if let Err(e) = backend
                .conn
                .send(&FrontendMessage::Unpin { identities }, &[])
            {
                tracing::warn!("unpin: {e}");
            }
        }
    }

    fn backend_ready(&mut self, root: Identity, needs_paths: bool, lost_locks: &[LostLock]) {
        let Some(backend) = &mut self.backend else {
            return;
        };
        if self.root.is_some_and(|known| known != root) {
            backend.failed = Some(format!(
                "{} is not the directory that was mounted any more; put it back, or unmount",
                self.config.source
            ));
            backend.kill_at = Some(Instant::now());
            return;
        }
        backend.ready = true;
        backend.kill_at = None;
        let generation = backend.generation;
        self.failures = 0;
        let mut core = self.shared.core.lock();
        if self.root.replace(root).is_none() {
            core.tables
                .set_root(&root, &crate::wire::abi::Attr::default());
            if let Some(standby) = &mut self.standby {
                standby.wanted();
            }
        } else {
            self.takeovers += 1;
        }
        core.lose_locks(&self.shared.io, lost_locks);
        core.backend_ready(&self.shared.io, generation, needs_paths);
        self.shared.made_room();
        let attributes = std::mem::take(&mut core.stale);
        let unseen = if self.config.source.has_sessions() && generation > 1 {
            core.open_nodes()
        } else {
            Vec::new()
        };
        drop(core);
        self.shared.progress.notify_all();
        let notifier = &self.shared.notifier;
        notifier.push(unseen.into_iter().map(Stale::everything));
        notifier.push(attributes.into_iter().map(Stale::attributes));
        self.unpin();
    }

    fn backend_exited(&mut self) {
        let Some(mut backend) = self.backend.take() else {
            return;
        };
        // Without a status (somebody else has waited for it) the cause is unknown.
        let status = backend.child.wait();
        let own_doing = status.as_ref().is_ok_and(|status| own_doing(*status));
        let mut core = self.shared.core.lock();
        let fruitful = core.backend_died(&self.shared.io, own_doing);
        let after_notice = std::mem::take(&mut core.after_notice);
        drop(core);
        for delivery in after_notice {
            self.shared.hand_out(delivery);
        }
        self.shared.made_room();
        let reason = backend.failed.unwrap_or_else(|| match &status {
            Ok(status) => describe(*status),
            Err(e) => format!("backend ended, nobody knows how: {e}"),
        });
        if !backend.ready {
            // One that gave up ended its session. A later one's is ended again, to be sure.
            let gave_up = status.is_ok_and(|status| status.code().is_some());
            if let Some(sessions) = &mut self.sessions
                && gave_up
                && self.root.is_none()
            {
                sessions.gave_up();
            }
            return self.start_failed(reason);
        }
        tracing::warn!("backend {} ended: {reason}", backend.generation);
        self.reason = Some(reason);
        self.fruitless = if fruitful { 0 } else { self.fruitless + 1 };
        let now = Instant::now();
        match self.fruitless.checked_sub(FRUITLESS_MAX) {
            None => self.start_backend(),
            Some(more) => self.start_at = Some(now + backoff(more + 1)),
        }
    }

    fn kill_overdue(&mut self) {
        let Some(backend) = &mut self.backend else {
            return;
        };
        if backend.kill_at.is_some_and(|at| at <= Instant::now()) {
            if !backend.ready && backend.failed.is_none() {
                backend.failed = Some(format!(
                    "backend was not ready after {} s and was killed",
                    START_LIMIT.as_secs()
                ));
            }
            backend.kill_at = None;
            let _ = backend.child.kill();
        }
    }

    /// Looks after what depends on time. Callers are looked at by a thread of its own: even to read
    /// their `/proc/PID/status` may, in the worst case, end their memory map, which writes back what
    /// they have mapped from this very mount.
    fn tick(&mut self) {
        let callers = self.shared.core.lock().callers();
        if !callers.is_empty() && !self.shared.looking.swap(true, Ordering::AcqRel) {
            let shared = self.shared.clone();
            let started = aside("callers", move || {
                let fates: HashMap<u32, Fate> =
                    callers.into_iter().map(|pid| (pid, fate(pid))).collect();
                let known = |pid| fates.get(&pid).copied().unwrap_or(Fate::Lives);
                shared.core.lock().tick(&shared.io, known);
                shared.looking.store(false, Ordering::Release);
                shared.made_room();
            });
            if !started {
                self.shared.looking.store(false, Ordering::Release);
            }
        }
        let mut core = self.shared.core.lock();
        core.tick(&self.shared.io, |_| Fate::Lives);
        let slack = core.shrink();
        let stale = match core.service {
            Service::Serving => std::mem::take(&mut core.stale),
            Service::Outage { .. } => Vec::new(),
        };
        drop(core);
        // What was answered early made room, and there may be no reply any more that tells it.
        self.shared.made_room();
        self.shared
            .notifier
            .push(stale.into_iter().map(Stale::attributes));
        if slack {
            // Tens of megabytes after an outage, or when the kernel forgot a million inodes.
            sys::give_memory_back();
        }
    }

    // ---- the standby session -----------------------------------------------------------------

    fn hear_standby(&mut self) {
        let (Some(standby), Some(sessions)) = (&mut self.standby, &mut self.sessions) else {
            return;
        };
        while let Some(event) = standby.hear() {
            let core = &self.shared.core;
            match event {
                standby::Event::Hello => {
                    let restore = core.lock().standby_begins();
                    let names = sessions.next_standby();
                    standby.attach(&self.config, self.secrets.as_ref(), names, &restore);
                }
                standby::Event::Keeps => sessions.standby_keeps(),
                standby::Event::Ended => core.lock().standby_ended(),
            }
        }
    }

    /// Ends the standby, as [`stop`](Supervisor::stop) ends the backend.
    fn end_standby(&mut self, deadline: Instant) {
        let limit = self.config.backend.retire_limit();
        loop {
            let (Some(standby), Some(sessions)) = (&mut self.standby, &mut self.sessions) else {
                return;
            };
            let over = Instant::now() >= deadline;
            if sessions.standbys_are_left() && !standby.keeps() && !over {
                standby.wanted();
                self.step(Some(TICK));
                continue;
            }
            if standby.end(limit) {
                sessions.standby_ended();
            }
            // Another one, if there has to be one, is told everything anew.
            self.shared.core.lock().standby_ended();
            if over || !sessions.standbys_are_left() {
                self.standby = None;
                return;
            }
        }
    }

    /// Tells the standby what to keep from now on, and what not.
    fn tell_standby(&mut self) {
        let Some(standby) = &mut self.standby else {
            return;
        };
        let mut core = self.shared.core.lock();
        if core
            .standby_due()
            .is_some_and(|at| at <= sys::monotonic_ns())
        {
            let (unpin, pin) = core.standby_news();
            drop(core);
            standby.tell(&unpin, &pin);
        }
    }

    // ---- clients -----------------------------------------------------------------------------

    fn accept(&mut self) {
        let Some(Ok(conn)) = self.listener.as_ref().map(Listener::accept) else {
            return;
        };
        let me = nix::unistd::geteuid().as_raw();
        let allowed = conn.peer_uid().is_ok_and(|uid| uid == 0 || uid == me);
        if allowed && self.clients.len() < CLIENTS_MAX {
            self.clients.push(conn);
        }
    }

    fn hear_clients(&mut self) {
        let mut clients = std::mem::take(&mut self.clients);
        clients.retain(|client| match client.try_recv::<Command>() {
            Ok(Received::Message(command, _)) => self.answer_client(client, &command).is_ok(),
            Ok(Received::Nothing) => true,
            Ok(Received::Closed) | Err(_) => false,
        });
        self.clients = clients;
    }

    fn answer_client(&self, client: &Conn, command: &Command) -> Result<(), ControlError> {
        // A client that does not read must not hold the supervisor up.
        client.set_timeout(Some(Duration::from_millis(100)))?;
        let answer = match command {
            Command::Status => CommandAnswer::Status(Box::new(self.status())),
            Command::Unknown => CommandAnswer::Failed {
                reason: format!(
                    "front-end {} does not know this command; use a client of its release",
                    env!("CARGO_PKG_VERSION")
                ),
            },
        };
        client.send(&answer, &[])
    }

    fn status(&self) -> Status {
        let ms = |ns: u64| ns as f64 / 1e6;
        let now = sys::monotonic_ns();
        let since = |then: u64| ms(now.saturating_sub(then));
        let count = |counter: fn(&Retained) -> &AtomicU64| {
            let retained = self.retained.as_ref();
            retained.map_or(0, |r| counter(r).load(Ordering::Relaxed))
        };
        let core = self.shared.core.lock();
        let outage = match core.service {
            Service::Serving => None,
            Service::Outage { since } => Some(since),
        };
        Status {
            mountpoint: self.mountpoint.clone(),
            source: self.config.source.to_string(),
            state: if outage.is_some() {
                State::Outage
            } else {
                State::Serving
            },
            reason: self.reason.clone(),
            generation: core.generation,
            channel: self.config.channel,
            frontend_pid: std::process::id(),
            backend_pid: self.backend.as_ref().map(|b| b.child.id()),
            standby_pid: self.standby.as_ref().and_then(Standby::pid),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend_version: self.backend_version.clone(),
            takeovers: self.takeovers,
            handovers: 0,
            last_pause_ms: core.last_pause.map(ms),
            longest_pause_ms: core.last_pause.map(|_| ms(core.longest_pause)),
            outage_ms: outage.map(since),
            open_files: core.tables.open_files(),
            open_dirs: core.tables.open_dirs(),
            locks: core.tables.locks(),
            lost_locks: core.counters.lost_locks,
            conflicts: count(Retained::conflicts),
            dropped_bytes: count(Retained::dropped_bytes),
            unflushed_bytes: self.unflushed(),
            lost_files: core.counters.lost_files,
            inodes: core.tables.inodes(),
            inflight: core.inflight() as u64,
            oldest_request_ms: core.oldest().map(since),
            reissued: core.counters.reissued,
            verified_done: core.counters.verified_done,
            ambiguous: core.counters.ambiguous,
            poisoned: core.counters.poisoned,
            early_answers: core.counters.early_answers,
            waiters: core.waiters() as u64,
            restarts_failed: u64::from(self.failures),
        }
    }

    fn end_signal(&mut self) {
        let _ = self.signals.read_signal();
        if self.listener.is_none() {
            // Not mounted yet: nothing to keep.
            self.shared.ended.store(true, Ordering::Release);
            return;
        }
        // The reader notices when it is done. Not in this thread: it may write mapped pages back,
        // which needs a backend.
        let mountpoint = self.mountpoint.clone();
        aside("unmount", move || {
            if let Err(e) = unmount(&mountpoint, false) {
                tracing::error!("asked to end: {e}");
            }
        });
    }
}

/// Does something that may wait for the mount itself in a thread that nobody waits for.
fn aside(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    let thread = std::thread::Builder::new()
        .name(name.into())
        .stack_size(256 * 1024)
        .spawn(work);
    if let Err(e) = &thread {
        tracing::warn!("cannot start a thread: {e}");
    }
    thread.is_ok()
}

#[derive(Default)]
struct Woken {
    bell: bool,
    signal: bool,
    exited: bool,
    conn: bool,
    standby: bool,
    listener: bool,
    clients: bool,
}

fn end_signals() -> SigSet {
    SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT])
}

/// Blocks the signals that ask this process to end, for this thread and those it starts.
pub fn block_signals() -> std::io::Result<()> {
    Ok(end_signals().thread_block()?)
}

fn answer(conn: &Conn, id: u64, errno: i32, fd: Option<OwnedFd>) -> Result<(), ControlError> {
    let message = FrontendMessage::Answer {
        id,
        errno,
        found: fd.is_some(),
    };
    let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
    conn.send(&message, &fds)
}

/// Starts this program again as a backend. Its standard input is the control socket.
pub(super) fn spawn() -> std::io::Result<(Child, OwnedFd, Conn)> {
    let (ours, theirs) = Conn::pair().map_err(std::io::Error::other)?;
    let mut child = Process::new("/proc/self/exe")
        // What `ps` shows instead of the path above.
        .arg0("evermount")
        .arg("__backend")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .spawn()?;
    let limited = ours.set_timeout(Some(SEND_LIMIT));
    let limited = limited.map_err(std::io::Error::other);
    match limited.and_then(|()| sys::pidfd_open(child.id())) {
        Ok(pidfd) => Ok((child, pidfd, ours)),
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(e)
        }
    }
}

/// It died of a fault in itself, which a request may have caused. An operator's or the kernel's
/// SIGKILL says nothing about the requests.
fn own_doing(status: ExitStatus) -> bool {
    match status.signal() {
        Some(signal) => [
            libc::SIGSEGV,
            libc::SIGABRT,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
            libc::SIGTRAP,
            libc::SIGSYS,
        ]
        .contains(&signal),
        None => !status.success() && status.code() != Some(EXIT_LOST),
    }
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => match Signal::try_from(signal) {
            Ok(signal) => format!("backend was ended by {signal}"),
            Err(_) => format!("backend was ended by signal {signal}"),
        },
        None => format!("backend exited with code {}", status.code().unwrap_or(-1)),
    }
}

/// Time to the next start after this many failures: 100 ms, doubled each time up to
/// [`BACKOFF_MAX`], give or take a quarter, so that the mounts of a node do not start in step.
pub(super) fn backoff(failures: u32) -> Duration {
    let base = Duration::from_millis(100 << failures.saturating_sub(1).min(16)).min(BACKOFF_MAX);
    let jitter = sys::realtime_ns() / 1000 % 500;
    base.mul_f64(0.75 + jitter as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_spread_over_time_and_never_given_up() {
        for failures in 1..100 {
            let wait = backoff(failures);
            assert!(wait >= Duration::from_millis(75), "{wait:?}");
            assert!(wait <= BACKOFF_MAX.mul_f64(1.25), "{wait:?}");
        }
        assert!(backoff(10) > backoff(1));
    }
}
