//! Every operation that changes something × every moment a backend can die in it: the caller sees
//! success exactly once, and the tree is as after exactly one execution.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use common::{Mount, PATIENCE, ceph_is_wanted, errno, within};
use rustix::fs::{AtFlags, CWD, FallocateFlags, RenameFlags, XattrFlags};

/// Where a death is placed, and how often.
const MOMENTS: [(&str, &str); 5] = [
    ("before-execution", "kill"),
    ("before-reply", "kill"),
    ("before-bookkeeping", "kill"),
    // The second death meets the request while it is being issued again.
    ("before-execution", "kill 2"),
    ("before-reply", "kill 2"),
];

/// One operation.
struct Case {
    /// The order's opcode, with `@name` where several requests of that kind are sent.
    meets: &'static str,
    /// Makes what the operation needs. Works on the mount.
    prepare: fn(&Path),
    /// The operation. Panics unless it succeeds.
    act: fn(&Path),
    /// Looks at the outcome, once through the mount and once behind it.
    check: fn(&Path),
}

fn nothing(_: &Path) {}

fn write(path: PathBuf, text: &str) {
    fs::write(path, text).unwrap();
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(path).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

const CASES: &[(&str, Case)] = &[
    (
        "mkdir",
        Case {
            meets: "MKDIR",
            prepare: nothing,
            act: |d| fs::create_dir(d.join("new")).unwrap(),
            check: |d| assert_eq!(names(d), ["new"]),
        },
    ),
    (
        "mkdir in a setgid directory",
        Case {
            meets: "MKDIR@new",
            prepare: |d| {
                fs::create_dir(d.join("setgid")).unwrap();
                std::os::unix::fs::chown(d.join("setgid"), None, Some(4242)).unwrap();
                fs::set_permissions(d.join("setgid"), fs::Permissions::from_mode(0o2775)).unwrap();
            },
            act: |d| fs::create_dir(d.join("setgid/new")).unwrap(),
            check: |d| {
                let new = fs::metadata(d.join("setgid/new")).unwrap();
                assert_eq!((new.gid(), new.mode() & 0o2000), (4242, 0o2000));
            },
        },
    ),
    (
        "mknod",
        Case {
            meets: "MKNOD",
            prepare: nothing,
            act: |d| nix::unistd::mkfifo(&d.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap(),
            check: |d| {
                let mode = fs::symlink_metadata(d.join("fifo")).unwrap().mode();
                assert_eq!(mode & libc::S_IFMT, libc::S_IFIFO);
            },
        },
    ),
    (
        "symlink",
        Case {
            meets: "SYMLINK",
            prepare: nothing,
            act: |d| symlink("target", d.join("new")).unwrap(),
            check: |d| assert_eq!(fs::read_link(d.join("new")).unwrap(), Path::new("target")),
        },
    ),
    (
        "link",
        Case {
            meets: "LINK",
            prepare: |d| write(d.join("old"), "text"),
            act: |d| fs::hard_link(d.join("old"), d.join("new")).unwrap(),
            check: |d| {
                assert_eq!(names(d), ["new", "old"]);
                assert_eq!(fs::metadata(d.join("old")).unwrap().nlink(), 2);
            },
        },
    ),
    (
        "unlink",
        Case {
            meets: "UNLINK",
            prepare: |d| write(d.join("old"), ""),
            act: |d| fs::remove_file(d.join("old")).unwrap(),
            check: |d| assert_eq!(names(d), [""; 0]),
        },
    ),
    (
        "unlink one of two hard links",
        Case {
            meets: "UNLINK",
            prepare: |d| {
                write(d.join("one"), "");
                fs::hard_link(d.join("one"), d.join("two")).unwrap();
            },
            act: |d| fs::remove_file(d.join("one")).unwrap(),
            check: |d| {
                assert_eq!(names(d), ["two"]);
                assert_eq!(fs::metadata(d.join("two")).unwrap().nlink(), 1);
            },
        },
    ),
    (
        "rmdir",
        Case {
            meets: "RMDIR",
            prepare: |d| fs::create_dir(d.join("old")).unwrap(),
            act: |d| fs::remove_dir(d.join("old")).unwrap(),
            check: |d| assert_eq!(names(d), [""; 0]),
        },
    ),
    (
        "rename",
        Case {
            meets: "RENAME2",
            prepare: |d| write(d.join("old"), "text"),
            act: |d| rename(d, RenameFlags::NOREPLACE),
            check: |d| {
                assert_eq!(names(d), ["new"]);
                assert_eq!(read(d.join("new")), "text");
            },
        },
    ),
    (
        "rename over a file",
        Case {
            meets: "RENAME",
            prepare: |d| {
                write(d.join("old"), "old");
                write(d.join("new"), "new");
            },
            act: |d| fs::rename(d.join("old"), d.join("new")).unwrap(),
            check: |d| {
                assert_eq!(names(d), ["new"]);
                assert_eq!(read(d.join("new")), "old");
            },
        },
    ),
    (
        "rename a directory over an empty one",
        Case {
            meets: "RENAME",
            prepare: |d| {
                fs::create_dir_all(d.join("old/child")).unwrap();
                fs::create_dir(d.join("new")).unwrap();
            },
            act: |d| fs::rename(d.join("old"), d.join("new")).unwrap(),
            check: |d| assert_eq!(names(&d.join("new")), ["child"]),
        },
    ),
    (
        "rename one of two hard links",
        Case {
            meets: "RENAME",
            prepare: |d| {
                write(d.join("old"), "text");
                fs::hard_link(d.join("old"), d.join("other")).unwrap();
            },
            act: |d| fs::rename(d.join("old"), d.join("new")).unwrap(),
            check: |d| assert_eq!(names(d), ["new", "other"]),
        },
    ),
    (
        "rename exchange",
        Case {
            meets: "RENAME2",
            prepare: |d| {
                write(d.join("old"), "old");
                write(d.join("new"), "new");
            },
            act: |d| rename(d, RenameFlags::EXCHANGE),
            check: |d| {
                assert_eq!(read(d.join("old")), "new");
                assert_eq!(read(d.join("new")), "old");
            },
        },
    ),
    (
        "rename whiteout",
        Case {
            meets: "RENAME2",
            prepare: |d| write(d.join("old"), "text"),
            act: |d| rename(d, RenameFlags::WHITEOUT),
            check: |d| {
                let whiteout = fs::symlink_metadata(d.join("old")).unwrap();
                assert_eq!(whiteout.mode() & libc::S_IFMT, libc::S_IFCHR);
                assert_eq!(whiteout.rdev(), 0);
                assert_eq!(read(d.join("new")), "text");
            },
        },
    ),
    (
        "create exclusively",
        Case {
            meets: "CREATE",
            prepare: nothing,
            act: |d| {
                let mut new = File::create_new(d.join("new")).unwrap();
                new.write_all(b"text").unwrap();
            },
            check: |d| assert_eq!(read(d.join("new")), "text"),
        },
    ),
    (
        "create exclusively without permissions",
        Case {
            meets: "CREATE",
            prepare: nothing,
            act: |d| {
                let mut options = OpenOptions::new();
                options.write(true).create_new(true).mode(0o0);
                let mut new = options.open(d.join("new")).unwrap();
                new.write_all(b"text").unwrap();
            },
            check: |d| {
                assert_eq!(read(d.join("new")), "text");
                assert_eq!(fs::metadata(d.join("new")).unwrap().mode() & 0o7777, 0);
            },
        },
    ),
    (
        "open with O_TRUNC",
        Case {
            meets: "OPEN",
            prepare: |d| write(d.join("old"), "long text"),
            act: |d| write(d.join("old"), "text"),
            check: |d| assert_eq!(read(d.join("old")), "text"),
        },
    ),
    (
        "truncate by O_TRUNC",
        Case {
            meets: "SETATTR",
            prepare: |d| write(d.join("old"), "long text"),
            act: |d| write(d.join("old"), "text"),
            check: |d| assert_eq!(read(d.join("old")), "text"),
        },
    ),
    (
        "tmpfile, linked afterwards",
        Case {
            meets: "TMPFILE",
            prepare: nothing,
            act: |d| {
                let mut options = OpenOptions::new();
                options.write(true).read(true).custom_flags(libc::O_TMPFILE);
                let mut file = options.open(d).unwrap();
                file.write_all(b"text").unwrap();
                rustix::fs::linkat(&file, "", CWD, d.join("new"), AtFlags::EMPTY_PATH).unwrap();
            },
            check: |d| {
                assert_eq!(names(d), ["new"]);
                assert_eq!(read(d.join("new")), "text");
            },
        },
    ),
    (
        "write",
        Case {
            meets: "WRITE",
            prepare: |d| write(d.join("file"), "aaaaaaaaaa"),
            act: |d| {
                let file = OpenOptions::new().write(true).open(d.join("file")).unwrap();
                file.write_all_at(b"bbb", 5).unwrap();
            },
            check: |d| assert_eq!(read(d.join("file")), "aaaaabbbaa"),
        },
    ),
    (
        "append",
        Case {
            meets: "WRITE",
            prepare: |d| write(d.join("file"), "one."),
            act: |d| {
                let mut file = OpenOptions::new()
                    .append(true)
                    .open(d.join("file"))
                    .unwrap();
                file.write_all(b"two.").unwrap();
                file.write_all(b"three.").unwrap();
            },
            check: |d| assert_eq!(read(d.join("file")), "one.two.three."),
        },
    ),
    (
        "write of a megabyte",
        Case {
            meets: "WRITE",
            prepare: nothing,
            act: |d| fs::write(d.join("file"), pattern(1 << 20)).unwrap(),
            check: |d| assert!(fs::read(d.join("file")).unwrap() == pattern(1 << 20)),
        },
    ),
    (
        "truncate",
        Case {
            meets: "SETATTR",
            prepare: |d| write(d.join("file"), "0123456789"),
            act: |d| {
                let file = OpenOptions::new().write(true).open(d.join("file")).unwrap();
                file.set_len(4).unwrap();
            },
            check: |d| assert_eq!(read(d.join("file")), "0123"),
        },
    ),
    (
        "chmod",
        Case {
            meets: "SETATTR",
            prepare: |d| write(d.join("file"), ""),
            act: |d| {
                let mode = fs::Permissions::from_mode(0o640);
                fs::set_permissions(d.join("file"), mode).unwrap();
            },
            check: |d| assert_eq!(fs::metadata(d.join("file")).unwrap().mode() & 0o7777, 0o640),
        },
    ),
    (
        "chown",
        Case {
            meets: "SETATTR",
            prepare: |d| write(d.join("file"), ""),
            act: |d| std::os::unix::fs::chown(d.join("file"), Some(7), Some(8)).unwrap(),
            check: |d| {
                let file = fs::metadata(d.join("file")).unwrap();
                assert_eq!((file.uid(), file.gid()), (7, 8));
            },
        },
    ),
    (
        "set times",
        Case {
            meets: "SETATTR",
            prepare: |d| write(d.join("file"), ""),
            act: |d| {
                let file = OpenOptions::new().write(true).open(d.join("file")).unwrap();
                let then = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
                file.set_times(fs::FileTimes::new().set_modified(then))
                    .unwrap();
            },
            check: |d| assert_eq!(fs::metadata(d.join("file")).unwrap().mtime(), 1_000_000_000),
        },
    ),
    (
        "set an attribute that must be new",
        Case {
            meets: "SETXATTR",
            prepare: |d| write(d.join("file"), ""),
            act: |d| set_xattr(&d.join("file"), XattrFlags::CREATE).unwrap(),
            check: |d| assert_eq!(xattr(&d.join("file")).unwrap(), b"value"),
        },
    ),
    (
        "remove an attribute",
        Case {
            meets: "REMOVEXATTR",
            prepare: |d| {
                write(d.join("file"), "");
                set_xattr(&d.join("file"), XattrFlags::empty()).unwrap();
            },
            act: |d| rustix::fs::removexattr(d.join("file"), "user.name").unwrap(),
            check: |d| assert_eq!(xattr(&d.join("file")), Err(rustix::io::Errno::NODATA)),
        },
    ),
    (
        "allocate",
        Case {
            meets: "FALLOCATE",
            prepare: |d| write(d.join("file"), "text"),
            act: |d| {
                let file = OpenOptions::new().write(true).open(d.join("file")).unwrap();
                rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 8192).unwrap();
            },
            check: |d| assert_eq!(fs::metadata(d.join("file")).unwrap().len(), 8192),
        },
    ),
    (
        "copy a range",
        Case {
            meets: "COPYFILERANGE64",
            prepare: |d| write(d.join("from"), "some text"),
            act: |d| {
                let from = File::open(d.join("from")).unwrap();
                let to = File::create(d.join("to")).unwrap();
                let copied = rustix::fs::copy_file_range(&from, None, &to, None, 9).unwrap();
                assert_eq!(copied, 9);
            },
            check: |d| assert_eq!(read(d.join("to")), "some text"),
        },
    ),
    (
        "fsync",
        Case {
            meets: "FSYNC",
            prepare: nothing,
            act: |d| {
                let mut file = File::create(d.join("file")).unwrap();
                file.write_all(b"text").unwrap();
                file.sync_all().unwrap();
            },
            check: |d| assert_eq!(read(d.join("file")), "text"),
        },
    ),
    (
        "lock",
        Case {
            meets: "SETLK",
            prepare: |d| write(d.join("file"), ""),
            act: |d| {
                let file = OpenOptions::new().write(true).open(d.join("file")).unwrap();
                let lock = rustix::fs::FlockOperation::NonBlockingLockExclusive;
                rustix::fs::fcntl_lock(&file, lock).unwrap();
                let unlock = rustix::fs::FlockOperation::NonBlockingUnlock;
                rustix::fs::fcntl_lock(&file, unlock).unwrap();
            },
            check: nothing,
        },
    ),
    (
        "flush",
        Case {
            meets: "FLUSH",
            prepare: nothing,
            act: |d| {
                let file = File::create(d.join("file")).unwrap();
                nix::unistd::close(std::os::fd::OwnedFd::from(file)).unwrap();
            },
            check: |d| assert_eq!(names(d), ["file"]),
        },
    ),
];

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 4096) as u8).collect()
}

/// There is no such operation in the protocol of CephFS.
const CEPHFS_HAS_NOT: &[&str] = &[
    "rename",
    "rename exchange",
    "rename whiteout",
    "tmpfile, linked afterwards",
];

fn rename(d: &Path, flags: RenameFlags) {
    rustix::fs::renameat_with(CWD, d.join("old"), CWD, d.join("new"), flags).unwrap();
}

fn set_xattr(path: &Path, flags: XattrFlags) -> rustix::io::Result<()> {
    rustix::fs::setxattr(path, "user.name", b"value", flags)
}

fn xattr(path: &Path) -> rustix::io::Result<Vec<u8>> {
    let mut value = vec![0; 100];
    let len = rustix::fs::getxattr(path, "user.name", &mut value)?;
    value.truncate(len);
    Ok(value)
}

#[test]
fn every_change_happens_exactly_once_whenever_the_backend_dies() {
    let mount = Mount::new();
    // For whoever looks for a fault: one case only.
    let only = std::env::var("EVERMOUNT_CASE").ok();
    for (number, (name, case)) in CASES.iter().enumerate() {
        let chosen = only.as_ref().is_none_or(|only| name == only);
        if !chosen || ceph_is_wanted() && CEPHFS_HAS_NOT.contains(name) {
            continue;
        }
        for (moment, (place, action)) in MOMENTS.iter().enumerate() {
            let what = format!("{name}, {action} {place}");
            let dir = format!("{number}-{moment}");
            let (front, behind) = (mount.path(&dir), mount.behind(&dir));
            fs::create_dir(&front).unwrap();
            (case.prepare)(&front);
            let order = format!("{place}@{}", case.meets);
            let before = mount.status();
            mount.order(&order, action);
            let act = case.act;
            let at = front.clone();
            within(PATIENCE, &what, move || act(&at));
            // A FLUSH may be answered in the outage after the first death, without a backend.
            let one_is_enough = case.meets == "FLUSH";
            assert!(
                mount.carried_out(&order) || one_is_enough,
                "{what}: nobody died\n{}",
                mount.log_text()
            );
            eprintln!("{what}");
            (case.check)(&front);
            (case.check)(&behind);
            let after = mount.wait("serving", |s| s.outage_ms.is_none());
            mount.cancel(&order);
            let twice = action.ends_with('2') && !one_is_enough;
            let deaths = if twice { 2 } else { 1 };
            assert!(
                after.takeovers >= before.takeovers + deaths,
                "{what}: {} takeovers, {before:?}",
                after.takeovers
            );
            assert_eq!((after.poisoned, after.ambiguous), (0, 0), "{what}");
        }
    }
    mount.end();
}

#[test]
fn a_genuine_conflict_keeps_its_errno_when_the_backend_dies() {
    type Conflict = (&'static str, i32, fn(&Path) -> Option<i32>);
    let conflicts: [Conflict; 7] = [
        ("MKDIR", libc::EEXIST, |d| {
            errno(fs::create_dir(d.join("dir")))
        }),
        ("SYMLINK", libc::EEXIST, |d| {
            errno(symlink("x", d.join("file")))
        }),
        ("LINK", libc::EEXIST, |d| {
            errno(fs::hard_link(d.join("file"), d.join("dir/child")))
        }),
        ("RMDIR", libc::ENOTEMPTY, |d| {
            errno(fs::remove_dir(d.join("dir")))
        }),
        ("RENAME", libc::ENOTEMPTY, |d| {
            errno(fs::rename(d.join("other"), d.join("dir")))
        }),
        ("SETXATTR", libc::EEXIST, |d| {
            set_xattr(&d.join("other"), XattrFlags::CREATE)
                .err()
                .map(|e| e.raw_os_error())
        }),
        ("REMOVEXATTR", libc::ENODATA, |d| {
            let removed = rustix::fs::removexattr(d.join("file"), "user.name");
            removed.err().map(|e| e.raw_os_error())
        }),
    ];
    let mount = Mount::new();
    for (place, _) in &MOMENTS[..3] {
        for (opcode, expected, act) in &conflicts {
            let what = format!("{opcode} {place}");
            let dir = mount.path(&what);
            fs::create_dir(&dir).unwrap();
            fs::create_dir(dir.join("dir")).unwrap();
            fs::create_dir(dir.join("other")).unwrap();
            rustix::fs::setxattr(
                dir.join("other"),
                "user.name",
                b"another",
                XattrFlags::empty(),
            )
            .unwrap();
            write(dir.join("file"), "");
            write(dir.join("dir/child"), "");
            let order = format!("{place}@{opcode}");
            mount.order(&order, "kill");
            let act = *act;
            let at = dir.clone();
            let got = within(PATIENCE, &what, move || act(&at));
            // An operation the kernel refuses by itself never meets the order.
            mount.cancel(&order);
            if *opcode == "REMOVEXATTR" {
                // Removed already or never there: told apart only by who did it.
                assert!(got.is_none() || got == Some(*expected), "{what}: {got:?}");
            } else {
                assert_eq!(got, Some(*expected), "{what}");
            }
        }
    }
    mount.end();
}
