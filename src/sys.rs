//! System calls that no crate wraps, each as a safe function.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::region::memory::{Span, iovecs};

fn check(ret: isize) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::last_os_error())
}

/// One heap for all threads of this process. Only of that one the allocator gives everything back
/// ([`give_memory_back`]); of a thread's own it keeps the end, which may be tens of megabytes.
pub fn use_one_heap() {
    // SAFETY: sets a number in the allocator. If it is refused, more memory is kept.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives what the allocator keeps of freed memory back to the system.
pub fn give_memory_back() {
    // SAFETY: only memory that is free; the allocator takes its own locks.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// No other process of this user may look into the memory of this one, and it leaves no core file:
/// it has a key.
pub fn keep_memory_private() -> io::Result<()> {
    // SAFETY: sets a flag of this process.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) } as isize)?;
    let none = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    Ok(rustix::process::setrlimit(
        rustix::process::Resource::Core,
        none,
    )?)
}

/// This process may have this many bytes of private memory (`RLIMIT_DATA`); asked for more, the
/// allocator fails.
pub fn limit_memory(bytes: u64) -> io::Result<()> {
    let limit = rustix::process::Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    Ok(rustix::process::setrlimit(
        rustix::process::Resource::Data,
        limit,
    )?)
}

/// Ends this process at once: no destructor runs, no thread is waited for.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: does not return.
    unsafe { libc::_exit(code) }
}

/// `readv(2)` into shared memory.
pub fn readv(fd: BorrowedFd<'_>, into: &[Span<'_>]) -> io::Result<usize> {
    // SAFETY: spans are valid for their lifetime; the kernel writes at most their length.
    check(unsafe { libc::readv(fd.as_raw_fd(), iovecs(into), into.len() as i32) })
}

/// `writev(2)` of bytes of this process and then from shared memory, in one message.
pub fn write_message(fd: BorrowedFd<'_>, head: &[u8], data: &[Span<'_>]) -> io::Result<usize> {
    let mut iov = vec![libc::iovec {
        iov_base: head.as_ptr().cast_mut().cast(),
        iov_len: head.len(),
    }];
    iov.extend(data.iter().map(Span::iovec));
    // SAFETY: `head` and the spans outlive the call, which only reads them.
    check(unsafe { libc::writev(fd.as_raw_fd(), iov.as_ptr(), iov.len() as i32) })
}

/// Children can be waited for, whatever this process inherited (`SIG_IGN` would make them vanish).
pub fn children_can_be_waited_for() {
    // SAFETY: the default action runs no code of ours.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
    }
}

/// `preadv(2)` into shared memory.
pub fn preadv(fd: BorrowedFd<'_>, into: &[Span<'_>], offset: u64) -> io::Result<usize> {
    // SAFETY: as for `readv`.
    check(unsafe {
        libc::preadv(
            fd.as_raw_fd(),
            iovecs(into),
            into.len() as i32,
            offset as i64,
        )
    })
}

/// `pwritev(2)` from shared memory.
pub fn pwritev(fd: BorrowedFd<'_>, from: &[Span<'_>], offset: u64) -> io::Result<usize> {
    // SAFETY: as for `readv`, reading.
    check(unsafe {
        libc::pwritev(
            fd.as_raw_fd(),
            iovecs(from),
            from.len() as i32,
            offset as i64,
        )
    })
}

/// Sleeps while `word` is `expected`, until woken or `timeout` (`FUTEX_WAIT`, shared between
/// processes). May return early for no reason.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let ts = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs() as i64,
        tv_nsec: i64::from(t.subsec_nanos()),
    });
    let ts = ts.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word is valid for the call, `ts` is null or points to a live timespec.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            ts,
        );
    }
}

/// Wakes up to `count` sleepers on `word` (`FUTEX_WAKE`, shared between processes).
pub fn futex_wake(word: &AtomicU32, count: u32) {
    // SAFETY: the word is valid for the call.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, count);
    }
}

/// Nanoseconds since the epoch (`CLOCK_REALTIME`), to compare with time stamps of files.
pub fn realtime_ns() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos() as u64)
}

/// Nanoseconds of a clock that never jumps (`CLOCK_MONOTONIC`), the same in every process.
pub fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// `pidfd_open(2)`.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the returned descriptor is new and owned by nobody else.
    unsafe {
        let fd = check(libc::syscall(libc::SYS_pidfd_open, pid, 0) as isize)?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Closes every descriptor above the standard ones. Only for the very beginning of a process, when
/// all of them were inherited and no value of this program owns one.
pub fn close_inherited() {
    // SAFETY: no pointers. Nothing in this process refers to a descriptor yet (see above). A kernel
    // without close_range (before Linux 5.9) fails it, and could not mount either.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32);
    }
}

/// Clones a mount without what is mounted below it (`open_tree(2)` with `OPEN_TREE_CLONE`), so that
/// a walk from it never crosses into another file system. Needs CAP_SYS_ADMIN.
pub fn clone_tree(root: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const OPEN_TREE_CLONE: u32 = 1;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as u32 | libc::AT_EMPTY_PATH as u32;
    // SAFETY: the path is a NUL-terminated literal; the returned descriptor is new.
    unsafe {
        let fd = libc::syscall(libc::SYS_open_tree, root.as_raw_fd(), c"".as_ptr(), flags);
        Ok(OwnedFd::from_raw_fd(check(fd as isize)? as i32))
    }
}

/// A `struct file_handle`: the type and up to 120 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHandle {
    /// `handle_type`.
    pub kind: i32,
    /// `handle_bytes`.
    pub len: u8,
    /// `f_handle`.
    pub bytes: [u8; FileHandle::MAX],
}

#[repr(C)]
struct RawHandle {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; FileHandle::MAX],
}

impl FileHandle {
    /// Longest handle kept; the kernel's limit is `MAX_HANDLE_SZ` = 128.
    pub const MAX: usize = 120;

    /// `name_to_handle_at(2)`. With an empty name, the handle of `dir` itself.
    pub fn of(dir: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<FileHandle> {
        let mut raw = RawHandle {
            handle_bytes: FileHandle::MAX as u32,
            handle_type: 0,
            f_handle: [0; FileHandle::MAX],
        };
        let mut mount_id = 0;
        let flags = if name.is_empty() {
            libc::AT_EMPTY_PATH
        } else {
            0
        };
        // SAFETY: `raw` has the layout of struct file_handle with room for `handle_bytes` bytes.
        check(unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                dir.as_raw_fd(),
                name.as_ptr(),
                &raw mut raw,
                &raw mut mount_id,
                flags,
            ) as isize
        })?;
        Ok(FileHandle {
            kind: raw.handle_type,
            len: raw.handle_bytes as u8,
            bytes: raw.f_handle,
        })
    }

    /// `open_by_handle_at(2)`. `mount` is any descriptor on the same mount. Needs
    /// CAP_DAC_READ_SEARCH.
    pub fn open(&self, mount: BorrowedFd<'_>, flags: i32) -> io::Result<OwnedFd> {
        let mut raw = RawHandle {
            handle_bytes: u32::from(self.len),
            handle_type: self.kind,
            f_handle: self.bytes,
        };
        // SAFETY: as in `of`; the returned descriptor is new.
        unsafe {
            let fd = libc::syscall(
                libc::SYS_open_by_handle_at,
                mount.as_raw_fd(),
                &raw mut raw,
                flags | libc::O_CLOEXEC,
            );
            Ok(OwnedFd::from_raw_fd(check(fd as isize)? as i32))
        }
    }
}

/// Gives the calling thread a file mode mask and working directory of its own (`CLONE_FS`), so that
/// each worker can have the umask of the request it serves.
pub fn unshare_fs() -> io::Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).map_err(io::Error::from)
}

/// Keeps the thread's capabilities when its file system uid changes (`SECBIT_NO_SETUID_FIXUP`):
/// access was decided by the kernel in front of the mount, with groups this process does not know.
pub fn keep_capabilities() -> io::Result<()> {
    const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) as isize })
        .map(drop)
}

/// A lock of an open file description (`F_OFD_SETLK`, `F_OFD_GETLK`).
///
/// For `get`, the returned lock is the conflicting one, or has type `F_UNLCK`.
pub fn ofd_lock(fd: impl AsFd, get: bool, mut lock: libc::flock) -> io::Result<libc::flock> {
    let cmd = if get {
        libc::F_OFD_GETLK
    } else {
        libc::F_OFD_SETLK
    };
    lock.l_pid = 0;
    // SAFETY: `lock` is a live struct flock.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), cmd, &raw mut lock) as isize })?;
    Ok(lock)
}

/// `getdents64(2)`: fills `into` with whole directory entries, 0 bytes at the end of the directory.
pub fn getdents64(directory: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most `into.len()` bytes into a unique borrow.
    check(unsafe {
        libc::syscall(
            libc::SYS_getdents64,
            directory.as_raw_fd(),
            into.as_mut_ptr(),
            into.len(),
        ) as isize
    })
}

/// The `ioctl(2)` requests about a file itself, which every file system understands alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileIoctl {
    /// `FS_IOC_GETFLAGS`: `chattr(1)` flags, an `int`.
    GetFlags,
    /// `FS_IOC_SETFLAGS`.
    SetFlags,
    /// `FS_IOC_GETVERSION`: the inode's generation, an `int`.
    GetVersion,
    /// `FS_IOC_FSGETXATTR`: a `struct fsxattr`.
    GetXattr,
    /// `FS_IOC_FSSETXATTR`.
    SetXattr,
}

impl FileIoctl {
    const ALL: [FileIoctl; 5] = [
        FileIoctl::GetFlags,
        FileIoctl::SetFlags,
        FileIoctl::GetVersion,
        FileIoctl::GetXattr,
        FileIoctl::SetXattr,
    ];

    /// The request with this number, if it is one of these.
    pub fn from_number(number: u32) -> Option<FileIoctl> {
        FileIoctl::ALL.into_iter().find(|r| r.number() == number)
    }

    /// Its number in `linux/fs.h`. The first three say `long` there and mean `int`.
    pub fn number(self) -> u32 {
        const READ: u32 = 2 << 30;
        const WRITE: u32 = 1 << 30;
        const fn encode(direction: u32, size: usize, group: u8, number: u32) -> u32 {
            direction | (size as u32) << 16 | (group as u32) << 8 | number
        }
        const LONG: usize = size_of::<libc::c_long>();
        match self {
            FileIoctl::GetFlags => encode(READ, LONG, b'f', 1),
            FileIoctl::SetFlags => encode(WRITE, LONG, b'f', 2),
            FileIoctl::GetVersion => encode(READ, LONG, b'v', 1),
            FileIoctl::GetXattr => encode(READ, 28, b'X', 31),
            FileIoctl::SetXattr => encode(WRITE, 28, b'X', 32),
        }
    }

    /// Bytes of its argument.
    pub fn size(self) -> usize {
        match self {
            FileIoctl::GetFlags | FileIoctl::SetFlags | FileIoctl::GetVersion => 4,
            FileIoctl::GetXattr | FileIoctl::SetXattr => 28,
        }
    }

    /// It changes the file.
    pub fn writes(self) -> bool {
        matches!(self, FileIoctl::SetFlags | FileIoctl::SetXattr)
    }

    /// Issues it. `argument` is read or filled; its first [`FileIoctl::size`] bytes count.
    pub fn issue(self, file: impl AsFd, argument: &mut [u8; 32]) -> io::Result<()> {
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: each of these requests reads or writes at most 28 bytes of a 32 byte array.
        check(unsafe { libc::ioctl(fd, self.number().into(), argument.as_mut_ptr()) as isize })
            .map(drop)
    }
}
