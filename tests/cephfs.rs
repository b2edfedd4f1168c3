//! Beginning and ending a CephFS mount: what is refused and how, what is said where, what is left.

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::ceph::{Cluster, ClusterOptions};
use common::{EVERMOUNT, PATIENCE, errno, let_users_mount, open_to_all, until, within};
use evermount::control::Status;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A cluster with two file systems. Nothing of it is harmed, and sessions are looked at by name only.
fn cluster() -> &'static Cluster {
    static SHARED: OnceLock<Cluster> = OnceLock::new();
    SHARED.get_or_init(|| {
        let cluster = two_file_systems();
        let other = cluster.ceph_fuse(&["--client_fs=fs2"]);
        fs::write(other.path("of-fs2"), "2").unwrap();
        let first = cluster.ceph_fuse(&["--client_fs=cephfs"]);
        let directories = [
            "app", "options", "timeouts", "removed", "secrets", "killed", "snapped",
        ];
        for directory in directories {
            fs::create_dir(first.path(directory)).unwrap();
            open_to_all(&first.path(directory));
        }
        cluster
    })
}

fn two_file_systems() -> Cluster {
    Cluster::start(&ClusterOptions {
        mgr: false,
        filesystems: &["cephfs", "fs2"],
        mds: 2,
        ..ClusterOptions::default()
    })
}

/// A directory to mount on, and what belongs to it.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        let dir = TempDir::with_prefix("evermount-test-").unwrap();
        open_to_all(dir.path());
        fs::create_dir(dir.path().join("mnt")).unwrap();
        Place { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A file of this place.
    fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn point(&self) -> PathBuf {
        self.path("mnt")
    }

    fn runtime(&self) -> PathBuf {
        self.path("run")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command
            .args(["--kill-after=5", "90", EVERMOUNT])
            .args(args)
            .env("EVERMOUNT_RUNTIME_DIR", self.runtime());
        command
    }

    /// `evermount mount SOURCE` here.
    fn try_mount(&self, source: &str, args: &[&str]) -> Output {
        let (point, log) = (self.point(), self.path("log"));
        let mut command = self.command(&["mount", source]);
        command.arg(&point).arg("--log").arg(&log).args(args);
        command.output().unwrap()
    }

    fn mount(&self, source: &str, args: &[&str]) {
        let output = self.try_mount(source, args);
        assert!(output.status.success(), "{output:?}\n{}", self.log());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn status_text(&self) -> String {
        let mut command = self.command(&["status", "--json"]);
        let output = command.arg(self.point()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn status(&self) -> Status {
        serde_json::from_str(&self.status_text()).unwrap()
    }

    /// SIGKILLs the backend and waits for the next one.
    fn replace_backend(&self) {
        let before = self.status();
        sigkill(before.backend_pid.unwrap());
        let next = until(PATIENCE, || {
            let now = self.status();
            now.generation > before.generation && now.outage_ms.is_none()
        });
        assert!(next, "{:#?}\n{}", self.status(), self.log());
    }

    /// The standby, as soon as it keeps what it should.
    fn standby(&self) -> u32 {
        assert!(until(PATIENCE, || self.status().standby_pid.is_some()));
        self.status().standby_pid.unwrap()
    }

    /// SIGKILLs everything that serves the mount, and waits until it is gone.
    fn kill_all(&self) {
        let status = self.status();
        let mut pids = vec![status.frontend_pid, status.backend_pid.unwrap()];
        pids.extend(status.standby_pid);
        // Stopped first: the backend would end its session in order when its front-end is gone.
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            for pid in &pids {
                kill(Pid::from_raw(*pid as i32), signal).unwrap();
            }
        }
        let gone = until(PATIENCE, || pids.iter().all(|pid| is_gone(*pid)));
        assert!(gone, "{pids:?}");
    }

    fn umount(&self) {
        let output = self
            .command(&["umount"])
            .arg(self.point())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}\n{}", self.log());
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        self.check_nothing_is_left("after umount");
    }

    fn is_mounted(&self) -> bool {
        let point = self.point();
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        (mounts.lines()).any(|line| line.split(' ').nth(4) == point.to_str())
    }

    /// Files of its runtime directory whose names begin so.
    fn files(&self, prefix: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.runtime()).into_iter().flatten();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .filter(|path| {
                path.file_name()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .starts_with(prefix)
            })
            .collect()
    }

    /// Processes with its runtime directory.
    fn processes(&self) -> Vec<u32> {
        let mark = format!("EVERMOUNT_RUNTIME_DIR={}", self.runtime().display());
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            // Only of ours: others may be stuck, and so would be who asks.
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            if !name.starts_with("evermount") {
                return None;
            }
            let environment = fs::read(entry.path().join("environ")).ok()?;
            let mut variables = environment.split(|b| *b == 0);
            variables.any(|v| v == mark.as_bytes()).then_some(pid)
        })
        .collect()
    }

    fn check_nothing_is_left(&self, what: &str) {
        assert!(!self.is_mounted(), "{what}: it is mounted");
        let gone = until(Duration::from_secs(10), || self.processes().is_empty());
        assert!(gone, "{what}: still running: {:?}", self.processes());
        assert_eq!(self.files(""), [] as [PathBuf; 0], "{what}");
    }

    /// The mount fails within half a minute, with one line that says this, and leaves nothing.
    fn refused(&self, source: &str, args: &[&str], words: &[&str]) {
        let what = format!("{source} {args:?}");
        let began = Instant::now();
        let output = self.try_mount(source, args);
        let took = began.elapsed();
        let errors = String::from_utf8_lossy(&output.stderr);
        eprintln!("{:.2} s: {errors}", took.as_secs_f64());
        assert_eq!(output.status.code(), Some(1), "{what}: {errors}");
        assert!(output.stdout.is_empty(), "{what}: {output:?}");
        assert_eq!(errors.lines().count(), 1, "{what}: {errors}");
        for word in words {
            assert!(errors.contains(word), "{what}: no '{word}' in: {errors}");
        }
        assert!(took < Duration::from_secs(30), "{what}: {took:?}");
        self.check_nothing_is_left(&what);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for _ in 0..2 {
            if self.is_mounted() {
                let umount = Command::new("umount").arg("-l").arg(self.point()).output();
                assert!(umount.unwrap().status.success());
            }
        }
        // Those of `let_users_mount`.
        if self.path("dev").exists() {
            for path in [Path::new("/dev/fuse"), &self.path("dev")] {
                let _ = nix::mount::umount2(path, nix::mount::MntFlags::MNT_DETACH);
            }
        }
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
        until(Duration::from_secs(10), || self.processes().is_empty());
        self.processes().into_iter().for_each(sigkill);
    }
}

fn sigkill(pid: u32) {
    let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
}

/// It is dead, and has closed what it had open.
fn is_gone(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().unwrap_or_default();
    state.is_empty() || state.starts_with(['Z', 'X'])
}

/// Names of the sessions that an MDS has of clients of ours.
fn sessions(cluster: &Cluster, mds: &str) -> Vec<String> {
    let all = cluster.sessions(mds);
    let names = all
        .iter()
        .filter_map(|s| s["client_metadata"]["uuid"].as_str());
    names
        .filter(|name| name.starts_with("evermount-"))
        .map(str::to_owned)
        .collect()
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// The bare key in a keyring.
fn key_of(keyring: &Path) -> String {
    let text = text(keyring);
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("key = "));
    line.unwrap().to_owned()
}

// ---- refusals --------------------------------------------------------------------------------

#[test]
fn what_cannot_be_mounted_is_refused_with_one_clear_line_and_leaves_nothing() {
    let cluster = two_file_systems();
    let other = cluster.ceph_fuse(&["--client_fs=cephfs"]);
    fs::write(other.path("file"), "x").unwrap();
    fs::create_dir(other.path("only")).unwrap();
    std::os::unix::fs::symlink("/only", other.path("link")).unwrap();
    drop(other);
    let app = cluster.authorize("client.app", "cephfs", "/");
    let only = cluster.authorize("client.only", "cephfs", "/only");
    let bare = |name: &str, caps: &[&str]| {
        let text = cluster.ceph(&[&["auth", "get-or-create", name], caps].concat());
        let path = cluster.dir().join(format!("{name}.keyring"));
        fs::write(&path, text).unwrap();
        path
    };
    let none = bare("client.none", &[]);
    let monitors = bare("client.monitors", &["mon", "allow r"]);

    let place = Place::new();
    let conf = format!("--conf={}", cluster.conf().display());
    let keyring = |path: &Path| format!("--keyring={}", path.display());
    let wrong = "AQBSdFhcbG+jFBAAO9OKVf2Ik1lUKG/SZEn1jg==";
    let wrong_key = place.write("wrong.key", wrong);
    let wrong_keyring = place.write("wrong", &format!("[client.admin]\n\tkey = {wrong}\n"));
    let garbage = place.write("garbage", "[[[ \n= what\n");
    let empty = place.write("empty", "");
    let without = text(cluster.conf()).replace(
        &format!("keyring = {}", cluster.keyring().display()),
        "keyring = /nowhere/keyring",
    );
    let no_keyring = place.write("no-keyring.conf", &without);
    let refused = |source: &str, args: &[&str], words: &[&str]| place.refused(source, args, words);

    // Who asks.
    let key = format!("--keyfile={wrong_key}");
    refused(
        "ceph:/",
        &[&conf, &key],
        &["client.admin", "do not accept", "`ceph auth get"],
    );
    let key = format!("--keyring={wrong_keyring}");
    refused(
        "ceph:/",
        &[&conf, &key],
        &["client.admin", "do not accept", "`ceph auth get"],
    );
    refused(
        "ceph:/",
        &[&conf, &keyring(&app)],
        &["no key for client.admin", "--id"],
    );
    let key = format!("--keyring={empty}");
    refused(
        "ceph:/",
        &[&conf, &key],
        &["no key for client.admin", "--keyring"],
    );
    let key = format!("--keyring={garbage}");
    refused(
        "ceph:/",
        &[&conf, &key],
        &["keyring cannot be read", "--keyfile"],
    );
    let key = format!("--keyfile={garbage}");
    refused("ceph:/", &[&conf, &key], &["does not hold a key", &garbage]);
    refused(
        "ceph:/",
        &[&conf, "--keyfile=/nowhere/key"],
        &["cannot read the key file /nowhere/key"],
    );
    refused(
        "ceph:/",
        &[&conf, "--keyring=/nowhere/k"],
        &["cannot read the keyring /nowhere/k"],
    );
    let no_key = format!("--conf={no_keyring}");
    refused(
        "ceph:/",
        &[&no_key],
        &["no key for client.admin", "/nowhere/keyring", "--keyring"],
    );
    let key = format!("--keyfile={}", cluster.keyfile("client.admin").display());
    refused(
        "ceph:/",
        &[&conf, "--id=nobody", &key],
        &["client.nobody", "do not accept"],
    );
    refused(
        "ceph:/",
        &[&conf, "--id=nobody"],
        &["no key for client.nobody"],
    );
    refused(
        "ceph:/",
        &[&conf, "--id=none", &keyring(&none)],
        &["client.none", "has rights"],
    );
    refused(
        "ceph:/",
        &[&conf, "--id=monitors", &keyring(&monitors)],
        &[
            "client.monitors may not use / of the default file system",
            "`ceph fs authorize",
        ],
    );

    // What is asked for.
    let lists = "`ceph fs ls`";
    refused(
        "ceph:no/",
        &[&conf],
        &["no file system 'no'", "client.admin", lists],
    );
    refused(
        "ceph:no/only",
        &[&conf],
        &["no file system 'no'", "client.admin", lists],
    );
    let as_app = ["--id=app", &keyring(&app), &conf];
    refused(
        "ceph:fs2/",
        &as_app,
        &["no file system 'fs2'", "client.app", lists],
    );
    refused(
        "ceph:/no/where",
        &[&conf],
        &["no directory /no/where in the default", "make it"],
    );
    refused(
        "ceph:cephfs/no",
        &[&conf],
        &["no directory /no in the file system 'cephfs'"],
    );
    refused(
        "ceph:cephfs/no",
        &as_app,
        &["no directory /no in the file system 'cephfs'"],
    );
    refused(
        "ceph:/file",
        &[&conf],
        &["/file of the default file system is no directory"],
    );
    refused(
        "ceph:/file/x",
        &[&conf],
        &["/file/x", "below something that is no directory"],
    );
    refused(
        "ceph:/link",
        &[&conf],
        &["/link", "a symbolic link", "the directory it leads to"],
    );
    let as_only = ["--id=only", &keyring(&only), &conf];
    refused(
        "ceph:/",
        &as_only,
        &["client.only may not use / of", "`ceph fs authorize"],
    );
    refused("ceph:/elsewhere", &as_only, &["/elsewhere", "client.only"]);

    // How to get there.
    refused(
        "ceph:/",
        &["--conf=/nowhere/c"],
        &["cannot read the configuration /nowhere/c"],
    );
    refused(
        "ceph:/",
        &[&format!("--conf={garbage}")],
        &["the Ceph configuration", "--conf"],
    );
    refused(
        "ceph:/",
        &[&format!("--conf={empty}")],
        &["no monitors", "--mon"],
    );
    refused(
        "ceph:/",
        &[&conf, "--mon=:::"],
        &["':::' are no addresses", "--mon"],
    );
    refused(
        "ceph:/",
        &[&conf, "--ceph-option=no_such=1"],
        &["the option no_such"],
    );
    refused(
        "ceph:/",
        &[&conf, "--ceph-option=client_cache_size=x"],
        &["option client_cache_size"],
    );

    for mds in ["mds.a", "mds.b"] {
        assert_eq!(sessions(&cluster, mds), [] as [String; 0], "{mds}");
    }
    // A key on the command line could be read by everybody.
    let output = place.try_mount("ceph:/", &[&conf, &format!("--ceph-option=key={wrong}")]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("--keyfile"),
        "{output:?}"
    );
}

#[test]
fn a_cluster_that_does_not_answer_is_given_up_within_half_a_minute() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    let conf = format!("--conf={}", cluster.conf().display());
    let place = Place::new();
    let words = [
        "no metadata server (MDS) of the default file system answers",
        "`ceph fs status`",
    ];
    // It hangs, and elsewhere there is not even a monitor, ...
    cluster.pause("mds.a");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let silent = "no monitor of the Ceph cluster answers at 127.0.0.1:1";
            let args = [&conf, "--mon=127.0.0.1:1"];
            Place::new().refused("ceph:/", &args, &[silent, "--mon", "network"]);
        });
        place.refused("ceph:/", &[&conf], &words);
    });
    // ... recovers, ...
    cluster.resume("mds.a");
    let served = until(PATIENCE, || {
        let output = place.try_mount("ceph:/", &[&conf]);
        output.status.success()
    });
    assert!(served, "{}", place.log());
    place.umount();
    // ... and is gone.
    cluster.kill("mds.a");
    place.refused("ceph:/", &[&conf], &words);
}

// ---- options ---------------------------------------------------------------------------------

#[test]
fn every_way_to_say_who_one_is_and_where_the_cluster_is_works() {
    let cluster = cluster();
    let keyring = cluster.authorize("client.app", "cephfs", "/app");
    let place = Place::new();
    let conf = text(cluster.conf());
    let mon = conf
        .lines()
        .find_map(|line| line.strip_prefix("mon host = "))
        .unwrap();
    // Neither an address nor a key.
    let bare: Vec<&str> = conf
        .lines()
        .filter(|line| !line.starts_with("mon host") && !line.starts_with("keyring"))
        .collect();
    let bare = place.write("bare.conf", &bare.join("\n"));
    let bare = format!("--conf={bare}");
    let whole = format!("--conf={}", cluster.conf().display());
    let ring = format!("--keyring={}", keyring.display());
    let key = format!("--keyfile={}", cluster.keyfile("client.app").display());
    let mon = format!("--mon={mon}");
    let works = |args: &[&str]| {
        place.mount("ceph:cephfs/app", args);
        let file = place.point().join("file");
        fs::write(&file, format!("{args:?}")).unwrap();
        place.replace_backend();
        assert_eq!(text(&file), format!("{args:?}"));
        place.umount();
    };
    works(&[&whole, "--id=app", &ring]);
    works(&[&whole, "--id=app", &key]);
    works(&[&bare, &mon, "--id=app", &key]);
    works(&[&bare, &mon, "--id=app", &ring]);
    works(&[&mon, "--id=app", &ring]);
    // What is on the command line has more weight than what is in the file.
    let wrong = "AQBSdFhcbG+jFBAAO9OKVf2Ik1lUKG/SZEn1jg==";
    let misled = format!("{conf}\nkey = {wrong}\nmon host = 127.0.0.1:1\n");
    let misled = format!("--conf={}", place.write("misled.conf", &misled));
    works(&[&misled, &mon, "--id=app", &ring]);
    works(&[&misled, &mon, "--id=app", &key]);
    // A key in the file.
    let own = format!("{conf}\nkey = {}\n", key_of(&keyring));
    works(&[
        &format!("--conf={}", place.write("own.conf", &own)),
        "--id=app",
    ]);
}

#[test]
fn options_of_the_client_and_timeouts_of_the_kernel_have_their_effect() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let other = cluster.ceph_fuse(&["--client_fs=cephfs", "--client_mountpoint=/timeouts"]);
    let place = Place::new();
    // The directory of the snapshots has the name that it is given.
    place.mount(
        "ceph:cephfs/options",
        &[&conf, "--ceph-option", "client snapdir=.before"],
    );
    assert!(place.point().join(".before").is_dir());
    assert!(!place.point().join(".snap").exists());
    place.replace_backend();
    assert!(place.point().join(".before").is_dir());
    place.umount();

    let mode = |name: &str| fs::metadata(place.point().join(name)).map(|m| m.mode() & 0o777);
    let set = |mode| {
        fs::set_permissions(other.path("file"), fs::Permissions::from_mode(mode)).unwrap();
    };
    fs::write(other.path("file"), "x").unwrap();
    set(0o644);
    // By default everything is seen at once.
    place.mount("ceph:cephfs/timeouts", &[&conf]);
    assert_eq!(mode("file").unwrap(), 0o644);
    set(0o600);
    assert_eq!(mode("file").unwrap(), 0o600);
    fs::rename(other.path("file"), other.path("moved")).unwrap();
    assert!(mode("file").is_err());
    fs::rename(other.path("moved"), other.path("file")).unwrap();
    place.umount();
    // Attributes are trusted for a time, ...
    place.mount(
        "ceph:cephfs/timeouts",
        &[&conf, "--attr-timeout=3600", "--entry-timeout=3600"],
    );
    assert_eq!(mode("file").unwrap(), 0o600);
    set(0o640);
    assert_eq!(mode("file").unwrap(), 0o600);
    // ... and names.
    fs::rename(other.path("file"), other.path("moved")).unwrap();
    assert!(mode("file").is_ok());
    place.umount();
}

#[test]
fn another_file_system_of_the_cluster_is_mounted_by_its_name() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let (default, second) = (Place::new(), Place::new());
    default.mount("ceph:/", &[&conf]);
    second.mount("ceph:fs2/", &[&conf]);
    assert_eq!(text(&second.point().join("of-fs2")), "2");
    assert!(!default.point().join("of-fs2").exists());
    fs::create_dir(second.point().join("deep")).unwrap();
    fs::write(second.point().join("deep/file"), "below").unwrap();
    second.replace_backend();
    assert_eq!(second.status().source, "ceph:fs2/");
    assert_eq!(text(&second.point().join("of-fs2")), "2");
    second.umount();
    second.mount("ceph:fs2/deep", &[&conf]);
    assert_eq!(text(&second.point().join("file")), "below");
    second.umount();
    default.umount();
}

#[test]
fn takeovers_go_on_when_configuration_and_keyring_are_gone() {
    let cluster = cluster();
    let key = text(cluster.keyring());
    for named in [true, false] {
        let place = Place::new();
        let keyring = place.write("keyring", &key);
        let from = format!("keyring = {}", cluster.keyring().display());
        let to = format!("keyring = {}", if named { "/nowhere" } else { &keyring });
        // Without an end of its last line, which the library alone refuses.
        let conf = text(cluster.conf()).replace(&from, &to);
        let conf = place.write("conf", conf.trim_end());
        let mut args = vec![format!("--conf={conf}")];
        if named {
            args.push(format!("--keyring={keyring}"));
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        place.mount("ceph:cephfs/removed", &args);
        let file = place.point().join("file");
        fs::write(&file, "1").unwrap();
        fs::remove_file(&keyring).unwrap();
        fs::remove_file(&conf).unwrap();
        for _ in 0..2 {
            place.replace_backend();
            assert_eq!(text(&file), "1");
        }
        place.umount();
    }
}

// ---- snapshots -------------------------------------------------------------------------------

/// Names in a directory that is open.
fn listed(directory: &File) -> Vec<String> {
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    let entries = fs::read_dir(path).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_open_in_snapshots_is_there_after_every_death() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let place = Place::new();
    place.mount("ceph:cephfs/snapped", &[&conf]);
    let root = place.point();
    fs::create_dir_all(root.join("d/below")).unwrap();
    for name in ["d/file", "d/below/deep"] {
        fs::write(root.join(name), "before").unwrap();
    }
    fs::create_dir(root.join("d/.snap/one")).unwrap();
    fs::write(root.join("d/file"), "after").unwrap();
    fs::remove_dir_all(root.join("d/below")).unwrap();

    let open = |name: &str| File::open(root.join(name)).unwrap();
    let files = [
        open("d/.snap/one/file"),
        open("d/.snap/one/below/deep"),
        open("d/file"),
    ];
    let snapshots = open("d/.snap");
    let directories = [open("d/.snap/one"), open("d/.snap/one/below")];
    for death in 0..3 {
        place.replace_backend();
        for (file, wanted) in files.iter().zip(["before", "before", "after"]) {
            let mut bytes = [0; 16];
            let len = file.read_at(&mut bytes, 0).unwrap();
            assert_eq!(&bytes[..len], wanted.as_bytes());
            assert_eq!(file.metadata().unwrap().len(), wanted.len() as u64);
        }
        assert_eq!(listed(&snapshots), ["one"], "{death}");
        assert_eq!(listed(&directories[0]), ["below", "file"], "{death}");
        assert_eq!(listed(&directories[1]), ["deep"], "{death}");
        assert_eq!(text(&root.join("d/.snap/one/below/deep")), "before");
        let write = fs::write(root.join("d/.snap/one/file"), "x");
        assert_eq!(errno(write), Some(libc::EROFS));
    }
    drop((files, snapshots, directories));
    // They come and go through the next backends as well.
    fs::create_dir(root.join("d/.snap/two")).unwrap();
    assert_eq!(listed(&open("d/.snap")), ["one", "two"]);
    for name in ["one", "two"] {
        fs::remove_dir(root.join("d/.snap").join(name)).unwrap();
        place.replace_backend();
    }
    assert_eq!(place.status().lost_files, 0);
    place.umount();
}

// ---- secrets ---------------------------------------------------------------------------------

/// All bytes of a file that can be read, and nothing if it cannot.
fn bytes(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let _ = file.read_to_end(&mut bytes);
    }
    bytes
}

fn contains(haystack: &[u8], needle: &str) -> bool {
    haystack
        .windows(needle.len())
        .any(|part| part == needle.as_bytes())
}

/// Memory files of a process by name.
fn memory_files(pid: u32, name: &str) -> Vec<PathBuf> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let paths = fds.map(|fd| fd.path());
    paths
        .filter(|path| {
            let target = fs::read_link(path).unwrap_or_default();
            target
                .to_string_lossy()
                .starts_with(&format!("/memfd:{name} "))
        })
        .collect()
}

/// It is as `keep_memory_private` makes it: `/proc/PID` belongs to root, and there is no core file.
fn check_private(pid: u32, what: &str) {
    let limits = text(Path::new(&format!("/proc/{pid}/limits")));
    let core = limits
        .lines()
        .find(|l| l.starts_with("Max core file size"))
        .unwrap();
    let numbers: Vec<&str> = core.split_whitespace().skip(4).take(2).collect();
    assert_eq!(numbers, ["0", "0"], "{what}: {core}");
}

#[test]
fn the_key_is_in_sealed_memory_files_and_nowhere_else() {
    let cluster = cluster();
    let keyring = cluster.authorize("client.secret", "cephfs", "/secrets");
    let key = key_of(&keyring);
    assert!(key.len() > 30, "{key}");
    let place = Place::new();
    let mark = "only-in-this-configuration";
    let conf = format!("{}\n# {mark}\n", text(cluster.conf()));
    let args = [
        &format!("--conf={}", place.write("conf", &conf)),
        "--id=secret",
        &format!("--keyring={}", keyring.display()),
        "--standby",
    ];
    place.mount("ceph:cephfs/secrets", &args);
    place.replace_backend();
    let standby = place.standby();
    fs::write(place.point().join("file"), "x").unwrap();
    let status = place.status();
    let (front, back) = (status.frontend_pid, status.backend_pid.unwrap());

    let all = [
        (front, "front-end"),
        (back, "backend"),
        (standby, "standby"),
    ];
    for (pid, what) in all {
        check_private(pid, what);
        let proc = PathBuf::from(format!("/proc/{pid}"));
        for name in ["cmdline", "environ", "comm", "maps", "mountinfo"] {
            let bytes = bytes(&proc.join(name));
            assert!(!bytes.is_empty(), "{what} {name}");
            assert!(!contains(&bytes, &key), "{what} {name}");
            assert!(!contains(&bytes, mark), "{what} {name}");
        }
    }
    let log = place.log();
    assert!(log.contains("backend"), "{log}");
    let status = place.status_text();
    assert!(status.contains("serving"), "{status}");
    for (text, what) in [(&log, "log"), (&status, "status")] {
        assert!(
            !text.contains(&key) && !text.contains(mark),
            "{what}: {text}"
        );
    }
    let files = place.files("session-");
    assert_eq!(files.len(), 1);
    for file in place.files("") {
        let bytes = bytes(&file);
        assert!(
            !contains(&bytes, &key) && !contains(&bytes, mark),
            "{}",
            file.display()
        );
    }
    let mounts = text(Path::new("/proc/self/mountinfo"));
    assert!(!mounts.contains(&key));
    // Others cannot read the names of the sessions: with one, and a key, a session can be ended.
    assert_eq!(fs::metadata(&files[0]).unwrap().mode() & 0o777, 0o600);

    // It is there, for the next backend only, and nobody can change it.
    let sealed = memory_files(front, "evermount-secrets");
    assert_eq!(sealed.len(), 1, "{sealed:?}");
    for name in ["evermount-secrets", "ceph.conf", "ceph.key"] {
        for pid in [back, standby] {
            assert_eq!(memory_files(pid, name), [] as [PathBuf; 0]);
        }
    }
    let file = File::open(&sealed[0]).unwrap();
    let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS).unwrap());
    let all = SealFlag::F_SEAL_SHRINK
        | SealFlag::F_SEAL_GROW
        | SealFlag::F_SEAL_WRITE
        | SealFlag::F_SEAL_SEAL;
    assert!(seals.contains(all), "{seals:?}");
    assert!(contains(&bytes(&sealed[0]), &key));
    assert!(contains(&bytes(&sealed[0]), mark));
    assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
    for (pid, path) in [
        (front, sealed[0].clone()),
        (back, format!("/proc/{back}/mem").into()),
    ] {
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "cat"])
            .arg(&path)
            .output()
            .unwrap();
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{pid}: {problem}");
        assert!(problem.contains("Permission denied"), "{pid}: {problem}");
        assert!(output.stdout.is_empty());
    }
    place.umount();
}

#[test]
fn a_user_without_privileges_mounts_and_nobody_sees_the_key() {
    let cluster = cluster();
    let keyring = cluster.authorize("client.plain", "cephfs", "/secrets");
    let place = Place::new();
    let_users_mount(place.dir.path());
    let own = |path: &Path| std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    fs::create_dir(place.runtime()).unwrap();
    fs::set_permissions(place.runtime(), fs::Permissions::from_mode(0o700)).unwrap();
    let ring = PathBuf::from(place.write("keyring", &text(&keyring)));
    let conf = place.write("conf", &text(cluster.conf()));
    fs::set_permissions(&ring, fs::Permissions::from_mode(0o600)).unwrap();
    [place.runtime(), place.point(), ring.clone()]
        .iter()
        .for_each(|path| own(path));
    let as_user = |args: &[&str]| {
        Command::new("timeout")
            .args([
                "60",
                "setpriv",
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
            ])
            .arg(EVERMOUNT)
            .args(args)
            .env("EVERMOUNT_RUNTIME_DIR", place.runtime())
            .output()
            .unwrap()
    };
    let point = place.point();
    let point = point.to_str().unwrap();
    let conf = format!("--conf={conf}");
    let ring = format!("--keyring={}", ring.display());
    let output = as_user(&[
        "mount",
        "ceph:cephfs/secrets",
        point,
        &conf,
        "--id=plain",
        &ring,
    ]);
    assert!(output.status.success(), "{output:?}");
    let output = as_user(&["status", "--json", point]);
    let status: Status = serde_json::from_slice(&output.stdout).unwrap();
    for pid in [status.frontend_pid, status.backend_pid.unwrap()] {
        check_private(pid, "a user's");
        // Of another process of the same user, too.
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "ls"])
            .arg(format!("/proc/{pid}/fd"))
            .output()
            .unwrap();
        assert!(!output.status.success(), "{output:?}");
    }
    let output = as_user(&["umount", point]);
    assert!(output.status.success(), "{output:?}");
    place.check_nothing_is_left("a user's mount");
}

// ---- sessions of dead mounts -----------------------------------------------------------------

/// A mount of `/killed`, with something in it that the MDS lends to one client only.
fn busy_mount(place: &Place, source: &str, args: &[&str], name: &str) -> File {
    place.mount(source, args);
    let mut file = File::create(place.point().join(name)).unwrap();
    file.write_all(b"of a dead mount").unwrap();
    file
}

#[test]
fn when_all_processes_of_a_mount_die_the_next_mount_ends_its_sessions_and_nobody_waits() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let other = cluster.ceph_fuse(&["--client_fs=cephfs", "--client_mountpoint=/killed"]);
    // The same store by other words: the name of the file system is the default one's.
    for (again, name) in [("ceph:cephfs/killed", "one"), ("ceph:/killed", "two")] {
        let place = Place::new();
        let file = busy_mount(&place, "ceph:cephfs/killed", &[&conf], name);
        let names = place.files("session-");
        assert_eq!(names.len(), 1);
        place.kill_all();
        drop(file);
        assert_eq!(place.files("session-"), names);
        assert!(
            Command::new("umount")
                .arg("-l")
                .arg(place.point())
                .status()
                .unwrap()
                .success()
        );

        let began = Instant::now();
        place.mount(again, &[&conf]);
        eprintln!("mounted again: {:?}", began.elapsed());
        let at = [place.point().join(name), other.path(name)];
        within(PATIENCE, "reading", move || {
            for path in at {
                assert_eq!(text(&path), "of a dead mount");
                fs::write(&path, "x").unwrap();
                fs::write(&path, "of a dead mount").unwrap();
            }
        });
        let took = began.elapsed();
        eprintln!("nobody waits: {took:?}");
        assert!(took < Duration::from_secs(3), "{took:?}");
        assert!(
            !names[0].exists(),
            "the names of the dead mount are still there"
        );
        assert_eq!(place.files("session-").len(), 1);
        place.umount();
    }
}

#[test]
fn an_unmount_of_a_dead_mount_ends_its_sessions() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let place = Place::new();
    for source in ["ceph:cephfs/killed", "ceph:fs2/"] {
        let fs = if source.contains("fs2") {
            "fs2"
        } else {
            "cephfs"
        };
        let file = busy_mount(&place, source, &[&conf, "--standby"], "three");
        place.standby();
        let name = text(&place.files("session-")[0]);
        let mds = cluster.active_mds(fs).unwrap();
        let ours = |all: Vec<String>| all.into_iter().any(|session| name.contains(&session));
        assert!(ours(sessions(cluster, &mds)), "{name}");
        place.kill_all();
        drop(file);
        assert!(
            ours(sessions(cluster, &mds)),
            "the MDS has noticed by itself"
        );
        place.umount();
        assert!(!ours(sessions(cluster, &mds)), "{name}");
    }
}

#[test]
fn an_unmount_of_a_dead_mount_that_cannot_end_its_sessions_says_so_and_leaves_it_to_the_next() {
    let cluster = cluster();
    let keyring = cluster.authorize("client.late", "cephfs", "/killed");
    let conf = format!("--conf={}", cluster.conf().display());
    let place = Place::new();
    let copy = place.write("keyring", &text(&keyring));
    let copy = format!("--keyring={copy}");
    let file = busy_mount(
        &place,
        "ceph:cephfs/killed",
        &[&conf, "--id=late", &copy],
        "five",
    );
    place.kill_all();
    drop(file);
    fs::remove_file(place.path("keyring")).unwrap();
    let mut command = place.command(&["umount"]);
    let output = command.arg(place.point()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    eprintln!("{errors}");
    assert!(output.status.success(), "{output:?}");
    assert!(!place.is_mounted());
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains("cannot read the keyring"), "{errors}");
    assert_eq!(place.files("session-").len(), 1);
    let names = place.files("session-");
    let ring = format!("--keyring={}", keyring.display());
    place.mount("ceph:cephfs/killed", &[&conf, "--id=late", &ring]);
    assert!(!names[0].exists());
    assert_eq!(text(&place.point().join("five")), "of a dead mount");
    place.umount();
}

#[test]
fn names_of_living_mounts_and_of_other_clients_are_left_alone() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let keyring = cluster.authorize("client.other", "cephfs", "/");
    let ring = format!("--keyring={}", keyring.display());
    let (living, dead, next) = (Place::new(), Place::new(), Place::new());
    // One runtime directory for all.
    for place in [&dead, &next] {
        fs::create_dir_all(living.runtime()).unwrap();
        fs::set_permissions(living.runtime(), fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(living.runtime(), place.runtime()).unwrap();
    }
    living.mount("ceph:cephfs/killed", &[&conf]);
    let file = busy_mount(
        &dead,
        "ceph:cephfs/killed",
        &[&conf, "--id=other", &ring],
        "four",
    );
    assert_eq!(living.files("session-").len(), 2);
    dead.kill_all();
    drop(file);
    next.mount("ceph:cephfs/app", &[&conf]);
    assert_eq!(living.files("session-").len(), 3);
    assert_eq!(living.status().generation, 1);
    next.command(&["umount"])
        .arg(next.point())
        .status()
        .unwrap();
    assert_eq!(living.files("session-").len(), 2);
    // Garbage beside them harms nobody, and is removed.
    let garbage = living.runtime().join("session-garbage.json");
    fs::write(&garbage, [0, 1, 2, 255]).unwrap();
    next.mount("ceph:cephfs/app", &[&conf, "--id=other", &ring]);
    assert!(!garbage.exists());
    assert!(
        next.log().contains("session-garbage.json is damaged"),
        "{}",
        next.log()
    );
    // That of the dead one is gone, as its client has mounted again.
    assert_eq!(living.files("session-").len(), 2);
    next.command(&["umount"])
        .arg(next.point())
        .status()
        .unwrap();
    let umount = dead.command(&["umount"]).arg(dead.point()).status();
    assert!(umount.unwrap().success());
    assert!(living.files("mount-").len() == 1, "{:?}", living.files(""));
    living.umount();
}

#[test]
fn a_backend_whose_front_end_died_ends_its_session_in_order() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let place = Place::new();
    place.mount("ceph:cephfs/app", &[&conf, "--standby"]);
    let (standby, status) = (place.standby(), place.status());
    let name = text(&place.files("session-")[0]);
    sigkill(status.frontend_pid);
    assert!(until(PATIENCE, || is_gone(status.backend_pid.unwrap())));
    assert!(until(PATIENCE, || is_gone(standby)));
    let mds = cluster.active_mds("cephfs").unwrap();
    let gone = until(PATIENCE, || {
        let all = sessions(cluster, &mds);
        !all.iter().any(|session| name.contains(session.as_str()))
    });
    assert!(gone);
    place.umount();
}

#[test]
fn a_mount_in_the_foreground_keeps_its_secrets_and_leaves_no_session() {
    let cluster = cluster();
    let conf = format!("--conf={}", cluster.conf().display());
    let place = Place::new();
    let mut command = place.command(&["mount", "ceph:cephfs/app"]);
    let mut child = command
        .arg(place.point())
        .args([&conf, "--foreground"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert!(until(PATIENCE, || place.is_mounted()
        && !place.files("mount-").is_empty()));
    let status = place.status();
    check_private(status.frontend_pid, "in the foreground");
    check_private(status.backend_pid.unwrap(), "backend");
    place.umount();
    assert!(child.wait().unwrap().success());
}
