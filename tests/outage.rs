//! What callers, users and administrators meet while no backend serves, or while one hangs.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::actor::{self, Actor, say, wait_for_go};
use common::{
    Mount, PATIENCE, ceph_is_wanted, errno, long, prompt, promptly, store_knows, until, within,
};
use evermount::control::State;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use rustix::fs::{FlockOperation, fcntl_lock, flock};

/// These tests start programs, which send FLUSH for every open file of this process when they are
/// executed: also for those of another test, whose mount is in an outage. So they run one at a time.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// Runs a program, which must be done within a second.
fn program(program: &'static str, args: &[&str]) -> Output {
    let args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
    let what = format!("{program} {}", args.join(" "));
    promptly(&what, move || {
        Command::new(program).args(&args).output().unwrap()
    })
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// `df` and `stat` of the mount's root, by the programs everybody uses.
fn look_at_root(mount: &Mount) {
    for tool in ["df", "stat"] {
        let output = program(tool, &[text(&mount.point)]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{tool}: {errors}");
    }
}

/// A process is gone, or a zombie that somebody else has to collect.
fn is_gone(pid: u32) -> bool {
    !Path::new(&format!("/proc/{pid}/exe")).exists()
}

// ---- actors ----------------------------------------------------------------------------------

#[test]
#[ignore = "not a test: what the actors of other tests do"]
fn an_actor_of_another_test() {
    actor::play(|role, at| match role.split_once(' ') {
        Some(("signals", restart)) => meet_signals(at, restart == "restart"),
        Some(("do", what)) => do_one(at, what),
        Some(("files", count)) => hold_files(at, count.parse().unwrap()),
        Some(("lock", kind)) => hold_lock(at, kind),
        _ => panic!("unknown role {role}"),
    });
}

/// One operation that needs a backend, prepared so that its own request is the one that waits.
fn do_one(at: &Path, what: &str) {
    let path = at.join("file");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    wait_for_go();
    match what {
        "read" => drop(file.read_at(&mut [0; 10], 0)),
        "write" => drop(file.write_at(b"text", 0)),
        "fsync" => drop(file.sync_all()),
        "truncate" => drop(file.set_len(1)),
        "open" => drop(File::open(&path)),
        "stat" => drop(fs::metadata(at.join("unknown"))),
        "mkdir" => drop(fs::create_dir(at.join("new"))),
        "create" => drop(File::create(at.join("new"))),
        "unlink" => drop(fs::remove_file(&path)),
        "rename" => drop(fs::rename(&path, at.join("new"))),
        "readdir" => drop(fs::read_dir(at).map(Iterator::count)),
        "setxattr" => drop(rustix::fs::setxattr(
            &path,
            "user.a",
            b"1",
            rustix::fs::XattrFlags::empty(),
        )),
        "lock" => drop(fcntl_lock(&file, FlockOperation::LockExclusive)),
        "close" => drop(file),
        _ => panic!("unknown operation {what}"),
    }
    say("done");
}

/// What waits for a backend; a close does not.
const OPERATIONS: [&str; 13] = [
    "read", "write", "fsync", "truncate", "open", "stat", "mkdir", "create", "unlink", "rename",
    "readdir", "setxattr", "lock",
];

/// Reads, opens and makes a directory while a signal comes every 10 ms.
fn meet_signals(at: &Path, restart: bool) {
    static HANDLED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn handle(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }
    let flags = if restart {
        SaFlags::SA_RESTART
    } else {
        SaFlags::empty()
    };
    let action = SigAction::new(SigHandler::Handler(handle), flags, SigSet::empty());
    // SAFETY: the handler only adds to an atomic.
    unsafe { sigaction(Signal::SIGALRM, &action) }.unwrap();
    let file = File::open(at.join("file")).unwrap();
    wait_for_go();
    let (sender, threads) = std::sync::mpsc::channel();
    std::thread::scope(|s| {
        let work: [Box<dyn FnOnce() -> std::io::Result<()> + Send>; 3] = [
            Box::new(|| file.read_at(&mut [0; 10], 0).map(drop)),
            Box::new(|| File::open(at.join("other")).map(drop)),
            Box::new(|| fs::create_dir(at.join("below/new"))),
        ];
        let workers = work.map(|work| {
            let sender = sender.clone();
            s.spawn(move || {
                sender.send(nix::unistd::gettid()).unwrap();
                work()
            })
        });
        let threads: Vec<_> = threads.iter().take(3).collect();
        while !workers.iter().all(|w| w.is_finished()) {
            for thread in &threads {
                let process = std::process::id();
                // SAFETY: tgkill(2) takes three numbers.
                unsafe { libc::syscall(libc::SYS_tgkill, process, thread.as_raw(), libc::SIGALRM) };
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        for worker in workers {
            match worker.join().unwrap() {
                Ok(()) => say("ok"),
                Err(e) => say(&e.to_string()),
            }
        }
    });
    say(&format!("{}", HANDLED.load(Ordering::Relaxed) > 0));
}

/// Holds open files, and does nothing.
fn hold_files(at: &Path, count: usize) {
    let files: Vec<File> = (0..count)
        .map(|n| File::create(at.join(n.to_string())).unwrap())
        .collect();
    wait_for_go();
    drop(files);
}

/// Holds a lock, and does nothing.
fn hold_lock(at: &Path, kind: &str) {
    let file = File::create(at.join(kind)).unwrap();
    lock(&file, kind).unwrap();
    wait_for_go();
}

/// Takes an exclusive lock if nobody has one.
fn lock(file: &File, kind: &str) -> std::io::Result<()> {
    match kind {
        "fcntl" => fcntl_lock(file, FlockOperation::NonBlockingLockExclusive)?,
        "flock" => flock(file, FlockOperation::NonBlockingLockExclusive)?,
        "ofd" => set_ofd(file, libc::F_WRLCK)?,
        _ => panic!("unknown lock {kind}"),
    }
    Ok(())
}

fn set_ofd(file: &File, kind: libc::c_int) -> nix::Result<()> {
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_OFD_SETLK(&lock)).map(drop)
}

// ---- callers ---------------------------------------------------------------------------------

#[test]
fn a_signal_with_a_handler_interrupts_nothing_in_an_outage() {
    let _alone = alone();
    let mount = Mount::new();
    let outage = Duration::from_secs(if long() { 5 } else { 2 });
    for restart in ["restart", "interrupt"] {
        let dir = mount.path(restart);
        fs::create_dir(&dir).unwrap();
        fs::write(mount.behind(restart).join("file"), "text").unwrap();
        fs::write(mount.behind(restart).join("other"), "text").unwrap();
        // A directory of its own: the kernel lets nobody look into one where a name is made.
        fs::create_dir(dir.join("below")).unwrap();
        let mut survivor = Actor::start(&format!("signals {restart}"), &dir);
        fs::create_dir_all(dir.join("2/below")).unwrap();
        fs::write(dir.join("2/file"), "text").unwrap();
        let mut victim = Actor::start(&format!("signals {restart}"), &dir.join("2"));
        mount.begin_outage();
        let began = Instant::now();
        survivor.go();
        mount.wait("three callers blocked", |s| s.inflight == 3);
        victim.go();
        mount.wait("more callers blocked", |s| s.inflight >= 5);
        let signalled = || {
            let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid())).unwrap();
            tasks
                .filter(|t| {
                    let status = t.as_ref().unwrap().path().join("status");
                    let status = fs::read_to_string(status).unwrap_or_default();
                    // Bit 13: SIGALRM waits for the end of the system call.
                    status.contains("SigPnd:\t0000000000002000")
                })
                .count()
        };
        assert!(until(PATIENCE, || signalled() >= 2), "nobody was signalled");
        prompt("kill -9 after a signal", victim.kill());
        // The time of the outage is the matter of this test.
        std::thread::sleep(outage.saturating_sub(began.elapsed()));
        mount.wait("only the survivor is left", |s| s.inflight == 3);
        mount.end_outage();
        for what in ["read", "open", "mkdir"] {
            assert_eq!(survivor.line(), "ok", "{what}, {restart}");
        }
        assert_eq!(survivor.line(), "true", "the handler never ran");
        assert!(survivor.end().success());
        assert!(mount.behind(restart).join("below/new").is_dir());
    }
    mount.end();
}

fn actors(mount: &Mount, sub: &str) -> Vec<(&'static str, Actor)> {
    OPERATIONS
        .into_iter()
        .map(|what| {
            let name = format!("{sub}{what}");
            fs::create_dir(mount.behind(&name)).unwrap();
            // Written behind the mount, so that nothing of it is in the page cache.
            fs::write(mount.behind(&name).join("file"), "text").unwrap();
            let actor = Actor::start(&format!("do {what}"), &mount.path(&name));
            (what, actor)
        })
        .collect()
}

#[test]
fn a_killed_caller_ends_at_once_in_an_outage_without_end() {
    let _alone = alone();
    let mount = Mount::new();
    let mut actors = actors(&mount, "");
    mount.begin_outage();
    for (_, actor) in &mut actors {
        actor.go();
    }
    mount.wait("all of them wait", |s| {
        s.inflight == OPERATIONS.len() as u64
    });
    for (what, actor) in &mut actors {
        prompt(&format!("kill -9 during {what}"), actor.kill());
    }
    // The kernel sends a RELEASE when it comes to it.
    mount.wait("forgotten", |s| {
        (s.inflight, s.open_files, s.locks) == (0, 0, 0)
    });
    mount.end_outage();
    // Nothing that was answered is done after all.
    assert!(mount.path("unlink/file").exists());
    assert!(!mount.path("mkdir/new").exists());
    assert_eq!(fs::read(mount.path("truncate/file")).unwrap(), b"text");
    mount.end();
}

#[test]
fn a_killed_caller_ends_at_once_when_its_request_was_running() {
    let _alone = alone();
    let mount = Mount::new();
    for what in ["read", "write", "mkdir", "fsync", "unlink", "open", "close"] {
        let opcode = match what {
            "close" => "FLUSH".to_owned(),
            _ => what.to_uppercase(),
        };
        fs::create_dir(mount.behind(what)).unwrap();
        fs::write(mount.behind(what).join("file"), "text").unwrap();
        let mut actor = Actor::start(&format!("do {what}"), &mount.path(what));
        // The backend is stopped in the midst of it, and its successor is kept back.
        let order = format!("before-execution@{opcode}");
        mount.order(&order, "hang");
        actor.go();
        let carried_out = || mount.carried_out(&order);
        assert!(until(PATIENCE, carried_out), "{what} was never asked for");
        mount.begin_outage();
        assert!(mount.status().inflight >= 1, "{what} does not wait");
        prompt(&format!("kill -9 during a running {what}"), actor.kill());
        mount.wait("forgotten", |s| {
            (s.inflight, s.open_files, s.locks) == (0, 0, 0)
        });
        mount.end_outage();
        assert_eq!(mount.status().inflight, 0);
    }
    mount.end();
}

#[test]
fn a_process_with_open_files_and_locks_ends_in_an_outage_and_leaves_nothing() {
    let _alone = alone();
    for policy in ["queue", "error"] {
        let mount = Mount::with_args(&["--outage", policy]);
        let mut files = Actor::start("files 30", &mount.point);
        let kinds = ["fcntl", "flock", "ofd"].into_iter();
        let kinds: Vec<&str> = kinds.filter(|kind| store_knows(kind)).collect();
        let locks = kinds.len() as u64;
        let mut holders: Vec<Actor> = kinds
            .iter()
            .map(|kind| Actor::start(&format!("lock {kind}"), &mount.point))
            .collect();
        let status = mount.status();
        assert_eq!((status.open_files, status.locks), (30 + locks, locks));
        for kind in &kinds {
            let behind = File::options().write(true).open(mount.behind(kind));
            assert!(lock(&behind.unwrap(), kind).is_err(), "{kind} is not held");
        }
        mount.begin_outage();
        prompt("the end of a process with 30 open files", files.kill());
        for (kind, holder) in kinds.iter().zip(&mut holders) {
            prompt(
                &format!("the end of a process with a lock of {kind}"),
                holder.kill(),
            );
        }
        mount.wait("all closed", |s| {
            (s.open_files, s.locks, s.inflight) == (0, 0, 0)
        });
        mount.end_outage();
        for kind in kinds {
            for path in [mount.behind(kind), mount.path(kind)] {
                let file = File::options().write(true).open(path).unwrap();
                lock(&file, kind).unwrap_or_else(|e| panic!("{kind} is still held: {e}"));
            }
        }
        mount.end();
    }
}

#[test]
fn a_lock_taken_again_in_an_outage_is_held_after_it() {
    let _alone = alone();
    let mount = Mount::new();
    for round in 0..if long() { 100 } else { 10 } {
        let name = format!("file{round}");
        // Shared and not duplicated: the end of any descriptor ends the process' locks.
        let file = std::sync::Arc::new(File::create(mount.path(&name)).unwrap());
        lock(&file, "fcntl").unwrap();
        mount.begin_outage();
        fcntl_lock(&file, FlockOperation::NonBlockingUnlock).unwrap();
        let again = file.clone();
        let locking = std::thread::spawn(move || lock(&again, "fcntl"));
        mount.wait("both in the queue", |s| s.inflight == 2);
        mount.end_outage();
        within(PATIENCE, "the lock", move || locking.join().unwrap()).unwrap();
        mount.wait("all done", |s| s.inflight == 0);
        assert_eq!(mount.status().locks, 1, "round {round}");
        let behind = File::options().write(true).open(mount.behind(&name));
        assert!(
            lock(&behind.unwrap(), "fcntl").is_err(),
            "round {round}: the store does not know the lock"
        );
    }
    mount.end();
}

#[test]
fn df_and_stat_return_with_a_thousand_callers_blocked() {
    let _alone = alone();
    const CALLERS: usize = 999;
    let mount = Mount::new();
    for n in 0..CALLERS / 3 {
        fs::create_dir(mount.path(&format!("dir{n}"))).unwrap();
        fs::write(mount.behind(&format!("file{n}")), "text").unwrap();
    }
    mount.begin_outage();
    let threads: Vec<_> = (0..CALLERS)
        .map(|n| {
            let (which, n) = (n % 3, n / 3);
            let path = match which {
                0 => mount.path(&format!("unknown{n}")),
                1 => mount.path(&format!("file{n}")),
                _ => mount.path(&format!("dir{n}/new")),
            };
            let work = move || match which {
                0 => errno(fs::metadata(path)) == Some(libc::ENOENT),
                1 => {
                    let mut text = String::new();
                    File::open(path).unwrap().read_to_string(&mut text).unwrap();
                    text == "text"
                }
                _ => fs::create_dir(path).is_ok(),
            };
            let builder = std::thread::Builder::new().stack_size(128 * 1024);
            builder.spawn(work).unwrap()
        })
        .collect();
    mount.wait("all of them wait", |s| s.inflight >= CALLERS as u64);
    for _ in 0..3 {
        look_at_root(&mount);
    }
    let status = mount.command(&["status", text(&mount.point)]).output();
    let shown = String::from_utf8(status.unwrap().stdout).unwrap();
    assert!(shown.contains("999 in flight"), "{shown}");
    mount.end_outage();
    let succeeded = within(PATIENCE, "callers", move || {
        threads.into_iter().all(|t| t.join().unwrap())
    });
    assert!(succeeded);
    for n in 0..CALLERS / 3 {
        assert!(mount.behind(&format!("dir{n}/new")).is_dir());
    }
    mount.end();
}

#[test]
fn the_root_can_be_walked_into_by_everybody_in_an_outage() {
    let _alone = alone();
    let mount = Mount::new();
    // Its owner is not who looks, so the kernel asks for its access control list.
    std::os::unix::fs::chown(&mount.point, Some(1234), Some(1234)).unwrap();
    fs::metadata(&mount.point).unwrap();
    mount.wait("the list was read again", |s| s.inflight == 0);
    mount.begin_outage();
    look_at_root(&mount);
    let point = text(&mount.point);
    assert!(program("test", &["-x", point]).status.success());
    let script = format!("cd {point}");
    assert!(program("sh", &["-c", &script]).status.success());
    let user = ["--reuid", "4242", "--regid", "4242", "--clear-groups"];
    let walk = [&user[..], &["sh", "-c", &script]].concat();
    assert!(program("setpriv", &walk).status.success());
    mount.end_outage();
    mount.end();
}

#[test]
fn a_close_and_the_start_of_a_program_do_not_wait_in_an_outage() {
    let _alone = alone();
    let mount = Mount::new();
    let file = File::create(mount.path("file")).unwrap();
    mount.begin_outage();
    // Its copy of the file is closed by `execve`, which sends a FLUSH with locks of the kernel held:
    // whoever reads `/proc/PID/stat` meanwhile waits for it, be it `ps` or a front-end.
    assert!(program("true", &[]).status.success());
    assert_eq!(mount.status().state, State::Outage);
    promptly("a close", move || {
        nix::unistd::close(std::os::fd::OwnedFd::from(file))
    })
    .unwrap();
    mount.wait("closed", |s| (s.open_files, s.inflight) == (0, 0));
    mount.end_outage();
    fs::metadata(mount.path("file")).unwrap();
    mount.end();
}

// ---- unmounting ------------------------------------------------------------------------------

/// A dead backend's session with CephFS is ended by another backend, so one must be able to start.
fn let_a_session_end(mount: &Mount) {
    if ceph_is_wanted() {
        mount.cancel("start");
    }
}

#[test]
fn an_unmount_returns_at_once_in_an_outage() {
    let _alone = alone();
    let mount = Mount::new();
    let point = text(&mount.point).to_owned();
    let mut user = Actor::start("files 1", &mount.point);
    mount.begin_outage();
    let (frontend, backend) = (mount.frontend, mount.status().backend_pid.unwrap());
    let output = program("umount", &[&point]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(32), "{errors}");
    assert!(errors.contains("busy"), "{errors}");
    assert_eq!(mount.status().state, State::Outage);
    prompt("the end of its user", user.kill());
    mount.wait("not in use", |s| s.open_files == 0);
    let output = program("umount", &[&point]);
    assert!(output.status.success(), "{output:?}");
    let_a_session_end(&mount);
    promptly("the end of the processes", move || {
        assert!(until(PATIENCE, || is_gone(frontend) && is_gone(backend)));
    });
    mount.end();
}

#[test]
fn a_lazy_unmount_returns_at_once_in_an_outage() {
    let _alone = alone();
    let mount = Mount::new();
    let point = text(&mount.point).to_owned();
    fs::create_dir(mount.path("mkdir")).unwrap();
    fs::write(mount.path("mkdir/file"), "").unwrap();
    let mut actor = Actor::start("do mkdir", &mount.path("mkdir"));
    mount.begin_outage();
    let (frontend, backend) = (mount.frontend, mount.status().backend_pid.unwrap());
    actor.go();
    mount.wait("a caller waits", |s| s.inflight == 1);
    assert!(program("umount", &["-l", &point]).status.success());
    assert!(!is_gone(frontend), "somebody still uses it");
    prompt("kill -9 in a detached mount", actor.kill());
    let_a_session_end(&mount);
    promptly("the end of the processes", move || {
        assert!(until(PATIENCE, || is_gone(frontend) && is_gone(backend)));
    });
    mount.end();
}

// ---- policies --------------------------------------------------------------------------------

/// A policy that ends with EIO: what it must not touch, and that it is over when a backend is back.
fn check_refusal(mount: &Mount) {
    let path = mount.path("known/unknown");
    let refused = promptly("a refused request", move || errno(fs::metadata(path)));
    assert_eq!(refused, Some(libc::EIO));
    look_at_root(mount);
    // The name is found; what cannot be had is the file's contents.
    let known = mount.path("known");
    let found = promptly("a known name", move || {
        rustix::fs::open(known, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
            .map(drop)
            .map_err(std::io::Error::from)
    });
    assert_eq!(errno(found), None, "a known name");
}

#[test]
fn with_a_time_limit_requests_wait_that_long_and_get_eio_then() {
    let _alone = alone();
    let limit = Duration::from_secs(if long() { 3 } else { 1 });
    let policy = format!("queue:{}", limit.as_secs());
    let mount = Mount::with_args(&["--outage", &policy]);
    fs::create_dir(mount.path("known")).unwrap();
    fs::write(mount.behind("file"), "text").unwrap();
    for _ in 0..2 {
        let held = File::open(mount.path("known")).unwrap();
        mount.begin_outage();
        let began = Instant::now();
        let path = mount.path("file");
        let waiting = std::thread::spawn(move || errno(File::open(path)));
        let answer = within(PATIENCE, "a waiting request", move || {
            waiting.join().unwrap()
        });
        assert_eq!(answer, Some(libc::EIO));
        let waited = began.elapsed();
        eprintln!("EIO after {waited:?}");
        // The outage began a moment before this test saw it.
        assert!(waited > limit.mul_f64(0.5), "only {waited:?}");
        check_refusal(&mount);
        drop(held);
        mount.end_outage();
        assert_eq!(fs::read(mount.path("file")).unwrap(), b"text");
        fs::metadata(mount.path("known")).unwrap();
    }
    mount.end();
}

#[test]
fn many_large_writes_that_were_refused_do_not_stop_the_mount() {
    let _alone = alone();
    // More bytes than the front-end keeps: it stops reading until some were answered.
    const WRITERS: usize = 300;
    let mount = Mount::with_args(&["--outage", "queue:2"]);
    let files: Vec<File> = (0..WRITERS)
        .map(|n| {
            let file = File::create(mount.path(&n.to_string())).unwrap();
            // Before its first write the kernel asks for the file's capabilities.
            file.write_all_at(b"text", 0).unwrap();
            file
        })
        .collect();
    mount.begin_outage();
    let data = vec![7; 1 << 20];
    let refused = within(PATIENCE, "writes", move || {
        std::thread::scope(|s| {
            let threads: Vec<_> = files
                .iter()
                .map(|file| s.spawn(|| errno(file.write_at(&data, 0))))
                .collect();
            let answers = threads.into_iter().map(|t| t.join().unwrap());
            answers.filter(|e| *e == Some(libc::EIO)).count()
        })
    });
    assert_eq!(refused, WRITERS);
    look_at_root(&mount);
    mount.end_outage();
    fs::create_dir(mount.path("new")).unwrap();
    mount.end();
}

#[test]
fn with_policy_error_requests_get_eio_at_once_until_a_backend_is_back() {
    let _alone = alone();
    let mount = Mount::with_args(&["--outage", "error"]);
    fs::create_dir(mount.path("known")).unwrap();
    fs::write(mount.path("file"), "text").unwrap();
    let file = File::open(mount.path("file")).unwrap();
    // What is mounted below a name stays.
    let below = mount.path("known");
    let mounted = program("mount", &["-t", "tmpfs", "tmpfs", text(&below)]);
    assert!(mounted.status.success());
    fs::write(below.join("inside"), "").unwrap();
    mount.begin_outage();
    check_refusal_of_others(&mount);
    for _ in 0..if long() { 100 } else { 5 } {
        assert!(below.join("inside").exists(), "the mount below went away");
        look_at_root(&mount);
    }
    mount.end_outage();
    fs::metadata(mount.path("unknown")).unwrap_err();
    assert!(below.join("inside").exists());
    assert_eq!(file.read_at(&mut [0; 10], 0).unwrap(), 4);
    fs::write(mount.path("file"), "more").unwrap();
    drop(file);
    assert!(program("umount", &[text(&below)]).status.success());
    assert!(below.exists());
    mount.end();
}

fn check_refusal_of_others(mount: &Mount) {
    type Act = fn(PathBuf) -> Option<i32>;
    let refused: [(&'static str, Act); 4] = [
        ("stat", |p| errno(fs::metadata(p.join("new")))),
        ("mkdir", |p| errno(fs::create_dir(p.join("new")))),
        ("create", |p| errno(File::create(p.join("new")))),
        ("readdir", |p| {
            errno(fs::read_dir(p).unwrap().next().unwrap())
        }),
    ];
    for (what, act) in refused {
        let point = mount.point.clone();
        let got = promptly(what, move || act(point));
        assert_eq!(got, Some(libc::EIO), "{what}");
    }
}

// ---- backends that do not come back, or hang ---------------------------------------------------

#[test]
fn a_backend_that_does_not_start_is_tried_again_and_again_and_its_reason_shown() {
    let _alone = alone();
    let mount = Mount::new();
    fs::write(mount.path("file"), "text").unwrap();
    mount.order("start-fails", "the store is on fire");
    let began = Instant::now();
    mount.kill_backend();
    let path = mount.path("unknown");
    let waiting = std::thread::spawn(move || errno(fs::metadata(path)));
    let tries = if long() { 10 } else { 6 };
    let status = mount.wait("tried often", |s| s.restarts_failed >= tries);
    assert_eq!(status.state, State::Outage);
    let reason = status.reason.clone().unwrap_or_default();
    assert!(reason.contains("the store is on fire"), "{reason}");
    // Not in a busy loop: the waits add up to 100 ms · (2^tries − 1), less a quarter.
    let least = Duration::from_millis(75 * ((1 << (tries - 1)) - 1));
    assert!(began.elapsed() >= least, "{:?}", began.elapsed());
    look_at_root(&mount);
    let output = mount.command(&["status", text(&mount.point)]).output();
    let shown = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(shown.contains("outage for"), "{shown}");
    assert!(shown.contains("the store is on fire"), "{shown}");
    mount.cancel("start-fails");
    mount.wait("served again", |s| s.outage_ms.is_none());
    let answer = within(PATIENCE, "the waiting request", move || {
        waiting.join().unwrap()
    });
    assert_eq!(answer, Some(libc::ENOENT));
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"text");
    mount.end();
}

#[test]
fn requests_that_hang_in_the_store_hold_up_nobody_else() {
    let _alone = alone();
    let mount = Mount::new();
    // More than a backend has threads at the start.
    const STUCK: usize = 5;
    let mut actors: Vec<Actor> = (0..STUCK)
        .map(|n| {
            let name = format!("stuck{n}");
            fs::create_dir(mount.path(&name)).unwrap();
            fs::write(mount.path(&name).join("file"), "").unwrap();
            Actor::start("do mkdir", &mount.path(&name))
        })
        .collect();
    for actor in &mut actors {
        mount.order("before-execution@MKDIR@new", "hang");
        actor.go();
        let carried_out = || mount.carried_out("before-execution@MKDIR@new");
        assert!(until(PATIENCE, carried_out), "nobody else was served");
    }
    let point = mount.point.clone();
    promptly("work beside it", move || {
        for n in 0..20 {
            fs::create_dir(point.join(n.to_string())).unwrap();
            fs::write(point.join(n.to_string()).join("file"), "text").unwrap();
        }
    });
    look_at_root(&mount);
    let mut victim = actors.pop().unwrap();
    prompt("kill -9 of a caller that hangs", victim.kill());
    let status = mount.wait("it is forgotten", |s| s.inflight == STUCK as u64 - 1);
    assert_eq!(status.state, State::Serving);
    mount.kill_backend();
    for (n, actor) in actors.iter_mut().enumerate() {
        assert_eq!(actor.line(), "done");
        assert!(mount.behind(&format!("stuck{n}/new")).is_dir());
    }
    // Its caller was told that it was interrupted, so it is never done.
    assert!(!mount.behind(&format!("stuck{}/new", STUCK - 1)).exists());
    fs::create_dir(mount.path("after")).unwrap();
    mount.wait("nothing is left", |s| s.inflight == 0);
    mount.end();
}

#[test]
fn the_root_answers_while_the_store_does_not_answer_for_it() {
    let _alone = alone();
    let mount = Mount::new();
    for opcode in ["STATFS", "GETATTR", "STATX"] {
        mount.order(&format!("before-execution@{opcode}"), "hang always");
    }
    // The kernel believes the root's attributes for a second.
    let met = AtomicBool::new(false);
    for _ in 0..3 {
        look_at_root(&mount);
        met.fetch_or(mount.status().early_answers > 0, Ordering::Relaxed);
    }
    assert!(met.into_inner(), "nothing was answered early");
    for opcode in ["STATFS", "GETATTR", "STATX"] {
        mount.cancel(&format!("before-execution@{opcode}"));
    }
    mount.replace_backend();
    look_at_root(&mount);
    mount.wait("nothing is left", |s| s.inflight == 0);
    mount.end();
}
