//! What an application holds (files, directories, mounts) goes on over the deaths of backends,
//! whatever happened to the names of it.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::tools::{entries, open_rw};
use common::{Mount, PATIENCE, ceph_is_wanted, errno, within};
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Uid, setfsuid};
use rustix::fs::{AtFlags, Mode, OFlags, openat, statat};

const USER: u32 = 1000;

/// Runs `work` as another user, in a thread of its own.
fn as_user<T: Send + 'static>(uid: u32, work: impl FnOnce() -> T + Send + 'static) -> T {
    within(PATIENCE, "another user", move || {
        // Of this thread only, and takes the capabilities that overrule permissions.
        setfsuid(Uid::from_raw(uid));
        work()
    })
}

/// Writes and reads through a handle, past the kernel's page cache.
fn works(file: &File) -> std::io::Result<()> {
    let stamp = file.metadata()?.len().to_ne_bytes();
    file.write_all_at(&stamp, 4096)?;
    file.sync_all()?;
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    let mut back = [0; 8];
    file.read_exact_at(&mut back, 4096)?;
    assert_eq!(back, stamp);
    Ok(())
}

fn path_of(fd: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

fn o_path(path: &Path) -> OwnedFd {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).unwrap()
}

#[test]
fn a_handle_whose_file_was_removed_behind_the_mount_fails_alone() {
    let mount = Mount::new();
    let names = ["a", "lost", "z"];
    let files = names.map(|name| open_rw(&mount.path(name)));
    let dir = mount.path("lost-dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("entry"), "").unwrap();
    let stream = File::open(&dir).unwrap();
    assert!(!entries(&stream, 60).unwrap().is_empty());
    for file in &files {
        works(file).unwrap();
    }
    fs::remove_file(mount.behind("lost")).unwrap();
    fs::remove_dir_all(mount.behind("lost-dir")).unwrap();
    // As long as the generation lives that has it open, nothing is lost.
    works(&files[1]).unwrap();
    mount.replace_backend();
    // CephFS keeps what a client has open, and the next session has it before the old one ends.
    let gone = |now: Option<i32>| now == (!ceph_is_wanted()).then_some(libc::ESTALE);
    for round in 0..3 {
        works(&files[0]).unwrap();
        works(&files[2]).unwrap();
        let lost = errno(files[1].write_at(b"x", 0));
        assert!(gone(lost), "{round}: {lost:?}");
        let lost = errno(entries(&stream, 60));
        assert!(gone(lost), "{round}: {lost:?}");
        mount.replace_backend();
    }
    drop((files, stream));
    // The name is free for a new file, which is another one.
    let new = open_rw(&mount.path("lost"));
    works(&new).unwrap();
    drop(new);
    mount.end();
}

#[test]
fn a_handle_goes_on_when_its_file_is_not_its_users_any_more() {
    let mount = Mount::new();
    for uid in [0, USER] {
        let changes: [fn(&Path); 3] = [
            |path| fs::set_permissions(path, fs::Permissions::from_mode(0o0)).unwrap(),
            |path| chown(path, Some(4242), Some(4242)).unwrap(),
            |path| {
                fs::set_permissions(path, fs::Permissions::from_mode(0o400)).unwrap();
                chown(path, Some(0), Some(0)).unwrap();
            },
        ];
        for (number, change) in changes.iter().enumerate() {
            for behind in [false, true] {
                let name = format!("{uid}-{number}-{behind}");
                let path = mount.path(&name);
                let file = as_user(uid, move || Arc::new(open_rw(&path)));
                assert_eq!(file.metadata().unwrap().uid(), uid);
                change(&if behind {
                    mount.behind(&name)
                } else {
                    mount.path(&name)
                });
                mount.replace_backend();
                let again = file.clone();
                as_user(uid, move || works(&again)).unwrap_or_else(|e| panic!("{name}: {e}"));
                mount.replace_backend();
                let again = file.clone();
                let resized = as_user(uid, move || again.set_len(3));
                resized.unwrap_or_else(|e| panic!("{name}: {e}"));
                // A new open is another matter.
                let path = mount.path(&name);
                let opened = as_user(uid, move || errno(File::options().write(true).open(path)));
                let expected = (uid != 0).then_some(libc::EACCES);
                // The kernel may trust old attributes for a second.
                if !behind {
                    assert_eq!(opened, expected, "{name}");
                }
            }
        }
    }
    mount.end();
}

#[test]
fn a_file_created_without_permissions_for_its_creator_is_written_over_deaths() {
    let mount = Mount::new();
    let path = mount.path("file");
    let file = as_user(USER, move || {
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o0);
        Arc::new(options.open(path).unwrap())
    });
    for _ in 0..3 {
        mount.replace_backend();
        let file = file.clone();
        as_user(USER, move || works(&file)).unwrap();
    }
    drop(file);
    mount.end();
}

#[test]
fn a_removed_inode_is_opened_again_through_a_path_descriptor() {
    let mount = Mount::new();
    let path = mount.path("file");
    fs::write(&path, "kept").unwrap();
    // Never opened before it goes.
    let file = o_path(&path);
    fs::remove_file(&path).unwrap();
    let dir = mount.path("dir");
    fs::create_dir(&dir).unwrap();
    let directory = o_path(&dir);
    fs::remove_dir(&dir).unwrap();
    for round in 0..3 {
        mount.replace_backend();
        let mut again = File::options()
            .read(true)
            .write(true)
            .open(path_of(&file))
            .unwrap();
        let mut text = String::new();
        again.read_to_string(&mut text).unwrap();
        assert_eq!(text.len(), 4 + round);
        again.write_all(b"x").unwrap();
        mount.replace_backend();
        works(
            &File::options()
                .read(true)
                .write(true)
                .open(path_of(&file))
                .unwrap(),
        )
        .unwrap();
        again.set_len(5 + round as u64).unwrap();
        assert_eq!(again.metadata().unwrap().nlink(), 0);
        let stream = File::open(path_of(&directory)).unwrap();
        // As on any file system: a directory that is gone has not even itself.
        assert_eq!(errno(entries(&stream, 4096)), Some(libc::ENOENT));
        let inside = openat(&directory, "x", OFlags::CREATE | OFlags::WRONLY, Mode::RWXU);
        assert_eq!(inside.unwrap_err(), rustix::io::Errno::NOENT);
    }
    drop((file, directory));
    mount.wait("without inodes", |s| s.inodes <= 2);
    mount.end();
}

#[test]
fn a_directory_goes_on_as_base_of_openat_and_as_working_directory() {
    let mount = Mount::new();
    let dir = mount.path("dir");
    fs::create_dir_all(dir.join("inner")).unwrap();
    fs::create_dir(mount.path("gone")).unwrap();
    let (base, gone) = (dir.clone(), mount.path("gone"));
    let (next, rounds) = std::sync::mpsc::channel::<u32>();
    let (done, finished) = std::sync::mpsc::channel::<u32>();
    let thread = std::thread::spawn(move || {
        // A working directory of its own.
        unshare(CloneFlags::CLONE_FS).unwrap();
        let by_path = o_path(&base);
        std::env::set_current_dir(base.join("inner")).unwrap();
        for round in rounds {
            let name = format!("by-path-{round}");
            let flags = OFlags::CREATE | OFlags::RDWR | OFlags::EXCL;
            let file = openat(&by_path, name.as_str(), flags, Mode::RWXU).unwrap();
            works(&File::from(file)).unwrap();
            assert!(base.join(&name).exists());
            fs::write(format!("by-cwd-{round}"), "x").unwrap();
            assert!(base.join(format!("inner/by-cwd-{round}")).exists());
            assert_eq!(
                fs::metadata("..").unwrap().ino(),
                fs::metadata(&base).unwrap().ino()
            );
            done.send(round).unwrap();
        }
        std::env::set_current_dir(&gone).unwrap();
        fs::remove_dir(&gone).unwrap();
        for _ in 0..2 {
            done.send(0).unwrap();
            while !base.join("go-on").exists() {
                std::thread::yield_now();
            }
            let here = fs::metadata(".").unwrap();
            assert!(here.is_dir());
            assert_eq!(fs::read_dir(".").unwrap().count(), 0);
            assert_eq!(errno(fs::write("x", "")), Some(libc::ENOENT));
            fs::remove_file(base.join("go-on")).unwrap();
        }
        done.send(0).unwrap();
    });
    for round in 0..3 {
        mount.replace_backend();
        next.send(round).unwrap();
        finished.recv_timeout(PATIENCE).unwrap();
        // Renamed, it is still the same directory.
        if round == 1 {
            let moved = mount.path("moved");
            fs::rename(&dir, &moved).unwrap();
            fs::rename(&moved, &dir).unwrap();
        }
    }
    drop(next);
    for _ in 0..2 {
        finished.recv_timeout(PATIENCE).unwrap();
        mount.replace_backend();
        fs::write(dir.join("go-on"), "").unwrap();
    }
    finished.recv_timeout(PATIENCE).unwrap();
    within(PATIENCE, "the thread", move || thread.join()).unwrap();
    mount.end();
}

#[test]
fn a_handle_goes_on_when_its_file_was_renamed_in_front_of_or_behind_the_mount() {
    let mount = Mount::new();
    fs::create_dir_all(mount.path("from/deep")).unwrap();
    fs::create_dir(mount.path("to")).unwrap();
    let file = open_rw(&mount.path("from/deep/file"));
    let dir = o_path(&mount.path("from/deep"));
    fs::rename(mount.path("from/deep"), mount.path("to/there")).unwrap();
    mount.replace_backend();
    works(&file).unwrap();
    fs::rename(mount.behind("to/there"), mount.behind("again")).unwrap();
    mount.replace_backend();
    works(&file).unwrap();
    statat(&dir, "file", AtFlags::empty()).unwrap();
    fs::rename(mount.behind("again/file"), mount.behind("elsewhere")).unwrap();
    mount.replace_backend();
    works(&file).unwrap();
    drop((file, dir));
    mount.end();
}

#[test]
fn a_hard_link_keeps_a_file_whose_other_name_goes() {
    let mount = Mount::new();
    let (one, two) = (mount.path("one"), mount.path("two"));
    let file = open_rw(&one);
    fs::hard_link(&one, &two).unwrap();
    let never_opened = o_path(&two);
    fs::remove_file(&one).unwrap();
    mount.replace_backend();
    file.write_all_at(b"first", 0).unwrap();
    assert_eq!(fs::read_to_string(&two).unwrap(), "first");
    assert_eq!(fs::read_to_string(mount.behind("two")).unwrap(), "first");
    assert_eq!(file.metadata().unwrap().nlink(), 1);
    fs::remove_file(&two).unwrap();
    mount.replace_backend();
    works(&file).unwrap();
    works(
        &File::options()
            .read(true)
            .write(true)
            .open(path_of(&never_opened))
            .unwrap(),
    )
    .unwrap();
    // It may get a name again (`linkat` of a file without one needs O_TMPFILE).
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    drop((file, never_opened));
    mount.end();
}

#[test]
fn a_temporary_file_lives_over_deaths_and_gets_a_name() {
    if ceph_is_wanted() {
        return; // CephFS has no files without a name
    }
    let mount = Mount::new();
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(&mount.point, flags, Mode::RWXU).unwrap());
    mount.replace_backend();
    works(&file).unwrap();
    mount.replace_backend();
    let from = path_of(&file);
    let cwd = rustix::fs::CWD;
    rustix::fs::linkat(
        cwd,
        &from,
        cwd,
        mount.path("named"),
        AtFlags::SYMLINK_FOLLOW,
    )
    .unwrap();
    mount.replace_backend();
    works(&file).unwrap();
    works(&open_rw(&mount.path("named"))).unwrap();
    fs::remove_file(mount.path("named")).unwrap();
    mount.replace_backend();
    works(&file).unwrap();
    drop(file);
    mount.end();
}

#[test]
fn a_file_that_is_renamed_over_goes_on() {
    let mount = Mount::new();
    let target = mount.path("target");
    let mut old = Vec::new();
    for round in 0..5u8 {
        let new = mount.path("new");
        let file = open_rw(&new);
        file.write_all_at(&[round], 0).unwrap();
        fs::rename(&new, &target).unwrap();
        old.push(file);
        mount.replace_backend();
        for (content, file) in old.iter().enumerate() {
            works(file).unwrap();
            let mut first = [0];
            file.read_exact_at(&mut first, 0).unwrap();
            assert_eq!(usize::from(first[0]), content);
        }
        assert_eq!(fs::read(&target).unwrap()[0], round);
    }
    drop(old);
    mount.end();
}

#[test]
fn positions_in_files_and_directories_are_kept() {
    let mount = Mount::new();
    let path = mount.path("dir");
    fs::create_dir(&path).unwrap();
    for n in 0..500 {
        File::create(mount.behind("dir").join(format!("{n:03}"))).unwrap();
    }
    let mut file = open_rw(&mount.path("file"));
    file.write_all(b"0123456789").unwrap();
    file.seek(SeekFrom::Start(4)).unwrap();
    file.write_all_at(b"x", 1 << 20).unwrap();
    let dir = File::open(&path).unwrap();
    let mut positions = Vec::new();
    let mut seen = Vec::new();
    loop {
        let next = entries(&dir, 400).unwrap();
        if next.is_empty() {
            break;
        }
        if seen.len() % 5 == 0 {
            mount.replace_backend();
        }
        positions.push((next.last().unwrap().1, seen.len() + next.len()));
        seen.extend(next.into_iter().map(|(name, _)| name));
    }
    let mut sorted = seen.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!((seen.len(), sorted.len()), (502, 502));
    // seekdir(3) to places an earlier generation named.
    for (position, index) in positions.iter().rev().step_by(7) {
        mount.replace_backend();
        rustix::fs::seek(&dir, rustix::fs::SeekFrom::Start(*position)).unwrap();
        let next = entries(&dir, 400).unwrap();
        let names: Vec<String> = next.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names[..], seen[*index..(*index + names.len())]);
    }
    let mut rest = [0; 3];
    file.read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"456");
    mount.replace_backend();
    assert_eq!(file.stream_position().unwrap(), 7);
    // CephFS does not tell holes from data.
    if !ceph_is_wanted() {
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap();
        assert!(hole < 1 << 20);
        mount.replace_backend();
        let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(hole)).unwrap();
        assert!(data > hole);
    }
    drop((file, dir));
    mount.end();
}

/// Walks to `path` in several threads until told to stop. Counts answers, errors included.
struct Walkers {
    stop: Arc<AtomicBool>,
    walks: Arc<AtomicU64>,
    errors: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Walkers {
    fn new(paths: &[PathBuf]) -> Walkers {
        let (stop, walks): (Arc<AtomicBool>, Arc<AtomicU64>) = Default::default();
        let errors: Arc<AtomicU64> = Arc::default();
        let walk = |path: &PathBuf| {
            let path = path.clone();
            let (stop, walks, errors) = (stop.clone(), walks.clone(), errors.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Err(e) = fs::metadata(&path) {
                        assert_eq!(e.raw_os_error(), Some(libc::EIO), "{}", path.display());
                        errors.fetch_add(1, Ordering::Relaxed);
                        // Not a busy loop for as long as the outage lasts.
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    walks.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = paths.iter().map(walk).collect();
        Walkers {
            stop,
            walks,
            errors,
            threads,
        }
    }
}

#[test]
fn what_is_mounted_inside_the_mount_stays_under_every_outage_policy() {
    for policy in ["queue", "queue:1", "error"] {
        let m = Mount::with_args(&["--outage", policy]);
        let places = ["volume", "other/a/b"].map(|name| m.path(name));
        for place in &places {
            fs::create_dir_all(place).unwrap();
            let (tmpfs, none) = (Some("tmpfs"), None::<&str>);
            mount(tmpfs, place, tmpfs, MsFlags::empty(), none).unwrap();
            fs::write(place.join("inside"), policy).unwrap();
        }
        let paths = [
            places[0].join("inside"),
            places[1].join("inside"),
            m.point.clone(),
            m.path("other"),
        ];
        let walkers = Walkers::new(&paths);
        for outage in 0..2 {
            m.begin_outage();
            // Long enough for the kernel to ask again for every name (it trusts one for a second),
            // and for the limit of `queue:1`.
            let since = Instant::now();
            while since.elapsed() < Duration::from_millis(2600) {
                let root = m.point.clone();
                let root = within(Duration::from_secs(10), "stat of the root", move || {
                    fs::metadata(root).map(|meta| meta.is_dir())
                });
                assert!(root.unwrap(), "{policy}, {outage}");
                let root = m.point.clone();
                let df = within(Duration::from_secs(10), "df", move || {
                    rustix::fs::statfs(root).map(|s| s.f_blocks > 0)
                });
                assert_eq!(df, Ok(true), "{policy}, {outage}");
                std::thread::sleep(Duration::from_millis(20));
            }
            m.end_outage();
            m.replace_backend();
            let (walks, walked) = (walkers.walks.clone(), walkers.walks.load(Ordering::Relaxed));
            assert!(
                common::until(PATIENCE, || walks.load(Ordering::Relaxed) > walked + 100),
                "{policy}: the walkers hang"
            );
            for place in &places {
                let text = within(PATIENCE, "read", {
                    let inside = place.join("inside");
                    move || fs::read_to_string(inside)
                });
                assert_eq!(text.unwrap(), policy, "{}", place.display());
                assert!(is_mounted(place), "{policy}: {}", place.display());
            }
        }
        walkers.stop.store(true, Ordering::Relaxed);
        for thread in walkers.threads {
            within(PATIENCE, "a walker", move || thread.join()).unwrap();
        }
        if policy == "queue" {
            assert_eq!(walkers.errors.load(Ordering::Relaxed), 0);
        }
        for place in &places {
            umount(place).unwrap();
        }
        m.end();
    }
}

fn is_mounted(place: &Path) -> bool {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let place = place.to_str().unwrap();
    text.lines()
        .any(|line| line.split(' ').nth(4) == Some(place))
}

#[test]
fn a_request_in_flight_is_not_held_in_an_outage_that_is_an_error() {
    for (policy, bound) in [("error", 30), ("queue:1", 30)] {
        let mount = Mount::with_args(&["--outage", policy]);
        fs::create_dir(mount.path("dir")).unwrap();
        let order = "before-execution@MKDIR@held";
        mount.order(order, "hang");
        let path = mount.path("dir/held");
        let thread = std::thread::spawn(move || fs::create_dir(path));
        assert!(common::until(PATIENCE, || mount.carried_out(order)));
        mount.begin_outage();
        let bound = Duration::from_secs(bound);
        let got = within(bound, policy, move || thread.join().unwrap());
        assert_eq!(errno(got), Some(libc::EIO), "{policy}");
        mount.end_outage();
        // What got EIO is not done later.
        assert!(!mount.behind("dir/held").exists(), "{policy}");
        fs::create_dir(mount.path("dir/held")).unwrap();
        mount.end();
    }
}

#[test]
fn a_short_outage_is_no_error_for_what_was_in_flight() {
    let mount = Mount::with_args(&["--outage", "error"]);
    for place in ["before-execution", "before-reply", "before-bookkeeping"] {
        let order = format!("{place}@MKDIR@short");
        mount.order(&order, "kill");
        let path = mount.path("short");
        within(PATIENCE, "mkdir", move || fs::create_dir(&path)).unwrap();
        assert!(mount.carried_out(&order));
        mount.wait("serving", |s| s.outage_ms.is_none());
        fs::remove_dir(mount.path("short")).unwrap();
    }
    mount.end();
}

#[test]
fn a_program_started_in_an_outage_holds_up_nobody() {
    let mount = Mount::new();
    // The child inherits it and closes it in execve(2), with locks held that readers of its /proc
    // entries wait for: `ps`, and the front-end itself if it looked there.
    let file = open_rw(&mount.path("file"));
    mount.begin_outage();
    let status = within(PATIENCE, "the child", || {
        std::process::Command::new("true").status()
    });
    assert!(status.unwrap().success());
    mount.end_outage();
    works(&file).unwrap();
    drop(file);
    mount.end();
}

#[test]
fn a_large_direct_append_keeps_its_order() {
    // The kernel sends the parts of such a write at the same time.
    const LEN: usize = 8 << 20;
    let mount = Mount::new();
    let mut buffer = memmap2::MmapMut::map_anon(LEN).unwrap();
    for (n, word) in buffer.chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&(n as u32).to_ne_bytes());
    }
    for round in 0..10 {
        let path = mount.path(&format!("file{round}"));
        let mut file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .unwrap();
        file.write_all(&buffer).unwrap();
        let behind = fs::read(mount.behind(&format!("file{round}"))).unwrap();
        assert!(behind == buffer[..], "round {round}");
    }
    mount.end();
}
