//! A real mount for a test: made by the `evermount` program, ended and checked when the test is over.

#![allow(dead_code)] // each test file uses a part of it

pub mod actor;
pub mod ceph;
pub mod tools;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use evermount::control::{Command as Ask, CommandAnswer, Conn, Status};
use nix::mount::MsFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use ceph::{CephFuse, Cluster};

/// The program under test.
pub const EVERMOUNT: &str = env!("CARGO_BIN_EXE_evermount");
/// Nothing a test waits for takes this long, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A mount of a temporary directory, or of a directory of a CephFS.
pub struct Mount {
    dir: Option<TempDir>,
    store: Store,
    /// Where.
    pub point: PathBuf,
    faults: PathBuf,
    runtime: PathBuf,
    log: PathBuf,
    pub frontend: u32,
    socket: PathBuf,
}

/// What is mounted.
enum Store {
    /// A local directory.
    Local(PathBuf),
    /// A directory of a CephFS, and an unmodified client that looks at it from elsewhere, once there
    /// is one.
    Ceph {
        conf: PathBuf,
        directory: String,
        observer: OnceLock<CephFuse>,
    },
}

/// How to make a mount.
#[derive(Default)]
pub struct Options<'a> {
    /// Directory on the file system that is to hold the source; the default is the temporary one.
    pub on: Option<&'a Path>,
    /// A CephFS that is to hold it instead, and its directory there.
    pub ceph: Option<(&'a Cluster, &'a str)>,
    /// Further arguments of `evermount mount`.
    pub args: &'a [&'a str],
}

/// Tests that say nothing else are to mount a CephFS (`EVERMOUNT_TEST_SOURCE=ceph`).
pub fn ceph_is_wanted() -> bool {
    std::env::var_os("EVERMOUNT_TEST_SOURCE").is_some_and(|kind| kind == "ceph")
}

/// When writes to a CephFS are to be acknowledged in tests that say nothing else
/// (`EVERMOUNT_TEST_WRITES`).
pub fn wanted_writes() -> Option<String> {
    std::env::var("EVERMOUNT_TEST_WRITES").ok()
}

/// The store knows locks of this kind. With CephFS `flock(2)` is the kernel's own: nobody else sees
/// them, and no backend is asked.
pub fn store_knows(lock: &str) -> bool {
    lock != "flock" || !ceph_is_wanted()
}

impl Mount {
    /// A mount with default options.
    pub fn new() -> Mount {
        Mount::with(&Options::default())
    }

    /// A mount with these arguments of `evermount mount`.
    pub fn with_args(args: &[&str]) -> Mount {
        Mount::with(&Options {
            args,
            ..Options::default()
        })
    }

    /// A mount of a directory of a CephFS, which is made if it is not there.
    pub fn of_ceph(cluster: &Cluster, directory: &str, args: &[&str]) -> Mount {
        cluster.make_dir(directory);
        Mount::with(&Options {
            ceph: Some((cluster, directory)),
            args,
            ..Options::default()
        })
    }

    /// A mount.
    pub fn with(options: &Options<'_>) -> Mount {
        if ceph_is_wanted() && options.on.is_none() && options.ceph.is_none() {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let directory = format!("/{}", NUMBER.fetch_add(1, Ordering::Relaxed));
            return Mount::of_ceph(Cluster::shared(), &directory, options.args);
        }
        let dir = TempDir::with_prefix("evermount-test-").unwrap();
        // Other users must be able to walk through.
        open_to_all(dir.path());
        let path = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            open_to_all(&path);
            path
        };
        let (point, faults) = (path("mnt"), path("faults"));
        let runtime = dir.path().join("run");
        let store = match (options.ceph, options.on) {
            (Some((cluster, directory)), _) => Store::Ceph {
                conf: cluster.conf().to_owned(),
                directory: directory.to_owned(),
                observer: OnceLock::new(),
            },
            (None, None) => Store::Local(path("src")),
            (None, Some(on)) => {
                let source = on.join("src");
                fs::create_dir_all(&source).unwrap();
                open_to_all(&source);
                Store::Local(source)
            }
        };
        let mut source_args = Vec::new();
        match &store {
            Store::Local(source) => source_args.push(format!("dir:{}", source.display())),
            Store::Ceph {
                conf, directory, ..
            } => {
                source_args.push(format!("ceph:{directory}"));
                source_args.push(format!("--conf={}", conf.display()));
                if !options.args.iter().any(|arg| arg.starts_with("--writes")) {
                    source_args.extend(wanted_writes().map(|when| format!("--writes={when}")));
                }
            }
        }
        let log = dir.path().join("log");
        let output = Command::new(EVERMOUNT)
            .arg("mount")
            .args(source_args)
            .arg(&point)
            .args(options.args)
            .arg("--log")
            .arg(&log)
            .env("EVERMOUNT_FAULTS", &faults)
            .env("EVERMOUNT_RUNTIME_DIR", &runtime)
            .output()
            .unwrap();
        let log_text = fs::read_to_string(&log).unwrap_or_default();
        assert!(
            output.status.success(),
            "mount failed: {}\n{log_text}",
            String::from_utf8_lossy(&output.stderr)
        );
        let socket = fs::read_dir(&runtime)
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.extension().is_some_and(|e| e == "sock"))
            .expect("the front-end has no socket");
        let mut mount = Mount {
            dir: Some(dir),
            store,
            point,
            faults,
            runtime,
            log,
            frontend: 0,
            socket,
        };
        mount.frontend = mount.status().frontend_pid;
        mount
    }

    /// A path on the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }

    /// The same path in the source, as somebody else sees it.
    pub fn behind(&self, name: &str) -> PathBuf {
        match &self.store {
            Store::Local(source) => source.join(name),
            Store::Ceph {
                conf,
                directory,
                observer,
            } => {
                let root = format!("--client_mountpoint={directory}");
                let observer = observer.get_or_init(|| CephFuse::mount(conf, &[&root]));
                observer.path(name)
            }
        }
    }

    /// The source as `evermount mount` takes it.
    pub fn source(&self) -> String {
        match &self.store {
            Store::Local(source) => format!("dir:{}", source.display()),
            Store::Ceph { directory, .. } => format!("ceph:{directory}"),
        }
    }

    /// The directory of its socket.
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The program with this mount's environment.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(EVERMOUNT);
        command
            .args(args)
            .env("EVERMOUNT_RUNTIME_DIR", &self.runtime);
        command
    }

    /// What `evermount status` would say.
    pub fn status(&self) -> Status {
        self.try_status().expect("the front-end does not answer")
    }

    fn try_status(&self) -> Option<Status> {
        let conn = Conn::connect(&self.socket).ok()?;
        conn.set_timeout(Some(Duration::from_secs(10))).unwrap();
        conn.send(&Ask::Status, &[]).ok()?;
        match conn.recv::<CommandAnswer>().ok()?? {
            (CommandAnswer::Status(status), _) => Some(*status),
            (other, _) => panic!("unexpected answer {other:?}"),
        }
    }

    /// Waits until the status is as wanted.
    pub fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "never {what}: {status:#?}\n{}",
                self.log_text()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// SIGKILLs the backend, if there is one just now.
    pub fn kill_backend(&self) {
        if let Some(pid) = self.status().backend_pid {
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
        }
    }

    /// SIGKILLs the backend and waits for its successor.
    pub fn replace_backend(&self) {
        let before = self.wait("serving", |s| s.outage_ms.is_none());
        let pid = before.backend_pid.unwrap();
        // It may have died meanwhile of an earlier kill: then its successor is the one.
        let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
        self.wait("taken over", |s| {
            s.generation > before.generation && s.outage_ms.is_none()
        });
    }

    /// Does `work` while the backend is killed again and again. Returns the number of deaths, too.
    pub fn under_fire<T>(&self, every: Duration, work: impl FnOnce() -> T) -> (T, u64) {
        let before = self.status().takeovers;
        let (work_goes_on, over) = std::sync::mpsc::channel::<()>();
        let done = std::thread::scope(|scope| {
            scope.spawn(move || {
                use std::sync::mpsc::RecvTimeoutError::Timeout;
                while over.recv_timeout(every) == Err(Timeout) {
                    self.kill_backend();
                }
            });
            let done = work();
            drop(work_goes_on);
            done
        });
        let after = self.wait("serving", |s| s.outage_ms.is_none());
        (done, after.takeovers - before)
    }

    /// Keeps every backend from starting until [`Mount::end_outage`], and kills the present one.
    pub fn begin_outage(&self) {
        self.order("start", "");
        self.kill_backend();
        self.wait("in outage", |s| s.outage_ms.is_some());
    }

    /// Lets backends start again.
    pub fn end_outage(&self) {
        self.cancel("start");
        self.wait("serving again", |s| s.outage_ms.is_none());
    }

    /// Places an order for a fault point; see `backend::fault`.
    pub fn order(&self, order: &str, action: &str) {
        let draft = self.faults.join(".draft");
        fs::write(&draft, action).unwrap();
        fs::rename(draft, self.faults.join(order)).unwrap();
    }

    /// The file of an order, which withdraws it when it is removed.
    pub fn order_file(&self, order: &str) -> PathBuf {
        self.faults.join(order)
    }

    /// Withdraws an order.
    pub fn cancel(&self, order: &str) {
        let _ = fs::remove_file(self.faults.join(order));
    }

    /// The order was carried out.
    pub fn carried_out(&self, order: &str) -> bool {
        !self.faults.join(order).exists()
    }

    /// What the front-end and its backends logged.
    pub fn log_text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Unmounts and checks that nothing is left.
    pub fn end(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        let Some(dir) = self.dir.take() else { return };
        let frontend = self.frontend;
        let backend = self.try_status().and_then(|s| s.backend_pid);
        let mount_id = mount_id(&self.point);
        let umount = Command::new("umount").arg("-l").arg(&self.point).output();
        let gone = until(Duration::from_secs(10), || {
            !Path::new(&format!("/proc/{frontend}/exe")).exists()
        });
        if !gone || std::thread::panicking() {
            let log = self.log_text();
            let tail: Vec<&str> = log.lines().rev().take(20).collect();
            eprintln!("umount: {umount:?}\n{}", tail.join("\n"));
        }
        if !gone {
            let uses = who_uses(mount_id.as_deref(), &self.point);
            eprintln!("{}{uses}", where_threads_wait(frontend));
            let _ = kill(Pid::from_raw(frontend as i32), Signal::SIGKILL);
            // A mount namespace that somebody else on this machine made meanwhile has a copy of the
            // mount, which lives on with it. That is not the front-end's doing.
            assert!(
                std::thread::panicking() || uses.contains(ELSEWHERE),
                "the front-end is still there after the unmount"
            );
        }
        if std::thread::panicking() {
            // The evidence stays.
            eprintln!("kept {}", dir.keep().display());
            return;
        }
        if let Some(pid) = backend {
            assert!(
                until(Duration::from_secs(5), || !Path::new(&format!(
                    "/proc/{pid}/exe"
                ))
                .exists()),
                "backend {pid} is still there after the unmount"
            );
        }
        assert!(!self.socket.exists(), "the socket is still there");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Polls until it is true. False after the limit.
pub fn until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !done() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Runs `work` in a thread and panics if it is not done in time: a hang is a failure, not a wait.
pub fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let _ = sender.send(work());
    });
    match receiver.recv_timeout(limit) {
        Ok(value) => value,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().expect_err("it panicked"))
        }
    }
}

/// Runs `work`, which must be over within a second: what a human, kubelet or a supervisor waits for.
/// On a machine with more work than processors nobody can promise that; there it must not hang.
pub fn promptly<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let began = Instant::now();
    let value = within(PATIENCE, what, work);
    prompt(what, began.elapsed());
    value
}

/// Checks a time for [`promptly`].
pub fn prompt(what: &str, took: Duration) {
    eprintln!("{what}: {:.0} ms", took.as_secs_f64() * 1e3);
    let limit = Duration::from_secs(if overloaded() { 10 } else { 1 });
    assert!(took <= limit, "{what} took {took:?}");
}

fn overloaded() -> bool {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    // The last minute's average, or more that can run right now than there are processors.
    let mut fields = load.split(['/', ' ']);
    let average: f64 = fields.next().and_then(|f| f.parse().ok()).unwrap_or(0.0);
    let running: usize = fields.nth(2).and_then(|f| f.parse().ok()).unwrap_or(0);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    average > processors as f64 || running > 2 * processors
}

/// The long form of a test is wanted (`EVERMOUNT_LONG=1`).
pub fn long() -> bool {
    std::env::var_os("EVERMOUNT_LONG").is_some_and(|v| v != "0")
}

/// Mode 0777, so that tests may act as another user.
pub fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
}

/// A machine whose `/dev/fuse` is for everybody, as udev makes it. Where it is not, this thread and
/// what it starts get a private one, below `place`.
pub fn let_users_mount(place: &Path) {
    use std::os::unix::fs::MetadataExt;
    let mode = fs::metadata("/dev/fuse").unwrap().mode();
    if mode & 0o006 == 0o006 {
        return;
    }
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
    let none = None::<&str>;
    nix::mount::mount(none, "/", none, private, none).unwrap();
    let dev = place.join("dev");
    fs::create_dir(&dev).unwrap();
    nix::mount::mount(Some("tmpfs"), &dev, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    let node = dev.join("fuse");
    let device = nix::sys::stat::makedev(10, 229);
    nix::sys::stat::mknod(
        &node,
        nix::sys::stat::SFlag::S_IFCHR,
        nix::sys::stat::Mode::empty(),
        device,
    )
    .unwrap();
    open_to_all(&node);
    nix::mount::mount(Some(&node), "/dev/fuse", none, MsFlags::MS_BIND, none).unwrap();
}

/// The errno of a failed operation.
pub fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

/// A file system in a file, mounted for the time of a test.
pub struct LoopFs {
    dir: TempDir,
}

impl LoopFs {
    /// Makes and mounts one: `ext4`, `xfs`, `tmpfs` or `overlay`.
    pub fn new(kind: &str) -> LoopFs {
        let dir = TempDir::with_prefix("evermount-store-").unwrap();
        let at = dir.path().join("fs");
        fs::create_dir(&at).unwrap();
        open_to_all(dir.path());
        let run = |program: &str, args: &[&str]| {
            let output = Command::new(program).args(args).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{program} {args:?}: {text}");
        };
        let target = at.to_str().unwrap().to_owned();
        match kind {
            "tmpfs" => run("mount", &["-t", "tmpfs", "tmpfs", &target]),
            "overlay" => {
                let layer = |name: &str| {
                    let path = dir.path().join(name);
                    fs::create_dir(&path).unwrap();
                    path.to_str().unwrap().to_owned()
                };
                let tmp = layer("layers");
                run("mount", &["-t", "tmpfs", "tmpfs", &tmp]);
                for name in ["lower", "upper", "work"] {
                    fs::create_dir(Path::new(&tmp).join(name)).unwrap();
                }
                let options =
                    format!("lowerdir={tmp}/lower,upperdir={tmp}/upper,workdir={tmp}/work");
                run(
                    "mount",
                    &["-t", "overlay", "overlay", "-o", &options, &target],
                );
            }
            kind => {
                let image = dir.path().join("image");
                let file = fs::File::create(&image).unwrap();
                file.set_len(512 << 20).unwrap();
                let image = image.to_str().unwrap().to_owned();
                run(&format!("mkfs.{kind}"), &["-q", &image]);
                run("mount", &["-o", "loop", &image, &target]);
            }
        }
        open_to_all(&at);
        LoopFs { dir }
    }

    /// Its root.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("fs")
    }
}

impl Drop for LoopFs {
    fn drop(&mut self) {
        for name in ["fs", "layers"] {
            let _ = Command::new("umount")
                .arg("-l")
                .arg(self.dir.path().join(name))
                .output();
        }
    }
}

/// What each thread of a process waits for, for the report of a failure.
fn where_threads_wait(pid: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().flatten();
    tasks.fold(String::new(), |text, task| {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        text + &format!("{} waits in {}\n", read("comm").trim(), read("wchan"))
    })
}

/// The number of the mount at a place.
fn mount_id(point: &Path) -> Option<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mut lines = text.lines().map(|line| line.split(' '));
    let mut found = lines.find(|line| line.clone().nth(4) == point.to_str())?;
    found.next().map(str::to_owned)
}

const ELSEWHERE: &str = "has it mounted";

/// The processes that keep a mount from ending, for the report of a failure.
fn who_uses(id: Option<&str>, point: &Path) -> String {
    let mut text = String::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = process.path();
        let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
        let mut tell = |what: &str| {
            // Not `cmdline`, which may wait for a lock held by a process that hangs.
            let command = read(process.join("comm"));
            text += &format!("{} {what}: {command}", process.display());
        };
        if read(process.join("mountinfo")).contains(&*point.to_string_lossy()) {
            tell(ELSEWHERE);
        }
        let files = fs::read_dir(process.join("fdinfo"));
        for file in files.into_iter().flatten().flatten() {
            let info = read(file.path());
            let line = info.lines().find_map(|l| l.strip_prefix("mnt_id:"));
            if line.map(str::trim) == id {
                tell("has a file open");
            }
        }
    }
    text
}
