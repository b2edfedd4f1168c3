//! Exactly once: each rule of "verify and re-issue" in both states, and its genuine conflicts.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::*;
use crate::wire::abi::SetattrValid;

fn setattr(node: u64, arg: SetattrIn) -> Ask {
    ask(Opcode::Setattr, node, arg, [])
}

#[test]
fn a_directory_is_made_once() {
    on_every_store(|world| {
        let made = world.died_after(&mkdir("after")).verified();
        assert_eq!(
            made.attr().ino,
            fs::metadata(world.path("after")).unwrap().ino()
        );
        world.died_before(&mkdir("before")).reissued();
        assert!(world.path("before").is_dir());
    });
}

#[test]
fn a_directory_that_was_there_before_is_a_conflict() {
    on_every_store(|world| {
        fs::create_dir(world.path("old")).unwrap();
        assert_eq!(world.died_before(&mkdir("old")).errno(), Errno::EEXIST);
    });
}

#[test]
fn a_directory_somebody_else_made_or_filled_is_a_conflict() {
    on_every_store(|world| {
        world
            .prepare(&world.generation(), &mkdir("theirs"))
            .unwrap();
        fs::create_dir(world.path("theirs")).unwrap();
        std::os::unix::fs::chown(world.path("theirs"), Some(7), None).unwrap();
        assert_eq!(world.again(&world.generation()).errno(), Errno::EEXIST);

        world.prepare(&world.generation(), &mkdir("full")).unwrap();
        fs::create_dir_all(world.path("full/of/things")).unwrap();
        assert_eq!(world.again(&world.generation()).errno(), Errno::EEXIST);
    });
}

#[test]
fn a_node_is_made_once() {
    on_every_store(|world| {
        let mknod = |name: &str| {
            let arg = MknodIn {
                mode: libc::S_IFIFO | 0o600,
                ..Default::default()
            };
            ask(Opcode::Mknod, 1, arg, z(name))
        };
        world.died_after(&mknod("after")).verified();
        world.died_before(&mknod("before")).reissued();
        world.prepare(&world.generation(), &mknod("file")).unwrap();
        fs::write(world.path("file"), "").unwrap();
        assert_eq!(world.again(&world.generation()).errno(), Errno::EEXIST);
    });
}

#[test]
fn a_symlink_is_made_once() {
    on_every_store(|world| {
        let link = |name: &str| ask(Opcode::Symlink, 1, (), zz(name, "target"));
        world.died_after(&link("after")).verified();
        world.died_before(&link("before")).reissued();
        assert_eq!(
            fs::read_link(world.path("before")).unwrap().to_str(),
            Some("target")
        );
        world.prepare(&world.generation(), &link("other")).unwrap();
        symlink("elsewhere", world.path("other")).unwrap();
        assert_eq!(world.again(&world.generation()).errno(), Errno::EEXIST);
    });
}

#[test]
fn an_exclusive_create_succeeds_once_even_without_permission_to_open() {
    on_every_store(|world| {
        let mut ask = create("after", libc::O_RDWR | libc::O_CREAT | libc::O_EXCL);
        let arg = CreateIn {
            flags: (libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC) as u32,
            ..Default::default()
        };
        ask.args = [arg.as_bytes(), b"after\0"].concat();
        let dir = world.generation();
        world.first(&dir, &ask).ok();
        let dir = world.generation();
        let made = world.again(&dir).verified();
        let node = world.know(1, "after", made.id());
        world
            .first(&dir, &write(node, made.new_fh, 0, 0, b"x"))
            .ok();
        assert_eq!(fs::read(world.path("after")).unwrap(), b"x");
        world
            .died_before(&create("before", libc::O_RDWR | libc::O_EXCL))
            .reissued();
        let old = create("before", libc::O_RDWR | libc::O_EXCL);
        assert_eq!(world.died_before(&old).errno(), Errno::EEXIST);
    });
}

#[test]
fn a_create_of_a_file_that_is_there_opens_it_for_its_owner_only() {
    on_every_store(|world| {
        let dir = world.generation();
        fs::write(world.path("file"), "content").unwrap();
        let mine = world.first(&dir, &create("file", libc::O_RDWR));
        let node = world.know(1, "file", mine.id());
        assert_eq!(world.read(&dir, node, mine.new_fh).unwrap(), b"content");
        let theirs = create("file", libc::O_RDWR).caller(1000, 1000);
        assert_eq!(world.first(&dir, &theirs).errno(), Errno::ESTALE);
        let cut = create("file", libc::O_RDWR | libc::O_TRUNC);
        assert_eq!(world.first(&dir, &cut).errno(), Errno::ESTALE);
    });
}

#[test]
fn a_name_is_removed_once() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        world.died_after(&unlink("file")).verified();
        fs::write(world.path("file"), "").unwrap();
        world.died_before(&unlink("file")).reissued();
        assert!(!world.path("file").exists());
        assert_eq!(world.died_before(&unlink("file")).errno(), Errno::ENOENT);

        let rmdir = ask(Opcode::Rmdir, 1, (), z("dir"));
        fs::create_dir(world.path("dir")).unwrap();
        world.died_after(&rmdir).verified();
        fs::create_dir(world.path("dir")).unwrap();
        world.died_before(&rmdir).reissued();
        fs::create_dir_all(world.path("dir/full")).unwrap();
        assert_eq!(world.died_before(&rmdir).errno(), Errno::ENOTEMPTY);
    });
}

#[test]
fn a_name_that_was_made_anew_after_the_unlink_stays() {
    on_every_store(|world| {
        fs::write(world.path("file"), "old").unwrap();
        let _pin = fs::File::open(world.path("file")).unwrap();
        world.first(&world.generation(), &unlink("file")).ok();
        fs::write(world.path("file"), "new").unwrap();
        world.again(&world.generation()).verified();
        assert_eq!(fs::read(world.path("file")).unwrap(), b"new");
    });
}

#[test]
fn a_rename_is_done_once() {
    on_every_store(|world| {
        fs::write(world.path("a"), "a").unwrap();
        world.died_after(&rename("a", "b", 0)).verified();
        world.died_before(&rename("b", "c", 0)).reissued();
        assert_eq!(names(&world.path("")), [b"c"]);
        assert_eq!(
            world.died_before(&rename("a", "b", 0)).errno(),
            Errno::ENOENT
        );
    });
}

#[test]
fn a_rename_over_another_file_is_done_once() {
    on_every_store(|world| {
        for died_after in [true, false] {
            fs::write(world.path("a"), "a").unwrap();
            fs::write(world.path("b"), "b").unwrap();
            if died_after {
                world.died_after(&rename("a", "b", 0)).verified();
            } else {
                world.died_before(&rename("a", "b", 0)).reissued();
            }
            assert_eq!(fs::read(world.path("b")).unwrap(), b"a");
            assert!(!world.path("a").exists());
        }
        fs::write(world.path("a"), "a").unwrap();
        let kind = rename("a", "b", libc::RENAME_NOREPLACE);
        assert_eq!(world.died_before(&kind).errno(), Errno::EEXIST);
    });
}

#[test]
fn a_rename_that_leaves_a_whiteout_is_done_once() {
    on_every_store(|world| {
        fs::write(world.path("a"), "a").unwrap();
        let whiteout = rename("a", "b", libc::RENAME_WHITEOUT);
        world.died_after(&whiteout).verified();
        assert_eq!(
            fs::metadata(world.path("a")).unwrap().mode() & libc::S_IFMT,
            libc::S_IFCHR
        );
    });
}

#[test]
fn two_files_are_exchanged_once() {
    on_every_store(|world| {
        fs::write(world.path("a"), "a").unwrap();
        fs::write(world.path("b"), "b").unwrap();
        let exchange = rename("a", "b", libc::RENAME_EXCHANGE);
        world.died_after(&exchange).verified();
        assert_eq!(fs::read(world.path("a")).unwrap(), b"b");
        world.died_before(&exchange).reissued();
        assert_eq!(fs::read(world.path("a")).unwrap(), b"a");
    });
}

#[test]
fn renaming_one_name_of_a_file_to_another_changes_nothing() {
    on_every_store(|world| {
        fs::write(world.path("a"), "a").unwrap();
        fs::hard_link(world.path("a"), world.path("b")).unwrap();
        world.died_after(&rename("a", "b", 0)).ok();
        assert_eq!(names(&world.path("")), [b"a", b"b"]);
    });
}

#[test]
fn a_link_is_made_once() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let file = world.lookup(&world.generation(), 1, "file");
        let link = |name: &str| {
            let arg = LinkIn { oldnodeid: file };
            ask(Opcode::Link, 1, arg, z(name)).second(file)
        };
        assert_eq!(world.died_after(&link("after")).verified().attr().nlink, 2);
        assert_eq!(
            world.died_before(&link("before")).reissued().attr().nlink,
            3
        );
        assert_eq!(world.died_before(&link("before")).errno(), Errno::EEXIST);
    });
}

#[test]
fn attributes_are_set_once() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let file = world.lookup(&world.generation(), 1, "file");
        let arg = SetattrIn {
            valid: (SetattrValid::MODE | SetattrValid::UID | SetattrValid::MTIME).bits(),
            mode: 0o4711,
            uid: 12,
            mtime: 1000,
            mtimensec: 5,
            ..Default::default()
        };
        let after = world.died_after(&setattr(file, arg)).verified().attr();
        assert_eq!(
            (after.mode & 0o7777, after.uid, after.mtime),
            (0o4711, 12, 1000)
        );
        let arg = SetattrIn { uid: 13, ..arg };
        assert_eq!(
            world.died_before(&setattr(file, arg)).reissued().attr().uid,
            13
        );
        let now = SetattrIn {
            valid: (SetattrValid::ATIME | SetattrValid::ATIME_NOW).bits(),
            ..Default::default()
        };
        world.died_after(&setattr(file, now)).verified();
    });
}

#[test]
fn a_truncation_never_cuts_bytes_that_were_written_after_it() {
    on_every_store(|world| {
        let cut = |file: u64, size: u64| {
            setattr(
                file,
                SetattrIn {
                    valid: SetattrValid::SIZE.bits(),
                    size,
                    ..Default::default()
                },
            )
        };
        let content = || fs::read(world.path("file")).unwrap();
        fs::write(world.path("file"), "0123456789").unwrap();
        let file = world.lookup(&world.generation(), 1, "file");
        world.died_before(&cut(file, 8)).reissued();
        assert_eq!(content(), b"01234567");
        world.died_after(&cut(file, 4)).verified();
        assert_eq!(content(), b"0123");
        world.first(&world.generation(), &cut(file, 0)).ok();
        fs::write(world.path("file"), "acknowledged").unwrap();
        let again = world.again(&world.generation()).ok();
        assert_eq!(again.replayed, Replayed::Ambiguous);
        assert_eq!(content(), b"acknowledged");
    });
}

#[test]
fn an_extended_attribute_is_made_and_removed_once() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let file = world.lookup(&world.generation(), 1, "file");
        let make = |value: &str| {
            let arg = SetxattrIn {
                size: value.len() as u32,
                flags: libc::XATTR_CREATE as u32,
                ..Default::default()
            };
            let tail = [&z("user.key"), value.as_bytes()].concat();
            ask(Opcode::Setxattr, file, arg, tail)
        };
        let remove = ask(Opcode::Removexattr, file, (), z("user.key"));
        world.died_after(&make("value")).verified();
        assert_eq!(world.died_before(&make("value")).errno(), Errno::EEXIST);
        world.died_before(&remove).reissued();
        world.died_before(&make("value")).reissued();
        world.died_after(&remove).verified();
        assert_eq!(world.died_before(&remove).errno(), Errno::ENODATA);
    });
}

#[test]
fn an_append_is_repeated_at_the_offset_it_was_given() {
    on_every_store(|world| {
        fs::write(world.path("file"), "old").unwrap();
        let flags = libc::O_WRONLY | libc::O_APPEND;
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        let fh = world.open(&dir, file, flags);
        let append = |data: &[u8]| write(file, fh, flags, 999, data);
        world.first(&dir, &append(b"+one")).ok();
        world.again(&world.generation()).reissued();
        assert_eq!(fs::read(world.path("file")).unwrap(), b"old+one");
        world.died_before(&append(b"+two")).reissued();
        assert_eq!(fs::read(world.path("file")).unwrap(), b"old+one+two");
    });
}

#[test]
fn an_append_to_an_append_only_file_is_done_once() {
    on_every_store(|world| {
        fs::write(world.path("log"), "old").unwrap();
        let chattr = |flag| {
            let path = world.path("log");
            let done = std::process::Command::new("chattr")
                .arg(flag)
                .arg(path)
                .status();
            assert!(done.unwrap().success());
        };
        chattr("+a");
        let flags = libc::O_WRONLY | libc::O_APPEND;
        let dir = world.generation();
        let log = world.lookup(&dir, 1, "log");
        let fh = world.open(&dir, log, flags);
        let append = |data: &[u8]| write(log, fh, flags, 0, data);
        world.died_after(&append(b"+one")).verified();
        world.died_before(&append(b"+two")).reissued();
        // Died in the middle of it.
        world.first(&world.generation(), &append(b"+th")).ok();
        let offset = world.slot().journal().offset;
        world.put(&append(b"+three"));
        assert_eq!((offset, world.slot().journal().offset), (11, 11));
        let out: WriteOut = world.again(&world.generation()).reissued().data();
        assert_eq!(out.size, 6);
        let overwrite = OpenIn {
            flags: libc::O_WRONLY as u32,
            open_flags: 0,
        };
        let open = world.first(&world.generation(), &ask(Opcode::Open, log, overwrite, []));
        assert_eq!(open.errno(), Errno::EPERM);
        chattr("-a");
        assert_eq!(fs::read(world.path("log")).unwrap(), b"old+one+two+three");
    });
}

#[test]
fn a_write_is_repeated_at_its_offset() {
    on_every_store(|world| {
        fs::write(world.path("file"), "0123456789").unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        let fh = world.open(&dir, file, libc::O_RDWR);
        let out: WriteOut = world
            .died_after(&write(file, fh, libc::O_RDWR, 4, b"xx"))
            .data();
        assert_eq!(out.size, 2);
        assert_eq!(fs::read(world.path("file")).unwrap(), b"0123xx6789");
    });
}

#[test]
fn a_file_made_before_the_request_came_is_a_conflict() {
    on_every_store(|world| {
        // The journal of a generation that did not see it: made between its look and its death.
        world
            .prepare(&world.generation(), &create("file", libc::O_EXCL))
            .unwrap();
        fs::write(world.path("file"), "").unwrap();
        let slot = world.slot();
        let annex = Annex {
            arrived_ns: sys::realtime_ns() + 1_000_000_000,
            ..slot.annex()
        };
        slot.set_annex(&annex, b"");
        assert_eq!(world.again(&world.generation()).errno(), Errno::EEXIST);
    });
}

#[test]
fn a_mode_that_forbids_reading_does_not_cost_a_handle() {
    on_every_store(|world| {
        fs::write(world.path("file"), "content").unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        let fh = world.open(&dir, file, libc::O_RDONLY);
        fs::set_permissions(world.path("file"), fs::Permissions::from_mode(0o000)).unwrap();
        drop(dir);
        assert_eq!(
            world.read(&world.generation(), file, fh).unwrap(),
            b"content"
        );
    });
}
