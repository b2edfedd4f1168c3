//! What several tests of deaths need: chance that can be repeated, and other processes that lock.

use std::env;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evermount::sys;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::Pid;
use rustix::fs::{FlockOperation, flock};

use super::PATIENCE;

/// Numbers by chance; the same ones for the same seed (splitmix64).
#[derive(Clone)]
pub struct Chance(u64);

impl Chance {
    /// The seed in EVERMOUNT_SEED, or a new one. It is printed, so that a failure can be repeated.
    pub fn new(what: &str) -> Chance {
        let seed = env::var("EVERMOUNT_SEED")
            .ok()
            .and_then(|s| s.parse().ok())
            .unwrap_or_else(|| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                now.as_nanos() as u64
            });
        eprintln!("{what}: EVERMOUNT_SEED={seed}");
        Chance(seed)
    }

    /// Another sequence, for another thread.
    pub fn split(&mut self) -> Chance {
        Chance(self.next())
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A time between the two, milliseconds.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from + 1))
    }
}

/// Kills in a long test: EVERMOUNT_KILLS, or `default`.
pub fn kills(default: usize) -> usize {
    let wanted = env::var("EVERMOUNT_KILLS").ok();
    wanted.and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Median and 99th percentile, and the largest.
pub fn percentiles(values: &mut [f64]) -> String {
    values.sort_by(f64::total_cmp);
    let at = |p: f64| {
        let last = values.len().saturating_sub(1);
        values.get((last as f64 * p).round() as usize).copied()
    };
    match (at(0.5), at(0.99), at(1.0)) {
        (Some(p50), Some(p99), Some(max)) => format!(
            "p50 {p50:.1} ms, p99 {p99:.1} ms, max {max:.1} ms of {}",
            values.len()
        ),
        _ => "nothing measured".to_owned(),
    }
}

/// Another process that opens, locks and waits as it is told: this test program, started again.
///
/// A test file that uses it has an ignored test named `actor` that calls [`act`].
pub struct Actor {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

const ANSWER: &str = "> ";

impl Actor {
    /// Starts one.
    pub fn new() -> Actor {
        let mut child = Command::new(env::current_exe().unwrap())
            // In one thread, so that a signal meets the one that waits.
            .args([
                "--exact",
                "actor",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("EVERMOUNT_ACTOR", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, answers) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The test harness writes to the same pipe, without an end of line.
                if let Some((_, answer)) = line.split_once(ANSWER)
                    && sender.send(answer.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Actor {
            input: child.stdin.take().unwrap(),
            child,
            answers,
        }
    }

    /// One that has opened `path`, as its file 0.
    pub fn on(path: &Path) -> Actor {
        let mut actor = Actor::new();
        assert_eq!(actor.ask(&format!("open {}", path.display())), "ok");
        actor
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to do something, and does not wait.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    /// Its answer.
    pub fn answer(&self) -> String {
        match self.answers.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => panic!("the other process hangs"),
            Err(RecvTimeoutError::Disconnected) => panic!("the other process died"),
        }
    }

    /// Its answer, if it came in this time.
    pub fn answer_within(&self, limit: Duration) -> Option<String> {
        self.answers.recv_timeout(limit).ok()
    }

    /// Tells it to do something and waits for the answer.
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    /// Makes its working thread catch SIGUSR1, without SA_RESTART. Returns the thread's id.
    pub fn catch(&mut self) -> i32 {
        self.ask("catch").parse().unwrap()
    }

    /// Sends SIGUSR1 to that thread.
    pub fn interrupt(&self, thread: i32) {
        let process = self.pid() as i32;
        // SAFETY: tgkill(2) takes three numbers.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
        assert_eq!(sent, 0);
    }

    /// SIGKILLs it and waits until it is gone.
    pub fn kill(mut self) {
        kill(Pid::from_raw(self.pid() as i32), Signal::SIGKILL).unwrap();
        let mut gone = || self.child.try_wait().unwrap().is_some();
        assert!(super::until(PATIENCE, &mut gone), "it cannot be killed");
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        // Not waited for without end: it may hang in the mount that is being tested.
        super::until(Duration::from_secs(10), || {
            !matches!(self.child.try_wait(), Ok(None))
        });
    }
}

/// The other process. Does nothing in an ordinary test run.
pub fn act() {
    if env::var_os("EVERMOUNT_ACTOR").is_none() {
        return;
    }
    let mut files: Vec<Option<OwnedFd>> = Vec::new();
    for line in std::io::stdin().lines() {
        let answer = match obey(&mut files, &line.unwrap()) {
            Ok(answer) => answer,
            Err(errno) => format!("{errno:?}"),
        };
        println!("{ANSWER}{answer}");
    }
}

fn obey(files: &mut Vec<Option<OwnedFd>>, line: &str) -> Result<String, Errno> {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |at: usize| words[at].parse::<i64>().unwrap();
    let io = |e: std::io::Error| Errno::from_raw(e.raw_os_error().unwrap());
    let rustix = |e: rustix::io::Errno| Errno::from_raw(e.raw_os_error());
    match words[0] {
        "open" => {
            let path = OsStr::new(words[1]);
            let file = OpenOptions::new().read(true).write(true).open(path);
            files.push(Some(file.map_err(io)?.into()));
            return Ok("ok".into());
        }
        "catch" => {
            extern "C" fn nothing(_: i32) {}
            let handler = SigHandler::Handler(nothing);
            let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
            // SAFETY: the handler does nothing, which is safe in any context.
            unsafe { sigaction(Signal::SIGUSR1, &action) }?;
            return Ok(nix::unistd::gettid().to_string());
        }
        _ => {}
    }
    let at = number(1) as usize;
    if words[0] == "close" {
        // As close(2) does it, which says what FLUSH says.
        nix::unistd::close(files[at].take().unwrap())?;
        return Ok("ok".into());
    }
    let file = files[at].as_ref().unwrap().as_fd();
    match words[0] {
        "dup" => {
            let copy = file.try_clone_to_owned().map_err(io)?;
            files.push(Some(copy));
        }
        "flock" | "flockw" => {
            let wait = words[0] == "flockw";
            let operation = match (words[2], wait) {
                ("r", false) => FlockOperation::NonBlockingLockShared,
                ("r", true) => FlockOperation::LockShared,
                ("w", false) => FlockOperation::NonBlockingLockExclusive,
                ("w", true) => FlockOperation::LockExclusive,
                ("u", _) => FlockOperation::Unlock,
                (other, _) => panic!("unknown kind {other}"),
            };
            flock(file, operation).map_err(rustix)?;
        }
        "posix" | "posixw" | "ofd" | "ofdw" | "posixget" | "ofdget" => {
            let mut lock = range(words[2], number(3), number(4));
            match words[0] {
                "posix" => fcntl(file, FcntlArg::F_SETLK(&lock))?,
                "posixw" => fcntl(file, FcntlArg::F_SETLKW(&lock))?,
                "ofd" => fcntl(file, FcntlArg::F_OFD_SETLK(&lock))?,
                "ofdw" => fcntl(file, FcntlArg::F_OFD_SETLKW(&lock))?,
                "ofdget" => fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?,
                _ => fcntl(file, FcntlArg::F_GETLK(&mut lock))?,
            };
            if words[0].ends_with("get") {
                let kind = match i32::from(lock.l_type) {
                    libc::F_UNLCK => return Ok("free".into()),
                    libc::F_RDLCK => "r",
                    _ => "w",
                };
                let libc::flock {
                    l_pid,
                    l_start,
                    l_len,
                    ..
                } = lock;
                return Ok(format!("{l_pid} {kind} {l_start} {l_len}"));
            }
        }
        other => panic!("unknown command {other}"),
    }
    Ok("ok".into())
}

/// A range as fcntl(2) takes it: kind `r`, `w` or `u`.
pub fn range(kind: &str, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: match kind {
            "r" => libc::F_RDLCK,
            "w" => libc::F_WRLCK,
            _ => libc::F_UNLCK,
        } as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

/// A file opened for reading and writing, made if need be.
pub fn open_rw(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Names and positions of the next entries of a directory, read with a buffer of `size` bytes.
pub fn entries(directory: &impl AsFd, size: usize) -> std::io::Result<Vec<(String, u64)>> {
    let mut buffer = vec![0; size];
    let len = sys::getdents64(directory.as_fd(), &mut buffer)?;
    let mut list = Vec::new();
    let mut rest = &buffer[..len];
    while !rest.is_empty() {
        let next = u64::from_ne_bytes(rest[8..16].try_into().unwrap());
        let len = usize::from(u16::from_ne_bytes(rest[16..18].try_into().unwrap()));
        let name = rest[19..len].split(|b| *b == 0).next().unwrap();
        list.push((String::from_utf8(name.to_vec()).unwrap(), next));
        rest = &rest[len..];
    }
    Ok(list)
}
