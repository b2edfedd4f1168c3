//! That an operation does to the store what the caller would have done to it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};

use super::*;
use crate::wire::abi::SetattrValid;

#[test]
fn new_objects_belong_to_their_caller_and_get_its_mask() {
    on_every_store(|world| {
        let dir = world.generation();
        let make = |ask: Ask| world.first(&dir, &ask.caller(1000, 1001)).ok().attr();
        let masked = MkdirIn {
            mode: 0o777,
            umask: 0o027,
        };
        let attr = make(ask(Opcode::Mkdir, 1, masked, z("dir")));
        assert_eq!(
            (attr.uid, attr.gid, attr.mode & 0o7777),
            (1000, 1001, 0o750)
        );
        let arg = CreateIn {
            flags: libc::O_RDWR as u32,
            mode: 0o666,
            umask: 0o022,
            open_flags: 0,
        };
        let attr = make(ask(Opcode::Create, 1, arg, z("file")));
        assert_eq!(
            (attr.uid, attr.gid, attr.mode & 0o7777),
            (1000, 1001, 0o644)
        );
        let attr = make(ask(Opcode::Symlink, 1, (), zz("link", "dir/file")));
        assert_eq!((attr.uid, attr.gid), (1000, 1001));
        let arg = MknodIn {
            mode: libc::S_IFCHR | 0o666,
            rdev: 0x103,
            umask: 0,
            padding: 0,
        };
        let attr = make(ask(Opcode::Mknod, 1, arg, z("null")));
        assert_eq!(
            (attr.uid, attr.rdev, attr.mode & 0o777),
            (1000, 0x103, 0o666)
        );
        assert!(
            fs::metadata(world.path("null"))
                .unwrap()
                .file_type()
                .is_char_device()
        );
        let attr = world.first(&dir, &mkdir("roots")).ok().attr();
        assert_eq!((attr.uid, attr.gid), (0, 0));
    });
}

#[test]
fn a_set_gid_directory_hands_its_group_on() {
    on_every_store(|world| {
        std::os::unix::fs::chown(world.path(""), None, Some(77)).unwrap();
        fs::set_permissions(world.path(""), fs::Permissions::from_mode(0o2777)).unwrap();
        let made = world
            .first(&world.generation(), &mkdir("dir").caller(1000, 1000))
            .ok();
        assert_eq!(made.attr().gid, 77);
        assert_ne!(made.attr().mode & libc::S_ISGID, 0);
    });
}

#[test]
fn a_symbolic_link_is_changed_and_not_what_it_points_to() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        symlink("file", world.path("link")).unwrap();
        let dir = world.generation();
        let link = world.lookup(&dir, 1, "link");
        assert_eq!(
            world
                .first(&dir, &ask(Opcode::Readlink, link, (), []))
                .bytes(),
            b"file"
        );
        let arg = SetattrIn {
            valid: (SetattrValid::UID | SetattrValid::MTIME).bits(),
            uid: 9,
            mtime: 77,
            ..Default::default()
        };
        let attr = world
            .first(&dir, &ask(Opcode::Setattr, link, arg, []))
            .ok()
            .attr();
        assert_eq!((attr.uid, attr.mtime), (9, 77));
        let mode = SetattrIn {
            valid: SetattrValid::MODE.bits(),
            ..Default::default()
        };
        let chmod = world.first(&dir, &ask(Opcode::Setattr, link, mode, []));
        assert_eq!(chmod.errno(), Errno::EOPNOTSUPP);
        let arg = SetxattrIn {
            size: 1,
            ..Default::default()
        };
        let set = |name: &str| {
            let tail = [&z(name)[..], b"x"].concat();
            world
                .first(&dir, &ask(Opcode::Setxattr, link, arg, tail))
                .answer
        };
        set("trusted.key").unwrap();
        assert_eq!(set("user.key").unwrap_err(), Errno::EPERM);
        let list = GetxattrIn {
            size: 100,
            ..Default::default()
        };
        let listed = |node| world.first(&dir, &ask(Opcode::Listxattr, node, list, []));
        assert_eq!(listed(link).bytes(), z("trusted.key"));
        let file = world.lookup(&dir, 1, "file");
        assert_eq!(listed(file).bytes(), b"");
        assert_eq!(fs::metadata(world.path("file")).unwrap().uid(), 0);
    });
}

#[test]
fn extended_attributes_tell_their_size_and_do_not_overflow() {
    on_every_store(|world| {
        fs::write(world.path("file"), "").unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        let arg = SetxattrIn {
            size: 5,
            ..Default::default()
        };
        let tail = [&z("user.key")[..], b"value"].concat();
        world
            .first(&dir, &ask(Opcode::Setxattr, file, arg, tail))
            .ok();
        let get = |name: &str, size| {
            let arg = GetxattrIn { size, padding: 0 };
            world.first(&dir, &ask(Opcode::Getxattr, file, arg, z(name)))
        };
        assert_eq!(get("user.key", 0).data::<GetxattrOut>().size, 5);
        assert_eq!(get("user.key", 5).bytes(), b"value");
        assert_eq!(get("user.key", 4).errno(), Errno::ERANGE);
        assert_eq!(get("user.none", 4).errno(), Errno::ENODATA);
        let arg = GetxattrIn::default();
        let list = world.first(&dir, &ask(Opcode::Listxattr, file, arg, []));
        assert_eq!(list.data::<GetxattrOut>().size, 9);
    });
}

#[test]
fn writes_truncations_and_changes_of_owner_clear_set_id_bits() {
    on_every_store(|world| {
        let dir = world.generation();
        fs::write(world.path("file"), "content").unwrap();
        let file = world.lookup(&dir, 1, "file");
        let fh = world.open(&dir, file, libc::O_RDWR);
        let set = || fs::set_permissions(world.path("file"), fs::Permissions::from_mode(0o6755));
        let mode = || fs::metadata(world.path("file")).unwrap().mode() & 0o7777;
        let arg = WriteIn {
            fh,
            size: 1,
            ..Default::default()
        };
        set().unwrap();
        world
            .first(&dir, &ask(Opcode::Write, file, arg, b"x").fh(fh))
            .ok();
        assert_eq!(mode(), 0o6755);
        let arg = WriteIn {
            write_flags: WRITE_KILL_SUIDGID,
            ..arg
        };
        world
            .first(&dir, &ask(Opcode::Write, file, arg, b"x").fh(fh))
            .ok();
        assert_eq!(mode(), 0o755);
        let change = |valid: SetattrValid| {
            set().unwrap();
            let arg = SetattrIn {
                valid: (valid | SetattrValid::KILL_SUIDGID).bits(),
                size: 3,
                mode: 0o6711,
                ..Default::default()
            };
            world.first(&dir, &ask(Opcode::Setattr, file, arg, [])).ok();
            mode()
        };
        assert_eq!(change(SetattrValid::SIZE), 0o755);
        assert_eq!(change(SetattrValid::UID), 0o755);
        assert_eq!(change(SetattrValid::UID | SetattrValid::MODE), 0o6711);
    });
}

#[test]
fn data_is_written_read_and_copied() {
    on_every_store(|world| {
        let dir = world.generation();
        let from = world.first(&dir, &create("from", libc::O_RDWR)).ok();
        let to = world.first(&dir, &create("to", libc::O_RDWR)).ok();
        let (a, b) = (
            world.know(1, "from", from.id()),
            world.know(1, "to", to.id()),
        );
        let (fh_a, fh_b) = (from.new_fh, to.new_fh);
        let payload: Vec<u8> = (0..8000u32).map(|n| n as u8).collect();
        let out: WriteOut = world.first(&dir, &write(a, fh_a, 0, 5, &payload)).data();
        assert_eq!(out.size, 8000);
        let expected = [&[0; 5][..], &payload].concat();
        assert_eq!(fs::read(world.path("from")).unwrap(), expected);
        assert_eq!(world.read(&dir, a, fh_a).unwrap(), &expected[..4096]);
        let arg = CopyFileRangeIn {
            fh_in: fh_a,
            nodeid_out: b,
            fh_out: fh_b,
            len: 1 << 40,
            ..Default::default()
        };
        // By a generation that knows neither handle.
        let dir = world.generation();
        let copy = |opcode| ask(opcode, a, arg, []).second(b).fh(fh_a).second_fh(fh_b);
        let out: CopyFileRangeOut = world.first(&dir, &copy(Opcode::CopyFileRange64)).data();
        assert_eq!(out.bytes_copied, 8005);
        assert_eq!(fs::read(world.path("to")).unwrap(), expected);
        let out: WriteOut = world.first(&dir, &copy(Opcode::CopyFileRange)).data();
        assert_eq!(out.size, 8005);
    });
}

#[test]
fn space_is_allocated_and_holes_are_found() {
    on_every_store(|world| {
        let dir = world.generation();
        let made = world.first(&dir, &create("file", libc::O_RDWR)).ok();
        let (file, fh) = (world.know(1, "file", made.id()), made.new_fh);
        let arg = FallocateIn {
            fh,
            length: 1 << 20,
            ..Default::default()
        };
        world
            .first(&dir, &ask(Opcode::Fallocate, file, arg, []).fh(fh))
            .ok();
        assert_eq!(world.getattr(&dir, file).attr().size, 1 << 20);
        let arg = FallocateIn {
            mode: libc::FALLOC_FL_COLLAPSE_RANGE as u32,
            ..arg
        };
        let collapse = world.first(&dir, &ask(Opcode::Fallocate, file, arg, []).fh(fh));
        assert_eq!(collapse.errno(), Errno::EOPNOTSUPP);
        fs::write(world.path("file"), "x").unwrap();
        let seek = |offset, whence: i32| {
            let arg = LseekIn {
                fh,
                offset,
                whence: whence as u32,
                padding: 0,
            };
            world.first(&dir, &ask(Opcode::Lseek, file, arg, []).fh(fh))
        };
        assert_eq!(seek(0, libc::SEEK_HOLE).data::<LseekOut>().offset, 1);
        assert_eq!(seek(0, libc::SEEK_DATA).data::<LseekOut>().offset, 0);
        assert_eq!(seek(9, libc::SEEK_DATA).errno(), Errno::ENXIO);
        for (opcode, flags) in [(Opcode::Fsync, 0), (Opcode::Fsync, FSYNC_FDATASYNC)] {
            let arg = FsyncIn {
                fh,
                fsync_flags: flags,
                padding: 0,
            };
            world.first(&dir, &ask(opcode, file, arg, []).fh(fh)).ok();
        }
        let root = world.open(&dir, 1, libc::O_DIRECTORY);
        let arg = FsyncIn {
            fh: root,
            ..Default::default()
        };
        world
            .first(&dir, &ask(Opcode::Fsyncdir, 1, arg, []).fh(root))
            .ok();
        world
            .first(&dir, &ask(Opcode::Syncfs, 1, SyncfsIn::default(), []))
            .ok();
        let st: Kstatfs = world.first(&dir, &ask(Opcode::Statfs, 1, (), [])).data();
        assert!(st.blocks > 0 && st.namelen == 255);
    });
}

#[test]
fn file_flags_are_read_and_set_and_other_ioctls_are_refused() {
    let world = World::new(Path::new("/tmp"), false);
    let dir = world.generation();
    let made = world.first(&dir, &create("file", libc::O_RDWR)).ok();
    let (file, fh) = (world.know(1, "file", made.id()), made.new_fh);
    let ioctl = |cmd: u32, input: &[u8], out_size| {
        let arg = IoctlIn {
            fh,
            cmd,
            in_size: input.len() as u32,
            out_size,
            ..Default::default()
        };
        world.first(&dir, &ask(Opcode::Ioctl, file, arg, input).fh(fh))
    };
    let flags = || {
        let reply = ioctl(0x8008_6601, &[], 4);
        u32::from_ne_bytes(reply.bytes()[size_of::<IoctlOut>()..].try_into().unwrap())
    };
    const NODUMP: u32 = 0x40;
    let before = flags();
    ioctl(0x4008_6602, &(before | NODUMP).to_ne_bytes(), 0).ok();
    assert_eq!(flags(), before | NODUMP);
    assert_eq!(ioctl(0x801c_581f, &[], 28).bytes().len(), 16 + 28);
    assert_eq!(ioctl(0x4008_6602, b"x", 0).errno(), Errno::EINVAL);
    assert_eq!(ioctl(0x5401, &[], 0).errno(), Errno::ENOTTY);
}

#[test]
fn statx_gives_the_birth_time() {
    on_every_store(|world| {
        let before = sys::realtime_ns() / 1_000_000_000;
        fs::write(world.path("file"), "content").unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        let arg = StatxIn {
            sx_mask: 0xfff,
            ..Default::default()
        };
        let out: StatxOut = world.first(&dir, &ask(Opcode::Statx, file, arg, [])).data();
        assert_eq!((out.stat.size, out.stat.mask), (7, 0xfff));
        assert!(out.stat.btime.sec as u64 >= before - 1);
        assert_eq!(out.attr_valid, 1);
    });
}

#[test]
fn dot_and_dot_dot_do_not_leave_the_source() {
    on_every_store(|world| {
        fs::create_dir(world.path("dir")).unwrap();
        let dir = world.generation();
        let node = world.lookup(&dir, 1, "dir");
        let look = |node, name: &str| world.first(&dir, &ask(Opcode::Lookup, node, (), z(name)));
        assert_eq!(look(1, "..").id(), dir.root());
        assert_eq!(look(1, ".").id(), dir.root());
        assert_eq!(look(node, "..").id(), dir.root());
        assert_eq!(look(1, "missing").errno(), Errno::ENOENT);
    });
}

#[test]
fn only_what_a_passthrough_cannot_have_is_answered_enosys() {
    let world = World::new(Path::new("/tmp"), false);
    let dir = world.generation();
    for &opcode in Opcode::ALL {
        let mut ask = ask(opcode, 1, [0u8; 256], b"x\0").second(1);
        if matches!(opcode, Opcode::Setxattr | Opcode::Write) {
            ask.args
                .truncate(if opcode == Opcode::Write { 40 } else { 256 });
        }
        // Zeros are no name; such requests are refused before they come here.
        world.put(&ask);
        if Request::decode(&world.slot().copy_request()).is_err() {
            continue;
        }
        let expected = matches!(
            opcode,
            Opcode::Bmap | Opcode::Poll | Opcode::Setupmapping | Opcode::Removemapping
        );
        let answer = world.first(&dir, &ask).answer;
        assert_eq!(
            matches!(answer, Err(Errno::ENOSYS)),
            expected,
            "{opcode}: {answer:?}"
        );
    }
}

#[test]
fn the_kernels_forget_closes_the_descriptor() {
    let world = World::new(Path::new("/tmp"), false);
    fs::write(world.path("file"), "").unwrap();
    let dir = world.generation();
    let file = world.lookup(&dir, 1, "file");
    world.getattr(&dir, file);
    assert!(dir.nodes.get(file).is_some());
    world
        .first(
            &dir,
            &ask(Opcode::Forget, file, ForgetIn { nlookup: 1 }, []),
        )
        .ok();
    assert!(dir.nodes.get(file).is_none());
    world.getattr(&dir, file);
    let one = ForgetOne {
        nodeid: file,
        nlookup: 1,
    };
    let arg = BatchForgetIn { count: 1, dummy: 0 };
    world
        .first(&dir, &ask(Opcode::BatchForget, 0, arg, one.as_bytes()))
        .ok();
    assert!(dir.nodes.get(file).is_none());
}

/// Runs a test in a mount namespace of its own thread.
fn in_own_mounts(test: impl FnOnce() + Send + 'static) {
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        test();
    });
    thread.join().unwrap();
}

#[test]
fn what_is_mounted_below_the_source_is_not_served() {
    in_own_mounts(|| {
        let world = World::new(Path::new("/tmp"), false);
        fs::create_dir_all(world.path("dir/below")).unwrap();
        let flags = nix::mount::MsFlags::empty();
        let target = world.path("dir");
        nix::mount::mount(Some("none"), &target, Some("tmpfs"), flags, None::<&str>).unwrap();
        fs::write(world.path("dir/above"), "").unwrap();
        let dir = world.generation();
        let node = world.lookup(&dir, 1, "dir");
        let below = world.lookup(&dir, node, "below");
        assert_eq!(
            world.getattr(&dir, below).attr().mode & libc::S_IFMT,
            libc::S_IFDIR
        );
        let above = world.first(&dir, &ask(Opcode::Lookup, node, (), z("above")));
        assert_eq!(above.errno(), Errno::ENOENT);
        nix::mount::umount(&target).unwrap();
    });
}

#[test]
fn an_overlay_is_served_by_walking_and_a_copy_up_keeps_the_identity() {
    in_own_mounts(|| {
        // Both layers on a file system that can be an upper one.
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| temp.path().join(name);
        for name in ["lower", "upper", "work", "merged"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("lower/file"), "lower").unwrap();
        let data = format!(
            "lowerdir={},upperdir={},workdir={}",
            at("lower").display(),
            at("upper").display(),
            at("work").display()
        );
        let flags = nix::mount::MsFlags::empty();
        let merged = at("merged");
        nix::mount::mount(Some("none"), &merged, Some("overlay"), flags, Some(&*data)).unwrap();
        {
            let mut world = World::at(temp, merged.clone(), false);
            let first = world.generation();
            assert!(first.needs_paths());
            world.options.always_walk = true; // so that the annex carries paths
            let file = world.lookup(&first, 1, "file");
            let fh = world.open(&first, file, libc::O_RDWR);
            world.first(&first, &write(file, fh, 0, 0, b"UP")).ok();
            drop(first);
            let second = world.generation();
            assert_eq!(world.read(&second, file, fh).unwrap(), b"UPwer");
            world.first(&second, &unlink("file")).ok();
            world.vaulted(file);
            drop(second);
            assert_eq!(world.read(&world.generation(), file, fh).unwrap(), b"UPwer");
        }
    });
}

#[test]
fn a_process_without_privileges_serves_what_is_its_own() {
    use rustix::thread::{set_thread_res_gid, set_thread_res_uid};
    use rustix::{process::Gid, process::Uid};
    // Credentials are the thread's.
    let thread = std::thread::spawn(|| {
        let mut world = World::new(Path::new("/tmp"), false);
        let source = world.path("");
        std::os::unix::fs::chown(&source, Some(1000), Some(1000)).unwrap();
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(source.parent().unwrap(), open).unwrap();
        let (uid, gid) = (Uid::from_raw(1000), Gid::from_raw(1000));
        set_thread_res_gid(gid, gid, gid).unwrap();
        set_thread_res_uid(uid, uid, Uid::ROOT).unwrap();

        let first = world.generation();
        assert!(first.needs_paths());
        world.options.always_walk = true; // so that the annex carries paths
        let masked = MkdirIn {
            mode: 0o777,
            umask: 0o077,
        };
        // A caller with another uid cannot be served as such.
        let made = ask(Opcode::Mkdir, 1, masked, z("dir")).caller(1000, 1000);
        let made = world.first(&first, &made).ok().attr();
        assert_eq!((made.uid, made.mode & 0o777), (1000, 0o700));
        let made = world.first(&first, &create("file", libc::O_RDWR)).ok();
        let (file, fh) = (world.know(1, "file", made.id()), made.new_fh);
        world.first(&first, &write(file, fh, 0, 0, b"content")).ok();
        let arg = LinkIn { oldnodeid: file };
        world
            .first(&first, &ask(Opcode::Link, 1, arg, z("link")).second(file))
            .ok();
        drop(first);
        let second = world.generation();
        assert_eq!(world.read(&second, file, fh).unwrap(), b"content");
        world.first(&second, &unlink("file")).ok();
        world.vaulted(file);
        assert_eq!(
            world.read(&world.generation(), file, fh).unwrap(),
            b"content"
        );
        world.died_after(&mkdir("again")).verified();
        drop(second);
        set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).unwrap();
    });
    thread.join().unwrap();
}

#[test]
fn a_file_opened_for_direct_io_is_read_into_the_slot() {
    on_every_store(|world| {
        fs::write(world.path("file"), vec![7; 8192]).unwrap();
        let dir = world.generation();
        let file = world.lookup(&dir, 1, "file");
        let fh = world.open(&dir, file, libc::O_RDWR | libc::O_DIRECT);
        assert_eq!(world.read(&dir, file, fh).unwrap(), vec![7; 4096]);
        let made = create("direct", libc::O_RDWR | libc::O_DIRECT);
        let made = world.first(&dir, &made).ok();
        let node = world.know(1, "direct", made.id());
        world
            .first(&dir, &write(node, made.new_fh, 0, 0, &[8; 4096]))
            .ok();
        assert_eq!(
            world.read(&world.generation(), node, made.new_fh).unwrap(),
            [8; 4096]
        );
    });
}
