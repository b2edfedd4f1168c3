//! What a CephFS mount has acknowledged is there, whatever dies, and seen by the other nodes.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::ceph::Cluster;
use common::tools::{Chance, kills, open_rw, percentiles};
use common::{Mount, PATIENCE, errno, until, within};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

/// A file, and what it has to hold.
struct Model {
    file: File,
    bytes: Vec<u8>,
}

const FILE_MAX: u64 = 3 << 20;

impl Model {
    fn new(path: &Path) -> Model {
        Model {
            file: open_rw(path),
            bytes: Vec::new(),
        }
    }

    /// Something that changes the file, acknowledged when this returns.
    fn change(&mut self, chance: &mut Chance) {
        match chance.below(20) {
            0 => {
                let size = chance.below(FILE_MAX);
                self.file.set_len(size).unwrap();
                self.bytes.resize(size as usize, 0);
            }
            1 => self.file.sync_data().unwrap(),
            2 => self.check(),
            _ => {
                let kind = chance.below(3) as usize;
                let len = 1 + chance.below([16, 4096, 300_000][kind]);
                let at = chance.below(FILE_MAX - len);
                let data = vec![chance.next() as u8 | 1; len as usize];
                self.file.write_all_at(&data, at).unwrap();
                let end = (at + len) as usize;
                self.bytes.resize(self.bytes.len().max(end), 0);
                self.bytes[at as usize..end].copy_from_slice(&data);
            }
        }
    }

    fn check(&self) {
        let len = self.file.metadata().unwrap().len();
        assert_eq!(len, self.bytes.len() as u64, "size");
        let mut there = vec![0; self.bytes.len()];
        self.file.read_exact_at(&mut there, 0).unwrap();
        same(&there, &self.bytes);
    }
}

/// Without printing megabytes.
fn same(there: &[u8], wanted: &[u8]) {
    assert_eq!(there.len(), wanted.len(), "size");
    let differs = there.iter().zip(wanted).position(|(a, b)| a != b);
    assert_eq!(differs, None, "first difference");
}

#[test]
fn every_acknowledged_byte_is_there_after_random_kills() {
    let mut chance = Chance::new("random writes");
    let mount = Mount::of_ceph(Cluster::shared(), "/bytes", &[]);
    let mut models: Vec<Model> = (0..3)
        .map(|n| Model::new(&mount.path(&format!("file{n}"))))
        .collect();
    let mut pauses = Vec::new();
    for _ in 0..kills(12) {
        let before = mount.wait("serving", |s| s.outage_ms.is_none());
        let mut chance = chance.split();
        models = within(PATIENCE, "writing", {
            let socket_pid = before.backend_pid.unwrap();
            let changes = 1 + chance.below(40);
            let killed_at = chance.below(changes);
            move || {
                for n in 0..changes {
                    if n == killed_at {
                        let pid = nix::unistd::Pid::from_raw(socket_pid as i32);
                        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
                    }
                    let which = chance.below(3) as usize;
                    models[which].change(&mut chance);
                }
                models
            }
        });
        let after = mount.wait("taken over", |s| {
            s.takeovers > before.takeovers && s.outage_ms.is_none()
        });
        pauses.extend(after.last_pause_ms);
    }
    eprintln!("pauses of the mount: {}", percentiles(&mut pauses));
    for (n, model) in models.into_iter().enumerate() {
        model.check();
        let elsewhere = fs::read(mount.behind(&format!("file{n}"))).unwrap();
        same(&elsewhere, &model.bytes);
    }
    mount.end();
}

#[test]
fn the_last_acknowledged_write_of_two_nodes_stays() {
    let mut chance = Chance::new("two nodes");
    let cluster = Cluster::shared();
    let mounts = ["/pair", "/pair"].map(|dir| Mount::of_ceph(cluster, dir, &[]));
    let mut files: Vec<File> = mounts.iter().map(|m| open_rw(&m.path("file"))).collect();
    let mut wanted = Vec::new();
    for round in 0..kills(12) {
        let mut chance = chance.split();
        (files, wanted) = within(PATIENCE, "writing", move || {
            for _ in 0..10 {
                let file = &files[chance.below(2) as usize];
                let (at, len) = (chance.below(50_000), 1 + chance.below(9_000));
                let data = vec![chance.next() as u8 | 1; len as usize];
                file.write_all_at(&data, at).unwrap();
                if chance.below(3) == 0 {
                    file.sync_all().unwrap();
                }
                let end = (at + len) as usize;
                let size = wanted.len().max(end);
                wanted.resize(size, 0);
                wanted[at as usize..end].copy_from_slice(&data);
            }
            (files, wanted)
        });
        mounts[round % 2].kill_backend();
        // Through a new open each: what is seen by a program that starts now.
        for mount in &mounts {
            let path = mount.path("file");
            let seen = within(PATIENCE, "reading", move || fs::read(path).unwrap());
            same(&seen, &wanted);
        }
    }
    let seen = fs::read(mounts[0].behind("file")).unwrap();
    same(&seen, &wanted);
    drop(files);
    for mount in mounts {
        mount.end();
    }
}

#[test]
fn times_and_modes_are_what_was_told_last() {
    let mount = Mount::of_ceph(Cluster::shared(), "/times", &[]);
    let time = Timespec {
        tv_sec: 1_000_000_000,
        tv_nsec: 123_456_789,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    for (n, closes) in [true, false, true, false].into_iter().enumerate() {
        let path = mount.path(&format!("{n}"));
        let file = open_rw(&path);
        file.write_all_at(&[7; 100_000], 0).unwrap();
        utimensat(CWD, &path, &times, AtFlags::empty()).unwrap();
        let mode: fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o640);
        fs::set_permissions(&path, mode).unwrap();
        std::os::unix::fs::chown(&path, Some(1234), Some(4321)).unwrap();
        let kept = if closes { None } else { Some(file) };
        mount.replace_backend();
        let seen = |path: &Path| {
            use std::os::unix::fs::MetadataExt;
            let m = fs::metadata(path).unwrap();
            (
                m.mtime(),
                m.mtime_nsec(),
                m.mode() & 0o7777,
                m.uid(),
                m.gid(),
            )
        };
        let wanted = (time.tv_sec, time.tv_nsec, 0o640, 1234, 4321);
        assert_eq!(seen(&path), wanted, "closed: {closes}");
        assert_eq!(seen(&mount.behind(&format!("{n}"))), wanted, "elsewhere");
        if let Some(file) = kept {
            // A write after that has a time of its own.
            file.write_all_at(b"x", 0).unwrap();
            mount.replace_backend();
            assert_ne!(seen(&path).0, time.tv_sec);
        }
    }
    mount.end();
}

#[test]
fn an_exceeded_quota_is_told_and_costs_nothing_else() {
    let mount = Mount::of_ceph(Cluster::shared(), "/quota", &[]);
    let limited = mount.path("limited");
    fs::create_dir(&limited).unwrap();
    let limit = |bytes: &str| {
        let name = "ceph.quota.max_bytes";
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&limited, name, bytes.as_bytes(), flags).unwrap();
    };
    limit("500000");
    let file = open_rw(&limited.join("file"));
    file.write_all_at(&[1; 100_000], 0).unwrap();
    // Ceph takes its time to tell clients of a quota.
    let told = until(PATIENCE, || {
        file.set_len(100_000).unwrap();
        errno(file.write_all_at(&[2; 900_000], 100_000)) == Some(libc::EDQUOT)
    });
    assert!(told, "the quota is never known");
    file.set_len(100_000).unwrap();
    file.write_all_at(&[1; 100_000], 0).unwrap();
    for _ in 0..3 {
        let refused = within(PATIENCE, "write", {
            let file = file.try_clone().unwrap();
            move || errno(file.write_all_at(&[2; 900_000], 100_000))
        });
        assert_eq!(refused, Some(libc::EDQUOT));
        mount.replace_backend();
    }
    // With an outage in the middle of it, too.
    mount.order("before-execution@WRITE", "kill");
    let refused = within(PATIENCE, "write", {
        let file = file.try_clone().unwrap();
        move || errno(file.write_all_at(&[2; 900_000], 100_000))
    });
    assert_eq!(refused, Some(libc::EDQUOT));
    let mut there = vec![0; 100_000];
    file.read_exact_at(&mut there, 0).unwrap();
    same(&there, &[1; 100_000]);
    limit("100000000");
    file.write_all_at(&[2; 900_000], 100_000).unwrap();
    drop(file);
    mount.end();
}

#[test]
fn a_full_store_is_told_and_goes_on_when_there_is_room() {
    // Of its own: the whole cluster is full.
    let cluster = Cluster::start(&Default::default());
    let mount = Mount::of_ceph(&cluster, "/full", &[]);
    let file = open_rw(&mount.path("file"));
    file.write_all_at(&[1; 100_000], 0).unwrap();
    let quota = |bytes: &str| {
        let pool = "cephfs.data";
        cluster.ceph(&["osd", "pool", "set-quota", pool, "max_bytes", bytes]);
    };
    quota("1");
    // It is noticed when the manager has reported and the map has arrived.
    let full = until(PATIENCE, || {
        let file = file.try_clone().unwrap();
        within(PATIENCE, "write", move || {
            errno(file.write_all_at(&[2; 4096], 0)) == Some(libc::ENOSPC)
        })
    });
    assert!(full, "never full");
    mount.replace_backend();
    let told = within(PATIENCE, "write", {
        let file = file.try_clone().unwrap();
        move || errno(file.write_all_at(&[3; 4096], 0))
    });
    assert_eq!(told, Some(libc::ENOSPC));
    let mut there = vec![0; 90_000];
    file.read_exact_at(&mut there, 10_000).unwrap();
    same(&there, &[1; 90_000]);
    quota("0");
    let room = until(PATIENCE, || file.write_all_at(&[4; 4096], 0).is_ok());
    assert!(room, "never room again");
    mount.replace_backend();
    let mut there = vec![0; 4096];
    file.read_exact_at(&mut there, 0).unwrap();
    same(&there, &[4; 4096]);
    drop(file);
    mount.end();
}
