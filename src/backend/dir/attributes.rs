//! Attributes: GETATTR, STATX, SETATTR, and the set-id bits.

use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{
    AtFlags, Gid, Mode, Statx as Stat, StatxAttributes, StatxFlags, StatxTimestamp, Timespec,
    Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat, chownat, utimensat,
};
use zerocopy::IntoBytes;

use super::identity::{Found, stat};
use super::{Answer, Attempt, Call, Dir};
use crate::backend::Replayed;
use crate::backend::convert::{encode_dev, has_values, kills_setid, nanoseconds, without_setid};
use crate::wire::Errno;
use crate::wire::abi::{Attr, EntryOut, SetattrIn, SetattrValid, Statx, StatxIn, StatxOut, SxTime};

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

/// Times of files come from a clock that ticks every few milliseconds, so a file made after a
/// request arrived may be stamped a little before.
pub(super) fn not_before(time: &StatxTimestamp, arrived_ns: u64) -> bool {
    nanoseconds(time.tv_sec, time.tv_nsec) >= earliest(arrived_ns)
}

fn earliest(arrived_ns: u64) -> i128 {
    const TICK_NS: i128 = 10_000_000;
    i128::from(arrived_ns) - TICK_NS
}

impl Dir {
    /// What the kernel gets of an object it looks up.
    pub(super) fn entry(&self, found: &Found) -> EntryOut {
        self.options.timeouts.entry(attr(&found.stat))
    }

    fn attr_out(&self, st: &Stat) -> Answer {
        self.options.timeouts.attr(attr(st))
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
        let timeout = self.options.timeouts.attr;
        let time = |t: &StatxTimestamp| SxTime {
            sec: t.tv_sec,
            nsec: t.tv_nsec,
            reserved: 0,
        };
        // A mount root below is not one above.
        let hidden = (StatxAttributes::MOUNT_ROOT | StatxAttributes::AUTOMOUNT).bits();
        let wanted = StatxFlags::BASIC_STATS.bits() | arg.sx_mask & StatxFlags::BTIME.bits();
        let out = StatxOut {
            attr_valid: timeout.as_secs(),
            attr_valid_nsec: timeout.subsec_nanos(),
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
            if has_values(&attr(&now), &arg, valid, earliest(call.annex.arrived_ns)) {
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
