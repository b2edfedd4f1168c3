//! Was it done already?
//!
//! [`Ceph::look_before`] writes down what the names of a request refer to. When the generation that
//! executed it died, the next one compares that with what the names refer to now; the dead session
//! has been ended by then, so nothing of it is still under way. Anything that does not look done is
//! done again, so that a genuine conflict gets its own errno.
//!
//! Not told apart: another client that between the death and the takeover makes exactly what the
//! request would have made (or removes exactly what it would have removed). The answer is success,
//! which is what the caller would have seen had that client come later.

use std::ffi::{CStr, OsStr};

use super::attributes::CLOCK_NS;
use super::client::Inode;
use super::ffi::Statx;
use super::node::{identity, vino_of};
use super::xattr::EXISTED;
use super::{Ceph, c_name};
use crate::backend::Call;
use crate::backend::convert::nanoseconds;
use crate::region::Identity;
use crate::region::slot::Journal;
use crate::wire::abi::SetattrValid;
use crate::wire::{Errno, Op, Opcode};

/// What a request makes.
#[derive(Clone, Copy)]
pub(super) enum Made<'a> {
    /// MKDIR.
    Directory,
    /// SYMLINK, with its target.
    Symlink(&'a OsStr),
    /// MKNOD and CREATE: a node of this type (`S_IFMT`), and its device number as the protocol has it.
    Node(u32, u32),
}

impl Ceph {
    /// What a second attempt needs to know. Costs one look per name, which the library mostly has in
    /// its cache, and nothing for requests that can simply be repeated.
    pub(super) fn look_before(&self, call: &Call<'_>) -> Result<Journal, Errno> {
        let mut journal = Journal::default();
        match call.request.op {
            Op::Symlink { name, .. }
            | Op::Mknod { name, .. }
            | Op::Mkdir { name, .. }
            | Op::Link { newname: name, .. } => {
                let parent = self.inode(&call.annex.node)?;
                journal.target = self.identity_of_name(&parent, &c_name(name)?)?;
            }
            Op::Create { name, .. } if call.request.opcode == Opcode::Create => {
                let parent = self.inode(&call.annex.node)?;
                journal.target = self.identity_of_name(&parent, &c_name(name)?)?;
            }
            Op::Unlink { name } | Op::Rmdir { name } => {
                let parent = self.inode(&call.annex.node)?;
                self.note_victim(&parent, name, &mut journal)?;
            }
            Op::Rename { name, newname, .. } => {
                let old = self.inode(&call.annex.node)?;
                let new = self.inode(&call.annex.second)?;
                journal.source = self.identity_of_name(&old, &c_name(name)?)?;
                self.note_victim(&new, newname, &mut journal)?;
                if journal.source == journal.target {
                    journal.flags &= !Journal::LAST_NAME;
                }
            }
            Op::Setattr(arg) if arg.valid & SetattrValid::SIZE.bits() != 0 => {
                journal.size = self.size_before(call)?;
            }
            // Only these two fail differently the second time.
            Op::Setxattr { arg, name, .. } if arg.flags & libc::XATTR_CREATE as u32 != 0 => {
                journal.flags = u64::from(self.xattr_exists(call, name)?) * EXISTED;
            }
            Op::Removexattr { name } => {
                journal.flags = u64::from(self.xattr_exists(call, name)?) * EXISTED;
            }
            _ => {}
        }
        Ok(journal)
    }

    fn note_victim(
        &self,
        parent: &Inode,
        name: &OsStr,
        journal: &mut Journal,
    ) -> Result<(), Errno> {
        if let Some((_, st)) = self.look(parent, &c_name(name)?, &self.superuser)? {
            journal.target = identity(vino_of(&st));
            let directory = u32::from(st.mode) & libc::S_IFMT == libc::S_IFDIR;
            if directory || st.nlink <= 1 {
                journal.flags |= Journal::LAST_NAME;
            }
        }
        Ok(())
    }

    /// What a name refers to; none if it does not exist.
    pub(super) fn identity_of_name(&self, parent: &Inode, name: &CStr) -> Result<Identity, Errno> {
        let found = self.look(parent, name, &self.superuser)?;
        Ok(found.map_or(Identity::NONE, |(_, st)| identity(vino_of(&st))))
    }

    /// The object the first attempt made: the name was absent, and is now what the request would
    /// have made, by this caller, after the request came, and still as it was made. Mode and gid are
    /// not compared: set-gid directories and default ACLs have a say in them.
    pub(super) fn made_before(
        &self,
        call: &Call<'_>,
        parent: &Inode,
        name: &CStr,
        made: Made<'_>,
        journal: &Journal,
    ) -> Result<Option<(Inode, Statx)>, Errno> {
        if !journal.target.is_none() {
            return Ok(None);
        }
        let Some((inode, st)) = self.look(parent, name, &self.superuser)? else {
            return Ok(None);
        };
        let file_type = u32::from(st.mode) & libc::S_IFMT;
        let born = nanoseconds(st.btime.tv_sec, st.btime.tv_nsec as u32);
        let same = st.uid == call.request.header.uid
            && born >= i128::from(call.annex.arrived_ns) - CLOCK_NS
            && match made {
                Made::Directory => file_type == libc::S_IFDIR && self.is_empty(&inode)?,
                Made::Symlink(target) => {
                    file_type == libc::S_IFLNK
                        && inode.read_link(&self.superuser)? == target.as_encoded_bytes()
                }
                Made::Node(wanted, dev) => {
                    let device = matches!(wanted, libc::S_IFCHR | libc::S_IFBLK);
                    file_type == wanted && st.size == 0 && (!device || st.rdev as u32 == dev)
                }
            };
        Ok(same.then_some((inode, st)))
    }

    /// Nothing but `.` and `..` is in it. A snapshot never is: it shows what was there.
    fn is_empty(&self, directory: &Inode) -> Result<bool, Errno> {
        if vino_of(&directory.stat(&self.superuser)?).snapid != super::ffi::NOSNAP {
            return Ok(true);
        }
        let mut directory = directory.open_dir(&self.superuser)?;
        while let Some(entry) = directory.read()? {
            if entry.name.as_c_str() != c"." && entry.name.as_c_str() != c".." {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The first attempt at an UNLINK or RMDIR happened: the name does not refer to its victim any
    /// more.
    pub(super) fn removed_before(
        &self,
        parent: &Inode,
        name: &CStr,
        journal: &Journal,
    ) -> Result<bool, Errno> {
        Ok(!journal.target.is_none() && self.identity_of_name(parent, name)? != journal.target)
    }

    /// The first attempt at a rename happened: the new name is what the old one was, and the old one
    /// is not that any more.
    pub(super) fn renamed_before(
        &self,
        old: (&Inode, &CStr),
        new: (&Inode, &CStr),
        journal: &Journal,
    ) -> Result<bool, Errno> {
        if journal.source.is_none() || self.identity_of_name(new.0, new.1)? != journal.source {
            return Ok(false);
        }
        // Two names of one inode: a rename changes nothing, however often it is done.
        if journal.source == journal.target {
            return Ok(false);
        }
        Ok(self.identity_of_name(old.0, old.1)? != journal.source)
    }
}
