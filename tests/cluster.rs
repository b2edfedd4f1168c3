//! The Ceph cluster that other tests rely on: it serves, it can be harmed and recovers, it goes away.

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::ceph::{Cluster, ClusterOptions};
use common::{PATIENCE, until, within};

/// A process is there, and not only as a zombie.
fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().unwrap_or_default();
    !state.is_empty() && !state.starts_with(['Z', 'X'])
}

/// Nothing is left of it.
fn gone(dir: &Path, pids: &[u32]) -> bool {
    !dir.exists() && !pids.iter().any(|pid| alive(*pid))
}

/// Writes a file down to the OSDs. A hang is a failure.
fn store(path: PathBuf, text: &'static str) {
    within(PATIENCE, "a write", move || {
        let mut file = File::create(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.sync_all().unwrap();
    });
}

/// Reads a file. A hang is a failure.
fn load(path: PathBuf) -> String {
    within(PATIENCE, "a read", move || {
        fs::read_to_string(path).unwrap()
    })
}

#[test]
fn a_cluster_is_healthy_and_has_space_when_it_is_up() {
    let began = Instant::now();
    let cluster = Cluster::start(&ClusterOptions::default());
    eprintln!("up after {:.2} s", began.elapsed().as_secs_f64());
    let health = cluster.health();
    assert!(health.starts_with("HEALTH_OK"), "{health}");
    assert_eq!(cluster.active_mds("cephfs").as_deref(), Some("mds.a"));
    // Nobody is there yet, not even the manager: tests count sessions.
    assert_eq!(cluster.sessions("mds.a").len(), 0);
    let mount = cluster.ceph_fuse(&[]);
    let path = mount.path("");
    let stat = within(PATIENCE, "statfs", move || {
        nix::sys::statvfs::statvfs(&path).unwrap()
    });
    assert!(stat.blocks() > 0, "{stat:?}");
}

#[test]
fn clusters_live_side_by_side_also_when_started_at_the_same_moment() {
    let start = || {
        Cluster::start(&ClusterOptions {
            mgr: false,
            ..ClusterOptions::default()
        })
    };
    let (one, other) = std::thread::scope(|scope| {
        let one = scope.spawn(start);
        let other = scope.spawn(start);
        (one.join().unwrap(), other.join().unwrap())
    });
    assert_ne!(one.ceph(&["fsid"]), other.ceph(&["fsid"]));
    let (at_one, at_other) = (one.ceph_fuse(&[]), other.ceph_fuse(&[]));
    store(at_one.path("file"), "one");
    store(at_other.path("file"), "other");
    assert_eq!(load(at_one.path("file")), "one");
    assert_eq!(load(at_other.path("file")), "other");
}

#[test]
fn what_one_client_writes_another_reads() {
    let cluster = Cluster::shared();
    let (writer, reader) = (cluster.ceph_fuse(&[]), cluster.ceph_fuse(&[]));
    store(writer.path("letter"), "hello");
    assert_eq!(load(reader.path("letter")), "hello");
}

#[test]
fn an_authorized_entity_sees_its_directory_as_the_root() {
    let cluster = Cluster::shared();
    let admin = cluster.ceph_fuse(&[]);
    let (home, path) = (admin.path("home"), admin.path("home/file"));
    within(PATIENCE, "mkdir", move || fs::create_dir(home).unwrap());
    store(path, "mine");
    let keyring = cluster.authorize("client.app", "cephfs", "/home");
    let keyring = keyring.to_str().unwrap();
    let app = cluster.ceph_fuse(&["-n", "client.app", "-k", keyring, "-r", "/home"]);
    assert_eq!(load(app.path("file")), "mine");
    let key = fs::read_to_string(cluster.keyfile("client.app")).unwrap();
    assert!(fs::read_to_string(keyring).unwrap().contains(key.trim()));
}

#[test]
fn an_evicted_client_is_no_longer_served() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    let mount = cluster.ceph_fuse(&[]);
    store(mount.path("file"), "before");
    let sessions = cluster.sessions("mds.a");
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    cluster.evict("mds.a", sessions[0]["id"].as_u64().unwrap());
    assert_eq!(cluster.sessions("mds.a").len(), 0);
    let path = mount.path("new");
    let refused = within(PATIENCE, "a mkdir", move || fs::create_dir(path).is_err());
    assert!(refused);
}

#[test]
fn every_file_system_has_its_own_mds() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        filesystems: &["first", "second"],
        mds: 2,
        ..ClusterOptions::default()
    });
    let (first, second) = (cluster.active_mds("first"), cluster.active_mds("second"));
    assert_ne!(first, second);
    let mount = cluster.ceph_fuse(&["--client_fs=second"]);
    store(mount.path("file"), "there");
    let client_of = |mds: Option<String>| cluster.sessions(&mds.unwrap()).len();
    assert_eq!((client_of(first), client_of(second)), (0, 1));
}

#[test]
fn a_killed_mds_is_replaced_by_a_standby() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        mds: 2,
        ..ClusterOptions::default()
    });
    let mount = cluster.ceph_fuse(&[]);
    store(mount.path("before"), "before");
    let killed = cluster.active_mds("cephfs").unwrap();
    let began = Instant::now();
    cluster.kill(&killed);
    let replaced = until(PATIENCE, || {
        let active = cluster.active_mds("cephfs");
        active.is_some_and(|active| active != killed)
    });
    assert!(replaced, "{}", cluster.ceph(&["fs", "dump"]));
    eprintln!("replaced after {:.1} s", began.elapsed().as_secs_f64());
    assert_eq!(load(mount.path("before")), "before");
    store(mount.path("after"), "after");
    eprintln!("serves after {:.1} s", began.elapsed().as_secs_f64());
    // The killed one becomes the standby.
    cluster.start_daemon(&killed);
    let standby = || cluster.ceph_json(&["fs", "dump"])["standbys"][0]["name"].clone();
    assert!(until(PATIENCE, || format!(
        "mds.{}",
        standby().as_str().unwrap_or("?")
    ) == killed));
}

#[test]
fn a_killed_mds_without_a_standby_serves_when_it_is_started_again() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    let mount = cluster.ceph_fuse(&[]);
    store(mount.path("before"), "before");
    let began = Instant::now();
    cluster.kill("mds.a");
    cluster.start_daemon("mds.a");
    store(mount.path("after"), "after");
    eprintln!("serves after {:.1} s", began.elapsed().as_secs_f64());
    assert_eq!(load(mount.path("before")), "before");
}

#[test]
fn a_killed_osd_on_disk_serves_when_it_is_started_again() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        on_disk: true,
        ..ClusterOptions::default()
    });
    let writer = cluster.ceph_fuse(&[]);
    store(writer.path("before"), "before");
    cluster.kill("osd.0");
    let path = writer.path("during");
    let waiting = std::thread::spawn(move || store(path, "during"));
    let began = Instant::now();
    cluster.start_daemon("osd.0");
    waiting.join().unwrap();
    eprintln!("serves after {:.1} s", began.elapsed().as_secs_f64());
    let reader = cluster.ceph_fuse(&[]);
    assert_eq!(load(reader.path("before")), "before");
    assert_eq!(load(reader.path("during")), "during");
}

#[test]
fn an_osd_in_memory_keeps_what_it_has_when_it_is_stopped() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    let writer = cluster.ceph_fuse(&[]);
    store(writer.path("file"), "kept");
    cluster.stop("osd.0");
    cluster.start_daemon("osd.0");
    let reader = cluster.ceph_fuse(&[]);
    assert_eq!(load(reader.path("file")), "kept");
}

#[test]
fn clients_wait_while_a_monitor_is_away_or_an_osd_stands_still() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        ..ClusterOptions::default()
    });
    let mount = cluster.ceph_fuse(&[]);
    cluster.kill("mon.a");
    store(mount.path("without-a-monitor"), "served");
    cluster.start_daemon("mon.a");
    cluster.pause("osd.0");
    let path = mount.path("without-an-osd");
    let waiting = std::thread::spawn(move || store(path, "served later"));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!waiting.is_finished());
    cluster.resume("osd.0");
    waiting.join().unwrap();
}

#[test]
fn nothing_is_left_of_a_cluster_that_is_taken_down() {
    let cluster = Cluster::start(&ClusterOptions::default());
    let (dir, pids) = (cluster.dir().to_owned(), cluster.pids());
    // Monitor, manager, MDS, OSD and the watcher.
    assert_eq!(pids.len(), 5);
    assert!(pids.iter().all(|pid| alive(*pid)));
    cluster.kill("osd.0");
    drop(cluster);
    assert!(gone(&dir, &pids));
}

#[test]
fn a_cluster_ends_with_its_owner_whatever_ended_that() {
    let mut owner = Command::new("sleep").arg("1000").spawn().unwrap();
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        owner: Some(owner.id()),
        ..ClusterOptions::default()
    });
    let (dir, pids) = (cluster.dir().to_owned(), cluster.pids());
    assert!(pids.iter().all(|pid| alive(*pid)));
    // SIGKILL: nobody can clean up.
    owner.kill().unwrap();
    owner.wait().unwrap();
    assert!(until(PATIENCE, || gone(&dir, &pids)));
}

#[test]
fn a_cluster_that_cannot_start_says_why_and_leaves_nothing() {
    let dir = tempfile::TempDir::with_prefix("evermount-ceph-").unwrap();
    let output = Command::new("container/ceph-cluster")
        .arg("up")
        .arg(dir.path())
        .args(["--conf", "osd data = /proc/nowhere"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(text.contains("making osd.0 failed"), "{text}");
    assert!(!dir.path().exists());
}
