//! The same behaviour on every kind of store: each step runs once on the mount, with the backend
//! killed before it, and once in a twin directory of the store itself. Both must say the same, errno
//! for errno, and leave the same tree.

mod common;

use std::collections::HashMap;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{
    DirBuilderExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown,
    symlink,
};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, UNIX_EPOCH};

use common::{LoopFs, Mount, Options, PATIENCE, open_to_all};
use memmap2::MmapMut;
use rustix::fs::{
    Access, AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, Timespec,
    Timestamps, XattrFlags, accessat, fallocate, flock, linkat, openat, renameat_with,
};
use rustix::thread::{Gid, Uid};

/// The user of the unprivileged half, and a group it belongs to beside its own.
const USER: u32 = 1000;
const TEAM: u32 = 4242;
/// A group it does not belong to.
const STRANGERS: u32 = 4343;

// ---- steps ---------------------------------------------------------------------------------------

/// What the steps of one actor share.
struct World {
    dir: PathBuf,
    files: HashMap<&'static str, File>,
    maps: Vec<MmapMut>,
    listing: Option<fs::ReadDir>,
    names: Vec<String>,
}

impl World {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn file(&self, name: &str) -> &File {
        &self.files[name]
    }

    fn keep(&mut self, name: &'static str, file: io::Result<File>) -> String {
        match file {
            Ok(file) => {
                self.files.insert(name, file);
                "open".into()
            }
            Err(e) => say::<()>(Err(e)),
        }
    }
}

/// What a step came to.
fn say<T: Debug>(result: io::Result<T>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(e) => match e.raw_os_error() {
            Some(errno) => format!("{:?}", nix::errno::Errno::from_raw(errno)),
            None => format!("{e}"),
        },
    }
}

fn tell<T: Debug>(result: rustix::io::Result<T>) -> String {
    say(result.map_err(io::Error::from))
}

fn rw(path: PathBuf) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
}

fn rename2(w: &World, from: &str, to: &str, flags: RenameFlags) -> String {
    tell(renameat_with(CWD, w.at(from), CWD, w.at(to), flags))
}

fn set_xattr(path: PathBuf, name: &str, value: &[u8], flags: XattrFlags) -> String {
    tell(rustix::fs::setxattr(path, name, value, flags))
}

fn text(path: PathBuf) -> String {
    say(fs::read_to_string(path))
}

fn facts(path: PathBuf) -> String {
    say(fs::symlink_metadata(path).map(|m| {
        let (kind, mode) = (m.mode() & libc::S_IFMT, m.mode() & 0o7777);
        format!("{kind:o} {mode:o} {}:{} {}", m.uid(), m.gid(), m.nlink())
    }))
}

type Step = (&'static str, fn(&mut World) -> String);

/// What everybody can do.
const STEPS: &[Step] = &[
    ("create", |w| {
        say(File::create_new(w.at("file")).and_then(|mut f| f.write_all(b"hello world")))
    }),
    ("create again", |w| say(File::create_new(w.at("file")))),
    ("read", |w| text(w.at("file"))),
    ("open and keep", |w| {
        let f = rw(w.at("file"));
        w.keep("kept", f)
    }),
    ("write through the kept file", |w| {
        say(w.file("kept").write_all_at(b"WORLD", 6))
    }),
    ("read through the kept file", |w| {
        let mut bytes = [0; 20];
        say(w
            .file("kept")
            .read_at(&mut bytes, 3)
            .map(|n| bytes[..n].to_vec()))
    }),
    ("fsync", |w| say(w.file("kept").sync_all())),
    ("fdatasync", |w| say(w.file("kept").sync_data())),
    ("mkdir", |w| say(fs::create_dir(w.at("dir")))),
    ("mkdir again", |w| say(fs::create_dir(w.at("dir")))),
    ("rename into a directory", |w| {
        say(fs::rename(w.at("file"), w.at("dir/file")))
    }),
    ("write through the kept file after its rename", |w| {
        say(w.file("kept").write_all_at(b"!", 11))
    }),
    ("read under the new name", |w| text(w.at("dir/file"))),
    ("the old name", |w| text(w.at("file"))),
    ("link", |w| {
        say(fs::hard_link(w.at("dir/file"), w.at("link")))
    }),
    ("link again", |w| {
        say(fs::hard_link(w.at("dir/file"), w.at("link")))
    }),
    ("linked", |w| facts(w.at("link"))),
    ("link a directory", |w| {
        say(fs::hard_link(w.at("dir"), w.at("dir2")))
    }),
    ("unlink one of two names", |w| {
        say(fs::remove_file(w.at("dir/file")))
    }),
    ("the other name", |w| facts(w.at("link"))),
    ("read the other name", |w| text(w.at("link"))),
    ("symlink", |w| say(symlink("dir/../link", w.at("symlink")))),
    ("readlink", |w| say(fs::read_link(w.at("symlink")))),
    ("read through the symlink", |w| text(w.at("symlink"))),
    ("a long symlink", |w| {
        say(symlink("x".repeat(1000), w.at("long")))
    }),
    ("read the long one", |w| {
        say(fs::read_link(w.at("long")).map(|t| t.as_os_str().len()))
    }),
    ("readlink of a file", |w| say(fs::read_link(w.at("link")))),
    ("fifo", |w| {
        say(nix::unistd::mkfifo(
            &w.at("fifo"),
            nix::sys::stat::Mode::from_bits_truncate(0o640),
        )
        .map_err(io::Error::from))
    }),
    ("fifo exists", |w| facts(w.at("fifo"))),
    // Extended attributes.
    ("setxattr", |w| {
        set_xattr(w.at("link"), "user.one", b"value", XattrFlags::CREATE)
    }),
    ("setxattr exclusively again", |w| {
        set_xattr(w.at("link"), "user.one", b"v", XattrFlags::CREATE)
    }),
    ("setxattr that must exist", |w| {
        set_xattr(w.at("link"), "user.two", b"v", XattrFlags::REPLACE)
    }),
    ("setxattr of 1000 bytes", |w| {
        set_xattr(w.at("link"), "user.long", &[7; 1000], XattrFlags::empty())
    }),
    ("getxattr", |w| say(xattr(&w.at("link"), "user.one"))),
    ("getxattr into too little", |w| {
        tell(rustix::fs::getxattr(
            w.at("link"),
            "user.long",
            &mut [0u8; 10],
        ))
    }),
    ("getxattr of none", |w| {
        say(xattr(&w.at("link"), "user.none"))
    }),
    ("listxattr", |w| say(xattr_names(&w.at("link")))),
    ("removexattr", |w| {
        tell(rustix::fs::removexattr(w.at("link"), "user.long"))
    }),
    ("removexattr of none", |w| {
        tell(rustix::fs::removexattr(w.at("link"), "user.none"))
    }),
    ("setxattr on a symlink", |w| {
        tell(rustix::fs::lsetxattr(
            w.at("symlink"),
            "user.x",
            b"v",
            XattrFlags::empty(),
        ))
    }),
    ("setxattr in trusted", |w| {
        set_xattr(w.at("link"), "trusted.x", b"v", XattrFlags::empty())
    }),
    ("setxattr of an unknown kind", |w| {
        set_xattr(w.at("link"), "nothing.x", b"v", XattrFlags::empty())
    }),
    // Memory maps.
    ("map", |w| {
        let file = rw(w.at("mapped")).unwrap();
        file.set_len(3 * 4096).unwrap();
        // SAFETY: nobody truncates the file while it is mapped.
        let mut map = unsafe { MmapMut::map_mut(&file) }.unwrap();
        map[5000..5003].copy_from_slice(b"one");
        w.maps.push(map);
        "mapped".into()
    }),
    ("flush the map", |w| say(w.maps[0].flush())),
    ("write through the map", |w| {
        w.maps[0][9000..9003].copy_from_slice(b"two");
        say(w.maps[0].flush())
    }),
    ("what was mapped", |w| {
        say(fs::read(w.at("mapped"))
            .map(|b| (b.len(), b[5000..5003].to_vec(), b[9000..9003].to_vec())))
    }),
    ("write what is mapped", |w| {
        say(rw(w.at("mapped")).and_then(|f| f.write_all_at(b"three", 100)))
    }),
    ("seen in the map", |w| {
        let seen = w.maps[0][100..105].to_vec();
        w.maps.clear();
        format!("{seen:?}")
    }),
    // Files without names.
    ("open what is unlinked", |w| {
        let f = rw(w.at("unlinked"));
        w.keep("unlinked", f)
    }),
    ("write before it is unlinked", |w| {
        say(w.file("unlinked").write_all_at(b"before ", 0))
    }),
    ("unlink it", |w| say(fs::remove_file(w.at("unlinked")))),
    ("write afterwards", |w| {
        say(w.file("unlinked").write_all_at(b"after", 7))
    }),
    ("truncate it", |w| say(w.file("unlinked").set_len(11))),
    ("chmod it", |w| {
        say(w
            .file("unlinked")
            .set_permissions(Permissions::from_mode(0o601)))
    }),
    ("read it", |w| {
        let mut all = String::new();
        let mut f = w.file("unlinked");
        say(f
            .seek(SeekFrom::Start(0))
            .and_then(|_| f.read_to_string(&mut all))
            .map(|_| all))
    }),
    ("fstat it", |w| {
        say(w
            .file("unlinked")
            .metadata()
            .map(|m| (m.nlink(), m.len(), m.mode())))
    }),
    ("the name is free again", |w| {
        say(fs::write(w.at("unlinked"), "another"))
    }),
    ("it is another file", |w| {
        say(w.file("unlinked").metadata().map(|m| (m.nlink(), m.len())))
    }),
    ("close it", |w| {
        say(Ok(w.files.remove("unlinked").map(drop)))
    }),
    ("open what is renamed over", |w| {
        fs::write(w.at("victim"), "victim").unwrap();
        fs::write(w.at("winner"), "winner").unwrap();
        let f = rw(w.at("victim"));
        w.keep("victim", f)
    }),
    ("rename over it", |w| {
        say(fs::rename(w.at("winner"), w.at("victim")))
    }),
    ("read what was renamed over", |w| {
        let mut b = [0; 6];
        say(w.file("victim").read_at(&mut b, 0).map(|_| b))
    }),
    ("read what took its name", |w| text(w.at("victim"))),
    ("open a directory that is removed", |w| {
        fs::create_dir(w.at("gone")).unwrap();
        let f = File::open(w.at("gone"));
        w.keep("gone", f)
    }),
    ("remove it", |w| say(fs::remove_dir(w.at("gone")))),
    ("create in it", |w| {
        tell(
            openat(
                w.file("gone"),
                "new",
                OFlags::CREATE | OFlags::WRONLY,
                Mode::RUSR,
            )
            .map(drop),
        )
    }),
    ("fstat the removed directory", |w| {
        say(w.file("gone").metadata().map(|m| m.nlink()))
    }),
    ("O_TMPFILE", |w| {
        let f = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o640)
            .custom_flags(libc::O_TMPFILE)
            .open(&w.dir);
        w.keep("tmpfile", f)
    }),
    ("write to it", |w| match w.files.get("tmpfile") {
        Some(f) => say(f.write_all_at(b"temporary", 0)),
        None => "none".into(),
    }),
    ("give it a name", |w| match w.files.get("tmpfile") {
        Some(f) => {
            use std::os::fd::AsRawFd;
            let from = format!("/proc/self/fd/{}", f.as_raw_fd());
            tell(linkat(
                CWD,
                from,
                CWD,
                w.at("named"),
                AtFlags::SYMLINK_FOLLOW,
            ))
        }
        None => "none".into(),
    }),
    ("read it by name", |w| text(w.at("named"))),
    // Locks, between two open files.
    ("open two", |w| {
        let (a, b) = (rw(w.at("locked")), rw(w.at("locked")));
        format!("{} {}", w.keep("a", a), w.keep("b", b))
    }),
    ("flock", |w| {
        tell(flock(w.file("a"), FlockOperation::NonBlockingLockExclusive))
    }),
    ("flock what is locked", |w| {
        tell(flock(w.file("b"), FlockOperation::NonBlockingLockShared))
    }),
    ("funlock", |w| {
        tell(flock(w.file("a"), FlockOperation::NonBlockingUnlock))
    }),
    ("flock what is free", |w| {
        tell(flock(w.file("b"), FlockOperation::NonBlockingLockShared))
    }),
    ("flock shared by both", |w| {
        tell(flock(w.file("a"), FlockOperation::NonBlockingLockShared))
    }),
    ("flock exclusively what is shared", |w| {
        tell(flock(w.file("a"), FlockOperation::NonBlockingLockExclusive))
    }),
    ("lock a range", |w| {
        ofd(w.file("a"), libc::F_OFD_SETLK, libc::F_WRLCK, 10, 10)
    }),
    ("lock an overlapping range", |w| {
        ofd(w.file("b"), libc::F_OFD_SETLK, libc::F_RDLCK, 15, 10)
    }),
    ("lock another range", |w| {
        ofd(w.file("b"), libc::F_OFD_SETLK, libc::F_RDLCK, 20, 10)
    }),
    ("who has it", |w| {
        ofd(w.file("b"), libc::F_OFD_GETLK, libc::F_WRLCK, 0, 0)
    }),
    ("unlock the middle", |w| {
        ofd(w.file("a"), libc::F_OFD_SETLK, libc::F_UNLCK, 12, 4)
    }),
    ("lock the middle", |w| {
        ofd(w.file("b"), libc::F_OFD_SETLK, libc::F_WRLCK, 12, 4)
    }),
    ("lock a part that is still locked", |w| {
        ofd(w.file("b"), libc::F_OFD_SETLK, libc::F_WRLCK, 16, 2)
    }),
    ("close the one", |w| say(Ok(w.files.remove("a").map(drop)))),
    ("lock what it had", |w| {
        ofd(w.file("b"), libc::F_OFD_SETLKW, libc::F_WRLCK, 0, 0)
    }),
    // Listings.
    ("2000 names", |w| {
        fs::create_dir(w.at("many")).unwrap();
        (0..2000).for_each(|n| drop(File::create(w.at(&format!("many/entry-{n:04}"))).unwrap()));
        "made".into()
    }),
    ("half of a listing", |w| {
        let mut listing = fs::read_dir(w.at("many")).unwrap();
        w.names = listing
            .by_ref()
            .take(1000)
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        w.listing = Some(listing);
        "listed".into()
    }),
    ("the other half", |w| {
        let rest = w.listing.take().unwrap();
        w.names
            .extend(rest.map(|e| e.unwrap().file_name().into_string().unwrap()));
        w.names.sort();
        let all = w.names.len();
        w.names.dedup();
        format!(
            "{all} {} {:?} {:?}",
            w.names.len(),
            w.names.first(),
            w.names.last()
        )
    }),
    ("rmdir what is not empty", |w| {
        say(fs::remove_dir(w.at("many")))
    }),
    ("empty it", |w| say(fs::remove_dir_all(w.at("many")))),
    // Space.
    ("fallocate", |w| {
        let f = rw(w.at("space")).unwrap();
        f.write_all_at(&[1; 10000], 0).unwrap();
        tell(fallocate(&f, FallocateFlags::empty(), 0, 20000))
    }),
    ("fallocate beyond the end", |w| {
        tell(fallocate(
            rw(w.at("space")).unwrap(),
            FallocateFlags::KEEP_SIZE,
            20000,
            9000,
        ))
    }),
    ("punch", |w| {
        tell(fallocate(
            rw(w.at("space")).unwrap(),
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            4096,
            4096,
        ))
    }),
    ("zero", |w| {
        tell(fallocate(
            rw(w.at("space")).unwrap(),
            FallocateFlags::ZERO_RANGE,
            100,
            50,
        ))
    }),
    ("what is left", |w| {
        say(fs::read(w.at("space"))
            .map(|b| (b.len(), b.iter().map(|&b| u64::from(b)).sum::<u64>())))
    }),
    ("where the hole is", |w| {
        tell(rustix::fs::seek(
            rw(w.at("space")).unwrap(),
            rustix::fs::SeekFrom::Hole(0),
        ))
    }),
    ("where data are", |w| {
        tell(rustix::fs::seek(
            rw(w.at("space")).unwrap(),
            rustix::fs::SeekFrom::Data(5000),
        ))
    }),
    ("copy_file_range", |w| {
        let (from, to) = (
            File::open(w.at("space")).unwrap(),
            rw(w.at("copy")).unwrap(),
        );
        tell(rustix::fs::copy_file_range(
            &from,
            Some(&mut 50),
            &to,
            Some(&mut 7),
            12000,
        ))
    }),
    ("truncate", |w| {
        say(rw(w.at("copy")).and_then(|f| f.set_len(5000)))
    }),
    ("truncate by path", |w| {
        say(nix::unistd::truncate(&w.at("copy"), 6000).map_err(io::Error::from))
    }),
    ("open with O_TRUNC", |w| {
        say(fs::write(w.at("link"), "rewritten"))
    }),
    ("the kept file sees it", |w| {
        let mut b = [0; 20];
        say(w.file("kept").read_at(&mut b, 0).map(|n| b[..n].to_vec()))
    }),
    ("open for appending", |w| {
        let f = OpenOptions::new()
            .append(true)
            .create(true)
            .open(w.at("log"));
        w.keep("log", f)
    }),
    ("append", |w| {
        let mut f = w.file("log");
        say(f.write_all(b"one "))
    }),
    ("append more", |w| {
        let mut f = w.file("log");
        say(f.write_all(b"two "))
    }),
    ("another appends", |w| {
        say(OpenOptions::new()
            .append(true)
            .open(w.at("log"))
            .and_then(|mut f| f.write_all(b"three ")))
    }),
    ("append at last", |w| {
        let mut f = w.file("log");
        say(f.write_all(b"four"))
    }),
    ("what was appended", |w| text(w.at("log"))),
    ("a megabyte", |w| {
        say(fs::write(w.at("big"), vec![b'x'; 1 << 20]))
    }),
    ("a megabyte back", |w| {
        say(fs::read(w.at("big")).map(|b| b.iter().filter(|&&b| b == b'x').count()))
    }),
    // Renames.
    ("rename onto what exists", |w| {
        rename2(w, "log", "link", RenameFlags::NOREPLACE)
    }),
    ("exchange", |w| {
        rename2(w, "log", "link", RenameFlags::EXCHANGE)
    }),
    ("exchanged", |w| {
        format!("{} {}", text(w.at("log")), text(w.at("link")))
    }),
    ("exchange with nothing", |w| {
        rename2(w, "log", "nothing", RenameFlags::EXCHANGE)
    }),
    ("whiteout", |w| {
        rename2(w, "big", "bigger", RenameFlags::WHITEOUT)
    }),
    ("what is there then", |w| {
        format!("{} {}", facts(w.at("big")), facts(w.at("bigger")))
    }),
    ("remove it", |w| say(fs::remove_file(w.at("big")))),
    ("rename a directory into itself", |w| {
        say(fs::rename(w.at("dir"), w.at("dir/dir")))
    }),
    ("rename a file over a directory", |w| {
        say(fs::rename(w.at("log"), w.at("dir")))
    }),
    ("rename a directory over a file", |w| {
        say(fs::rename(w.at("dir"), w.at("log")))
    }),
    ("rename nothing", |w| {
        say(fs::rename(w.at("nothing"), w.at("log")))
    }),
    ("rename a directory", |w| {
        fs::create_dir_all(w.at("dir/sub/subsub")).unwrap();
        fs::write(w.at("dir/sub/subsub/f"), "deep").unwrap();
        say(fs::rename(w.at("dir/sub"), w.at("moved")))
    }),
    ("what is in it", |w| text(w.at("moved/subsub/f"))),
    ("open a file in it", |w| {
        let f = rw(w.at("moved/subsub/f"));
        w.keep("deep", f)
    }),
    ("rename it again", |w| {
        say(fs::rename(w.at("moved"), w.at("moved-again")))
    }),
    ("write to the file in it", |w| {
        say(w.file("deep").write_all_at(b"DE", 0))
    }),
    ("read the file in it", |w| {
        text(w.at("moved-again/subsub/f"))
    }),
    // Attributes.
    ("chmod", |w| {
        say(fs::set_permissions(
            w.at("log"),
            Permissions::from_mode(0o4755),
        ))
    }),
    ("chmod done", |w| facts(w.at("log"))),
    ("set-uid goes when it is written to", |w| {
        say(OpenOptions::new()
            .append(true)
            .open(w.at("log"))
            .and_then(|mut f| f.write_all(b"x")))
    }),
    ("set-uid gone", |w| facts(w.at("log"))),
    ("set-uid goes when it is truncated", |w| {
        fs::set_permissions(w.at("log"), Permissions::from_mode(0o6755)).unwrap();
        say(rw(w.at("log")).and_then(|f| f.set_len(3)))
    }),
    ("gone again", |w| facts(w.at("log"))),
    ("chown to a stranger", |w| {
        say(chown(w.at("log"), Some(7), None))
    }),
    ("chgrp to the team", |w| {
        say(chown(w.at("log"), None, Some(TEAM)))
    }),
    ("chgrp to strangers", |w| {
        say(chown(w.at("link"), None, Some(STRANGERS)))
    }),
    ("chown done", |w| {
        format!("{} {}", facts(w.at("log")), facts(w.at("link")))
    }),
    ("lchown", |w| {
        say(std::os::unix::fs::lchown(w.at("symlink"), None, Some(TEAM)))
    }),
    ("utimens", |w| {
        let time = |s| Timespec {
            tv_sec: s,
            tv_nsec: 123_456_789,
        };
        let times = Timestamps {
            last_access: time(1_000_000_000),
            last_modification: time(1_100_000_000),
        };
        tell(rustix::fs::utimensat(
            CWD,
            w.at("copy"),
            &times,
            AtFlags::empty(),
        ))
    }),
    ("times", |w| {
        say(fs::metadata(w.at("copy")).map(|m| (m.mtime(), m.mtime_nsec())))
    }),
    ("utimens of a kept file", |w| {
        say(w
            .file("kept")
            .set_modified(UNIX_EPOCH + Duration::from_secs(77)))
    }),
    ("kept time", |w| {
        say(w.file("kept").metadata().map(|m| m.mtime()))
    }),
    ("umask", |w| {
        say(fs::DirBuilder::new().mode(0o777).create(w.at("masked"))) + &facts(w.at("masked"))
    }),
    // Errors.
    ("unlink a directory", |w| say(fs::remove_file(w.at("dir")))),
    ("rmdir a file", |w| say(fs::remove_dir(w.at("log")))),
    ("a file as a directory", |w| say(File::open(w.at("log/x")))),
    ("a directory written to", |w| {
        say(OpenOptions::new().write(true).open(w.at("dir")))
    }),
    ("a name of 255 bytes", |w| {
        say(fs::write(w.at(&"n".repeat(255)), "long"))
    }),
    ("a name of 256 bytes", |w| {
        say(fs::write(w.at(&"n".repeat(256)), "long"))
    }),
    ("nothing", |w| say(fs::metadata(w.at("nothing")))),
    ("unlink nothing", |w| say(fs::remove_file(w.at("nothing")))),
    ("open a symlink without following", |w| {
        say(OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(w.at("symlink"))
            .map(drop))
    }),
    ("O_DIRECTORY of a file", |w| {
        say(OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(w.at("log"))
            .map(drop))
    }),
    ("device node", |w| {
        let mode = nix::sys::stat::Mode::S_IRUSR;
        let made = nix::sys::stat::mknod(
            &w.at("null"),
            nix::sys::stat::SFlag::S_IFCHR,
            mode,
            nix::sys::stat::makedev(1, 3),
        );
        say(made.map_err(io::Error::from)) + &facts(w.at("null"))
    }),
];

/// What permissions are about. The directories are made by root; see `furnish`.
const PERMISSIONS: &[Step] = &[
    ("create in the team's directory", |w| {
        say(fs::write(w.at("team/file"), "x")) + &facts(w.at("team/file"))
    }),
    ("list the team's directory", |w| {
        say(fs::read_dir(w.at("team")).map(|d| d.count()))
    }),
    ("create in the strangers' directory", |w| {
        say(fs::write(w.at("strangers/file"), "x"))
    }),
    ("list the strangers' directory", |w| {
        say(fs::read_dir(w.at("strangers")).map(drop))
    }),
    ("read the team's file", |w| text(w.at("team-file"))),
    ("write the team's file", |w| {
        say(OpenOptions::new()
            .write(true)
            .open(w.at("team-file"))
            .and_then(|f| f.write_all_at(b"T", 0)))
    }),
    ("read root's file", |w| text(w.at("root-file"))),
    ("access root's file", |w| {
        tell(accessat(
            CWD,
            w.at("root-file"),
            Access::READ_OK,
            AtFlags::empty(),
        ))
    }),
    ("access the team's file", |w| {
        tell(accessat(
            CWD,
            w.at("team-file"),
            Access::WRITE_OK,
            AtFlags::empty(),
        ))
    }),
    ("chmod root's file", |w| {
        say(fs::set_permissions(
            w.at("root-file"),
            Permissions::from_mode(0o777),
        ))
    }),
    ("touch the team's file", |w| {
        tell(rustix::fs::utimensat(
            CWD,
            w.at("team-file"),
            &now(),
            AtFlags::empty(),
        ))
    }),
    ("set another's times", |w| {
        let time = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        tell(rustix::fs::utimensat(
            CWD,
            w.at("team-file"),
            &times,
            AtFlags::empty(),
        ))
    }),
    ("O_NOATIME of another's file", |w| {
        say(OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOATIME)
            .open(w.at("team-file"))
            .map(drop))
    }),
    ("link another's file", |w| {
        say(fs::hard_link(w.at("root-file"), w.at("linked")))
    }),
    ("create in a setgid directory", |w| {
        say(fs::write(w.at("setgid/file"), "x")) + &facts(w.at("setgid/file"))
    }),
    ("mkdir in a setgid directory", |w| {
        say(fs::create_dir(w.at("setgid/dir"))) + &facts(w.at("setgid/dir"))
    }),
    (
        "setgid executable in the strangers' setgid directory",
        |w| {
            let made = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o2755)
                .open(w.at("setgid-strangers/exe"));
            say(made.map(drop)) + &facts(w.at("setgid-strangers/exe"))
        },
    ),
    ("chmod g+s of a file of the strangers", |w| {
        say(fs::set_permissions(
            w.at("setgid-strangers/exe"),
            Permissions::from_mode(0o2755),
        )) + &facts(w.at("setgid-strangers/exe"))
    }),
    ("mkdir in the strangers' setgid directory", |w| {
        say(fs::create_dir(w.at("setgid-strangers/dir"))) + &facts(w.at("setgid-strangers/dir"))
    }),
    ("tmpfile in a setgid directory", |w| {
        let f = OpenOptions::new()
            .write(true)
            .mode(0o660)
            .custom_flags(libc::O_TMPFILE)
            .open(w.at("setgid"));
        say(f
            .and_then(|f| f.metadata())
            .map(|m| (m.uid(), m.gid(), m.mode())))
    }),
    ("create under a default ACL", |w| {
        let made = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o666)
            .open(w.at("acl/file"));
        say(made.map(drop)) + &facts(w.at("acl/file"))
    }),
    ("mkdir under a default ACL", |w| {
        say(fs::create_dir(w.at("acl/dir"))) + &facts(w.at("acl/dir"))
    }),
    ("mkfifo under a default ACL", |w| {
        say(nix::unistd::mkfifo(
            &w.at("acl/fifo"),
            nix::sys::stat::Mode::from_bits_truncate(0o666),
        )
        .map_err(io::Error::from))
            + &facts(w.at("acl/fifo"))
    }),
    ("the ACL that came of it", |w| {
        say(xattr(&w.at("acl/file"), "system.posix_acl_access"))
            + &say(xattr(&w.at("acl/dir"), "system.posix_acl_default"))
    }),
    ("chmod changes the ACL's mask", |w| {
        say(fs::set_permissions(
            w.at("acl/file"),
            Permissions::from_mode(0o640),
        )) + &say(xattr(&w.at("acl/file"), "system.posix_acl_access"))
    }),
    ("read what an ACL allows", |w| text(w.at("acl-allows"))),
    ("write what an ACL only lets read", |w| {
        say(OpenOptions::new()
            .write(true)
            .open(w.at("acl-allows"))
            .map(drop))
    }),
    ("read what an ACL forbids", |w| text(w.at("acl-forbids"))),
    ("set an ACL on another's file", |w| {
        set_xattr(
            w.at("acl-allows"),
            "system.posix_acl_access",
            &acl(&[(1, 7, !0), (4, 7, !0), (32, 7, !0)]),
            XattrFlags::empty(),
        )
    }),
    ("set an ACL on a file of one's own", |w| {
        fs::write(w.at("own"), "x").unwrap();
        set_xattr(
            w.at("own"),
            "system.posix_acl_access",
            &acl(&[
                (1, 6, !0),
                (2, 4, 1234),
                (4, 4, !0),
                (16, 4, !0),
                (32, 0, !0),
            ]),
            XattrFlags::empty(),
        ) + &facts(w.at("own"))
    }),
    ("set an ACL that is no ACL", |w| {
        set_xattr(
            w.at("own"),
            "system.posix_acl_access",
            b"nonsense",
            XattrFlags::empty(),
        )
    }),
    ("remove the ACL", |w| {
        tell(rustix::fs::removexattr(
            w.at("own"),
            "system.posix_acl_access",
        )) + &facts(w.at("own"))
    }),
    ("unlink another's file in a sticky directory", |w| {
        say(fs::remove_file(w.at("sticky/root")))
    }),
    ("rename another's file in a sticky directory", |w| {
        say(fs::rename(w.at("sticky/root"), w.at("sticky/mine")))
    }),
    ("rename over another's file in a sticky directory", |w| {
        fs::write(w.at("sticky/own"), "own").unwrap();
        say(fs::rename(w.at("sticky/own"), w.at("sticky/root")))
    }),
    ("unlink one's own file in a sticky directory", |w| {
        say(fs::remove_file(w.at("sticky/own")))
    }),
    ("write to a setuid file of another", |w| {
        say(OpenOptions::new()
            .write(true)
            .open(w.at("setuid"))
            .and_then(|f| f.write_all_at(b"x", 0)))
            + &facts(w.at("setuid"))
    }),
    ("allocate in a setuid file of another", |w| {
        say(OpenOptions::new()
            .write(true)
            .open(w.at("setuid2"))
            .and_then(|f| Ok(fallocate(f, FallocateFlags::empty(), 0, 9000)?)))
            + &facts(w.at("setuid2"))
    }),
    ("copy into a setuid file of another", |w| {
        let to = OpenOptions::new()
            .write(true)
            .open(w.at("setuid5"))
            .unwrap();
        let from = File::open(w.at("team-file")).unwrap();
        tell(rustix::fs::copy_file_range(
            &from,
            Some(&mut 0),
            &to,
            Some(&mut 0),
            4,
        )) + &facts(w.at("setuid5"))
    }),
    ("truncate a setuid file of another", |w| {
        say(nix::unistd::truncate(&w.at("setuid3"), 1).map_err(io::Error::from))
            + &facts(w.at("setuid3"))
    }),
    ("O_TRUNC of a setuid file of another", |w| {
        say(fs::write(w.at("setuid4"), "")) + &facts(w.at("setuid4"))
    }),
    ("chgrp drops setuid", |w| {
        fs::write(w.at("own2"), "x").unwrap();
        fs::set_permissions(w.at("own2"), Permissions::from_mode(0o6755)).unwrap();
        say(chown(w.at("own2"), None, Some(TEAM))) + &facts(w.at("own2"))
    }),
    ("a file only its creator's open can write", |w| {
        let f = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o400)
            .open(w.at("readonly"));
        w.keep("readonly", f)
    }),
    ("write to it", |w| {
        say(w.file("readonly").write_all_at(b"written", 0))
    }),
    ("take all rights away", |w| {
        say(fs::set_permissions(
            w.at("readonly"),
            Permissions::from_mode(0o0),
        ))
    }),
    ("write to it still", |w| {
        say(w.file("readonly").write_all_at(b"again", 7)) + &facts(w.at("readonly"))
    }),
    ("open it again", |w| text(w.at("readonly"))),
    ("keep a file of the team open", |w| {
        let f = rw(w.at("team-file"));
        w.keep("team-file", f)
    }),
    ("root closes the directory", |_| "root".into()),
    ("write to it nevertheless", |w| {
        say(w.file("team-file").write_all_at(b"!", 1))
    }),
    ("execute by group", |w| {
        use std::os::unix::process::CommandExt;
        let mut command = std::process::Command::new(w.at("team-exe"));
        command.uid(USER).gid(USER);
        say(command.status().map(|s| s.code()))
    }),
];

fn now() -> Timestamps {
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: rustix::fs::UTIME_NOW,
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

/// Version 2 of the attribute: tag, permissions, id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(perm.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// A lock of an open file description.
fn ofd(file: &File, command: i32, kind: i32, start: i64, len: i64) -> String {
    use nix::fcntl::{FcntlArg, fcntl};
    let mut lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    let done = fcntl(
        file,
        match command {
            libc::F_OFD_GETLK => FcntlArg::F_OFD_GETLK(&mut lock),
            libc::F_OFD_SETLKW => FcntlArg::F_OFD_SETLKW(&lock),
            _ => FcntlArg::F_OFD_SETLK(&lock),
        },
    );
    let done = say(done.map_err(io::Error::from));
    format!("{done} {} {} {}", lock.l_type, lock.l_start, lock.l_len)
}

fn xattr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let mut value = vec![0; 4096];
    let len = rustix::fs::lgetxattr(path, name, &mut value)?;
    value.truncate(len);
    Ok(value)
}

fn xattr_names(path: &Path) -> io::Result<Vec<String>> {
    let mut list = vec![0u8; 4096];
    let len = rustix::fs::llistxattr(path, &mut list)?;
    let names = list[..len].split(|&b| b == 0).filter(|n| !n.is_empty());
    let mut names: Vec<String> = names
        .map(|n| String::from_utf8_lossy(n).into_owned())
        .collect();
    names.sort();
    Ok(names)
}

// ---- actors --------------------------------------------------------------------------------------

/// Who acts.
#[derive(Clone, Copy, PartialEq)]
enum Who {
    Root,
    User,
}

/// A thread with the credentials of a user that does one step after the other.
struct Actor {
    steps: mpsc::Sender<Step>,
    answers: mpsc::Receiver<String>,
    thread: JoinHandle<()>,
}

impl Actor {
    fn new(who: Who, dir: PathBuf) -> Actor {
        let (steps, todo) = mpsc::channel::<Step>();
        let (done, answers) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            // A mask and a working directory of its own.
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).unwrap();
            rustix::process::umask(Mode::from_raw_mode(0o027));
            if who == Who::User {
                let (uid, gid) = (Uid::from_raw(USER), Gid::from_raw(USER));
                rustix::thread::set_thread_groups(&[Gid::from_raw(TEAM)]).unwrap();
                rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            }
            let mut world = World {
                dir,
                files: HashMap::new(),
                maps: Vec::new(),
                listing: None,
                names: Vec::new(),
            };
            for (_, step) in todo {
                if done.send(step(&mut world)).is_err() {
                    return;
                }
            }
        });
        Actor {
            steps,
            answers,
            thread,
        }
    }

    fn does(&self, step: Step) -> String {
        self.steps.send(step).unwrap();
        match self.answers.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(e) => panic!("{}: {e}", step.0),
        }
    }

    fn leave(self) {
        drop(self.steps);
        self.thread.join().unwrap();
    }
}

/// What the steps about permissions find. Made by root, on the mount as in the twin.
fn furnish(dir: &Path) {
    let make = |name: &str, mode: u32, gid: u32| {
        let path = dir.join(name);
        fs::create_dir(&path).unwrap();
        chown(&path, Some(0), Some(gid)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    };
    let file = |name: &str, mode: u32, gid: u32| {
        let path = dir.join(name);
        fs::write(&path, name).unwrap();
        chown(&path, Some(0), Some(gid)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    };
    make("team", 0o770, TEAM);
    make("strangers", 0o770, STRANGERS);
    make("setgid", 0o2777, TEAM);
    make("setgid-strangers", 0o2777, STRANGERS);
    make("sticky", 0o1777, 0);
    make("acl", 0o777, 0);
    file("team-file", 0o660, TEAM);
    file("root-file", 0o600, 0);
    file("sticky/root", 0o666, 0);
    for name in ["setuid", "setuid2", "setuid3", "setuid4", "setuid5"] {
        file(name, 0o6777, STRANGERS);
    }
    file("acl-allows", 0o600, 0);
    file("acl-forbids", 0o644, 0);
    let set = |name: &str, which: &str, entries: &[(u16, u16, u32)]| {
        let name_of = format!("system.posix_acl_{which}");
        rustix::fs::setxattr(
            dir.join(name),
            &*name_of,
            &acl(entries),
            XattrFlags::empty(),
        )
        .unwrap();
    };
    // Owner, user, group, mask, others.
    set(
        "acl",
        "default",
        &[
            (1, 7, !0),
            (2, 7, 1234),
            (4, 5, !0),
            (16, 7, !0),
            (32, 1, !0),
        ],
    );
    set(
        "acl-allows",
        "access",
        &[
            (1, 6, !0),
            (2, 4, USER),
            (4, 0, !0),
            (16, 4, !0),
            (32, 0, !0),
        ],
    );
    set(
        "acl-forbids",
        "access",
        &[
            (1, 6, !0),
            (2, 0, USER),
            (4, 4, !0),
            (16, 4, !0),
            (32, 4, !0),
        ],
    );
    fs::copy("/bin/true", dir.join("team-exe")).unwrap();
    chown(dir.join("team-exe"), Some(0), Some(USER)).unwrap();
    fs::set_permissions(dir.join("team-exe"), Permissions::from_mode(0o710)).unwrap();
}

// ---- trees ---------------------------------------------------------------------------------------

/// Everything that can be seen of a tree, one line per object.
fn tree(dir: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            let m = fs::symlink_metadata(&path).unwrap();
            let kind = m.file_type();
            let content = if kind.is_symlink() {
                fs::read_link(&path)
                    .unwrap()
                    .as_os_str()
                    .as_bytes()
                    .to_vec()
            } else if kind.is_file() {
                fs::read(&path).unwrap()
            } else {
                Vec::new()
            };
            if kind.is_dir() {
                todo.push(path.clone());
            }
            assert!(!kind.is_socket());
            let sum = content.iter().enumerate().fold(0u64, |sum, (n, &b)| {
                sum.wrapping_mul(31).wrapping_add(u64::from(b) + n as u64)
            });
            let size = if kind.is_dir() { 0 } else { m.len() };
            let names = xattr_names(&path).unwrap();
            let xattrs: Vec<_> = names
                .into_iter()
                .map(|name| (xattr(&path, &name), name))
                .map(|(value, name)| format!("{name}={value:?}"))
                .collect();
            lines.push(format!(
                "{} {:o} {}:{} nlink {} rdev {} size {size} sum {sum:x} {xattrs:?}",
                path.strip_prefix(dir).unwrap().display(),
                m.mode(),
                m.uid(),
                m.gid(),
                m.nlink(),
                m.rdev(),
            ));
        }
    }
    lines.sort();
    lines
}

/// Times as the mount has them and as the source has them.
fn times(dir: &Path, names: &[String]) -> Vec<String> {
    let names = names.iter().map(|line| line.split(' ').next().unwrap());
    let stamp = |name: &str| {
        let m = fs::symlink_metadata(dir.join(name)).unwrap();
        let (mtime, ctime) = ((m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec()));
        format!("{name} {mtime:?} {ctime:?} {}", m.blocks())
    };
    names.map(stamp).collect()
}

fn assert_same(what: &str, left: &[String], right: &[String]) {
    let differing: Vec<String> = left
        .iter()
        .filter(|line| !right.contains(line))
        .map(|line| format!("- {line}"))
        .chain(
            right
                .iter()
                .filter(|line| !left.contains(line))
                .map(|line| format!("+ {line}")),
        )
        .collect();
    assert!(differing.is_empty(), "{what}:\n{}", differing.join("\n"));
}

// ---- tests ---------------------------------------------------------------------------------------

fn behaves_like_itself(store: &str) {
    let store = LoopFs::new(store);
    let on = store.path();
    let mount = Mount::with(&Options {
        on: Some(&on),
        args: &[],
        ..Options::default()
    });
    let mut wrong = Vec::new();
    for who in [Who::Root, Who::User] {
        let name = if who == Who::Root { "root" } else { "user" };
        let (front, twin) = (mount.path(name), on.join(format!("twin-{name}")));
        for dir in [&front, &twin] {
            fs::create_dir(dir).unwrap();
            open_to_all(dir);
            furnish(dir);
        }
        let (actor, native) = (
            Actor::new(who, front.clone()),
            Actor::new(who, twin.clone()),
        );
        for (number, step) in STEPS.iter().chain(PERMISSIONS).enumerate() {
            // Half of the steps meet the outage, half the new generation.
            if number % 2 == 0 {
                mount.kill_backend();
            } else {
                mount.replace_backend();
            }
            if step.0 == "root closes the directory" {
                for dir in [&front, &twin] {
                    fs::set_permissions(dir.join("team-file"), Permissions::from_mode(0o0))
                        .unwrap();
                }
            }
            let (seen, expected) = (actor.does(*step), native.does(*step));
            if seen != expected {
                wrong.push(format!(
                    "{name}: {}: {seen}, in the store {expected}",
                    step.0
                ));
            }
        }
        actor.leave();
        native.leave();
        assert_eq!(wrong, [""; 0], "\n{}", mount.log_text());
        mount.replace_backend();
        let seen = tree(&front);
        assert_same("mount and twin", &seen, &tree(&twin));
        let behind = mount.behind(name);
        assert_same("mount and source", &seen, &tree(&behind));
        assert_same("times", &times(&front, &seen), &times(&behind, &seen));
    }
    let end = mount.wait("idle", |s| s.open_files + s.open_dirs + s.locks == 0);
    assert_eq!((end.poisoned, end.ambiguous, end.lost_locks), (0, 0, 0));
    eprintln!("{} deaths", end.takeovers);
    mount.end();
    drop(store);
}

#[test]
fn ext4_behaves_like_itself() {
    behaves_like_itself("ext4");
}

#[test]
fn xfs_behaves_like_itself() {
    behaves_like_itself("xfs");
}

#[test]
fn tmpfs_behaves_like_itself() {
    behaves_like_itself("tmpfs");
}

#[test]
fn overlayfs_behaves_like_itself() {
    behaves_like_itself("overlay");
}

/// One thread's life: every change of it happens exactly once, so each step knows its answer.
fn live(dir: &Path, thread: usize, end: std::time::Instant) -> usize {
    let at = |name: &str| dir.join(format!("{thread}-{name}"));
    let mut rounds = 0;
    let mut log = OpenOptions::new()
        .append(true)
        .create(true)
        .open(at("log"))
        .unwrap();
    let mut expected = String::new();
    while std::time::Instant::now() < end {
        let (a, b, c) = (at("a"), at("b"), at("c"));
        let mut file = File::create_new(&a).unwrap();
        file.write_all(b"content").unwrap();
        fs::hard_link(&a, &b).unwrap();
        assert_eq!(fs::symlink_metadata(&a).unwrap().nlink(), 2);
        fs::rename(&a, &c).unwrap();
        assert_eq!(say(fs::symlink_metadata(&a).map(drop)), "ENOENT");
        assert_eq!(say(fs::hard_link(&c, &b)), "EEXIST");
        fs::remove_file(&b).unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 1);
        fs::create_dir(&a).unwrap();
        assert_eq!(say(fs::create_dir(&a)), "EEXIST");
        fs::rename(&c, a.join("inside")).unwrap();
        assert_eq!(say(fs::remove_dir(&a)), "ENOTEMPTY");
        fs::rename(&a, &b).unwrap();
        symlink("nowhere", &c).unwrap();
        renameat_with(CWD, &c, CWD, &b, RenameFlags::EXCHANGE).unwrap();
        assert_eq!(fs::read_to_string(c.join("inside")).unwrap(), "content");
        fs::remove_file(c.join("inside")).unwrap();
        file.set_len(3).unwrap();
        let mut bytes = [0; 10];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 3);
        let unlinked = file.metadata().unwrap();
        assert_eq!((unlinked.nlink(), unlinked.len()), (0, 3));
        fs::remove_dir(&c).unwrap();
        fs::remove_file(&b).unwrap();
        assert_eq!(say(fs::remove_file(&b)), "ENOENT");
        let line = format!("round {rounds}\n");
        log.write_all(line.as_bytes()).unwrap();
        expected.push_str(&line);
        rounds += 1;
    }
    assert_eq!(fs::read_to_string(at("log")).unwrap(), expected);
    rounds
}

fn happens_once_in_a_crowd(store: &str) {
    let store = LoopFs::new(store);
    let on = store.path();
    let mount = Mount::with(&Options {
        on: Some(&on),
        args: &[],
        ..Options::default()
    });
    let end = std::time::Instant::now() + Duration::from_secs(if common::long() { 60 } else { 6 });
    let point = mount.point.clone();
    let (rounds, deaths) = mount.under_fire(Duration::from_millis(10), || {
        common::within(PATIENCE * 2, "the crowd", move || {
            let threads: Vec<_> = (0..8)
                .map(|n| {
                    let point = point.clone();
                    std::thread::spawn(move || live(&point, n, end))
                })
                .collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap())
                .sum::<usize>()
        })
    });
    let status = mount.status();
    eprintln!(
        "{rounds} rounds, {deaths} deaths, {} issued again, {} were done",
        status.reissued, status.verified_done
    );
    assert!(deaths > 20 && rounds > 20);
    assert_eq!((status.poisoned, status.ambiguous), (0, 0));
    assert_same(
        "mount and source",
        &tree(&mount.point),
        &tree(&mount.behind("")),
    );
    assert_eq!(tree(&mount.behind("")).len(), 8);
    mount.end();
    drop(store);
}

#[test]
fn every_change_in_a_crowd_happens_once_on_ext4() {
    happens_once_in_a_crowd("ext4");
}

#[test]
fn every_change_in_a_crowd_happens_once_on_overlayfs() {
    happens_once_in_a_crowd("overlay");
}
