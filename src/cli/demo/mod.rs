//! `evermount demo`: kills backends under a writing application and checks that nothing was lost.

pub mod app;

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

use self::app::Sighting;
use super::status;
use crate::control::message::{State, Status};
use crate::control::{Conn, mountinfo, runtime};
use crate::frontend::mount::unmount;

/// Longest the demonstration may take beside its kills. A mount that hangs would keep it for ever.
const LIMIT: Duration = Duration::from_secs(90);
/// Longest a successor may take to serve. Generous: the machine may be busy.
const TAKEOVER_LIMIT: Duration = Duration::from_secs(30);

/// Kill backends under a writing application and check that nothing is lost.
#[derive(clap::Args)]
pub struct Args {
    /// How many backends to kill
    #[arg(long, default_value_t = 5)]
    kills: u16,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    // Blocked before any thread exists, so that all inherit it and only the guard takes them.
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    let stage = Arc::new(Stage::build()?);
    let guarded = stage.clone();
    std::thread::spawn(move || {
        if let Ok(signal) = signals.wait() {
            guarded.fall();
            eprintln!("\nevermount: ended by {signal}; everything is cleaned up");
            std::process::exit(128 + signal as i32);
        }
    });
    let guarded = stage.clone();
    let limit = LIMIT + TAKEOVER_LIMIT * u32::from(args.kills);
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        guarded.fall();
        eprintln!(
            "evermount: the demonstration did not end within {} s: something waits for ever",
            limit.as_secs()
        );
        std::process::exit(1);
    });
    let played = play(&stage, usize::from(args.kills));
    while *stage.curtain() == Curtain::Falling {
        // What went wrong went wrong because of that, and the process is about to end.
        std::thread::park();
    }
    stage.clear();
    played
}

/// The directories of the demonstration, and the processes to end.
struct Stage {
    root: PathBuf,
    source: PathBuf,
    mountpoint: PathBuf,
    runtime: PathBuf,
    /// Process ids of the application and the front-end.
    cast: Mutex<Vec<u32>>,
    curtain: Mutex<Curtain>,
}

/// Whether the stage may still be played on. Locked while the source and the mount are made, so that
/// what clears the stage finds all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Curtain {
    Open,
    /// Something else than the play's end clears the stage and ends the process.
    Falling,
}

impl Stage {
    fn build() -> anyhow::Result<Stage> {
        let base = std::env::temp_dir()
            .canonicalize()
            .context("the directory for temporary files")?;
        let root = base.join(format!("evermount-demo-{}", std::process::id()));
        let stage = Stage {
            source: root.join("source"),
            mountpoint: root.join("mount"),
            runtime: root.join("run"),
            root,
            cast: Mutex::default(),
            curtain: Mutex::new(Curtain::Open),
        };
        for dir in [
            &stage.root,
            &stage.source,
            &stage.mountpoint,
            &stage.runtime,
        ] {
            DirBuilder::new()
                .mode(0o700)
                .create(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
        }
        Ok(stage)
    }

    fn enter(&self, pid: u32) {
        let mut cast = self.cast.lock().unwrap_or_else(PoisonError::into_inner);
        cast.push(pid);
    }

    fn program(&self) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("evermount")
            .env("EVERMOUNT_RUNTIME_DIR", &self.runtime);
        command
    }

    fn entry(&self) -> anyhow::Result<mountinfo::MountEntry> {
        let mounts = mountinfo::read().context("cannot read /proc/self/mountinfo")?;
        mountinfo::topmost(&mounts, &self.mountpoint)
            .filter(|m| m.is_evermount())
            .cloned()
            .context("the mount is not there any more")
    }

    fn status(&self) -> anyhow::Result<Status> {
        let socket = self.runtime.join(runtime::socket_name(self.entry()?.minor));
        status::ask(&Conn::connect(&socket)?)
    }

    fn curtain(&self) -> std::sync::MutexGuard<'_, Curtain> {
        self.curtain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the play from outside.
    fn fall(&self) {
        *self.curtain() = Curtain::Falling;
        self.clear();
    }

    /// Ends and removes everything. Asks nothing of the mount.
    fn clear(&self) {
        let mut cast = self.cast.lock().unwrap_or_else(PoisonError::into_inner);
        let processes: Vec<_> = std::mem::take(&mut *cast)
            .into_iter()
            .filter_map(|pid| Some((pid, crate::sys::pidfd_open(pid).ok()?)))
            .collect();
        let _ = unmount(&self.mountpoint, true);
        for (pid, pidfd) in processes {
            // The application ends when its input does and the front-end when its mount is gone;
            // they have a moment for it.
            if !ended_within(&pidfd, Duration::from_secs(3)) {
                let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
                ended_within(&pidfd, Duration::from_secs(3));
            }
        }
        for _ in 0..50 {
            // Never walk into a mount that is still there: it would delete through it.
            if self.entry().is_ok() || fs::remove_dir_all(&self.root).is_ok() {
                break;
            }
            // A process that is about to end has made a file meanwhile.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn ended_within(pidfd: &std::os::fd::OwnedFd, limit: Duration) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;
    let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, timeout) != Ok(0)
}

/// What must not change while backends come and go.
#[derive(Debug, PartialEq, Eq)]
struct Fixture {
    mount_id: u64,
    device: u64,
    root_inode: u64,
    records_inode: u64,
}

impl Fixture {
    fn of(stage: &Stage) -> anyhow::Result<Fixture> {
        let root = fs::metadata(&stage.mountpoint).context("the root of the mount")?;
        let records =
            fs::metadata(stage.mountpoint.join(app::RECORDS)).context("the file of records")?;
        Ok(Fixture {
            mount_id: stage.entry()?.mount_id,
            device: root.dev(),
            root_inode: root.ino(),
            records_inode: records.ino(),
        })
    }
}

fn play(stage: &Stage, kills: usize) -> anyhow::Result<()> {
    let say = |text: String| super::print(&(text + "\n"));
    mount(stage)?;
    let first = stage.status()?;
    stage.enter(first.frontend_pid);
    say(format!(
        "mounted {} on {}: front-end {}, backend {}",
        first.source,
        stage.mountpoint.display(),
        first.frontend_pid,
        first.backend_pid.unwrap_or(0)
    ))?;

    let mut actor = Actor::start(stage, kills)?;
    stage.enter(actor.child.id());
    actor.order("step")?;
    say(format!(
        "application {} appends records and syncs them, creates, renames and deletes, holds a lock, \
         reads a directory, and uses a file it has deleted\n",
        actor.child.id()
    ))?;
    let before = Fixture::of(stage)?;
    ensure!(is_locked(stage)?, "the application has not got its lock");

    let mut pauses = Vec::new();
    let mut lock_held = true;
    for turn in 1..=kills {
        std::thread::sleep(Duration::from_millis(600));
        let killed = serving(stage)?;
        let pid = killed
            .backend_pid
            .context("a serving mount has no backend")?;
        kill(Pid::from_raw(pid as i32), Signal::SIGKILL)
            .with_context(|| format!("cannot kill backend {pid}"))?;
        let next = successor(stage, killed.generation)?;
        let seen = actor.order("step")?;
        lock_held &= is_locked(stage)?;
        // A pause ends with the first answer, of which there has been one by now.
        let pause = stage.status()?.last_pause_ms.unwrap_or(f64::NAN);
        pauses.push(pause);
        say(format!(
            "kill {turn}: backend {pid} ended by SIGKILL, {} serves after {pause:6.1} ms; {} records, \
             {} syncs, {} entries so far",
            next.backend_pid.unwrap_or(0),
            seen.records,
            seen.syncs,
            seen.entries
        ))?;
    }

    std::thread::sleep(Duration::from_millis(300));
    let after = Fixture::of(stage);
    lock_held &= is_locked(stage)?;
    let seen = actor.finish()?;
    let last = stage.status()?;
    let through_mount = fs::read(stage.mountpoint.join(app::RECORDS));
    let in_store = fs::read(stage.source.join(app::RECORDS));
    let released = !is_locked(stage)?;

    let mut wrong = 0;
    let mut verdict = |holds: bool, what: String| {
        wrong += usize::from(!holds);
        say(format!("  {}  {what}", if holds { "ok  " } else { "FAIL" }))
    };
    super::print("\nwhat became of it:\n")?;
    verdict(
        seen.error.is_none(),
        match &seen.error {
            None => format!(
                "no call of the application failed, and none happened twice ({} names created, \
                 changed and deleted)",
                seen.names
            ),
            Some(error) => format!("a call of the application failed: {error}"),
        },
    )?;
    for (place, text) in [("mount", through_mount), ("source", in_store)] {
        let checked = text
            .map_err(|e| e.to_string())
            .and_then(|text| app::check_records(&text, seen.records));
        verdict(
            checked.is_ok(),
            match checked {
                Ok(()) => format!(
                    "{} records in the {place}, each once, in order ({} syncs)",
                    seen.records, seen.syncs
                ),
                Err(e) => format!("records in the {place}: {e}"),
            },
        )?;
    }
    verdict(
        lock_held,
        "the lock was held all the time: nobody else could take it".to_owned(),
    )?;
    verdict(
        released,
        "the lock was released when the application ended".to_owned(),
    )?;
    verdict(
        seen.deleted_is_intact && seen.deleted_links == 0,
        format!(
            "the file that was deleted while open was read and written throughout ({} links)",
            seen.deleted_links
        ),
    )?;
    verdict(
        seen.entries == app::ENTRIES && seen.repeated == 0,
        format!(
            "the directory read in the meantime showed {} of {} entries, {} of them twice",
            seen.entries,
            app::ENTRIES,
            seen.repeated
        ),
    )?;
    verdict(
        after.as_ref().is_ok_and(|after| *after == before),
        match &after {
            Ok(after) if *after == before => format!(
                "the mount is the same: mount id {}, device {}, inode numbers",
                before.mount_id, before.device
            ),
            Ok(after) => format!("the mount has changed: {before:?} became {after:?}"),
            Err(e) => format!("the mount: {e:#}"),
        },
    )?;
    verdict(
        last.takeovers >= kills as u64 && last.lost_locks == 0 && last.dropped_bytes == 0,
        format!(
            "{} takeovers; {} locks and {} bytes lost; {} requests done again, {} found done",
            last.takeovers, last.lost_locks, last.dropped_bytes, last.reissued, last.verified_done
        ),
    )?;
    let list: Vec<String> = pauses.iter().map(|p| format!("{p:.1}")).collect();
    let longest = last.longest_pause_ms.unwrap_or(f64::NAN);
    super::print(&format!(
        "pauses: {} ms; the longest {longest:.1} ms\n",
        list.join(", ")
    ))?;
    ensure!(wrong == 0, "{wrong} of the checks above failed");
    super::print("everything survived\n")
}

fn mount(stage: &Stage) -> anyhow::Result<()> {
    let curtain = stage.curtain();
    ensure!(*curtain == Curtain::Open, "the demonstration was ended");
    app::prepare(&stage.source).context("cannot prepare the source directory")?;
    let mounted = stage
        .program()
        .arg("mount")
        .arg(format!("dir:{}", stage.source.display()))
        .arg(&stage.mountpoint)
        .stdin(Stdio::null())
        .status()
        .context("cannot start /proc/self/exe; is /proc mounted?")?;
    drop(curtain);
    ensure!(
        mounted.success(),
        "mounting failed; `evermount doctor` checks what is missing"
    );
    Ok(())
}

/// Waits until a backend serves.
fn serving(stage: &Stage) -> anyhow::Result<Status> {
    successor(stage, 0)
}

/// Waits until a backend of a later generation serves.
fn successor(stage: &Stage, than: u32) -> anyhow::Result<Status> {
    let deadline = Instant::now() + TAKEOVER_LIMIT;
    loop {
        let status = stage.status()?;
        if status.state == State::Serving && status.generation > than {
            return Ok(status);
        }
        if Instant::now() > deadline {
            bail!(
                "no backend serves within {} s after generation {than} was killed; state {}, {}",
                TAKEOVER_LIMIT.as_secs(),
                status.state,
                status.reason.as_deref().unwrap_or("no reason given")
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether this process, which is not the application, is refused the lock.
fn is_locked(stage: &Stage) -> anyhow::Result<bool> {
    let path: &Path = &stage.mountpoint.join(app::LOCKED);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .context("cannot open the locked file")?;
    match app::lock(&file) {
        Ok(()) => Ok(false), // closing the file releases it
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(true),
        Err(e) => Err(e).context("cannot try the lock"),
    }
}

/// The application, from outside.
struct Actor {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Actor {
    fn start(stage: &Stage, kills: usize) -> anyhow::Result<Actor> {
        let mut child = stage
            .program()
            .arg("__demo-app")
            // One part before the first kill, one after each, and one for the end.
            .arg(format!("--parts={}", kills + 2))
            .arg(&stage.mountpoint)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the application")?;
        let orders = child.stdin.take();
        let answers = child.stdout.take().context("the application has no pipe")?;
        Ok(Actor {
            child,
            orders,
            answers: BufReader::new(answers),
        })
    }

    /// Gives an order and reads what the application has seen.
    fn order(&mut self, order: &str) -> anyhow::Result<Sighting> {
        let orders = self
            .orders
            .as_mut()
            .context("the application was stopped")?;
        writeln!(orders, "{order}").context("the application has ended")?;
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .context("cannot read the application's answer")?;
        serde_json::from_str(&line).context("the application has ended without an answer")
    }

    /// Has it check everything and end.
    fn finish(&mut self) -> anyhow::Result<Sighting> {
        let seen = self.order("stop")?;
        self.orders = None;
        let status = self
            .child
            .wait()
            .context("cannot wait for the application")?;
        ensure!(status.success(), "the application ended with {status}");
        Ok(seen)
    }
}
