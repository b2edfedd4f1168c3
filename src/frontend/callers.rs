//! Whether the process that waits for a request is about to end.
//!
//! The kernel says once that a caller was interrupted, and any signal with a handler does that; a
//! SIGKILL later is not announced. So the front-end looks for itself, in `/proc`, before it answers
//! a request in an outage: only a caller that will never see the answer may be given one.

/// Bit of a signal set in `/proc/PID/status`: SIGKILL is signal 9.
const SIGKILL_BIT: u64 = 1 << (libc::SIGKILL - 1);
/// `PF_EXITING` of the kernel (`include/linux/sched.h`): the task is on its way out. It may still
/// wait for its FLUSH.
const PF_EXITING: u64 = 0x4;

/// The caller (`InHeader::pid`) will never see an answer: a SIGKILL is pending, it is exiting, or it
/// is gone.
///
/// The number is that of a *thread* in this process's pid namespace; 0 is a caller of another
/// namespace, of which nothing can be known.
pub fn is_dying(pid: u32) -> bool {
    if pid == 0 {
        return false;
    }
    // /proc/TID works for threads that are not listed in /proc, too.
    let file = |name| std::fs::read(format!("/proc/{pid}/{name}"));
    match (file("status"), file("stat")) {
        (Ok(status), Ok(stat)) => kill_is_pending(&status) || is_exiting(&stat),
        // It ended between the calls, or before. Any other reason says nothing about it.
        (Err(e), _) | (_, Err(e)) => {
            e.kind() == std::io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH)
        }
    }
}

/// SIGKILL is in the set of the thread or of its process.
fn kill_is_pending(status: &[u8]) -> bool {
    status
        .split(|b| *b == b'\n')
        .filter_map(|line| {
            line.strip_prefix(b"SigPnd:")
                .or_else(|| line.strip_prefix(b"ShdPnd:"))
        })
        .filter_map(|set| u64::from_str_radix(std::str::from_utf8(set).ok()?.trim(), 16).ok())
        .any(|set| set & SIGKILL_BIT != 0)
}

/// The seventh field after the name, which is in parentheses and may contain some itself.
fn is_exiting(stat: &[u8]) -> bool {
    let after_name = match stat.iter().rposition(|b| *b == b')') {
        Some(end) => &stat[end + 1..],
        None => return false,
    };
    // state ppid pgrp session tty_nr tpgid flags
    let flags = after_name
        .split(|b| *b == b' ')
        .filter(|f| !f.is_empty())
        .nth(6)
        .and_then(|f| std::str::from_utf8(f).ok()?.trim().parse::<u64>().ok());
    flags.is_some_and(|flags| flags & PF_EXITING != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn a_pending_kill_is_seen_in_either_set() {
        let status = |own: &str, shared: &str| {
            format!("Name:\tx\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t0000000000000100\n")
        };
        let none = "0000000000000000";
        let kill = "0000000000000100";
        assert!(!kill_is_pending(status(none, none).as_bytes()));
        assert!(kill_is_pending(status(kill, none).as_bytes()));
        assert!(kill_is_pending(status(none, kill).as_bytes()));
        assert!(!kill_is_pending(
            status("00000000fffffeff", none).as_bytes()
        ));
        assert!(!kill_is_pending(b"SigPnd:\tnonsense\nShdPnd:"));
    }

    #[test]
    fn an_exiting_task_is_seen_whatever_its_name() {
        assert!(is_exiting(b"7 (a) S 1 (b)) D 1 1 1 0 -1 4194308 0 0\n"));
        assert!(!is_exiting(b"7 (a) S 1 (b)) D 1 1 1 0 -1 4194304 0 0\n"));
        assert!(!is_exiting(b"7 (a"));
        assert!(!is_exiting(b"7 (a) D 1"));
    }

    #[test]
    fn a_live_process_is_not_dying_and_one_that_is_gone_is() {
        assert!(!is_dying(0));
        assert!(!is_dying(std::process::id()));
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(is_dying(child.id()));
    }

    #[test]
    fn a_killed_process_that_waits_in_a_mount_is_dying_while_it_waits() {
        use crate::frontend::mount::{MountOptions, mount, unmount};
        let dir = tempfile::tempdir().unwrap();
        let point = dir.path().canonicalize().unwrap();
        let mounted = mount(&MountOptions {
            mountpoint: point.clone(),
            fsname: "test".into(),
            options: Default::default(),
        })
        .unwrap();
        let mut child = Command::new("stat")
            .arg(point.join("x"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Once its request was read it cannot be killed: it waits for the answer.
        let mut buf = vec![0; 1 << 21];
        let mut fuse = std::fs::File::from(mounted.fuse);
        let _ = fuse.read(&mut buf).unwrap();
        assert!(!is_dying(child.id()));
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_dying(child.id()) {
            assert!(Instant::now() < deadline, "the kill was not seen");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(child.try_wait().unwrap().is_none(), "it did not wait");
        unmount(&point, true).unwrap();
        drop(fuse); // ends the connection, and the wait
        child.wait().unwrap();
    }
}
