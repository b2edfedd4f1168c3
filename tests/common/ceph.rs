//! A real Ceph cluster for a test, made by `container/ceph-cluster`, and unmodified clients of it.
//!
//! A cluster ends when its [`Cluster`] is dropped, and at the latest with the test process: a watcher
//! takes it down when that process is gone, whatever ended it. So [`Cluster::shared`] may stay in a
//! static, which is never dropped.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;

use super::{PATIENCE, until};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/container/ceph-cluster");

/// What a cluster has.
pub struct ClusterOptions<'a> {
    /// A manager: without one, statfs is all zeros.
    pub mgr: bool,
    /// File systems by name.
    pub filesystems: &'a [&'a str],
    /// MDS daemons; those beyond one per file system are standbys.
    pub mds: usize,
    /// OSD daemons.
    pub osds: usize,
    /// OSDs on disk, which survive [`Cluster::kill`]. In memory they start four seconds sooner.
    pub on_disk: bool,
    /// Lines of configuration, `option = value`.
    pub conf: &'a [&'a str],
    /// The process with which the cluster ends; the default is this one.
    pub owner: Option<u32>,
}

impl Default for ClusterOptions<'_> {
    fn default() -> Self {
        ClusterOptions {
            mgr: true,
            filesystems: &["cephfs"],
            mds: 1,
            osds: 1,
            on_disk: false,
            conf: &[],
            owner: None,
        }
    }
}

/// A running cluster.
pub struct Cluster {
    starter: Starter,
    dir: PathBuf,
    conf: PathBuf,
    keyring: PathBuf,
}

impl Cluster {
    /// Starts one; it is usable when this returns.
    pub fn start(options: &ClusterOptions<'_>) -> Cluster {
        // The script removes it, also when this process cannot any more.
        let dir = TempDir::with_prefix("evermount-ceph-").unwrap().keep();
        // Clients of other users have to find their configuration.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        let cluster = Cluster {
            starter: Starter::new(),
            conf: dir.join("ceph.conf"),
            keyring: dir.join("keyring"),
            dir,
        };
        let mut args: Vec<String> = Vec::new();
        let mut option = |name: &str, value: &str| args.extend([name.into(), value.into()]);
        option("--mds", &options.mds.to_string());
        option("--osds", &options.osds.to_string());
        option(
            "--store",
            ["memstore", "bluestore"][usize::from(options.on_disk)],
        );
        let owner = options.owner.unwrap_or_else(std::process::id);
        option("--while-pid", &owner.to_string());
        option("--timeout", &PATIENCE.as_secs().to_string());
        options.filesystems.iter().for_each(|fs| option("--fs", fs));
        options.conf.iter().for_each(|line| option("--conf", line));
        if options.mgr {
            args.push("--mgr".into());
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        cluster.script("up", &args);
        cluster
    }

    /// The one that all tests of a test program share, with default options. Tests that harm daemons
    /// or evict clients of others start their own.
    pub fn shared() -> &'static Cluster {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        SHARED.get_or_init(|| Cluster::start(&ClusterOptions::default()))
    }

    /// Everything it has is below this directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The configuration for clients, `ceph.conf`.
    pub fn conf(&self) -> &Path {
        &self.conf
    }

    /// The keyring of client.admin. [`Cluster::conf`] names it, too.
    pub fn keyring(&self) -> &Path {
        &self.keyring
    }

    /// What `ceph` prints.
    pub fn ceph(&self, args: &[&str]) -> String {
        let output = self.script("ceph", args);
        String::from_utf8(output.stdout).unwrap()
    }

    /// What `ceph` prints as JSON.
    pub fn ceph_json(&self, args: &[&str]) -> Value {
        let text = self.ceph(&[args, &["--format=json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("ceph {args:?}: {e}: {text}"))
    }

    /// Lets an entity such as `client.app` read and write below `path` of a file system. Returns its
    /// keyring. For the bare key, see [`Cluster::keyfile`].
    pub fn authorize(&self, entity: &str, filesystem: &str, path: &str) -> PathBuf {
        self.ceph(&["fs", "authorize", filesystem, entity, path, "rw"]);
        let keyring = self.dir.join(format!("{entity}.keyring"));
        write_secret(&keyring, &self.ceph(&["auth", "get", entity]));
        keyring
    }

    /// A file with the key of an entity and nothing else, as for `--keyfile`.
    pub fn keyfile(&self, entity: &str) -> PathBuf {
        let keyfile = self.dir.join(format!("{entity}.key"));
        write_secret(&keyfile, &self.ceph(&["auth", "print-key", entity]));
        keyfile
    }

    /// The sessions of an MDS, such as `mds.a`.
    pub fn sessions(&self, mds: &str) -> Vec<Value> {
        match self.ceph_json(&["tell", mds, "session", "ls"]) {
            Value::Array(sessions) => sessions,
            other => panic!("no list of sessions: {other}"),
        }
    }

    /// Ends a session as an administrator would; its client is blocklisted.
    pub fn evict(&self, mds: &str, session: u64) {
        self.ceph(&["tell", mds, "session", "evict", &format!("id={session}")]);
    }

    /// Ends the sessions of a process, dead or alive, as an administrator would: of a backend its own,
    /// and the one that helped it to take over if that has not ended yet.
    pub fn evict_process(&self, mds: &str, pid: u32) {
        let mut found = self.sessions(mds);
        let of = pid.to_string();
        found.retain(|s| s["client_metadata"]["pid"].as_str() == Some(&of));
        assert!(!found.is_empty(), "{pid} has no session");
        for session in found {
            self.evict(mds, session["id"].as_u64().unwrap());
        }
    }

    /// The MDS that serves a file system, such as `mds.a`. None while there is none.
    pub fn active_mds(&self, filesystem: &str) -> Option<String> {
        let map = self.ceph_json(&["fs", "get", filesystem]);
        let daemons = map["mdsmap"]["info"].as_object().unwrap();
        let active = daemons.values().find(|d| d["state"] == "up:active")?;
        Some(format!("mds.{}", active["name"].as_str().unwrap()))
    }

    /// SIGKILLs a daemon: `mon.a`, `mgr.a`, `osd.0`, `mds.a`. An OSD in memory loses what it has.
    pub fn kill(&self, daemon: &str) {
        self.script("kill", &[daemon]);
    }

    /// SIGTERMs a daemon and waits until it is gone.
    pub fn stop(&self, daemon: &str) {
        self.script("stop", &[daemon]);
    }

    /// Starts a daemon again, without waiting until it serves.
    pub fn start_daemon(&self, daemon: &str) {
        self.script("start", &[daemon]);
    }

    /// SIGSTOPs a daemon.
    pub fn pause(&self, daemon: &str) {
        self.script("pause", &[daemon]);
    }

    /// SIGCONTs a daemon.
    pub fn resume(&self, daemon: &str) {
        self.script("resume", &[daemon]);
    }

    /// `HEALTH_OK`, or what is wrong.
    pub fn health(&self) -> String {
        self.ceph(&["health", "detail"])
    }

    /// The processes of all its daemons, and its watcher.
    pub fn pids(&self) -> Vec<u32> {
        let files = fs::read_dir(self.dir.join("run")).unwrap();
        let paths = files.map(|file| file.unwrap().path());
        let pid_files = paths.filter(|path| path.extension().is_some_and(|e| e == "pid"));
        let pid = |path: PathBuf| fs::read_to_string(path).unwrap().trim().parse().unwrap();
        pid_files.map(pid).collect()
    }

    /// Mounts a file system with `ceph-fuse`, as client.admin unless `args` say otherwise.
    pub fn ceph_fuse(&self, args: &[&str]) -> CephFuse {
        CephFuse::mount(&self.conf, args)
    }

    /// Makes a directory anybody may write to.
    pub fn make_dir(&self, path: &str) {
        const PROGRAM: &str = "import cephfs, sys\n\
            fs = cephfs.LibCephFS(conffile=sys.argv[1])\n\
            fs.mount()\n\
            fs.mkdirs(sys.argv[2], 0o777)\n\
            fs.chmod(sys.argv[2], 0o777)\n\
            fs.shutdown()";
        let output = Command::new("timeout")
            .args(["30", "/usr/bin/python3", "-c", PROGRAM])
            .arg(&self.conf)
            .arg(path)
            .output()
            .unwrap();
        let problem = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "mkdir {path}: {problem}");
    }

    /// Runs the script on this cluster.
    fn script(&self, command: &str, args: &[&str]) -> Output {
        let output = self.try_script(command, args);
        assert!(
            output.status.success(),
            "ceph-cluster {command} {args:?}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        output
    }

    fn try_script(&self, command: &str, args: &[&str]) -> Output {
        // Later than its own deadline, after which it cleans up.
        let limit = (2 * PATIENCE).as_secs().to_string();
        let dir = self.dir.to_str().unwrap();
        let script = ["timeout", "--kill-after=10", &limit, SCRIPT, command, dir];
        self.starter.output(&[&script[..], args].concat())
    }
}

/// A process that starts others for this one.
///
/// What is started from here has, until its program runs, all files this process has open, and closes
/// them then. Of a file on a mount that waits for the cluster that waits as well: behind whoever is
/// writing to it. So the cluster must not be helped by a process that is started here.
struct Starter(Mutex<Child>);

impl Starter {
    fn new() -> Starter {
        // A command is one line; the answer is a status and the names of files with what it wrote.
        const PROGRAM: &str = r#"
            dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
            while IFS= read -r command; do
              status=0
              eval "$command" >"$dir/out" 2>"$dir/err" </dev/null || status=$?
              echo "$status $dir"; IFS= read -r _ || exit
            done"#;
        let child = Command::new("bash")
            .args(["-c", PROGRAM])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Starter(Mutex::new(child))
    }

    fn output(&self, words: &[&str]) -> Output {
        let quoted = words
            .iter()
            .map(|word| format!("'{}'", word.replace('\'', r"'\''")))
            .collect::<Vec<_>>();
        let mut child = self.0.lock();
        let mut answer = String::new();
        writeln!(child.stdin.as_mut().unwrap(), "{}", quoted.join(" ")).unwrap();
        // One byte at a time: nothing of the next answer is there before this one is acknowledged.
        let mut byte = [0];
        while byte != *b"\n" {
            child
                .stdout
                .as_mut()
                .unwrap()
                .read_exact(&mut byte)
                .unwrap();
            answer.push(byte[0].into());
        }
        let (status, dir) = answer.trim().split_once(' ').unwrap();
        let read = |name: &str| fs::read(Path::new(dir).join(name)).unwrap();
        let output = Output {
            status: ExitStatus::from_raw(status.parse::<i32>().unwrap() << 8),
            stdout: read("out"),
            stderr: read("err"),
        };
        writeln!(child.stdin.as_mut().unwrap(), "read").unwrap();
        output
    }
}

impl Drop for Starter {
    fn drop(&mut self) {
        let child = self.0.get_mut();
        // The end of its input ends it.
        drop(child.stdin.take());
        let _ = child.wait();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for log in fs::read_dir(self.dir.join("log")).into_iter().flatten() {
                let log = log.unwrap().path();
                let text = fs::read(&log).unwrap_or_default();
                let text = String::from_utf8_lossy(&text);
                let lines: Vec<&str> = text.lines().collect();
                let tail = &lines[lines.len().saturating_sub(20)..];
                eprintln!("--- {}\n{}", log.display(), tail.join("\n"));
            }
        }
        let output = self.try_script("down", &[]);
        let problem = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() || std::thread::panicking(),
            "the cluster does not end: {problem}"
        );
    }
}

/// A CephFS mounted by the unmodified `ceph-fuse`.
pub struct CephFuse {
    point: TempDir,
    process: Child,
}

impl CephFuse {
    /// Mounts the file system of a configuration.
    pub fn mount(conf: &Path, args: &[&str]) -> CephFuse {
        let point = TempDir::with_prefix("evermount-ceph-fuse-").unwrap();
        // It unmounts and ends with this thread, should a signal end this process.
        let process = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "ceph-fuse", "-f"])
            // Otherwise it tries a remount at its start, for seconds if the mount is gone by then.
            .arg("--client_try_dentry_invalidate=true")
            .arg("-c")
            .arg(conf)
            .args(args)
            .arg(point.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("setpriv (Debian: util-linux)");
        let mut mount = CephFuse { point, process };
        let mounted = until(PATIENCE, || {
            assert_eq!(mount.process.try_wait().unwrap(), None, "ceph-fuse ended");
            mount.mounted()
        });
        assert!(mounted, "ceph-fuse does not mount");
        mount
    }

    /// A path on the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.point.path().join(name)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    fn mounted(&self) -> bool {
        // Not by a look at the mount itself, which may hang.
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let point = self.point.path().to_str();
        mounts.lines().any(|line| line.split(' ').nth(1) == point)
    }
}

impl Drop for CephFuse {
    fn drop(&mut self) {
        let mut ended = |limit| until(limit, || !matches!(self.process.try_wait(), Ok(None)));
        let umount = Command::new("umount")
            .arg("-l")
            .arg(self.point.path())
            .output();
        // It waits for the cluster, which a test may have taken down.
        if !ended(Duration::from_secs(5)) {
            let _ = kill(Pid::from_raw(self.process.id() as i32), Signal::SIGKILL);
            let _ = self.process.wait();
        }
        assert!(
            !self.mounted() || std::thread::panicking(),
            "still mounted: {umount:?}"
        );
    }
}

fn write_secret(path: &Path, text: &str) {
    let draft = path.with_extension("draft");
    fs::write(&draft, "").unwrap();
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&draft, text).unwrap();
    fs::rename(draft, path).unwrap();
}
