//! The structs of `linux/fuse.h`, field for field. Names are the kernel's without `fuse_`.

#![allow(missing_docs)] // fields are documented where the kernel defines them

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! wire_structs {
    ($($(#[$m:meta])* $name:ident = $size:literal { $($field:ident : $ty:ty),* $(,)? })*) => {$(
        $(#[$m])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $(pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

wire_structs! {
    /// Begins every request.
    InHeader = 40 { len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16 }
    /// Begins every reply and every notification.
    OutHeader = 16 { len: u32, error: i32, unique: u64 }

    Attr = 88 { ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32 }
    SxTime = 16 { sec: i64, nsec: u32, reserved: i32 }
    Statx = 256 { mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16, ino: u64, size: u64, blocks: u64, attributes_mask: u64, atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime, rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14] }
    Kstatfs = 80 { blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32, padding: u32, spare: [u32; 6] }
    FileLock = 24 { start: u64, end: u64, typ: u32, pid: u32 }

    EntryOut = 128 { nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attr }
    AttrOut = 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    StatxOut = 288 { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Statx }
    OpenOut = 16 { fh: u64, open_flags: u32, backing_id: i32 }
    WriteOut = 8 { size: u32, padding: u32 }
    CopyFileRangeOut = 8 { bytes_copied: u64 }
    GetxattrOut = 8 { size: u32, padding: u32 }
    LkOut = 24 { lk: FileLock }
    LseekOut = 8 { offset: u64 }
    IoctlOut = 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    /// Followed by the name, padded to 8 bytes.
    Dirent = 24 { ino: u64, off: u64, namelen: u32, typ: u32 }

    ForgetIn = 8 { nlookup: u64 }
    ForgetOne = 16 { nodeid: u64, nlookup: u64 }
    BatchForgetIn = 8 { count: u32, dummy: u32 }
    GetattrIn = 16 { getattr_flags: u32, dummy: u32, fh: u64 }
    StatxIn = 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    SetattrIn = 88 { valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32 }
    MknodIn = 16 { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn = 8 { mode: u32, umask: u32 }
    RenameIn = 8 { newdir: u64 }
    Rename2In = 16 { newdir: u64, flags: u32, padding: u32 }
    LinkIn = 8 { oldnodeid: u64 }
    OpenIn = 8 { flags: u32, open_flags: u32 }
    CreateIn = 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    ReleaseIn = 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    FlushIn = 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    ReadIn = 40 { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteIn = 40 { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    FsyncIn = 16 { fh: u64, fsync_flags: u32, padding: u32 }
    /// As sent with `FUSE_SETXATTR_EXT`.
    SetxattrIn = 16 { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    GetxattrIn = 8 { size: u32, padding: u32 }
    LkIn = 48 { fh: u64, owner: u64, lk: FileLock, lk_flags: u32, padding: u32 }
    AccessIn = 8 { mask: u32, padding: u32 }
    InterruptIn = 8 { unique: u64 }
    FallocateIn = 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    LseekIn = 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
    CopyFileRangeIn = 56 { fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64 }
    IoctlIn = 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
    SyncfsIn = 8 { padding: u64 }
    BmapIn = 16 { block: u64, blocksize: u32, padding: u32 }
    PollIn = 24 { fh: u64, kh: u64, flags: u32, events: u32 }

    NotifyInvalInode = 24 { ino: u64, off: i64, len: i64 }
    NotifyInvalEntry = 16 { parent: u64, namelen: u32, flags: u32 }
}

/// The node id of the root of a mount (`FUSE_ROOT_ID`).
pub const ROOT_ID: u64 = 1;
/// Bit of `InHeader::unique` that marks a request delivered again (`FUSE_UNIQUE_RESEND`).
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// `fuse_notify_code`, sent in `OutHeader::error` with `unique` 0.
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    /// `FUSE_EXPIRE_ONLY`: look the name up again at its next use; keeps what is mounted below it.
    pub const EXPIRE_ONLY: u32 = 1;
}

bitflags::bitflags! {
    /// `FATTR_*`: which fields of [`SetattrIn`] count.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SetattrValid: u32 {
        const MODE = 1 << 0;
        const UID = 1 << 1;
        const GID = 1 << 2;
        const SIZE = 1 << 3;
        const ATIME = 1 << 4;
        const MTIME = 1 << 5;
        const FH = 1 << 6;
        const ATIME_NOW = 1 << 7;
        const MTIME_NOW = 1 << 8;
        const LOCKOWNER = 1 << 9;
        const CTIME = 1 << 10;
        const KILL_SUIDGID = 1 << 11;
    }
}

/// `FUSE_GETATTR_FH`: `GetattrIn::fh` is valid.
pub const GETATTR_FH: u32 = 1 << 0;
/// `FUSE_WRITE_KILL_SUIDGID`: the writer may not keep set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// `FUSE_OPEN_KILL_SUIDGID`, in `OpenIn::open_flags` and `CreateIn::open_flags`.
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// `FUSE_RELEASE_FLOCK_UNLOCK`.
pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// `FUSE_FSYNC_FDATASYNC`.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// `FUSE_LK_FLOCK`: a `flock(2)` lock.
pub const LK_FLOCK: u32 = 1 << 0;
/// `FUSE_SETXATTR_ACL_KILL_SGID`.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// Bytes of the reply to CREATE and TMPFILE: `EntryOut` and `OpenOut`.
pub const CREATE_OUT: usize = size_of::<EntryOut>() + size_of::<OpenOut>();
/// `FOPEN_DIRECT_IO`.
pub const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// `FOPEN_KEEP_CACHE`.
pub const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// `FUSE_IOCTL_DIR`.
pub const IOCTL_DIR: u32 = 1 << 4;

/// Bytes a directory entry takes in a READDIR reply (`FUSE_DIRENT_SIZE`).
pub fn dirent_size(namelen: usize) -> usize {
    (size_of::<Dirent>() + namelen).next_multiple_of(8)
}

/// Bytes a directory entry takes in a READDIRPLUS reply (`FUSE_DIRENTPLUS_SIZE`).
pub fn direntplus_size(namelen: usize) -> usize {
    (size_of::<EntryOut>() + size_of::<Dirent>() + namelen).next_multiple_of(8)
}
