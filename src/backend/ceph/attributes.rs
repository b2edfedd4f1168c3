//! Attributes: GETATTR, STATX, SETATTR, ACCESS, STATFS.

use zerocopy::IntoBytes;

use super::Ceph;
use super::client::{Inode, Perms};
use super::ffi::{Statx as Stat, setattr};
use super::node::{identity, vino_of};
use crate::backend::convert::{has_values, kills_setid, without_setid};
use crate::backend::{Answer, Attempt, Call, Replayed};
use crate::region::Identity;
use crate::wire::Errno;
use crate::wire::abi::{
    AccessIn, Attr, EntryOut, Kstatfs, SetattrIn, SetattrValid, Statx, StatxIn, StatxOut, SxTime,
};

/// Clocks of clients and servers differ; what a request made may be stamped this much before it
/// arrived, nanoseconds.
pub(super) const CLOCK_NS: i128 = 2_000_000_000;

/// Attributes as the protocol has them.
pub(super) fn attr(st: &Stat) -> Attr {
    Attr {
        ino: st.ino,
        size: st.size,
        blocks: st.blocks,
        atime: st.atime.tv_sec as u64,
        mtime: st.mtime.tv_sec as u64,
        ctime: st.ctime.tv_sec as u64,
        atimensec: st.atime.tv_nsec as u32,
        mtimensec: st.mtime.tv_nsec as u32,
        ctimensec: st.ctime.tv_nsec as u32,
        mode: st.mode.into(),
        nlink: st.nlink,
        uid: st.uid,
        gid: st.gid,
        // The library keeps device numbers in the protocol's own form.
        rdev: st.rdev as u32,
        blksize: st.blksize,
        flags: 0,
    }
}

impl Ceph {
    /// What the kernel gets of an object it looks up.
    pub(super) fn entry(&self, st: &Stat) -> (EntryOut, Identity) {
        (self.timeouts.entry(attr(st)), identity(vino_of(st)))
    }

    pub(super) fn getattr(&self, call: &Call<'_>) -> Result<Answer, Errno> {
        let st = self.inode(&call.annex.node)?.stat(&self.superuser)?;
        Ok(self.timeouts.attr(attr(&st)))
    }

    pub(super) fn statx(&self, call: &Call<'_>, arg: StatxIn) -> Result<Answer, Errno> {
        let st = self.inode(&call.annex.node)?.stat(&self.superuser)?;
        let time = |t: &libc::timespec| SxTime {
            sec: t.tv_sec,
            nsec: t.tv_nsec as u32,
            reserved: 0,
        };
        let attr = attr(&st);
        let wanted = libc::STATX_BASIC_STATS | arg.sx_mask & libc::STATX_BTIME;
        let out = StatxOut {
            attr_valid: self.timeouts.attr.as_secs(),
            attr_valid_nsec: self.timeouts.attr.subsec_nanos(),
            flags: 0,
            spare: [0; 2],
            stat: Statx {
                mask: wanted,
                blksize: attr.blksize,
                nlink: attr.nlink,
                uid: attr.uid,
                gid: attr.gid,
                mode: st.mode,
                ino: attr.ino,
                size: attr.size,
                blocks: attr.blocks,
                atime: time(&st.atime),
                btime: time(&st.btime),
                ctime: time(&st.ctime),
                mtime: time(&st.mtime),
                // `new_decode_dev` of linux/kdev_t.h.
                rdev_major: (attr.rdev & 0xfff00) >> 8,
                rdev_minor: attr.rdev & 0xff | (attr.rdev >> 12) & 0xfff00,
                ..Default::default()
            },
        };
        Ok(Answer::Data(out.as_bytes().to_vec()))
    }

    pub(super) fn setattr(
        &self,
        call: &Call<'_>,
        arg: SetattrIn,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let valid = SetattrValid::from_bits_truncate(arg.valid);
        let inode = self.inode(&call.annex.node)?;
        let mut mask = wanted(valid);
        if let Attempt::Again(journal) = attempt {
            let now = inode.stat(&self.superuser)?;
            let since = i128::from(call.annex.arrived_ns) - CLOCK_NS;
            if has_values(&attr(&now), &arg, valid, since) {
                call.note(Replayed::Verified);
                return Ok(self.timeouts.attr(attr(&now)));
            }
            call.note(Replayed::Reissued);
            // Bytes written after our truncation must not be cut off.
            if mask & setattr::SIZE != 0 && now.size != arg.size && now.size != journal.size {
                call.note(Replayed::Ambiguous);
                mask &= !setattr::SIZE;
            }
        }
        let st = Stat {
            mode: (arg.mode & 0o7777) as u16,
            uid: arg.uid,
            gid: arg.gid,
            size: arg.size,
            atime: timespec(arg.atime, arg.atimensec),
            mtime: timespec(arg.mtime, arg.mtimensec),
            ..Stat::default()
        };
        // A handle's right to write was decided when it was opened.
        let by_handle = valid.contains(SetattrValid::FH) && mask & !setattr::SIZE == 0;
        let perms = if by_handle {
            self.superuser.clone()
        } else {
            self.caller(&call.request.header)?
        };
        if kills_setid(valid) {
            self.clear_setid(&inode)?;
        }
        if mask != 0 {
            self.change(&inode, &st, mask, &perms)?;
        }
        let st = inode.stat(&self.superuser)?;
        Ok(self.timeouts.attr(attr(&st)))
    }

    /// Size before a truncation, for the journal.
    pub(super) fn size_before(&self, call: &Call<'_>) -> Result<u64, Errno> {
        Ok(self.inode(&call.annex.node)?.stat(&self.superuser)?.size)
    }

    /// Takes the set-id bits away, as a write by an unprivileged process does: not the caller's wish, so
    /// not the caller's right.
    pub(super) fn clear_setid(&self, inode: &Inode) -> Result<(), Errno> {
        let mode = u32::from(inode.stat(&self.superuser)?.mode);
        let cleared = without_setid(mode);
        if cleared == mode {
            return Ok(());
        }
        let st = Stat {
            mode: (cleared & 0o7777) as u16,
            ..Stat::default()
        };
        self.change(inode, &st, setattr::MODE, &self.superuser)
    }

    /// Changes attributes, for good: with the exclusive right to them the library only notes them
    /// down.
    fn change(&self, inode: &Inode, st: &Stat, mask: i32, perms: &Perms) -> Result<(), Errno> {
        if let Some(retainer) = &self.retainer {
            let vino = vino_of(&inode.known(&self.superuser)?);
            if mask & setattr::SIZE != 0 {
                // What was written before must not be written again after this.
                retainer.settle(vino)?;
            } else if retainer.set_attributes(vino, inode, st, mask, perms)? {
                return Ok(());
            }
        }
        inode.set_stat(st, mask, perms)?;
        inode.sync(false)
    }

    /// `access(2)` and `chdir(2)`, by the mode bits: the library has no call for it.
    pub(super) fn access(&self, call: &Call<'_>, arg: AccessIn) -> Result<Answer, Errno> {
        let st = self.inode(&call.annex.node)?.stat(&self.superuser)?;
        let header = &call.request.header;
        let mask = arg.mask & 7;
        let mode = u32::from(st.mode);
        let granted = if header.uid == 0 {
            let directory = mode & libc::S_IFMT == libc::S_IFDIR;
            if directory || mode & 0o111 != 0 { 7 } else { 6 }
        } else if header.uid == st.uid {
            mode >> 6
        } else if header.gid == st.gid || self.in_group(header, st.gid) {
            mode >> 3
        } else {
            mode
        };
        if mask & !granted == 0 {
            Ok(Answer::Empty)
        } else {
            Err(Errno::EACCES)
        }
    }

    pub(super) fn statfs(&self) -> Result<Answer, Errno> {
        let st = self.root.statfs()?;
        let out = Kstatfs {
            blocks: st.f_blocks,
            bfree: st.f_bfree,
            bavail: st.f_bavail,
            files: st.f_files,
            ffree: st.f_ffree,
            bsize: st.f_bsize as u32,
            namelen: st.f_namemax as u32,
            frsize: st.f_frsize as u32,
            ..Default::default()
        };
        Ok(Answer::Data(out.as_bytes().to_vec()))
    }
}

fn timespec(sec: u64, nsec: u32) -> libc::timespec {
    libc::timespec {
        tv_sec: sec as i64,
        tv_nsec: nsec.into(),
    }
}

/// What of a SETATTR the library is asked for.
fn wanted(valid: SetattrValid) -> i32 {
    let pairs = [
        (SetattrValid::MODE, setattr::MODE),
        (SetattrValid::UID, setattr::UID),
        (SetattrValid::GID, setattr::GID),
        (SetattrValid::SIZE, setattr::SIZE),
        (SetattrValid::ATIME, setattr::ATIME),
        (SetattrValid::MTIME, setattr::MTIME),
        (SetattrValid::ATIME_NOW, setattr::ATIME_NOW),
        (SetattrValid::MTIME_NOW, setattr::MTIME_NOW),
    ];
    pairs
        .into_iter()
        .filter(|(flag, _)| valid.contains(*flag))
        .fold(0, |mask, (_, bit)| mask | bit)
}
