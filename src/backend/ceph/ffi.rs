//! The part of libcephfs that is used, as `cephfs/libcephfs.h` declares it.
//!
//! The library is loaded when a `ceph:` source is opened, so building and all other sources need no
//! Ceph. The low-level API used here has had the same ABI from release 16.2 on; a test compiles the
//! installed header and compares every layout (`tests/cephfs_abi.rs`).

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::region::retained::Stamp;

/// File name of the library; the number is that of its ABI.
pub const LIBRARY: &str = "libcephfs.so.2";

/// `struct ceph_mount_info`: a client instance.
#[repr(C)]
pub struct CephMount {
    opaque: [u8; 0],
}

/// `struct Inode`.
#[repr(C)]
pub struct CephInode {
    opaque: [u8; 0],
}

/// `struct Fh`: an open file.
#[repr(C)]
pub struct CephFh {
    opaque: [u8; 0],
}

/// `struct ceph_dir_result`: an open directory.
#[repr(C)]
pub struct CephDir {
    opaque: [u8; 0],
}

/// `struct UserPerm`: who asks.
#[repr(C)]
pub struct CephPerms {
    opaque: [u8; 0],
}

/// `vinodeno_t`: an inode number and a snapshot. Passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Vino {
    /// Inode number, unique in the file system for ever.
    pub ino: u64,
    /// Number of a snapshot, [`NOSNAP`] or [`SNAPDIR`].
    pub snapid: u64,
}

/// `CEPH_NOSNAP`: the file as it is now.
pub const NOSNAP: u64 = -2i64 as u64;
/// `CEPH_SNAPDIR`: the directory `.snap`.
pub const SNAPDIR: u64 = -1i64 as u64;

/// `struct ceph_statx`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // fields are those of statx(2)
pub struct Statx {
    pub mask: u32,
    pub blksize: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub ino: u64,
    pub size: u64,
    pub blocks: u64,
    /// Number of the snapshot.
    pub dev: libc::dev_t,
    pub rdev: libc::dev_t,
    pub atime: libc::timespec,
    pub ctime: libc::timespec,
    pub mtime: libc::timespec,
    pub btime: libc::timespec,
    /// Grows with every change.
    pub version: u64,
}

impl Statx {
    /// Version and modification time, which were asked for.
    pub fn stamp(&self) -> Stamp {
        Stamp {
            version: self.version,
            sec: self.mtime.tv_sec,
            nsec: self.mtime.tv_nsec as u32,
            timed: 1,
        }
    }
}

impl Default for Statx {
    fn default() -> Statx {
        let never = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        Statx {
            mask: 0,
            blksize: 0,
            nlink: 0,
            uid: 0,
            gid: 0,
            mode: 0,
            ino: 0,
            size: 0,
            blocks: 0,
            dev: 0,
            rdev: 0,
            atime: never,
            ctime: never,
            mtime: never,
            btime: never,
            version: 0,
        }
    }
}

/// `CEPH_STATX_BASIC_STATS`.
pub const STATX_BASIC: c_uint = 0x7ff;
/// `AT_STATX_DONT_SYNC`, of the library: what is known here.
pub const DONT_SYNC: c_uint = 0x4000;
/// `CEPH_STATX_BTIME`.
pub const STATX_BTIME: c_uint = 0x800;

/// `CEPH_STATX_MTIME`.
pub const STATX_MTIME: c_uint = 0x40;
/// `CEPH_STATX_VERSION`.
pub const STATX_VERSION: c_uint = 0x1000;

/// `CEPH_SETATTR_*`.
pub mod setattr {
    #![allow(missing_docs)] // names are the header's
    use std::ffi::c_int;
    pub const MODE: c_int = 1 << 0;
    pub const UID: c_int = 1 << 1;
    pub const GID: c_int = 1 << 2;
    pub const MTIME: c_int = 1 << 3;
    pub const ATIME: c_int = 1 << 4;
    pub const SIZE: c_int = 1 << 5;
    pub const CTIME: c_int = 1 << 6;
    pub const MTIME_NOW: c_int = 1 << 7;
    pub const ATIME_NOW: c_int = 1 << 8;
}

/// `CEPH_DELEGATION_*`.
pub mod delegation {
    #![allow(missing_docs)] // names are the header's
    use std::ffi::c_uint;
    pub const NONE: c_uint = 0;
    pub const RD: c_uint = 1;
    pub const WR: c_uint = 2;
}

/// `CEPH_RECLAIM_RESET`: end the session, keep nothing of it.
pub const RECLAIM_RESET: c_uint = 1;

/// `struct ceph_client_callback_args`. What is `None` is never called.
#[repr(C)]
#[allow(missing_docs)] // names are the header's
pub struct CallbackArgs {
    pub handle: *mut c_void,
    pub ino_cb: Option<unsafe extern "C" fn(*mut c_void, Vino, i64, i64)>,
    pub dentry_cb: Option<unsafe extern "C" fn(*mut c_void, Vino, Vino, *const c_char, usize)>,
    pub switch_intr_cb: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
    pub remount_cb: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    pub umask_cb: Option<unsafe extern "C" fn(*mut c_void) -> libc::mode_t>,
    pub ino_release_cb: Option<unsafe extern "C" fn(*mut c_void, Vino)>,
}

macro_rules! functions {
    (@returned) => { None };
    (@returned $ret:ty) => { Some(stringify!($ret)) };
    ($($name:ident($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// What is believed of each function: its name, types of its arguments, and of what it
        /// returns, if anything. Compared with the header by `tests/cephfs_abi.rs`.
        pub const SIGNATURES: &[(&str, &[&str], Option<&str>)] = &[
            $((
                concat!("ceph_", stringify!($name)),
                &[$(stringify!($arg)),*],
                functions!(@returned $($ret)?),
            ),)*
        ];

        /// The functions of the library, each under its own name without `ceph_`.
        #[allow(missing_docs)]
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            /// Of later releases: refuses (EBUSY) when it is too late for callbacks.
            pub ll_register_callbacks2: Option<Register>,
            /// Never unloaded: its threads live as long as the process.
            _library: std::mem::ManuallyDrop<Library>,
        }

        impl Functions {
            /// Loads the library.
            pub fn load() -> Result<Functions, libloading::Error> {
                // SAFETY: constructors of the library are run as by any program linked to it.
                let library = unsafe { Library::new(LIBRARY) }?;
                Ok(Functions {
                    $($name: {
                        let symbol = concat!("ceph_", stringify!($name), "\0");
                        // SAFETY: the type is the header's; tests/cephfs_abi.rs checks it.
                        *unsafe { library.get(symbol.as_bytes()) }?
                    },)*
                    // SAFETY: as above, where the header has it.
                    ll_register_callbacks2: unsafe { library.get(b"ceph_ll_register_callbacks2\0") }
                        .map(|symbol| *symbol)
                        .ok(),
                    _library: std::mem::ManuallyDrop::new(library),
                })
            }
        }
    };
}

type Mount = *mut CephMount;
type Inode = *mut CephInode;
type Fh = *mut CephFh;
type Dir = *mut CephDir;
type Perms = *const CephPerms;
type Str = *const c_char;
type Register = unsafe extern "C" fn(Mount, *mut CallbackArgs) -> c_int;
type Recall = unsafe extern "C" fn(Fh, *mut c_void);

functions! {
    version(*mut c_int, *mut c_int, *mut c_int) -> *const c_char;
    create(*mut Mount, Str) -> c_int;
    init(Mount) -> c_int;
    release(Mount) -> c_int;
    conf_read_file(Mount, Str) -> c_int;
    conf_set(Mount, Str, Str) -> c_int;
    conf_get(Mount, Str, *mut c_char, usize) -> c_int;
    select_filesystem(Mount, Str) -> c_int;
    mount(Mount, Str) -> c_int;
    unmount(Mount) -> c_int;
    set_uuid(Mount, Str);
    start_reclaim(Mount, Str, c_uint) -> c_int;
    finish_reclaim(Mount);
    sync_fs(Mount) -> c_int;
    userperm_new(libc::uid_t, libc::gid_t, c_int, *mut libc::gid_t) -> *mut CephPerms;
    userperm_destroy(*mut CephPerms);
    ll_register_callbacks(Mount, *mut CallbackArgs);
    ll_lookup_root(Mount, *mut Inode) -> c_int;
    ll_lookup_vino(Mount, Vino, *mut Inode) -> c_int;
    ll_get_inode(Mount, Vino) -> Inode;
    ll_lookup(Mount, Inode, Str, *mut Inode, *mut Statx, c_uint, c_uint, Perms) -> c_int;
    ll_put(Mount, Inode) -> c_int;
    ll_getattr(Mount, Inode, *mut Statx, c_uint, c_uint, Perms) -> c_int;
    ll_setattr(Mount, Inode, *mut Statx, c_int, Perms) -> c_int;
    ll_open(Mount, Inode, c_int, *mut Fh, Perms) -> c_int;
    ll_create(Mount, Inode, Str, libc::mode_t, c_int, *mut Inode, *mut Fh, *mut Statx, c_uint, c_uint, Perms) -> c_int;
    ll_close(Mount, Fh) -> c_int;
    ll_readv(Mount, Fh, *const libc::iovec, c_int, i64) -> i64;
    ll_writev(Mount, Fh, *const libc::iovec, c_int, i64) -> i64;
    ll_fsync(Mount, Fh, c_int) -> c_int;
    ll_sync_inode(Mount, Inode, c_int) -> c_int;
    ll_fallocate(Mount, Fh, c_int, i64, i64) -> c_int;
    ll_mknod(Mount, Inode, Str, libc::mode_t, libc::dev_t, *mut Inode, *mut Statx, c_uint, c_uint, Perms) -> c_int;
    ll_mkdir(Mount, Inode, Str, libc::mode_t, *mut Inode, *mut Statx, c_uint, c_uint, Perms) -> c_int;
    ll_symlink(Mount, Inode, Str, Str, *mut Inode, *mut Statx, c_uint, c_uint, Perms) -> c_int;
    ll_link(Mount, Inode, Inode, Str, Perms) -> c_int;
    ll_unlink(Mount, Inode, Str, Perms) -> c_int;
    ll_rmdir(Mount, Inode, Str, Perms) -> c_int;
    ll_rename(Mount, Inode, Str, Inode, Str, Perms) -> c_int;
    ll_readlink(Mount, Inode, *mut c_char, usize, Perms) -> c_int;
    ll_getxattr(Mount, Inode, Str, *mut c_void, usize, Perms) -> c_int;
    ll_setxattr(Mount, Inode, Str, *const c_void, usize, c_int, Perms) -> c_int;
    ll_listxattr(Mount, Inode, *mut c_char, usize, *mut usize, Perms) -> c_int;
    ll_removexattr(Mount, Inode, Str, Perms) -> c_int;
    ll_statfs(Mount, Inode, *mut libc::statvfs) -> c_int;
    ll_opendir(Mount, Inode, *mut Dir, Perms) -> c_int;
    ll_releasedir(Mount, Dir) -> c_int;
    readdirplus_r(Mount, Dir, *mut libc::dirent, *mut Statx, c_uint, c_uint, *mut Inode) -> c_int;
    rewinddir(Mount, Dir);
    seekdir(Mount, Dir, i64);
    set_deleg_timeout(Mount, u32) -> c_int;
    ll_delegation(Mount, Fh, c_uint, Recall, *mut c_void) -> c_int;
    ll_getlk(Mount, Fh, *mut libc::flock, u64) -> c_int;
    ll_setlk(Mount, Fh, *mut libc::flock, u64, c_int) -> c_int;
}
