//! Naming objects so that a later generation finds the same ones.
//!
//! Two ways, chosen once when the source is opened:
//!
//! * **file handles** (`name_to_handle_at(2)`), where the file system has them and this process may
//!   open them. They find an object whatever it is called by now, and a reused inode number has
//!   another generation.
//! * **paths**: device, inode number and birth time, found again by walking from the root and
//!   comparing. For overlayfs and for processes without CAP_DAC_READ_SEARCH. An object another
//!   client renamed is not found (ESTALE).
//!
//! The bytes: a tag, then the handle or the numbers in host byte order. A table holds one identity
//! per inode the kernel knows, so they are kept short: ten bytes on ext4.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags, fstatfs, openat2, statx};

use super::Dir;
use crate::region::Identity;
use crate::sys::FileHandle;
use crate::wire::Errno;

/// A file handle whose type fits into one byte (all known ones do): tag, type, handle.
const HANDLE: u8 = 1;
/// A file handle of any type: tag, four bytes of type, handle.
const LONG_HANDLE: u8 = 2;
/// Device, inode number, birth seconds and nanoseconds.
const NUMBERS: u8 = 3;

/// What every statx asks for.
const STAT: StatxFlags = StatxFlags::BASIC_STATS
    .union(StatxFlags::BTIME)
    .union(StatxFlags::MNT_ID);

/// How objects are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// By file handle.
    Handles,
    /// By numbers, found by walking.
    Paths {
        /// The birth time belongs to the object. Not so on overlayfs, where a copy-up makes a new
        /// file below with a new birth time.
        births: bool,
    },
}

/// An object and what it is.
pub(super) struct Found {
    pub(super) id: Identity,
    pub(super) stat: Statx,
}

impl Naming {
    /// Handles if this process can open the handle of `root`. An error is neither yes nor no.
    pub(super) fn probe(root: BorrowedFd<'_>) -> std::io::Result<Naming> {
        let open = FileHandle::of(root, c"").and_then(|h| h.open(root, libc::O_PATH));
        match open.as_ref().map_err(std::io::Error::raw_os_error) {
            Ok(_) => Ok(Naming::Handles),
            Err(Some(
                libc::EOPNOTSUPP
                | libc::EPERM
                | libc::EACCES
                | libc::ENOSYS
                | libc::ESTALE
                | libc::EOVERFLOW
                | libc::EINVAL,
            )) => Naming::paths(root),
            Err(_) => open.map(|_| Naming::Handles),
        }
    }

    /// Paths, whether or not handles would work.
    pub(super) fn paths(root: BorrowedFd<'_>) -> std::io::Result<Naming> {
        const OVERLAYFS: u64 = 0x794c_7630;
        let births = fstatfs(root)?.f_type as u64 != OVERLAYFS;
        Ok(Naming::Paths { births })
    }

    /// The identity of an open object.
    pub(super) fn identify(self, fd: BorrowedFd<'_>) -> Result<Identity, Errno> {
        match self {
            Naming::Handles => from_handle(&FileHandle::of(fd, c"")?),
            Naming::Paths { .. } => Ok(self.numbers_of(&stat(fd)?)),
        }
    }

    fn numbers_of(self, st: &Statx) -> Identity {
        let births = self != (Naming::Paths { births: false });
        let birth = if births && st.stx_mask & StatxFlags::BTIME.bits() != 0 {
            (st.stx_btime.tv_sec, st.stx_btime.tv_nsec)
        } else {
            (0, 0)
        };
        let mut bytes = Vec::with_capacity(29);
        bytes.push(NUMBERS);
        bytes.extend_from_slice(&st.stx_dev_major.to_ne_bytes());
        bytes.extend_from_slice(&st.stx_dev_minor.to_ne_bytes());
        bytes.extend_from_slice(&st.stx_ino.to_ne_bytes());
        bytes.extend_from_slice(&birth.0.to_ne_bytes());
        bytes.extend_from_slice(&birth.1.to_ne_bytes());
        Identity::new(&bytes).unwrap_or_default() // 29 bytes always fit
    }
}

fn from_handle(handle: &FileHandle) -> Result<Identity, Errno> {
    let kind = handle.kind.to_ne_bytes();
    let short = u8::try_from(handle.kind).map(|kind| [HANDLE, kind]);
    let long = [LONG_HANDLE, kind[0], kind[1], kind[2], kind[3]];
    let prefix = short.as_ref().map_or(&long[..], |short| &short[..]);
    let body = handle.bytes.get(..usize::from(handle.len));
    let bytes = [prefix, body.ok_or(Errno::EOVERFLOW)?].concat();
    Identity::new(&bytes).ok_or(Errno::EOVERFLOW)
}

fn to_handle(id: &Identity) -> Option<FileHandle> {
    let (kind, body) = match id.as_bytes_ref() {
        [HANDLE, kind, body @ ..] => (i32::from(*kind), body),
        [LONG_HANDLE, a, b, c, d, body @ ..] => (i32::from_ne_bytes([*a, *b, *c, *d]), body),
        _ => return None,
    };
    let mut bytes = [0; FileHandle::MAX];
    bytes.get_mut(..body.len())?.copy_from_slice(body);
    Some(FileHandle {
        kind,
        len: body.len() as u8,
        bytes,
    })
}

/// What the kernel knows of an open object, `O_PATH` or not.
pub(super) fn stat(fd: impl AsFd) -> Result<Statx, Errno> {
    Ok(statx(fd, c"", AtFlags::EMPTY_PATH, STAT)?)
}

fn stat_name(dir: BorrowedFd<'_>, name: &CStr) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    Ok(statx(dir, name, flags, STAT)?)
}

impl Dir {
    /// The object a name refers to: identity and attributes of the same object.
    pub(super) fn look(&self, dir: BorrowedFd<'_>, name: &CStr) -> Result<Found, Errno> {
        let found = match self.naming {
            Naming::Paths { .. } => {
                let stat = stat_name(dir, name)?;
                Found {
                    id: self.naming.numbers_of(&stat),
                    stat,
                }
            }
            Naming::Handles => {
                // Two calls cannot see one state of the directory. When the handle is the same
                // before and after, the attributes between them are of that object; cheaper than to
                // open and close it.
                let mut handle = FileHandle::of(dir, name)?;
                loop {
                    let stat = stat_name(dir, name)?;
                    let after = FileHandle::of(dir, name)?;
                    if after == handle {
                        let id = from_handle(&handle)?;
                        break Found { id, stat };
                    }
                    handle = after;
                }
            }
        };
        // Only where the source's mount could not be cloned: another file system is mounted here.
        // Its handles mean nothing on ours.
        if found.stat.stx_mnt_id != self.mount_id {
            return Err(Errno::EXDEV);
        }
        Ok(found)
    }

    /// Identity of what a name refers to, [`Identity::NONE`] if it is absent.
    pub(super) fn identity_of_name(
        &self,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<Identity, Errno> {
        let id = match self.naming {
            Naming::Handles => FileHandle::of(dir, name)
                .map_err(Errno::from)
                .and_then(|handle| from_handle(&handle)),
            Naming::Paths { .. } => stat_name(dir, name).map(|st| self.naming.numbers_of(&st)),
        };
        match id {
            Err(Errno::ENOENT) => Ok(Identity::NONE),
            id => id,
        }
    }

    /// An `O_PATH` descriptor of the object with this identity, at `path` if it has to be walked to.
    /// ESTALE: there is none any more.
    pub(super) fn find(&self, id: &Identity, path: &OsStr) -> Result<OwnedFd, Errno> {
        let found = match self.naming {
            Naming::Handles => to_handle(id).ok_or(Errno::ESTALE).and_then(|handle| {
                Ok(handle.open(self.anchor.as_fd(), libc::O_PATH | libc::O_NOFOLLOW)?)
            }),
            Naming::Paths { .. } => self.walk(path).and_then(|fd| {
                if self.naming.identify(fd.as_fd())? == *id {
                    Ok(fd)
                } else {
                    Err(Errno::ESTALE)
                }
            }),
        };
        match found {
            // All of these say that what was there is there no more.
            Err(
                Errno::ENOENT
                | Errno::ENOTDIR
                | Errno::ELOOP
                | Errno::EXDEV
                | Errno::EINVAL
                | Errno::EACCES,
            ) => Err(Errno::ESTALE),
            found => found,
        }
    }

    /// Opens a path below the root without following anything out of it. The path may be longer
    /// than the kernel takes at a time.
    fn walk(&self, path: &OsStr) -> Result<OwnedFd, Errno> {
        const STEP: usize = 3072;
        const HOW: ResolveFlags = ResolveFlags::BENEATH
            .union(ResolveFlags::NO_SYMLINKS)
            .union(ResolveFlags::NO_XDEV);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut rest = path.as_bytes();
        let mut at: Option<OwnedFd> = None;
        loop {
            let split = if rest.len() > STEP {
                rest[..STEP].iter().rposition(|&b| b == b'/')
            } else {
                None
            };
            let (step, tail) = split.map_or((rest, None), |n| (&rest[..n], Some(&rest[n + 1..])));
            let step = if step.is_empty() { b"." } else { step };
            let from = at.as_ref().map_or(self.root.as_fd(), OwnedFd::as_fd);
            let fd = openat2(from, step, flags, Mode::empty(), HOW)?;
            match tail {
                None => return Ok(fd),
                Some(tail) => (at, rest) = (Some(fd), tail),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_handle_is_kept_byte_for_byte() {
        for kind in [1, 0x97, 0x1234, -5] {
            let mut handle = FileHandle {
                kind,
                len: 8,
                bytes: [0; FileHandle::MAX],
            };
            handle.bytes[..8].copy_from_slice(b"\x01\0\xff\x03abcd");
            let id = from_handle(&handle).unwrap();
            assert_eq!(to_handle(&id), Some(handle));
        }
    }

    #[test]
    fn the_longest_file_handle_fits_an_identity() {
        let handle = FileHandle {
            kind: -1,
            len: FileHandle::MAX as u8,
            bytes: [7; FileHandle::MAX],
        };
        assert_eq!(to_handle(&from_handle(&handle).unwrap()), Some(handle));
    }

    #[test]
    fn bytes_that_are_no_identity_name_nothing() {
        for bytes in [&b""[..], b"\x01", b"\x02abc", b"\xffxyz"] {
            let id = Identity::new(bytes).unwrap();
            assert!(to_handle(&id).is_none());
        }
    }
}
