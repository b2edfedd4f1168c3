//! The standby session (`--standby`): what it keeps, and that it does no harm.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

use common::ceph::{Cluster, ClusterOptions};
use common::tools::open_rw;
use common::{Mount, PATIENCE, errno, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A session of an evermount process.
#[derive(Debug, PartialEq)]
struct Session {
    id: u64,
    name: String,
    pid: u32,
    caps: u64,
}

fn sessions(cluster: &Cluster) -> Vec<Session> {
    let text = |s: &serde_json::Value, key| {
        let text = s["client_metadata"][key].as_str();
        text.unwrap_or_default().to_owned()
    };
    let all = cluster.sessions("mds.a");
    let all = all.iter().map(|s| Session {
        id: s["id"].as_u64().unwrap(),
        name: text(s, "uuid"),
        pid: text(s, "pid").parse().unwrap_or(0),
        caps: s["num_caps"].as_u64().unwrap(),
    });
    all.filter(|s| s.name.starts_with("evermount-")).collect()
}

/// A mount whose standby keeps what it should, and that one's process.
fn with_standby(cluster: &Cluster, directory: &str) -> (Mount, u32) {
    let mount = Mount::of_ceph(cluster, directory, &["--standby"]);
    let pid = standby(&mount);
    (mount, pid)
}

fn standby(mount: &Mount) -> u32 {
    let status = mount.wait("with a standby", |s| s.standby_pid.is_some());
    status.standby_pid.unwrap()
}

/// Waits until there is one session of standbys, and it refers to this many objects besides the root
/// and the directory above it.
fn keeps(cluster: &Cluster, objects: u64) -> Session {
    let mut found = Vec::new();
    let kept = until(PATIENCE, || {
        found = sessions(cluster);
        found.retain(|s| s.name.contains("-standby-"));
        found.len() == 1 && found[0].caps == objects + 2
    });
    assert!(kept, "not {objects}: {found:?}");
    found.remove(0)
}

fn sigkill(pid: u32) {
    kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap();
}

/// A file that is open and has no name any more.
fn deleted(mount: &Mount, name: &str) -> File {
    let file = open_rw(&mount.path(name));
    file.write_all_at(b"still", 0).unwrap();
    fs::remove_file(mount.path(name)).unwrap();
    file
}

fn still_there(file: &File) -> io::Result<()> {
    let mut bytes = [0; 5];
    file.read_exact_at(&mut bytes, 0)?;
    assert_eq!(&bytes, b"still");
    file.write_all_at(b"still", 0)?;
    file.sync_all()
}

#[test]
fn deleted_files_in_use_outlive_backend_and_metadata_server_with_a_standby_and_only_so() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    let (with, pid) = with_standby(&cluster, "/with");
    let without = Mount::of_ceph(&cluster, "/without", &[]);
    let (kept, lost) = (deleted(&with, "open"), deleted(&without, "open"));
    let (named, other) = (
        open_rw(&with.path("named")),
        open_rw(&without.path("named")),
    );
    // Renamed over, and known by a path descriptor only.
    fs::write(with.path("target"), "still").unwrap();
    let mut options = OpenOptions::new();
    let known = options.read(true).custom_flags(libc::O_PATH);
    let known = known.open(with.path("target")).unwrap();
    fs::write(with.path("source"), "x").unwrap();
    fs::rename(with.path("source"), with.path("target")).unwrap();
    keeps(&cluster, 2);
    // The metadata server answers before it has written its journal, and the client that could tell it
    // again dies with it.
    for mount in [&with, &without] {
        File::open(&mount.point).unwrap().sync_all().unwrap();
    }

    let dead = [&with, &without].map(|mount| mount.status().backend_pid.unwrap());
    with.begin_outage();
    without.begin_outage();
    cluster.kill("mds.a");
    cluster.start_daemon("mds.a");
    let active = || cluster.active_mds("cephfs").is_some();
    assert!(until(PATIENCE, active), "the metadata server is not back");
    let forgotten = || !sessions(&cluster).iter().any(|s| dead.contains(&s.pid));
    assert!(until(PATIENCE, forgotten), "{:?}", sessions(&cluster));
    // What nobody refers to is deleted in the end.
    let strays = || {
        let counters = cluster.ceph_json(&["tell", "mds.a", "perf", "dump"]);
        counters["mds_cache"]["num_strays"].as_u64().unwrap()
    };
    assert!(until(PATIENCE, || strays() == 2), "{} strays", strays());
    with.end_outage();
    without.end_outage();

    still_there(&kept).unwrap();
    let again = format!("/proc/self/fd/{}", known.as_raw_fd());
    still_there(&open_rw(again.as_ref())).unwrap();
    assert_eq!(fs::read(with.path("target")).unwrap(), b"x");
    for _ in 0..2 {
        let told = errno(still_there(&lost));
        assert!(
            [Some(libc::ESTALE), Some(libc::EIO)].contains(&told),
            "{told:?}"
        );
        for file in [&named, &other] {
            file.write_all_at(b"still", 0).unwrap();
            still_there(file).unwrap();
        }
        assert_eq!(with.status().lost_files, 0);
        assert_eq!(without.status().lost_files, 1);
        without.replace_backend();
    }
    assert_eq!(standby(&with), pid);
    drop((kept, lost, named, other, known));
    // Nothing is kept for ever.
    keeps(&cluster, 0);
    with.end();
    without.end();
    assert_eq!(sessions(&cluster), []);
}

#[test]
fn a_standby_that_dies_or_is_evicted_comes_back_and_nobody_notices() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    let (mount, mut pid) = with_standby(&cluster, "/dies");
    let file = deleted(&mount, "open");
    let mut session = keeps(&cluster, 1);
    for evicted in [false, true, false] {
        if evicted {
            cluster.evict("mds.a", session.id);
        } else {
            sigkill(pid);
        }
        let began = Instant::now();
        // In the root, of which the dead session has capabilities.
        fs::write(mount.path("file"), "x").unwrap();
        fs::remove_file(mount.path("file")).unwrap();
        eprintln!("evicted: {evicted}: {:?}", began.elapsed());
        assert!(began.elapsed() < PATIENCE / 10);
        still_there(&file).unwrap();
        let next = mount.wait("with another standby", |s| {
            s.standby_pid.is_some_and(|next| next != pid)
        });
        eprintln!("another one after {:?}", began.elapsed());
        pid = next.standby_pid.unwrap();
        session = keeps(&cluster, 1);
        let after = sessions(&cluster);
        assert_eq!(after.len(), 2, "{after:?}");
        assert_eq!((next.generation, next.takeovers), (1, 0));
    }
    // It begins in an outage as well, and keeps what the dead backend held.
    mount.begin_outage();
    sigkill(pid);
    mount.wait("with another standby", |s| {
        s.standby_pid.is_some_and(|next| next != pid)
    });
    keeps(&cluster, 1);
    mount.end_outage();
    still_there(&file).unwrap();
    // The serving session is evicted, and with it goes what it kept.
    let before = mount.status();
    let serving = sessions(&cluster);
    let serving = serving.iter().find(|s| Some(s.pid) == before.backend_pid);
    cluster.evict("mds.a", serving.unwrap().id);
    mount.wait("replaced", |s| {
        s.generation > before.generation && s.outage_ms.is_none()
    });
    still_there(&file).unwrap();
    assert_eq!(mount.status().lost_files, 0);
    drop(file);
    let umount = mount.command(&["umount"]).arg(&mount.point).status();
    assert!(umount.unwrap().success());
    let log = mount.log_text();
    assert!(!log.contains("has not ended in order"), "{log}");
    mount.end();
    assert_eq!(sessions(&cluster), []);
}

#[test]
fn nothing_is_left_of_a_standby_after_an_unmount_however_it_ended() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    for how in ["", "standby", "backend", "both"] {
        let (mount, pid) = with_standby(&cluster, "/end");
        let file = deleted(&mount, "open");
        keeps(&cluster, 1);
        drop(file);
        let backend = mount.status().backend_pid.unwrap();
        if how != "backend" && !how.is_empty() {
            sigkill(pid);
        }
        if how != "standby" && !how.is_empty() {
            sigkill(backend);
        }
        let began = Instant::now();
        mount.end();
        eprintln!("{how}: unmounted after {:?}", began.elapsed());
        assert_eq!(sessions(&cluster), [], "{how}");
        for pid in [pid, backend] {
            assert!(!std::path::Path::new(&format!("/proc/{pid}/exe")).exists());
        }
    }
}
