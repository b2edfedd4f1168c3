//! What a new generation finds again: objects, open files, directories half read, locks.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

use super::*;
use crate::backend::{Vault, VaultKey};

fn kept(world: &World, id: Identity) -> bool {
    world.vault.withdraw(VaultKey::Inode(id)).unwrap().is_some()
}

#[test]
fn an_object_is_the_same_for_the_next_generation() {
    on_every_store(|world| {
        fs::create_dir(world.path("dir")).unwrap();
        fs::write(world.path("dir/file"), "content").unwrap();
        let first = world.generation();
        let dir = world.lookup(&first, 1, "dir");
        let file = world.lookup(&first, dir, "file");
        let ino = world.getattr(&first, file).attr().ino;
        drop(first);
        let second = world.generation();
        assert_eq!(world.getattr(&second, file).attr().ino, ino);
        let again = world.first(&second, &ask(Opcode::Lookup, dir, (), z("file")));
        assert_eq!(again.id(), world.nodes.borrow()[&file].id);
    });
}

#[test]
fn an_object_that_was_renamed_outside_is_found_by_its_handle() {
    on_every_store(|world| {
        fs::write(world.path("old"), "content").unwrap();
        let file = world.lookup(&world.generation(), 1, "old");
        fs::rename(world.path("old"), world.path("new")).unwrap();
        fs::write(world.path("old"), "another").unwrap();
        let found = world.getattr(&world.generation(), file);
        if world.walks() {
            assert_eq!(found.errno(), Errno::ESTALE);
        } else {
            assert_eq!(
                found.attr().ino,
                fs::metadata(world.path("new")).unwrap().ino()
            );
        }
    });
}

#[test]
fn an_object_deeper_than_a_path_may_be_long_is_found() {
    on_every_store(|world| {
        let dir = world.generation();
        let name = "d".repeat(200);
        let mut node = 1;
        for _ in 0..30 {
            let made = Ask {
                node,
                ..mkdir(&name)
            };
            let id = world.first(&dir, &made).ok().id();
            node = world.know(node, &name, id);
        }
        let ino = world.getattr(&dir, node).attr().ino;
        assert_eq!(world.getattr(&world.generation(), node).attr().ino, ino);
    });
}

#[test]
fn the_path_of_an_object_cannot_lead_out_of_the_source() {
    let world = World::new(Path::new("/tmp"), true);
    fs::write(world.path("../outside"), "").unwrap();
    std::os::unix::fs::symlink("..", world.path("up")).unwrap();
    let dir = world.generation();
    for path in ["../outside", "up/outside", "/etc/passwd", "up"] {
        let node = world.know(1, path, dir.root());
        assert_eq!(world.getattr(&dir, node).errno(), Errno::ESTALE);
    }
}

#[test]
fn a_removed_object_is_stale_even_if_its_number_is_used_again() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let file = world.lookup(&world.generation(), 1, "file");
        fs::remove_file(world.path("file")).unwrap();
        fs::write(world.path("file"), "").unwrap();
        assert_eq!(
            world.getattr(&world.generation(), file).errno(),
            Errno::ESTALE
        );
    });
}

#[test]
fn the_mount_survives_a_renaming_of_its_source() {
    on_every_store(|world| {
        fs::write(world.path("file"), "content").unwrap();
        let root = world.generation().root();
        let moved = world.path("").parent().unwrap().join("moved");
        fs::rename(world.path(""), &moved).unwrap();
        let second = world.generation();
        assert_eq!(second.root(), root);
        world.lookup(&second, 1, "file");
    });
}

#[test]
fn a_source_that_cannot_be_served_is_refused_with_a_reason() {
    let temp = tempfile::tempdir().unwrap();
    let open = |name: &str| {
        let vault = LocalVault::default();
        let opened = Dir::open(&temp.path().join(name), DirOptions::default(), &vault);
        opened.err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert!(open("missing").contains("check that it exists"));
    fs::write(temp.path().join("file"), "").unwrap();
    assert!(open("file").contains("is not a directory"));
}

#[test]
fn a_file_without_names_is_read_and_opened_by_the_next_generation() {
    on_every_store(|world| {
        fs::write(world.path("file"), "content").unwrap();
        let first = world.generation();
        let file = world.lookup(&first, 1, "file");
        let fh = world.open(&first, file, libc::O_RDONLY);
        world.first(&first, &unlink("file")).ok();
        world.vaulted(file);
        drop(first);
        let second = world.generation();
        assert_eq!(world.read(&second, file, fh).unwrap(), b"content");
        let fh = world.open(&second, file, libc::O_RDWR);
        world.first(&second, &write(file, fh, 0, 0, b"CON")).ok();
        assert_eq!(world.read(&second, file, fh).unwrap(), b"CONtent");
        assert_eq!(world.getattr(&second, file).attr().nlink, 0);
    });
}

#[test]
fn a_file_replaced_by_a_rename_is_kept() {
    on_every_store(|world| {
        fs::write(world.path("a"), "a").unwrap();
        fs::write(world.path("b"), "b").unwrap();
        let first = world.generation();
        let victim = world.lookup(&first, 1, "b");
        let fh = world.open(&first, victim, libc::O_RDONLY);
        world.first(&first, &rename("a", "b", 0)).ok();
        drop(first);
        // Not marked as vaulted: the tables may not know it yet.
        assert_eq!(world.read(&world.generation(), victim, fh).unwrap(), b"b");
    });
}

#[test]
fn a_removed_directory_is_still_there_for_those_who_are_in_it() {
    on_every_store(|world| {
        fs::create_dir(world.path("dir")).unwrap();
        let first = world.generation();
        let dir = world.lookup(&first, 1, "dir");
        world
            .first(&first, &ask(Opcode::Rmdir, 1, (), z("dir")))
            .ok();
        world.vaulted(dir);
        drop(first);
        let second = world.generation();
        assert_eq!(world.getattr(&second, dir).attr().nlink, 0);
        let lookup = ask(Opcode::Lookup, dir, (), z("file"));
        assert_eq!(world.first(&second, &lookup).errno(), Errno::ENOENT);
    });
}

#[test]
fn only_the_last_name_of_a_file_sends_it_to_the_vault() {
    on_every_store(|world| {
        fs::write(world.path("a"), "").unwrap();
        fs::hard_link(world.path("a"), world.path("b")).unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "a");
        let id = world.nodes.borrow()[&file].id;
        world.first(&dir, &unlink("a")).ok();
        assert_eq!(kept(world, id), world.walks());
        world.first(&dir, &unlink("b")).ok();
        assert!(kept(world, id));
    });
}

#[test]
fn two_unlinks_at_once_do_not_both_leave_the_last_name_to_the_other() {
    let world = World::new(Path::new("/dev/shm"), false);
    let dir = world.generation();
    let root = NodeRef {
        nodeid: 1,
        identity: dir.root(),
        ..Default::default()
    };
    let remove = |index: u32, name: &str| {
        let slot = world.region.slot(SlotIndex::new(index).unwrap());
        let header = InHeader {
            len: (size_of::<InHeader>() + name.len() + 1) as u32,
            opcode: Opcode::Unlink as u32,
            nodeid: 1,
            ..Default::default()
        };
        let bytes = [header.as_bytes(), &z(name)].concat();
        slot.set_annex(
            &Annex {
                node: root,
                ..Default::default()
            },
            &[],
        );
        (slot, bytes)
    };
    for _ in 0..100 {
        fs::write(world.path("a"), "").unwrap();
        fs::hard_link(world.path("a"), world.path("b")).unwrap();
        let file = world.lookup(&dir, 1, "a");
        let start = std::sync::Barrier::new(2);
        let (dir, vault, start) = (&dir, &world.vault, &start);
        std::thread::scope(|scope| {
            for (slot, bytes) in [remove(1, "a"), remove(2, "b")] {
                scope.spawn(move || {
                    let call = Call::new(Request::decode(&bytes).unwrap(), slot, vault);
                    let journal = dir.prepare(&call).unwrap();
                    start.wait();
                    dir.execute(&call, Attempt::First(&journal)).unwrap();
                });
            }
        });
        assert!(kept(&world, world.nodes.borrow()[&file].id));
    }
}

#[test]
fn a_removal_that_fails_keeps_nothing() {
    on_every_store(|world| {
        fs::create_dir_all(world.path("dir/full")).unwrap();
        let dir = world.generation();
        let node = world.lookup(&dir, 1, "dir");
        let rmdir = ask(Opcode::Rmdir, 1, (), z("dir"));
        assert_eq!(world.first(&dir, &rmdir).errno(), Errno::ENOTEMPTY);
        assert_eq!(kept(world, world.nodes.borrow()[&node].id), world.walks());
    });
}

#[test]
fn a_vault_without_room_prevents_the_unlink() {
    struct Full;
    impl Vault for Full {
        fn deposit(&self, _: VaultKey, _: std::os::fd::BorrowedFd<'_>) -> Result<(), Errno> {
            Err(Errno::ENFILE)
        }
        fn withdraw(&self, _: VaultKey) -> Result<Option<std::os::fd::OwnedFd>, Errno> {
            Ok(None)
        }
        fn discard(&self, _: VaultKey) {}
    }
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let dir = world.generation();
        world.prepare(&dir, &unlink("file")).unwrap();
        let slot = world.slot();
        let bytes = slot.copy_request();
        let call = Call::new(Request::decode(&bytes).unwrap(), slot, &Full);
        let journal = slot.journal();
        let answer = dir.execute(&call, Attempt::First(&journal));
        assert_eq!(answer.unwrap_err(), Errno::ENFILE);
        assert!(world.path("file").exists());
    });
}

#[test]
fn a_temporary_file_gets_its_name_from_the_next_generation() {
    on_every_store(|world| {
        let arg = CreateIn {
            flags: (libc::O_TMPFILE | libc::O_RDWR) as u32,
            mode: 0o600,
            ..Default::default()
        };
        let first = world.generation();
        let made = world
            .first(&first, &ask(Opcode::Tmpfile, 1, arg, z("/")))
            .ok();
        let file = world.know(1, "/", made.id());
        world.vaulted(file);
        let fh = made.new_fh;
        world
            .first(&first, &write(file, fh, libc::O_RDWR, 0, b"content"))
            .ok();
        drop(first);
        let second = world.generation();
        assert_eq!(world.read(&second, file, fh).unwrap(), b"content");
        let arg = LinkIn { oldnodeid: file };
        let link = ask(Opcode::Link, 1, arg, z("name")).second(file);
        assert_eq!(world.first(&second, &link).ok().attr().nlink, 1);
        assert_eq!(fs::read(world.path("name")).unwrap(), b"content");
    });
}

#[test]
fn a_handle_whose_file_is_gone_is_stale_and_no_other() {
    on_every_store(|world| {
        fs::write(world.path("gone"), "gone").unwrap();
        fs::write(world.path("here"), "here").unwrap();
        let first = world.generation();
        let (gone, here) = (
            world.lookup(&first, 1, "gone"),
            world.lookup(&first, 1, "here"),
        );
        let fh_gone = world.open(&first, gone, libc::O_RDONLY);
        let fh_here = world.open(&first, here, libc::O_RDONLY);
        drop(first);
        fs::remove_file(world.path("gone")).unwrap();
        let second = world.generation();
        assert_eq!(
            world.read(&second, gone, fh_gone).unwrap_err(),
            Errno::ESTALE
        );
        assert_eq!(world.read(&second, here, fh_here).unwrap(), b"here");
        let arg = ReleaseIn::default();
        world
            .first(&second, &ask(Opcode::Release, gone, arg, []).fh(fh_gone))
            .ok();
    });
}

/// One READDIR(PLUS): names, and the offset to go on at. Empty at the end.
fn list(
    world: &World,
    dir: &Dir,
    (node, fh): (u64, u64),
    offset: u64,
    plus: bool,
) -> (Vec<String>, u64) {
    let arg = ReadIn {
        fh,
        offset,
        size: 4096,
        ..Default::default()
    };
    let opcode = if plus {
        Opcode::Readdirplus
    } else {
        Opcode::Readdir
    };
    let outcome = world.first(dir, &ask(opcode, node, arg, []).fh(fh)).ok();
    assert!(outcome.bytes().len() <= 4096);
    let mut ids = match &outcome.answer {
        Ok(Answer::Entries(_, ids)) => ids.iter(),
        _ => [].iter(),
    };
    let (mut rest, mut names, mut next) = (outcome.bytes(), Vec::new(), offset);
    while !rest.is_empty() {
        let start = rest;
        if plus {
            let (entry, tail) = EntryOut::read_from_prefix(rest).unwrap();
            assert!(entry.nodeid == 0 || ids.next().is_some());
            rest = tail;
        }
        let (dirent, tail) = Dirent::read_from_prefix(rest).unwrap();
        let len = dirent.namelen as usize;
        names.push(String::from_utf8(tail[..len].to_vec()).unwrap());
        next = dirent.off;
        rest = &start[if plus {
            direntplus_size(len)
        } else {
            dirent_size(len)
        }..];
    }
    assert!(ids.next().is_none());
    (names, next)
}

#[test]
fn a_listing_that_many_generations_continue_has_every_entry_once() {
    on_every_store(|world| {
        for n in 0..3000 {
            fs::write(world.path(&format!("a file with the number {n}")), "").unwrap();
        }
        for plus in [false, true] {
            let mut dir = world.generation();
            let fh = world.open(&dir, 1, libc::O_RDONLY | libc::O_DIRECTORY);
            let (mut seen, mut offset, mut replies) = (HashMap::new(), 0, 0);
            loop {
                let (names, next) = list(world, &dir, (1, fh), offset, plus);
                if names.is_empty() {
                    break;
                }
                for name in names {
                    *seen.entry(name).or_insert(0) += 1;
                }
                offset = next;
                replies += 1;
                if replies % 7 == 0 {
                    dir = world.generation();
                }
            }
            assert_eq!(seen.len(), 3002);
            assert!(seen.values().all(|&times| times == 1));
            // From the start, with the handle at the end.
            assert!(!list(world, &dir, (1, fh), 0, plus).0.is_empty());
        }
    });
}

#[test]
fn a_listing_may_go_back_to_an_offset_in_its_middle() {
    on_every_store(|world| {
        for n in 0..300 {
            fs::write(world.path(&format!("{n}")), "").unwrap();
        }
        let dir = world.generation();
        let fh = world.open(&dir, 1, libc::O_RDONLY | libc::O_DIRECTORY);
        let (_, middle) = list(world, &dir, (1, fh), 0, false);
        let (second, _) = list(world, &dir, (1, fh), middle, false);
        list(world, &dir, (1, fh), 0, false);
        assert_eq!(list(world, &dir, (1, fh), middle, false).0, second);
        assert_eq!(list(world, &dir, (1, fh), 0, false).1, middle);
    });
}

#[test]
fn a_reply_too_small_for_an_entry_is_an_error() {
    on_every_store(|world| {
        let dir = world.generation();
        let fh = world.open(&dir, 1, libc::O_RDONLY | libc::O_DIRECTORY);
        let arg = ReadIn {
            fh,
            size: 16,
            ..Default::default()
        };
        let tiny = ask(Opcode::Readdir, 1, arg, []).fh(fh);
        assert_eq!(world.first(&dir, &tiny).errno(), Errno::EINVAL);
        assert_eq!(list(world, &dir, (1, fh), 0, false).0.len(), 2);
    });
}

const READ: i32 = libc::F_RDLCK;
const WRITE: i32 = libc::F_WRLCK;
const UNLOCK: i32 = libc::F_UNLCK;
const END: u64 = i64::MAX as u64;

fn lk(opcode: Opcode, node: u64, owner: u64, typ: i32, range: (u64, u64), flock: bool) -> Ask {
    let arg = LkIn {
        fh: 7,
        owner,
        lk: FileLock {
            start: range.0,
            end: range.1,
            typ: typ as u32,
            pid: 42,
        },
        lk_flags: u32::from(flock),
        padding: 0,
    };
    ask(opcode, node, arg, []).fh(7)
}

fn set(node: u64, owner: u64, typ: i32, range: (u64, u64)) -> Ask {
    lk(Opcode::Setlk, node, owner, typ, range, false)
}

fn lock_key(nodeid: u64, owner: u64, flock: bool) -> VaultKey {
    VaultKey::Lock {
        nodeid,
        owner,
        flock,
    }
}

#[test]
fn locks_outlive_the_generation_that_took_them() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let first = world.generation();
        let file = world.lookup(&first, 1, "file");
        world.first(&first, &set(file, 1, WRITE, (0, 99))).ok();
        world
            .first(&first, &lk(Opcode::Setlk, file, 1, WRITE, (0, END), true))
            .ok();
        drop(first);
        // Between the generations nobody gets them either.
        let other = fs::File::open(world.path("file")).unwrap();
        assert!(other.try_lock_shared().is_err());
        let second = world.generation();
        let busy = |ask: &Ask| assert_eq!(world.first(&second, ask).errno(), Errno::EAGAIN);
        busy(&set(file, 2, READ, (50, 50)));
        busy(&lk(Opcode::Setlkw, file, 2, WRITE, (99, 99), false));
        busy(&lk(Opcode::Setlk, file, 2, READ, (0, END), true));
        world.first(&second, &set(file, 2, WRITE, (100, END))).ok();
        let found: LkOut = world
            .first(&second, &lk(Opcode::Getlk, file, 2, WRITE, (0, END), false))
            .data();
        assert_eq!(
            (found.lk.start, found.lk.end, found.lk.typ),
            (0, 99, WRITE as u32)
        );
        let mine: LkOut = world
            .first(&second, &lk(Opcode::Getlk, file, 1, WRITE, (0, 99), false))
            .data();
        assert_eq!(mine.lk.typ, UNLOCK as u32);
        // Our own lock is no conflict.
        world.first(&second, &set(file, 1, WRITE, (0, 99))).ok();
        world.first(&second, &set(file, 1, UNLOCK, (0, 49))).ok();
        world.first(&second, &set(file, 2, WRITE, (0, 49))).ok();
        busy(&set(file, 2, WRITE, (50, 99)));
        assert!(
            world
                .vault
                .withdraw(lock_key(file, 1, false))
                .unwrap()
                .is_some()
        );
        world.first(&second, &set(file, 1, UNLOCK, (0, END))).ok();
        assert!(
            world
                .vault
                .withdraw(lock_key(file, 1, false))
                .unwrap()
                .is_none()
        );
        world.first(&second, &set(file, 2, WRITE, (50, 99))).ok();
    });
}

#[test]
fn a_close_in_a_later_generation_drops_the_owners_locks() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let first = world.generation();
        let file = world.lookup(&first, 1, "file");
        world.first(&first, &set(file, 1, WRITE, (0, END))).ok();
        world
            .first(&first, &lk(Opcode::Setlk, file, 5, WRITE, (0, END), true))
            .ok();
        drop(first);
        let second = world.generation();
        let arg = FlushIn {
            fh: 7,
            lock_owner: 1,
            ..Default::default()
        };
        let flush = ask(Opcode::Flush, file, arg, []).fh(7);
        world.first(&second, &flush).ok();
        assert_eq!(
            world.first(&second, &set(file, 2, READ, (0, 0))).errno(),
            Errno::EAGAIN
        );
        world
            .first(&second, &flush.flags(HandleRef::OWNER_HAS_LOCKS))
            .ok();
        world.first(&second, &set(file, 2, READ, (0, 0))).ok();
        let arg = ReleaseIn {
            fh: 7,
            release_flags: RELEASE_FLOCK_UNLOCK,
            lock_owner: 5,
            ..Default::default()
        };
        world
            .first(&second, &ask(Opcode::Release, file, arg, []).fh(7))
            .ok();
        // This generation never had the description: the front-end, which knows the handle it was
        // locked through, drops it.
        world.vault.discard(lock_key(file, 5, true));
        world
            .first(&second, &lk(Opcode::Setlk, file, 6, WRITE, (0, END), true))
            .ok();
    });
}

#[test]
fn a_release_drops_the_locks_of_its_open_file_description() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        world.first(&dir, &set(file, 1, WRITE, (0, END))).ok();
        let arg = ReleaseIn {
            fh: 7,
            ..Default::default()
        };
        let release = ask(Opcode::Release, file, arg, []).fh(7);
        world.first(&dir, &release).ok();
        world.first(&dir, &set(file, 2, WRITE, (0, END))).ok();
        assert!(
            world
                .vault
                .withdraw(lock_key(file, 1, false))
                .unwrap()
                .is_none()
        );
    });
}

#[test]
fn a_lock_that_was_refused_leaves_nothing_in_the_vault() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        world.first(&dir, &set(file, 1, WRITE, (0, 9))).ok();
        world.first(&dir, &set(file, 2, WRITE, (20, 29))).ok();
        for owner in [2, 3] {
            let refused = set(file, owner, READ, (0, 0));
            assert_eq!(world.first(&dir, &refused).errno(), Errno::EAGAIN);
        }
        assert!(
            world
                .vault
                .withdraw(lock_key(file, 2, false))
                .unwrap()
                .is_some()
        );
        assert!(
            world
                .vault
                .withdraw(lock_key(file, 3, false))
                .unwrap()
                .is_none()
        );
        world.first(&dir, &set(file, 4, UNLOCK, (0, END))).ok();
    });
}

#[test]
fn a_late_release_leaves_the_locks_of_the_next_open_file_alone() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        let flock = |owner| lk(Opcode::Setlk, file, owner, WRITE, (0, END), true);
        world.first(&dir, &flock(5)).ok();
        // The first open file is closed, and another one gets its number before RELEASE comes.
        let arg = LkIn {
            fh: 8,
            owner: 5,
            lk: FileLock {
                end: END,
                typ: WRITE as u32,
                ..Default::default()
            },
            lk_flags: 1,
            ..Default::default()
        };
        world
            .first(&dir, &ask(Opcode::Setlk, file, arg, []).fh(8))
            .ok();
        let arg = ReleaseIn {
            fh: 7,
            release_flags: RELEASE_FLOCK_UNLOCK,
            lock_owner: 5,
            ..Default::default()
        };
        world
            .first(&dir, &ask(Opcode::Release, file, arg, []).fh(7))
            .ok();
        assert_eq!(world.first(&dir, &flock(6)).errno(), Errno::EAGAIN);
    });
}
