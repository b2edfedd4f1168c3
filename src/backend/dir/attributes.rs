//! Attributes: GETATTR, STATX, SETATTR, and the set-id bits.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::fs::{
    AtFlags, Gid, Mode, Statx as Stat, StatxAttributes, StatxFlags, StatxTimestamp, Timespec,
    Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat, chownat, utimensat,
};
use zerocopy::IntoBytes;

use super::identity::{Found, stat};
use super::{Answer, Attempt, Call, Dir};
use crate::backend::Replayed;
use crate::wire::Errno;
use crate::wire::abi::{
    Attr, AttrOut, EntryOut, SetattrIn, SetattrValid, Statx, StatxIn, StatxOut, SxTime,
};

/// A device number as the FUSE protocol has it: `new_encode_dev` of `linux/kdev_t.h`.
pub(super) fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The device number a MKNOD names.
pub(super) fn decode_dev(dev: u32) -> rustix::fs::Dev {
    rustix::fs::makedev((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xfff00))
}

fn attr(st: &Stat) -> Attr {
    Attr {
        ino: st.stx_ino,
        size: st.stx_size,
        blocks: st.stx_blocks,
        atime: st.stx_atime.tv_sec as u64,
        mtime: st.stx_mtime.tv_sec as u64,
        ctime: st.stx_ctime.tv_sec as u64,
        atimensec: st.stx_atime.tv_nsec,
        mtimensec: st.stx_mtime.tv_nsec,
        ctimensec: st.stx_ctime.tv_nsec,
        mode: st.stx_mode.into(),
        nlink: st.stx_nlink,
        uid: st.stx_uid,
        gid: st.stx_gid,
        rdev: encode_dev(st.stx_rdev_major, st.stx_rdev_minor),
        blksize: st.stx_blksize,
        flags: 0,
    }
}

/// A time of a file as nanoseconds since the epoch.
pub(super) fn nanoseconds(t: &StatxTimestamp) -> i128 {
    i128::from(t.tv_sec) * 1_000_000_000 + i128::from(t.tv_nsec)
}

/// Times of files come from a clock that ticks every few milliseconds, so a file made after a
/// request arrived may be stamped a little before.
pub(super) fn not_before(time: &StatxTimestamp, arrived_ns: u64) -> bool {
    const TICK_NS: i128 = 10_000_000;
    nanoseconds(time) >= i128::from(arrived_ns) - TICK_NS
}

impl Dir {
    /// What the kernel gets of an object it looks up.
    pub(super) fn entry(&self, found: &Found) -> EntryOut {
        let (entry_valid, entry_valid_nsec) = split(self.options.entry_timeout);
        let (attr_valid, attr_valid_nsec) = split(self.options.attr_timeout);
        EntryOut {
            nodeid: 0,
            generation: 0,
            entry_valid,
            attr_valid,
            entry_valid_nsec,
            attr_valid_nsec,
            attr: attr(&found.stat),
        }
    }

    fn attr_out(&self, st: &Stat) -> Answer {
        let (attr_valid, attr_valid_nsec) = split(self.options.attr_timeout);
        let out = AttrOut {
            attr_valid,
            attr_valid_nsec,
            dummy: 0,
            attr: attr(st),
        };
        Answer::Data(out.as_bytes().to_vec())
    }

    /// Attributes through the open file if this process has it, else through the node: a handle is
    /// never restored only to look.
    fn stat_request(&self, call: &Call<'_>) -> Result<Stat, Errno> {
        match self.handles.get(call.annex.handle.fh) {
            Some(file) => stat(&file.fd),
            None => stat(self.node(call)?),
        }
    }

    pub(super) fn getattr(&self, call: &Call<'_>) -> Result<Answer, Errno> {
        Ok(self.attr_out(&self.stat_request(call)?))
    }

    pub(super) fn statx(&self, call: &Call<'_>, arg: StatxIn) -> Result<Answer, Errno> {
        let st = self.stat_request(call)?;
        let (attr_valid, attr_valid_nsec) = split(self.options.attr_timeout);
        let time = |t: &StatxTimestamp| SxTime {
            sec: t.tv_sec,
            nsec: t.tv_nsec,
            reserved: 0,
        };
        // A mount root below is not one above.
        let hidden = (StatxAttributes::MOUNT_ROOT | StatxAttributes::AUTOMOUNT).bits();
        let wanted = StatxFlags::BASIC_STATS.bits() | arg.sx_mask & StatxFlags::BTIME.bits();
        let out = StatxOut {
            attr_valid,
            attr_valid_nsec,
            flags: 0,
            spare: [0; 2],
            stat: Statx {
                mask: st.stx_mask & wanted,
                blksize: st.stx_blksize,
                attributes: st.stx_attributes.bits() & !hidden,
                nlink: st.stx_nlink,
                uid: st.stx_uid,
                gid: st.stx_gid,
                mode: st.stx_mode,
                ino: st.stx_ino,
                size: st.stx_size,
                blocks: st.stx_blocks,
                attributes_mask: st.stx_attributes_mask.bits() & !hidden,
                atime: time(&st.stx_atime),
                btime: time(&st.stx_btime),
                ctime: time(&st.stx_ctime),
                mtime: time(&st.stx_mtime),
                rdev_major: st.stx_rdev_major,
                rdev_minor: st.stx_rdev_minor,
                dev_major: st.stx_dev_major,
                dev_minor: st.stx_dev_minor,
                ..Default::default()
            },
        };
        Ok(Answer::Data(out.as_bytes().to_vec()))
    }

    /// Size before a truncation, for the journal.
    pub(super) fn size_before(&self, call: &Call<'_>) -> Result<u64, Errno> {
        Ok(self.stat_request(call)?.stx_size)
    }

    pub(super) fn setattr(
        &self,
        call: &Call<'_>,
        arg: SetattrIn,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let valid = SetattrValid::from_bits_truncate(arg.valid);
        let node = self.node(call)?;
        if attempt.is_again() {
            let now = stat(&node)?;
            if has_values(&now, &arg, valid, call.annex.arrived_ns) {
                call.note(Replayed::Verified);
                return Ok(self.attr_out(&now));
            }
            call.note(Replayed::Reissued);
        }
        // In this order: a change of owner clears set-id bits (the file system does that itself),
        // an explicit mode has the last word on them, and a truncation moves the times.
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            let uid = (valid.contains(SetattrValid::UID)).then(|| Uid::from_raw(arg.uid));
            let gid = (valid.contains(SetattrValid::GID)).then(|| Gid::from_raw(arg.gid));
            chownat(&node, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if valid.contains(SetattrValid::MODE) {
            self.chmod(&node, arg.mode)?;
        }
        if valid.contains(SetattrValid::SIZE) {
            self.truncate(call, arg.size, attempt)?;
        }
        if kills_setid(valid) {
            self.clear_setid(&node)?;
        }
        if let Some(times) = times(&arg, valid) {
            utimensat(&node, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(self.attr_out(&stat(&node)?))
    }

    /// Sets the size. A second attempt does it only if nobody changed the size since the first one
    /// was made: bytes written after it must not be cut off.
    pub(super) fn truncate(
        &self,
        call: &Call<'_>,
        size: u64,
        attempt: Attempt<'_>,
    ) -> Result<(), Errno> {
        if let Attempt::Again(journal) = attempt {
            let now = self.size_before(call)?;
            if now == size {
                call.note(Replayed::Verified);
                return Ok(());
            }
            if now != journal.size {
                // Somebody wrote after our truncation, or instead of it: cannot be told apart.
                call.note(Replayed::Ambiguous);
                return Ok(());
            }
        }
        let length = i64::try_from(size).map_err(|_| Errno::EFBIG)?;
        match self.handles.get(call.annex.handle.fh) {
            Some(file) => nix::unistd::ftruncate(&file.fd, length)?,
            None => {
                let node = self.node(call)?;
                nix::unistd::truncate(proc_path(&node).as_str(), length)?;
            }
        }
        Ok(())
    }

    /// `fchmod(2)` for an `O_PATH` descriptor.
    pub(super) fn chmod(&self, fd: impl AsFd, mode: u32) -> Result<(), Errno> {
        let name = fd.as_fd().as_raw_fd().to_string();
        let mode = Mode::from_raw_mode(mode & 0o7777);
        Ok(chmodat(
            &self.descriptors,
            name.as_str(),
            mode,
            AtFlags::empty(),
        )?)
    }

    /// Takes the set-id bits away, as a write by an unprivileged process does
    /// (`setattr_should_drop_suidgid`). A set-gid bit without group execution is no privilege.
    pub(super) fn clear_setid(&self, fd: impl AsFd) -> Result<(), Errno> {
        let mode = u32::from(stat(&fd)?.stx_mode);
        let cleared = without_setid(mode);
        if cleared != mode {
            self.chmod(fd, cleared)?;
        }
        Ok(())
    }
}

/// `/proc/self/fd/N`: for the calls that know neither a directory descriptor nor `O_PATH`.
pub(super) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

fn split(timeout: Duration) -> (u64, u32) {
    (timeout.as_secs(), timeout.subsec_nanos())
}

fn without_setid(mode: u32) -> u32 {
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
fn kills_setid(valid: SetattrValid) -> bool {
    let changes = SetattrValid::SIZE | SetattrValid::UID | SetattrValid::GID;
    valid.contains(SetattrValid::KILL_SUIDGID)
        && valid.intersects(changes)
        && !valid.contains(SetattrValid::MODE)
}

fn times(arg: &SetattrIn, valid: SetattrValid) -> Option<Timestamps> {
    if !valid.intersects(SetattrValid::ATIME | SetattrValid::MTIME) {
        return None;
    }
    let time = |set, now, tv_sec: u64, nsec: u32| Timespec {
        tv_sec: tv_sec as i64,
        tv_nsec: if !valid.contains(set) {
            UTIME_OMIT
        } else if valid.contains(now) {
            UTIME_NOW
        } else {
            nsec.into()
        },
    };
    Some(Timestamps {
        last_access: time(
            SetattrValid::ATIME,
            SetattrValid::ATIME_NOW,
            arg.atime,
            arg.atimensec,
        ),
        last_modification: time(
            SetattrValid::MTIME,
            SetattrValid::MTIME_NOW,
            arg.mtime,
            arg.mtimensec,
        ),
    })
}

/// Every attribute that was asked for has its value.
fn has_values(st: &Stat, arg: &SetattrIn, valid: SetattrValid, arrived_ns: u64) -> bool {
    let mode = u32::from(st.stx_mode);
    let time = |set, now, t: &StatxTimestamp, sec: u64, nsec: u32| {
        !valid.contains(set)
            || if valid.contains(now) {
                not_before(t, arrived_ns)
            } else {
                t.tv_sec == sec as i64 && t.tv_nsec == nsec
            }
    };
    (!valid.contains(SetattrValid::MODE) || (mode ^ arg.mode) & 0o7777 == 0)
        && (!valid.contains(SetattrValid::UID) || st.stx_uid == arg.uid)
        && (!valid.contains(SetattrValid::GID) || st.stx_gid == arg.gid)
        && (!valid.contains(SetattrValid::SIZE) || st.stx_size == arg.size)
        && (!kills_setid(valid) || without_setid(mode) == mode)
        && time(
            SetattrValid::ATIME,
            SetattrValid::ATIME_NOW,
            &st.stx_atime,
            arg.atime,
            arg.atimensec,
        )
        && time(
            SetattrValid::MTIME,
            SetattrValid::MTIME_NOW,
            &st.stx_mtime,
            arg.mtime,
            arg.mtimensec,
        )
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
}
