//! Whether the process that waits for a request is about to end.
//!
//! The kernel says once that a caller was interrupted, and any signal with a handler does that; a
//! SIGKILL later is not announced. So the front-end looks for itself, in `/proc`, before it answers
//! a request in an outage: only a caller that will never see the answer may be given one.

/// Bit of a signal set in `/proc/PID/status`: SIGKILL is signal 9.
const SIGKILL_BIT: u64 = 1 << (libc::SIGKILL - 1);
/// The parent of all kernel threads.
const KTHREADD: &str = "2";

/// What becomes of the caller of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It lives, or nothing is known of it.
    Lives,
    /// It will never see an answer: a SIGKILL is pending, or it is exiting.
    Dying,
    /// It is gone, so it does not wait. Its process may live, and want the result of asynchronous
    /// I/O; only of a page read ahead it is certain that nobody does.
    Gone,
}

/// The fate of a caller (`InHeader::pid`).
///
/// The number is that of a *thread* in this process's pid namespace; 0 is a caller of another
/// namespace, of which nothing can be known.
///
/// Reads `status` and nothing else of `/proc/PID`. `stat`, `cmdline`, `maps` and others wait for
/// locks that a process holds over a request to this very mount: `execve(2)` closes descriptors,
/// which sends FLUSH, with `exec_update_lock` held, and whoever reads `stat` meanwhile waits for
/// that FLUSH to be answered.
pub fn fate(pid: u32) -> Fate {
    if pid == 0 {
        return Fate::Lives;
    }
    // /proc/TID works for threads that are not listed in /proc, too.
    match std::fs::read(format!("/proc/{pid}/status")) {
        Ok(status) => {
            let status = String::from_utf8_lossy(&status);
            if kill_is_pending(&status) || is_exiting(&status) {
                Fate::Dying
            } else {
                Fate::Lives
            }
        }
        // Before, or meanwhile.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Fate::Gone,
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Fate::Gone,
        Err(_) => Fate::Lives,
    }
}

/// The value of a line of `/proc/PID/status`.
fn value<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}

/// SIGKILL is in the set of the thread or of its process.
fn kill_is_pending(status: &str) -> bool {
    ["SigPnd", "ShdPnd"].iter().any(|name| {
        let set = value(status, name).and_then(|set| u64::from_str_radix(set, 16).ok());
        set.is_some_and(|set| set & SIGKILL_BIT != 0)
    })
}

/// A task on its way out gives its memory up (`exit_mm`) before its files, whose FLUSH it may still
/// wait for. Kernel threads never had any.
fn is_exiting(status: &str) -> bool {
    let kernel_thread = match value(status, "Kthread") {
        Some(kernel_thread) => kernel_thread != "0",
        None => value(status, "PPid") == Some(KTHREADD), // before Linux 6.9
    };
    // A status without signals is cut short, and says nothing.
    !kernel_thread && value(status, "SigPnd").is_some() && value(status, "VmSize").is_none()
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
        assert!(!kill_is_pending(&status(none, none)));
        assert!(kill_is_pending(&status(kill, none)));
        assert!(kill_is_pending(&status(none, kill)));
        assert!(!kill_is_pending(&status("00000000fffffeff", none)));
        assert!(!kill_is_pending("SigPnd:\tnonsense\nShdPnd:"));
    }

    #[test]
    fn an_exiting_task_is_one_without_memory_that_is_no_kernel_thread() {
        let signals = "SigPnd:\t0000000000000000\n";
        let dying = |text: &str| is_exiting(&format!("{text}{signals}"));
        assert!(dying("Name:\tx\nPPid:\t17\nKthread:\t0\n"));
        assert!(dying("Name:\tx\nPPid:\t17\n"));
        assert!(!dying("Name:\tx\nPPid:\t17\nKthread:\t0\nVmSize:\t 4 kB\n"));
        assert!(!dying("Name:\tx\nPPid:\t2\nKthread:\t1\n"));
        assert!(!dying("Name:\tx\nPPid:\t2\n"));
        assert!(!is_exiting("Name:\tx\n"));
        assert_eq!(fate(2), Fate::Lives, "kthreadd");
    }

    #[test]
    fn a_process_lives_or_is_gone() {
        assert_eq!(fate(0), Fate::Lives);
        assert_eq!(fate(std::process::id()), Fate::Lives);
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(fate(child.id()), Fate::Gone);
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
            features: Default::default(),
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
        assert_eq!(fate(child.id()), Fate::Lives);
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while fate(child.id()) != Fate::Dying {
            assert!(Instant::now() < deadline, "the kill was not seen");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(child.try_wait().unwrap().is_none(), "it did not wait");
        unmount(&point, true).unwrap();
        drop(fuse); // ends the connection, and the wait
        child.wait().unwrap();
    }
}
