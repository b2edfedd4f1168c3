//! With `--writes retained` a write is acknowledged before the cluster has it: it is there all the same,
//! or whoever wrote it is told.

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::thread::spawn;
use std::time::Duration;

use common::ceph::{CephFuse, Cluster};
use common::tools::{kills, open_rw};
use common::{Mount, PATIENCE, errno, until, within};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

const RETAINED: &[&str] = &["--writes=retained"];

fn mount(directory: &str) -> Mount {
    Mount::of_ceph(Cluster::shared(), directory, RETAINED)
}

/// Another node, with an unmodified client.
fn other(directory: &str) -> CephFuse {
    CephFuse::mount(
        Cluster::shared().conf(),
        &[&format!("--client_mountpoint={directory}")],
    )
}

/// A file on a mount, known to the cluster, with 100 000 bytes of 1.
fn file_on(mount: &Mount, name: &str) -> File {
    let before = mount.status().unflushed_bytes;
    let file = open_rw(&mount.path(name));
    file.write_all_at(&[1; 100_000], 0).unwrap();
    file.sync_all().unwrap();
    assert!(mount.status().unflushed_bytes <= before, "after fsync");
    file
}

/// Writes that stay here for the moment.
fn write_retained(mount: &Mount, file: &File, byte: u8, at: u64, len: usize) {
    let before = mount.status().unflushed_bytes;
    file.write_all_at(&vec![byte; len], at).unwrap();
    let retained = mount.status().unflushed_bytes - before;
    assert_eq!(retained, len as u64, "this test needs them to be retained");
}

/// What is in a file. Not from the pages of the kernel: an unmodified client that reads while another
/// one writes leaves old ones there, for good (16.2.15).
fn contents(path: &Path) -> Vec<u8> {
    let path = path.to_owned();
    within(PATIENCE, "reading", move || {
        let mut file = File::open(path).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Byte and length of each part.
fn parts(bytes: &[u8]) -> Vec<(u8, usize)> {
    let parts = bytes.chunk_by(|a, b| a == b);
    parts.map(|part| (part[0], part.len())).collect()
}

/// What a file that was written or failed says, once.
fn fails_once(file: &File) {
    assert_eq!(errno(file.sync_all()), Some(libc::EIO));
    file.sync_all().unwrap();
}

/// Ends the session of a mount's backend, as an administrator or the metadata server would.
fn evict(mount: &Mount) {
    let backend = mount.status().backend_pid.unwrap();
    Cluster::shared().evict_process("mds.a", backend);
}

#[test]
fn acknowledged_writes_are_written_again_and_keep_their_time() {
    let mount = mount("/again");
    let file = file_on(&mount, "file");
    for round in 0..kills(5) as u8 {
        let byte = round + 2;
        write_retained(&mount, &file, byte, 1_000, 5_000);
        write_retained(&mount, &file, byte + 100, 3_000, 1);
        let time = |m: fs::Metadata| (m.mtime(), m.mtime_nsec(), m.size());
        let before = time(file.metadata().unwrap());
        mount.replace_backend();
        assert!(mount.status().unflushed_bytes > 0, "they stay retained");
        assert_eq!(time(file.metadata().unwrap()), before);
        let seen = contents(&mount.path("file"));
        let wanted = [
            (1, 1_000),
            (byte, 2_000),
            (byte + 100, 1),
            (byte, 2_999),
            (1, 94_000),
        ];
        assert_eq!(parts(&seen), wanted);
    }
    mount.wait("flushed by itself", |s| s.unflushed_bytes == 0);
    assert_eq!(
        contents(&mount.behind("file")),
        contents(&mount.path("file"))
    );
    assert_eq!(mount.status().dropped_bytes, 0);
    drop(file);
    mount.end();
}

#[test]
fn a_death_while_they_are_written_again_loses_nothing() {
    let mount = mount("/twice");
    let files: Vec<File> = (0..3).map(|n| file_on(&mount, &n.to_string())).collect();
    for file in &files {
        for n in 0..20 {
            write_retained(&mount, file, n as u8 + 2, n * 4_000, 4_000);
        }
    }
    mount.order("retained", "kill");
    mount.replace_backend();
    assert!(mount.carried_out("retained"));
    let wanted: Vec<(u8, usize)> = (2..22).map(|n| (n, 4_000)).chain([(1, 20_000)]).collect();
    for n in 0..3 {
        assert_eq!(parts(&contents(&mount.path(&n.to_string()))), wanted);
        assert_eq!(parts(&contents(&mount.behind(&n.to_string()))), wanted);
    }
    let status = mount.status();
    assert_eq!((status.conflicts, status.dropped_bytes), (0, 0));
    drop(files);
    mount.end();
}

fn attributes(path: &Path) -> (u32, u32, u32, i64, i64) {
    let m = fs::metadata(path).unwrap();
    (m.mode() & 0o7777, m.uid(), m.gid(), m.mtime(), m.atime())
}

fn set_attributes(path: &Path, mode: u32, owner: u32, time: i64) {
    let time = Timespec {
        tv_sec: time,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    utimensat(CWD, path, &times, AtFlags::empty()).unwrap();
    chown(path, Some(owner), Some(owner)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn attributes_are_what_was_told_last_by_whomever() {
    let (a, b) = (mount("/attributes"), other("/attributes"));
    for round in 0..kills(4) as u32 {
        let (name, directory) = (format!("f{round}"), format!("d{round}"));
        let file = file_on(&a, &name);
        fs::create_dir(a.path(&directory)).unwrap();
        write_retained(&a, &file, 2, 0, 10_000);
        for path in [a.path(&name), a.path(&directory)] {
            set_attributes(&path, 0o700, 7, 1_000_000_000);
            set_attributes(&path, 0o751, 8, 1_000_000_001);
        }
        assert!(
            a.status().unflushed_bytes > 10_000,
            "they are retained, too"
        );
        let mut wanted = (0o751, 8, 8, 1_000_000_001, 1_000_000_001);
        if round % 2 == 1 {
            for path in [b.path(&name), b.path(&directory)] {
                assert_eq!(attributes(&path), wanted, "as another node sees it");
                chown(&path, Some(9), Some(9)).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
            }
            wanted = (0o640, 9, 9, wanted.3, wanted.4);
        }
        a.replace_backend();
        for name in [&name, &directory] {
            assert_eq!(attributes(&a.path(name)), wanted, "{name}");
            assert_eq!(attributes(&b.path(name)), wanted, "{name} elsewhere");
        }
        assert_eq!(parts(&contents(&a.path(&name))), [(2, 10_000), (1, 90_000)]);
    }
    let status = a.status();
    assert_eq!((status.conflicts, status.dropped_bytes), (0, 0));
    a.end();
}

#[test]
fn what_another_node_wrote_later_is_never_overwritten() {
    let (a, b) = (mount("/later"), other("/later"));
    for round in 0..kills(4) {
        let name = format!("{round}");
        let file = file_on(&a, &name);
        write_retained(&a, &file, 2, 0, 10_000);
        {
            let theirs = open_rw(&b.path(&name));
            theirs.write_all_at(&[3; 4_000], 0).unwrap();
            theirs.sync_all().unwrap();
        }
        // Elsewhere in the file, and after them.
        if round % 2 == 1 {
            file.write_all_at(&[4; 1_000], 50_000).unwrap();
        }
        a.replace_backend();
        let mut wanted = vec![(3, 4_000), (2, 6_000)];
        wanted.extend(match round % 2 {
            1 => vec![(1, 40_000), (4, 1_000), (1, 49_000)],
            _ => vec![(1, 90_000)],
        });
        assert_eq!(parts(&contents(&b.path(&name))), wanted);
        assert_eq!(parts(&contents(&a.path(&name))), wanted);
        // Nothing was lost, so nobody is told so.
        file.sync_all().unwrap();
    }
    let status = a.status();
    assert_eq!((status.conflicts, status.dropped_bytes), (0, 0));
    a.end();
}

#[test]
fn whoever_waits_for_the_file_when_the_backend_dies_has_the_last_word() {
    let (a, b) = (mount("/waiting"), other("/waiting"));
    for round in 0..kills(3) {
        let name = format!("{round}");
        let file = file_on(&a, &name);
        write_retained(&a, &file, 2, 0, 10_000);
        a.begin_outage();
        let theirs = spawn({
            let path = b.path(&name);
            move || {
                let theirs = open_rw(&path);
                theirs.write_all_at(&[3; 4_000], 0).unwrap();
                theirs.sync_all().unwrap();
            }
        });
        // Waits in the metadata server by then, which nobody tells.
        std::thread::sleep(Duration::from_millis(100 + 50 * round as u64));
        a.end_outage();
        within(PATIENCE, "the other node", move || theirs.join().unwrap());
        let seen = parts(&contents(&b.path(&name)));
        assert_eq!(seen[0].0, 3, "overwritten: {seen:?}");
        let dropped = a.status().conflicts;
        match errno(file.sync_all()) {
            None => assert_eq!(seen, [(3, 4_000), (2, 6_000), (1, 90_000)]),
            told => assert_eq!(
                (told, seen),
                (Some(libc::EIO), vec![(3, 4_000), (1, 96_000)])
            ),
        }
        eprintln!("round {round}: {dropped} conflicts so far");
        assert_eq!(parts(&contents(&a.path(&name)))[0], (3, 4_000));
    }
    a.end();
}

#[test]
fn whoever_waits_to_read_costs_nothing() {
    let (a, b) = (mount("/reading"), other("/reading"));
    for round in 0..kills(3) {
        let name = format!("{round}");
        let file = file_on(&a, &name);
        write_retained(&a, &file, 2, 0, 10_000);
        a.begin_outage();
        let reader = spawn({
            let path = b.path(&name);
            move || {
                let file = File::open(path).unwrap();
                file.read_at(&mut [0; 10], 0).unwrap();
                file
            }
        });
        std::thread::sleep(Duration::from_millis(100 * round as u64));
        a.end_outage();
        let reader = within(PATIENCE, "the other node", move || reader.join().unwrap());
        file.sync_all().unwrap();
        let wanted = [(2, 10_000), (1, 90_000)];
        assert_eq!(parts(&contents(&a.path(&name))), wanted);
        let seen = until(PATIENCE, || parts(&contents(&b.path(&name))) == wanted);
        assert!(seen);
        drop(reader);
    }
    assert_eq!(a.status().conflicts, 0);
    a.end();
}

#[test]
fn after_an_eviction_writes_are_written_again_or_their_loss_is_told() {
    let (a, b) = (mount("/evicted"), other("/evicted"));
    for (round, changed) in [false, true, false, true].into_iter().enumerate() {
        let name = format!("{round}");
        let file = file_on(&a, &name);
        write_retained(&a, &file, 2, 0, 10_000);
        let before = a.status();
        a.order("start", "");
        evict(&a);
        if changed {
            let theirs = open_rw(&b.path(&name));
            theirs.write_all_at(&[3; 4_000], 0).unwrap();
            theirs.sync_all().unwrap();
        }
        a.cancel("start");
        a.wait("taken over", |s| {
            s.generation > before.generation && s.outage_ms.is_none()
        });
        let status = a.status();
        if changed {
            fails_once(&file);
            let wanted = [(3, 4_000), (1, 96_000)];
            assert_eq!(parts(&contents(&a.path(&name))), wanted);
            assert_eq!(parts(&contents(&b.path(&name))), wanted);
            assert_eq!(status.conflicts, before.conflicts + 1);
            assert_eq!(status.dropped_bytes, before.dropped_bytes + 10_000);
        } else {
            file.sync_all().unwrap();
            let wanted = [(2, 10_000), (1, 90_000)];
            assert_eq!(parts(&contents(&b.path(&name))), wanted);
            assert_eq!(status.conflicts, before.conflicts);
        }
        // The handle goes on.
        file.write_all_at(&[9; 10], 0).unwrap();
        file.sync_all().unwrap();
        // The other client's kernel is told a moment later.
        let seen = until(PATIENCE, || contents(&b.path(&name))[..10] == [9; 10]);
        assert!(seen);
    }
    a.end();
}

#[test]
fn writing_through_several_files_or_under_locks_loses_nothing_either() {
    let mount = mount("/several");
    let first = file_on(&mount, "file");
    let second = open_rw(&mount.path("file"));
    for round in 0..kills(4) as u8 {
        first.write_all_at(&[round + 10; 500], 0).unwrap();
        second.write_all_at(&[round + 20; 500], 250).unwrap();
        mount.replace_backend();
        let seen = contents(&mount.path("file"));
        assert_eq!(parts(&seen[..750]), [(round + 10, 250), (round + 20, 500)]);
    }
    drop((first, second));
    mount.end();
}

#[test]
fn what_is_truncated_or_unlinked_is_not_written_again() {
    let mount = mount("/gone");
    let cut = file_on(&mount, "cut");
    write_retained(&mount, &cut, 2, 50_000, 1_000);
    cut.set_len(10).unwrap();
    let gone = file_on(&mount, "gone");
    write_retained(&mount, &gone, 2, 0, 1_000);
    fs::remove_file(mount.path("gone")).unwrap();
    mount.replace_backend();
    assert_eq!(parts(&contents(&mount.path("cut"))), [(1, 10)]);
    let mut there = vec![0; 2_000];
    gone.read_exact_at(&mut there, 0).unwrap();
    assert_eq!(parts(&there), [(2, 1_000), (1, 1_000)]);
    drop(gone);
    mount.replace_backend();
    let done = mount.wait("nothing is left", |s| s.unflushed_bytes == 0);
    assert_eq!((done.conflicts, done.dropped_bytes), (0, 0));
    drop(cut);
    mount.end();
}

#[test]
fn an_unmount_writes_what_is_retained_also_when_a_backend_dies_over_it() {
    for dies in [false, true] {
        let directory = format!("/unmounted-{dies}");
        let a = mount(&directory);
        let b = other(&directory);
        let big = open_rw(&a.path("file"));
        let mut sum = 0;
        for n in 0..40 {
            big.write_all_at(&vec![n as u8 + 1; 1 << 20], n << 20)
                .unwrap();
            sum += 1 << 20;
        }
        assert!(a.status().unflushed_bytes > 0);
        drop(big);
        if dies {
            a.order("start", "");
            a.kill_backend();
            let canceller = spawn({
                let order = a.order_file("start");
                move || {
                    std::thread::sleep(Duration::from_millis(200));
                    let _ = fs::remove_file(order);
                }
            });
            a.end();
            canceller.join().unwrap();
        } else {
            a.end();
        }
        let seen = contents(&b.path("file"));
        assert_eq!(seen.len(), sum);
        let wanted: Vec<(u8, usize)> = (1..=40).map(|n| (n, 1 << 20)).collect();
        assert_eq!(parts(&seen), wanted);
    }
}

#[test]
fn a_store_that_is_full_is_told_once_to_every_handle() {
    // Of its own: the whole cluster is full.
    let cluster = Cluster::start(&Default::default());
    let mount = Mount::of_ceph(&cluster, "/full", RETAINED);
    let file = file_on(&mount, "file");
    let quota = |bytes: &str| {
        let pool = "cephfs.data";
        cluster.ceph(&["osd", "pool", "set-quota", pool, "max_bytes", bytes]);
    };
    quota("1");
    // Until the cluster is full writes are taken; from then on they are refused or, if they were
    // acknowledged just before, their loss is told by fsync.
    let told = until(PATIENCE, || {
        let written = file.write_all_at(&[2; 4096], 0);
        let synced = written.and_then(|()| file.sync_data());
        errno(synced) == Some(libc::ENOSPC)
    });
    assert!(told, "never full");
    for _ in 0..2 {
        let refused = within(PATIENCE, "write", {
            let file = file.try_clone().unwrap();
            move || errno(file.write_all_at(&[3; 4096], 8192))
        });
        assert_eq!(refused, Some(libc::ENOSPC));
        mount.replace_backend();
    }
    quota("0");
    let room = until(PATIENCE, || file.write_all_at(&[4; 4096], 0).is_ok());
    assert!(room, "never room again");
    file.sync_all().unwrap();
    mount.replace_backend();
    assert_eq!(parts(&contents(&mount.path("file"))[..4096]), [(4, 4096)]);
    mount.wait("nothing is left", |s| s.unflushed_bytes == 0);
    drop(file);
    mount.end();
}

#[test]
fn a_write_that_kills_the_library_is_refused_and_not_done_again_with_what_is_retained() {
    let mount = mount("/poison");
    let file = file_on(&mount, "file");
    write_retained(&mount, &file, 2, 0, 10_000);
    mount.order("retaining", "abort always");
    let refused = within(PATIENCE, "writing", {
        let file = file.try_clone().unwrap();
        move || errno(file.write_all_at(&[3; 5_000], 0))
    });
    mount.cancel("retaining");
    assert_eq!(refused, Some(libc::EIO));
    assert_eq!(mount.status().poisoned, 1);
    let wanted = [(2, 10_000), (1, 90_000)];
    assert_eq!(parts(&contents(&mount.path("file"))), wanted);
    file.write_all_at(&[4; 10], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    mount.end();
}
