//! Between what the protocol says and what systems say: the parts all stores share.

use std::time::Duration;

use zerocopy::IntoBytes;

use super::Answer;
use crate::wire::Errno;
use crate::wire::abi::{Attr, AttrOut, EntryOut, FileLock, GetxattrOut, SetattrIn, SetattrValid};

/// How long the kernel may trust what it is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// Names.
    pub entry: Duration,
    /// Attributes.
    pub attr: Duration,
}

impl Timeouts {
    /// What the kernel gets of an object it looks up; the node id is added later.
    pub(super) fn entry(&self, attr: Attr) -> EntryOut {
        EntryOut {
            nodeid: 0,
            generation: 0,
            entry_valid: self.entry.as_secs(),
            attr_valid: self.attr.as_secs(),
            entry_valid_nsec: self.entry.subsec_nanos(),
            attr_valid_nsec: self.attr.subsec_nanos(),
            attr,
        }
    }

    /// The answer to GETATTR and SETATTR.
    pub(super) fn attr(&self, attr: Attr) -> Answer {
        let out = AttrOut {
            attr_valid: self.attr.as_secs(),
            attr_valid_nsec: self.attr.subsec_nanos(),
            dummy: 0,
            attr,
        };
        Answer::Data(out.as_bytes().to_vec())
    }
}

/// A device number as the FUSE protocol has it: `new_encode_dev` of `linux/kdev_t.h`.
pub(super) fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The device number a MKNOD names.
pub(super) fn decode_dev(dev: u32) -> rustix::fs::Dev {
    rustix::fs::makedev((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xfff00))
}

/// The mode without the bits a write by an unprivileged process takes away
/// (`setattr_should_drop_suidgid`). A set-gid bit without group execution is no privilege.
pub(super) fn without_setid(mode: u32) -> u32 {
    if mode & libc::S_IFMT != libc::S_IFREG {
        return mode;
    }
    let group = if mode & libc::S_IXGRP != 0 {
        libc::S_ISGID
    } else {
        0
    };
    mode & !(libc::S_ISUID | group)
}

/// The kernel wants the set-id bits gone (`FATTR_KILL_SUIDGID`) and does not give a mode itself.
pub(super) fn kills_setid(valid: SetattrValid) -> bool {
    let changes = SetattrValid::SIZE | SetattrValid::UID | SetattrValid::GID;
    valid.contains(SetattrValid::KILL_SUIDGID)
        && valid.intersects(changes)
        && !valid.contains(SetattrValid::MODE)
}

/// Every attribute a SETATTR asks for has its value. `since_ns`: a time that was to be "now" is not
/// older than this, nanoseconds since the epoch.
pub(super) fn has_values(
    attr: &Attr,
    arg: &SetattrIn,
    valid: SetattrValid,
    since_ns: i128,
) -> bool {
    let time = |set, now, is: (u64, u32), wanted: (u64, u32)| {
        !valid.contains(set)
            || if valid.contains(now) {
                nanoseconds(is.0 as i64, is.1) >= since_ns
            } else {
                is == wanted
            }
    };
    (!valid.contains(SetattrValid::MODE) || (attr.mode ^ arg.mode) & 0o7777 == 0)
        && (!valid.contains(SetattrValid::UID) || attr.uid == arg.uid)
        && (!valid.contains(SetattrValid::GID) || attr.gid == arg.gid)
        && (!valid.contains(SetattrValid::SIZE) || attr.size == arg.size)
        && (!kills_setid(valid) || without_setid(attr.mode) == attr.mode)
        && time(
            SetattrValid::ATIME,
            SetattrValid::ATIME_NOW,
            (attr.atime, attr.atimensec),
            (arg.atime, arg.atimensec),
        )
        && time(
            SetattrValid::MTIME,
            SetattrValid::MTIME_NOW,
            (attr.mtime, attr.mtimensec),
            (arg.mtime, arg.mtimensec),
        )
}

/// A time as nanoseconds since the epoch.
pub(super) fn nanoseconds(sec: i64, nsec: u32) -> i128 {
    i128::from(sec) * 1_000_000_000 + i128::from(nsec)
}

/// The last byte a lock can cover: `OFFSET_MAX`, which means "to the end".
pub(super) const LOCK_END: u64 = i64::MAX as u64;

/// `start..=end` as `fcntl(2)` takes it, where a length of 0 means "to the end".
pub(super) fn to_flock(lk: &FileLock) -> Result<libc::flock, Errno> {
    let kind = i32::try_from(lk.typ).unwrap_or(-1);
    if ![libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK].contains(&kind)
        || lk.start > LOCK_END
        || lk.end < lk.start
    {
        return Err(Errno::EINVAL);
    }
    let len = if lk.end >= LOCK_END {
        0
    } else {
        lk.end - lk.start + 1
    };
    Ok(libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: lk.start as i64,
        l_len: len as i64,
        l_pid: 0,
    })
}

/// The lock that was found to be in the way of `asked`, if one was.
pub(super) fn from_flock(found: &libc::flock, asked: &FileLock) -> FileLock {
    if i32::from(found.l_type) == libc::F_UNLCK {
        return FileLock {
            typ: libc::F_UNLCK as u32,
            ..*asked
        };
    }
    let start = found.l_start as u64;
    FileLock {
        start,
        end: match found.l_len {
            0 => LOCK_END,
            len => start.saturating_add(len as u64) - 1,
        },
        typ: found.l_type as u32,
        // Owners without a pid are -1.
        pid: u32::try_from(found.l_pid).unwrap_or(0),
    }
}

/// The answer to GETXATTR and LISTXATTR without room: how much there is.
pub(super) fn size_out(size: usize) -> Answer {
    let out = GetxattrOut {
        size: size as u32,
        padding: 0,
    };
    Answer::Data(out.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_the_protocol() {
        for (major, minor) in [(0, 0), (8, 1), (259, 0x12345), (0xfff, 0xfffff)] {
            let dev = decode_dev(encode_dev(major, minor));
            assert_eq!(
                (rustix::fs::major(dev), rustix::fs::minor(dev)),
                (major, minor)
            );
        }
    }

    #[test]
    fn a_setgid_bit_without_group_execution_stays() {
        let file = libc::S_IFREG;
        assert_eq!(without_setid(file | 0o6755), file | 0o755);
        assert_eq!(without_setid(file | 0o6745), file | 0o2745);
        assert_eq!(
            without_setid(libc::S_IFDIR | 0o2755),
            libc::S_IFDIR | 0o2755
        );
    }

    #[test]
    fn a_lock_is_the_same_after_the_way_there_and_back() {
        for (start, end) in [(0, LOCK_END), (0, 0), (5, 9), (7, LOCK_END)] {
            let lk = FileLock {
                start,
                end,
                typ: libc::F_WRLCK as u32,
                pid: 0,
            };
            assert_eq!(from_flock(&to_flock(&lk).unwrap(), &lk), lk);
        }
        let backwards = FileLock {
            start: 2,
            end: 1,
            typ: libc::F_WRLCK as u32,
            pid: 0,
        };
        assert_eq!(to_flock(&backwards).err(), Some(Errno::EINVAL));
    }
}
