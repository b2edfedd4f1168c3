//! Hundreds of thousands of inodes the kernel has cached: what they cost, and that a takeover does
//! not take longer because of them.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::{LoopFs, Mount, Options, PATIENCE, long, until, within};

/// Files of a directory.
const FILES: usize = 1000;
/// Kills of which the median pause is taken.
const KILLS: usize = 21;
/// What the machine may add to a pause, milliseconds.
const NOISE: f64 = 5.0;
const BYTES_PER_INODE: f64 = 200.0;

fn dirs() -> usize {
    if long() { 1000 } else { 200 }
}

/// Makes the directories `from..to`, each full of files, behind the mount.
fn populate(source: &Path, from: usize, to: usize) {
    for dir in from..to {
        let path = source.join(format!("directory-{dir:014}"));
        fs::create_dir(&path).unwrap();
        for file in 0..FILES {
            // 24 bytes.
            File::create(path.join(format!("a-file-of-many-{file:09}"))).unwrap();
        }
    }
}

/// Dropping caches does it to every mount: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at every file of the directories.
fn walk(point: PathBuf, from: usize, to: usize) {
    within(Duration::from_secs(600), "the walk", move || {
        for dir in from..to {
            let path = point.join(format!("directory-{dir:014}"));
            let entries = fs::read_dir(&path).unwrap();
            let files = entries.map(|entry| fs::symlink_metadata(entry.unwrap().path()).unwrap());
            assert_eq!(files.filter(|m| m.is_file()).count(), FILES);
        }
    });
}

/// Median of the pauses of some kills, milliseconds.
fn pause(mount: &Mount) -> f64 {
    let mut pauses: Vec<f64> = (0..KILLS)
        .map(|_| {
            mount.replace_backend();
            // The pause ends with an answer.
            let _ = fs::metadata(mount.path("directory-00000000000000"));
            mount.status().last_pause_ms.unwrap()
        })
        .collect();
    pauses.sort_by(f64::total_cmp);
    pauses[KILLS / 2]
}

/// Memory of a process, its share of what it shares included, bytes. `kind`: `Pss`, `Pss_Anon`, …
fn memory_of(pid: u32, kind: &str) -> f64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let mut lines = rollup.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(name, _)| *name == kind).unwrap();
    let kilobytes: f64 = value.trim().trim_end_matches(" kB").parse().unwrap();
    kilobytes * 1024.0
}

fn memory(pid: u32) -> f64 {
    memory_of(pid, "Pss")
}

fn backend_memory(mount: &Mount) -> f64 {
    let status = mount.wait("serving", |s| s.outage_ms.is_none());
    memory(status.backend_pid.unwrap())
}

/// Asks the kernel to forget what nobody uses.
fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}

/// Drops caches until the mount has only its root.
fn forget_all(mount: &Mount) {
    let forgotten = until(PATIENCE, || {
        drop_caches();
        // FORGETs travel on their own.
        until(Duration::from_millis(200), || mount.status().inodes == 1)
    });
    assert!(forgotten, "{} inodes stay", mount.status().inodes);
}

fn tmpfs_mount() -> (LoopFs, Mount) {
    let store = LoopFs::new("tmpfs");
    let on = store.path();
    let mount = Mount::with(&Options {
        on: Some(&on),
        args: &[],
        ..Options::default()
    });
    (store, mount)
}

#[test]
fn cached_inodes_cost_little_and_no_time_at_a_takeover() {
    let _alone = alone();
    let (store, mount) = tmpfs_mount();
    populate(&mount.behind(""), 0, dirs());
    walk(mount.point.clone(), 0, 1);
    let few_inodes = mount.status().inodes as f64;
    let few = pause(&mount);
    let empty = memory(mount.frontend);

    walk(mount.point.clone(), 1, dirs());
    let inodes = mount.status().inodes as f64;
    let all = (dirs() * (FILES + 1) + 1) as f64;
    // The kernel may have dropped some when the machine was short of memory.
    assert!(inodes > 0.9 * all && inodes <= all, "{inodes} of {all}");
    let full = memory(mount.frontend);
    let backend = backend_memory(&mount);
    let many = pause(&mount);
    let fresh = backend_memory(&mount);
    let each = (full - empty) / (inodes - few_inodes);
    eprintln!(
        "{inodes} inodes: {each:.0} bytes each, front-end {empty} → {full}, \
         backend {backend} (new {fresh}), pause {few} → {many} ms"
    );
    assert!(each <= BYTES_PER_INODE, "{each} bytes per inode");
    assert!(backend < 16e6, "the backend has {backend} bytes");
    assert!(
        many <= few * 1.3 + NOISE,
        "a takeover pauses {many} ms with {inodes} inodes, {few} ms with {FILES}"
    );
    walk(mount.point.clone(), 0, 10);

    forget_all(&mount);
    // Given back by a thread that has time.
    let mut after = full;
    let given_back = until(Duration::from_secs(10), || {
        after = memory(mount.frontend);
        after <= empty + 0.05 * (full - empty)
    });
    let private = memory_of(mount.frontend, "Pss_Anon");
    eprintln!("front-end {after} after everything was forgotten, of which its own {private}");
    assert!(given_back, "{after} bytes after everything was forgotten");
    mount.end();
    drop(store);
}

#[test]
fn lookups_and_forgets_are_counted_exactly_while_backends_die() {
    let _alone = alone();
    let (store, mount) = tmpfs_mount();
    let dirs = if long() { 40 } else { 8 };
    populate(&mount.behind(""), 0, dirs);
    let ((), deaths) = mount.under_fire(Duration::from_millis(20), || {
        for round in 0..10 {
            walk(mount.point.clone(), 0, dirs);
            if round % 2 == 1 {
                drop_caches();
            }
        }
    });
    eprintln!("{deaths} deaths");
    assert!(deaths > 10, "{deaths} deaths");
    mount.under_fire(Duration::from_millis(20), || forget_all(&mount));
    forget_all(&mount);
    let end = mount.wait("idle", |s| s.open_files + s.open_dirs + s.inflight == 0);
    assert_eq!((end.inodes, end.poisoned, end.ambiguous), (1, 0, 0));
    // A count too low would have forgotten what the kernel still uses.
    walk(mount.point.clone(), 0, dirs);
    mount.end();
    drop(store);
}

#[test]
fn memory_of_requests_held_in_an_outage_is_given_back() {
    let _alone = alone();
    const WRITERS: usize = 64;
    const BYTES: usize = 1 << 20;
    let mount = Mount::new();
    let files: Vec<File> = (0..WRITERS)
        .map(|n| {
            let file = File::create(mount.path(&n.to_string())).unwrap();
            // The first write asks for attributes beforehand.
            file.write_all_at(b"x", 0).unwrap();
            file
        })
        .collect();
    let before = memory(mount.frontend);
    mount.begin_outage();
    let writers: Vec<_> = files
        .into_iter()
        .map(|file| std::thread::spawn(move || file.write_all_at(&vec![7; BYTES], 0).unwrap()))
        .collect();
    mount.wait("holding", |s| s.inflight as usize >= WRITERS);
    let held = memory(mount.frontend);
    mount.end_outage();
    within(PATIENCE, "the writers", || {
        writers.into_iter().for_each(|w| w.join().unwrap());
    });
    let mut after = held;
    let given_back = until(Duration::from_secs(10), || {
        after = memory(mount.frontend);
        after - before < 0.05 * (WRITERS * BYTES) as f64
    });
    eprintln!("front-end {before} before, {held} with requests held, {after} afterwards");
    assert!(
        held - before > 0.5 * (WRITERS * BYTES) as f64,
        "nothing was held"
    );
    assert!(given_back, "{after} bytes are kept of {held}");
    for n in 0..WRITERS {
        let content = fs::read(mount.behind(&n.to_string())).unwrap();
        assert!(content.len() == BYTES && content.iter().all(|&b| b == 7));
    }
    mount.end();
}
