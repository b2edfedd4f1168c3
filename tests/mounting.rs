//! Making, looking at and removing mounts: what is refused and how, and what is left of it.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use common::ceph::Cluster;
use common::{
    EVERMOUNT, Mount, PATIENCE, ceph_is_wanted, let_users_mount, open_to_all, prompt, until, within,
};
use nix::mount::{MntFlags, MsFlags};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Directories for a mount that may fail, and what to look at after it.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        let dir = TempDir::with_prefix("evermount-test-").unwrap();
        open_to_all(dir.path());
        for name in ["src", "mnt"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            open_to_all(&dir.path().join(name));
        }
        fs::write(dir.path().join("file"), "").unwrap();
        Place { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn runtime(&self) -> PathBuf {
        self.path("run")
    }

    /// `evermount` with these arguments, in which `@` is the directory.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(EVERMOUNT);
        command.args(self.filled(args));
        command.env("EVERMOUNT_RUNTIME_DIR", self.runtime());
        command
    }

    fn filled(&self, args: &[&str]) -> Vec<String> {
        let at = self.dir.path().to_str().unwrap();
        args.iter().map(|a| a.replace('@', at)).collect()
    }

    /// Processes whose environment names this place.
    fn processes(&self) -> Vec<u32> {
        let mark = format!("EVERMOUNT_RUNTIME_DIR={}", self.runtime().display());
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            // The environment of a process that is stuck in an `execve` cannot be read: only of ours.
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

    fn is_mounted(&self, name: &str) -> bool {
        is_mounted(&self.path(name))
    }

    fn check_nothing_is_left(&self, what: &str) {
        assert!(!self.is_mounted("mnt"), "{what}: it is mounted");
        let gone = until(Duration::from_secs(10), || self.processes().is_empty());
        assert!(gone, "{what}: still running: {:?}", self.processes());
        let sockets = fs::read_dir(self.runtime()).into_iter().flatten().flatten();
        let sockets: Vec<_> = sockets.map(|e| e.file_name()).collect();
        assert!(sockets.is_empty(), "{what}: {sockets:?}");
    }

    /// The command fails with this exit code and one line that says this.
    fn refused(&self, command: &mut Command, code: i32, words: &[&str]) {
        let what = format!("{command:?}");
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        eprintln!("{errors}");
        assert_eq!(output.status.code(), Some(code), "{what}: {errors}");
        assert!(output.stdout.is_empty(), "{what}: {output:?}");
        for word in words {
            assert!(errors.contains(word), "{what}: no '{word}' in: {errors}");
        }
        if code == 1 {
            assert_eq!(errors.lines().count(), 1, "{what}: {errors}");
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // In the order in which one lies on the other.
        for name in ["/dev/fuse".into(), self.path("dev")] {
            if is_mounted(&self.path("dev")) {
                let _ = nix::mount::umount2(&name, MntFlags::MNT_DETACH);
            }
        }
        for _ in 0..3 {
            let _ = Command::new("umount")
                .arg("-l")
                .arg(self.path("mnt"))
                .output();
        }
    }
}

fn is_mounted(path: &Path) -> bool {
    let path = path.to_str().unwrap();
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    mounts.lines().any(|l| l.split(' ').nth(4) == Some(path))
}

fn is_gone(pid: u32) -> bool {
    !Path::new(&format!("/proc/{pid}/exe")).exists()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

// ---- refusals --------------------------------------------------------------------------------

#[test]
fn what_cannot_be_mounted_is_refused_with_one_clear_line_and_leaves_nothing() {
    let place = Place::new();
    let cases: &[(&[&str], i32, &[&str])] = &[
        (
            &["mount", "dir:@/none", "@/mnt"],
            1,
            &["@/none", "No such file"],
        ),
        (
            &["mount", "dir:@/file", "@/mnt"],
            1,
            &["@/file", "not a directory"],
        ),
        (
            &["mount", "dir:@/src", "@/none"],
            1,
            &["mountpoint", "@/none", "create the directory"],
        ),
        (
            &["mount", "dir:@/src", "@/file"],
            1,
            &["mountpoint", "@/file", "not a directory"],
        ),
        (
            &["mount", "dir:@/src", "@/src"],
            1,
            &["@/src", "another directory"],
        ),
        (
            &["mount", "dir:@/src", "@/mnt", "--channel", "lease"],
            1,
            &["lease", "relay"],
        ),
        (
            &["mount", "dir:@/src", "@/mnt", "--standby"],
            1,
            &["--standby is for ceph: sources"],
        ),
        (
            &["mount", "dir:@/src", "@/mnt", "-o", "bogus"],
            2,
            &["'bogus'", "noatime"],
        ),
        (
            &["mount", "dir:@/src", "@/mnt", "--outage", "panic"],
            2,
            &["panic", "queue:SECONDS"],
        ),
        (
            &["mount", "dir:@/src", "@/mnt", "--outage", "queue:-1"],
            2,
            &["queue:-1"],
        ),
        (
            &["mount", "dir:@/src", "@/mnt", "--channel", "pipe"],
            2,
            &["pipe", "relay"],
        ),
        (&["mount", "ceph:fs", "@/mnt"], 2, &["ceph:[FSNAME]/path"]),
        (
            &["mount", "nfs:server/path", "@/mnt"],
            2,
            &["nfs", "dir:/path"],
        ),
        (
            &["mount", "exec:ceph-fuse", "@/mnt"],
            2,
            &["exec", "dir:/path"],
        ),
        (&["mount", "nfs:/path", "@/mnt"], 2, &["nfs", "dir:/path"]),
        (&["mount", "@/src", "@/mnt"], 2, &["@/src", "dir:"]),
        (
            &["mount", "dir:@/src", "@/mnt", "--log", "@/none/log"],
            1,
            &["log", "@/none/log"],
        ),
        (&["status", "@/none"], 1, &["@/none", "No such file"]),
        (&["status", "@/mnt"], 1, &["@/mnt", "not a mountpoint"]),
        (&["status", "/proc"], 1, &["/proc", "type proc"]),
        (&["umount", "@/mnt"], 1, &["@/mnt", "not a mountpoint"]),
        (&["umount", "@/none"], 1, &["@/none", "No such file"]),
        (&["umount", "/proc"], 1, &["/proc", "type proc"]),
    ];
    for (args, code, words) in cases {
        let words = place.filled(words);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        place.refused(&mut place.command(args), *code, &words);
        place.check_nothing_is_left(&args.join(" "));
    }
}

#[test]
fn a_runtime_directory_that_cannot_be_trusted_or_used_is_refused() {
    let place = Place::new();
    let mount = ["mount", "dir:@/src", "@/mnt"];
    let open = place.path("run");
    fs::create_dir(&open).unwrap();
    open_to_all(&open);
    place.refused(
        &mut place.command(&mount),
        1,
        &["runtime directory", "mode 777"],
    );
    place.check_nothing_is_left("a directory for all");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(&open, Some(4242), None).unwrap();
    place.refused(
        &mut place.command(&mount),
        1,
        &["runtime directory", "uid 4242"],
    );
    place.check_nothing_is_left("a directory of somebody else");
    let file = place.path("file");
    let mut command = place.command(&mount);
    command.env("EVERMOUNT_RUNTIME_DIR", &file);
    place.refused(
        &mut command,
        1,
        &["runtime directory", file.to_str().unwrap()],
    );
    // Where nothing can be made.
    let mut command = place.command(&mount);
    command.env("EVERMOUNT_RUNTIME_DIR", "/proc/evermount");
    place.refused(&mut command, 1, &["runtime directory", "/proc/evermount"]);
    place.check_nothing_is_left("a directory that cannot be made");
}

#[test]
fn a_mountpoint_in_use_is_refused() {
    let mount = Mount::new();
    let point = mount.point.to_str().unwrap();
    let source = mount.source();
    let place = Place::new();
    let mut command = mount.command(&["mount", &source, point]);
    if ceph_is_wanted() {
        command.arg("--conf").arg(Cluster::shared().conf());
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("in use") && errors.contains("evermount umount"),
        "{errors}"
    );
    assert_eq!(errors.lines().count(), 1, "{errors}");
    fs::write(mount.path("file"), "text").unwrap();
    assert_eq!(mount.status().takeovers, 0);
    mount.end();

    // Another FUSE mount, whose daemon does not answer: nothing may ask it.
    let fuse = File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .unwrap();
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0",
        fuse.as_raw_fd()
    );
    let (fs, flags) = (Some("fuse.other"), MsFlags::empty());
    nix::mount::mount(
        Some("other"),
        &place.path("mnt"),
        fs,
        flags,
        Some(options.as_str()),
    )
    .unwrap();
    let mut command = place.command(&["mount", "dir:@/src", "@/mnt"]);
    let runtime = place.runtime();
    let at = place.path("mnt");
    within(PATIENCE, "a refusal", move || {
        place.refused(&mut command, 1, &["in use", "fuse.other"]);
        let what = ["status", "umount"];
        for command in what {
            place.refused(&mut place.command(&[command, "@/mnt"]), 1, &["fuse.other"]);
        }
        place
    });
    let _ = nix::mount::umount2(&at, MntFlags::MNT_DETACH);
    drop(fuse);
    assert!(!runtime.join("mount.sock").exists());
}

#[test]
fn a_machine_without_a_usable_fuse_device_is_told_so() {
    let cases = [
        // The device is not there.
        (
            "mkdir dev && mount -t tmpfs tmpfs dev && mknod -m 666 dev/null c 1 3 && mount --move dev /dev",
            "modprobe fuse",
        ),
        // It may not be opened: devices do not work where it lies.
        (
            "mkdir dev && mount -t tmpfs -o nodev tmpfs dev && mknod dev/fuse c 10 229 && mount --bind dev/fuse /dev/fuse",
            "--device /dev/fuse",
        ),
        // There is no driver behind it.
        (
            "mkdir dev && mount -t tmpfs -o dev tmpfs dev && mknod dev/fuse c 10 250 && mount --bind dev/fuse /dev/fuse",
            "modprobe fuse",
        ),
        // It is something else.
        (
            "touch fuse && mount --bind fuse /dev/fuse",
            "evermount-test",
        ),
    ];
    for (prepare, advice) in cases {
        let place = Place::new();
        // Everything happens in a mount namespace of its own.
        let script =
            format!("cd \"$1\" && {{ {prepare}; }} && exec \"$2\" mount dir:\"$1\"/src \"$1\"/mnt");
        let mut command = Command::new("unshare");
        command
            .args(["-m", "--propagation", "private", "sh", "-c", &script, "sh"])
            .arg(place.dir.path())
            .arg(EVERMOUNT)
            .env("EVERMOUNT_RUNTIME_DIR", place.runtime());
        place.refused(&mut command, 1, &["mnt", advice]);
        place.check_nothing_is_left(prepare);
    }
}

// ---- status ----------------------------------------------------------------------------------

#[test]
fn the_status_has_every_promised_field_with_its_type() {
    use serde_json::Value;
    let mount = Mount::new();
    let point = mount.point.to_str().unwrap();
    mount.replace_backend();
    let output = mount
        .command(&["status", point, "--json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let status: BTreeMap<String, Value> = serde_json::from_str(&text(&output)).unwrap();
    let field = |name: &str| {
        status
            .get(name)
            .unwrap_or_else(|| panic!("no field {name}"))
    };
    for name in [
        "mountpoint",
        "source",
        "state",
        "channel",
        "version",
        "backend_version",
    ] {
        assert!(field(name).is_string(), "{name}: {}", field(name));
    }
    for name in [
        "generation",
        "frontend_pid",
        "backend_pid",
        "takeovers",
        "handovers",
        "open_files",
        "open_dirs",
        "locks",
        "lost_locks",
        "conflicts",
        "dropped_bytes",
        "inodes",
        "inflight",
        "unflushed_bytes",
        "reissued",
        "verified_done",
        "ambiguous",
        "poisoned",
    ] {
        assert!(field(name).is_u64(), "{name}: {}", field(name));
    }
    for name in [
        "last_pause_ms",
        "longest_pause_ms",
        "outage_ms",
        "oldest_request_ms",
    ] {
        assert!(
            field(name).is_f64() || field(name).is_null(),
            "{name}: {}",
            field(name)
        );
    }
    assert!(field("last_pause_ms").is_f64());
    assert!(field("reason").is_string());
    assert!(field("standby_pid").is_null());
    assert_eq!(field("mountpoint"), point);
    assert_eq!(field("state"), "serving");
    assert_eq!(field("channel"), "relay");
    assert_eq!(
        (field("generation"), field("takeovers")),
        (&2.into(), &1.into())
    );

    let list = mount.command(&["status", "--json"]).output().unwrap();
    let list: Vec<Value> = serde_json::from_str(&text(&list)).unwrap();
    assert!(list.iter().any(|s| s["mountpoint"] == *field("mountpoint")));
    let shown = text(&mount.command(&["status"]).output().unwrap());
    assert!(shown.contains(point), "{shown}");
    // A bind mount of it is the same mount.
    let place = Place::new();
    let bind = place.path("mnt");
    nix::mount::mount(
        Some(&mount.point),
        &bind,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .unwrap();
    let output = mount
        .command(&["status", bind.to_str().unwrap(), "--json"])
        .output()
        .unwrap();
    assert!(text(&output).contains("\"serving\""), "{output:?}");
    nix::mount::umount2(&bind, MntFlags::empty()).unwrap();
    mount.end();
}

// ---- the end ---------------------------------------------------------------------------------

#[test]
fn a_busy_mount_is_not_unmounted_unless_lazily() {
    let mount = Mount::new();
    let point = mount.point.to_str().unwrap();
    let file = File::create(mount.path("file")).unwrap();
    let output = mount.command(&["umount", point]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("in use") && errors.contains("--lazy"),
        "{errors}"
    );
    assert_eq!(errors.lines().count(), 1, "{errors}");
    fs::write(mount.path("other"), "text").unwrap();
    // So does who is asked to end.
    kill(Pid::from_raw(mount.frontend as i32), Signal::SIGTERM).unwrap();
    let refused = || mount.log_text().contains("asked to end");
    assert!(until(PATIENCE, refused), "{}", mount.log_text());
    fs::write(mount.path("other"), "text").unwrap();

    let backend = mount.status().backend_pid.unwrap();
    let output = mount
        .command(&["umount", "--lazy", point])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(!is_mounted(&mount.point));
    // It lives for who still uses it.
    use std::os::unix::fs::FileExt;
    file.write_all_at(b"text", 0).unwrap();
    kill(Pid::from_raw(backend as i32), Signal::SIGKILL).unwrap();
    within(PATIENCE, "a write", move || file.write_all_at(b"text", 0)).unwrap();
    assert!(until(PATIENCE, || is_gone(mount.frontend)));
    mount.end();
}

/// Memory files of a process, by inode.
fn memory_files(pid: u32) -> HashSet<u64> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    fds.filter_map(|fd| {
        let target = fs::read_link(fd.path()).ok()?;
        let ours = target.to_str()?.starts_with("/memfd:evermount");
        ours.then(|| fs::metadata(fd.path()).ok().map(|m| m.ino()))?
    })
    .collect()
}

fn processes() -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|e| e.file_name().to_str()?.parse().ok())
        .collect()
}

#[test]
fn nothing_is_left_of_a_mount_that_was_unmounted() {
    for how in ["umount", "evermount umount", "SIGTERM"] {
        let mount = Mount::new();
        let point = mount.point.to_str().unwrap();
        fs::write(mount.path("file"), "text").unwrap();
        mount.replace_backend();
        let (frontend, backend) = (mount.frontend, mount.status().backend_pid.unwrap());
        let memory = memory_files(frontend);
        assert!(!memory.is_empty());
        let began = std::time::Instant::now();
        match how {
            "umount" => {
                assert!(
                    Command::new("umount")
                        .arg(point)
                        .status()
                        .unwrap()
                        .success()
                );
            }
            "SIGTERM" => kill(Pid::from_raw(frontend as i32), Signal::SIGTERM).unwrap(),
            _ => {
                let output = mount.command(&["umount", point]).output().unwrap();
                assert!(output.status.success(), "{output:?}");
                // This one waits for it.
                assert!(is_gone(frontend));
            }
        }
        assert!(
            until(PATIENCE, || is_gone(frontend) && is_gone(backend)),
            "{how}"
        );
        prompt(&format!("the end by {how}"), began.elapsed());
        assert!(!is_mounted(&mount.point));
        let sockets: Vec<_> = fs::read_dir(mount.runtime()).unwrap().collect();
        assert!(sockets.is_empty(), "{sockets:?}");
        for pid in processes() {
            assert!(
                memory_files(pid).is_disjoint(&memory),
                "{how}: process {pid}"
            );
        }
        mount.end();
    }
}

// ---- thin ------------------------------------------------------------------------------------

/// Times a thread of the process went to sleep by itself.
fn sleeps(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    tasks
        .map(|task| number(&task.path().join("status"), "voluntary_ctxt_switches:"))
        .sum()
}

fn number(path: &Path, field: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix(field));
    let value = line.unwrap_or_else(|| panic!("no {field} in {path:?}"));
    value.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn an_idle_mount_sleeps_and_needs_little_memory() {
    let mount = Mount::new();
    fs::write(mount.path("file"), "text").unwrap();
    let (frontend, backend) = (mount.frontend, mount.status().backend_pid.unwrap());
    // Another test's `df` may look at this mount as well, so there is more than one chance.
    let asleep = (0..20).any(|_| {
        // The library of CephFS has threads that look after its connections every second.
        let count = || {
            (
                sleeps(frontend),
                (!ceph_is_wanted()).then(|| sleeps(backend)),
            )
        };
        let before = count();
        std::thread::sleep(Duration::from_secs(1));
        before == count()
    });
    assert!(asleep, "it woke up every second, doing nothing");
    for (who, pid) in [("front-end", frontend), ("backend", backend)] {
        let status = PathBuf::from(format!("/proc/{pid}/status"));
        let kib = |field| number(&status, field);
        let (anon, file, shared) = (kib("RssAnon:"), kib("RssFile:"), kib("RssShmem:"));
        eprintln!("{who}: {anon} KiB anonymous, {file} KiB of files, {shared} KiB shared");
        // A program with debug information has larger pages of code.
        let own = if cfg!(debug_assertions) {
            anon
        } else {
            anon + file
        };
        assert!(who == "backend" || own <= 8 * 1024, "{own} KiB");
    }
    mount.end();
}

// ---- users -----------------------------------------------------------------------------------

#[test]
fn the_demonstration_succeeds() {
    let output = within(Duration::from_secs(300), "the demonstration", || {
        Command::new(EVERMOUNT)
            .args(["demo", "--kills", "3"])
            .output()
            .unwrap()
    });
    assert!(output.status.success(), "{output:?}");
}

/// An ordinary user, with what a login gives.
fn as_user(place: &Place, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let home = place.path("home");
    if !home.exists() {
        fs::create_dir(&home).unwrap();
        std::os::unix::fs::chown(&home, Some(65534), Some(65534)).unwrap();
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
    }
    let mut command = Command::new(program);
    command
        .uid(65534)
        .gid(65534)
        .env("HOME", &home)
        .env("TMPDIR", &home)
        .env("XDG_RUNTIME_DIR", &home)
        .current_dir("/");
    command
}

#[test]
fn a_user_mounts_and_loses_nothing_when_backends_are_killed() {
    let place = Place::new();
    let_users_mount(place.dir.path());
    let runtime = place.path("home").join("run");
    let user = |args: &[&str]| {
        let mut command = as_user(&place, EVERMOUNT);
        command
            .args(place.filled(args))
            .env("EVERMOUNT_RUNTIME_DIR", &runtime);
        command
    };
    as_user(&place, "true");
    for name in ["src", "mnt"] {
        std::os::unix::fs::chown(place.path(name), Some(65534), Some(65534)).unwrap();
    }
    let output = user(&["mount", "dir:@/src", "@/mnt", "--log", "@/home/log"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let status = || -> serde_json::Value {
        let output = user(&["status", "@/mnt", "--json"]).output().unwrap();
        serde_json::from_str(&text(&output)).unwrap_or_else(|e| panic!("{e}: {output:?}"))
    };
    // A file that is open, one that was deleted, and names that change, over three deaths.
    let script = "cd \"$1\" && exec 3>kept 4<>gone && rm gone && echo deleted >&4 && echo ready
        while read word; do
            echo $word >&3 && mkdir d && echo x > d/f && mv d e && rm e/f && rmdir e && echo ok || echo failed
        done
        exec 3>&- 4>&-; cat kept";
    let mut shell = as_user(&place, "sh")
        .args(["-c", script, "sh"])
        .arg(place.path("mnt"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    use std::io::{BufRead, Write};
    let mut input = shell.stdin.take().unwrap();
    let output = std::io::BufReader::new(shell.stdout.take().unwrap());
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let said = || {
        lines
            .recv_timeout(PATIENCE)
            .expect("a user's program hangs")
    };
    assert_eq!(said(), "ready");
    for n in 1..=3 {
        let backend = status()["backend_pid"].as_i64().unwrap();
        kill(Pid::from_raw(backend as i32), Signal::SIGKILL).unwrap();
        writeln!(input, "{n}").unwrap();
        assert_eq!(said(), "ok", "after kill {n}");
        assert!(until(PATIENCE, || status()["takeovers"] == n
            && status()["state"] == "serving"));
    }
    drop(input);
    assert_eq!([said(), said(), said()], ["1", "2", "3"]);
    assert!(within(PATIENCE, "a user's program", move || shell.wait().unwrap()).success());
    let frontend = status()["frontend_pid"].as_u64().unwrap() as u32;
    let output = user(&["umount", "@/mnt"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(is_gone(frontend) && !place.is_mounted("mnt"));
}

#[test]
fn the_demonstration_succeeds_for_a_user() {
    let place = Place::new();
    let_users_mount(place.dir.path());
    let mut command = as_user(&place, EVERMOUNT);
    command.args(["demo", "--kills", "2"]);
    let output = within(Duration::from_secs(300), "the demonstration", move || {
        command.output().unwrap()
    });
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_user_is_told_what_is_missing() {
    let place = Place::new();
    let_users_mount(place.dir.path());
    let mut command = as_user(&place, EVERMOUNT);
    command
        .args(place.filled(&["mount", "dir:@/src", "@/mnt"]))
        .env_remove("XDG_RUNTIME_DIR");
    place.refused(
        &mut command,
        1,
        &["XDG_RUNTIME_DIR", "EVERMOUNT_RUNTIME_DIR"],
    );
    // Nothing to mount with.
    let mut command = as_user(&place, EVERMOUNT);
    command
        .args(place.filled(&["mount", "dir:@/src", "@/mnt"]))
        .env("PATH", "/nonexistent");
    place.refused(&mut command, 1, &["fusermount3", "fuse3"]);
    // A directory of somebody else.
    fs::set_permissions(place.path("mnt"), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = as_user(&place, EVERMOUNT);
    command.args(place.filled(&["mount", "dir:@/src", "@/mnt"]));
    place.refused(&mut command, 1, &["fusermount3", "mnt"]);
    let mut command = as_user(&place, EVERMOUNT);
    command.args(place.filled(&["mount", "dir:@/src", "@/mnt", "-o", "allow_other"]));
    place.refused(&mut command, 1, &["user_allow_other", "/etc/fuse.conf"]);
    place.check_nothing_is_left("a user");
}

#[test]
fn a_mount_recovers_although_its_starter_ignored_the_end_of_children() {
    let place = Place::new();
    // An ignored SIGCHLD is inherited, and then nobody can be waited for.
    let script = "trap '' CHLD; exec \"$2\" mount dir:\"$1\"/src \"$1\"/mnt";
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "sh"])
        .arg(place.dir.path())
        .arg(EVERMOUNT)
        .env("EVERMOUNT_RUNTIME_DIR", place.runtime());
    assert!(command.status().unwrap().success());
    let status = || -> serde_json::Value {
        let output = place.command(&["status", "@/mnt", "--json"]).output();
        serde_json::from_slice(&output.unwrap().stdout).unwrap()
    };
    let backend = status()["backend_pid"].as_i64().unwrap();
    kill(Pid::from_raw(backend as i32), Signal::SIGKILL).unwrap();
    let recovered = || status()["takeovers"] == 1 && status()["state"] == "serving";
    assert!(until(PATIENCE, recovered), "{}", status());
    let umount = place.command(&["umount", "@/mnt"]).output().unwrap();
    assert!(umount.status.success(), "{umount:?}");
    place.check_nothing_is_left("a mount that recovered");
}
