//! Was it done already?
//!
//! [`Dir::look_before`] writes down what the names of a request refer to. When the generation that
//! executed it died, the next one compares that with what the names refer to now. Anything that does
//! not look done is done again, so that a genuine conflict gets its own errno.
//!
//! Not told apart: another client, behind the mount's back, that between the death and the takeover
//! makes exactly what the request would have made (or removes exactly what it would have removed).
//! The answer is success, which is what the caller would have seen had that client come later.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{FileType, Mode, OFlags, RenameFlags, StatxFlags, openat, readlinkat};

use super::attributes::not_before;
use super::directory::is_empty;
use super::identity::Found;
use super::xattr::EXISTED;
use super::{Call, Dir, c_name};
use crate::backend::convert::encode_dev;
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
    /// MKNOD and CREATE: a node of this type, and its device number as the protocol has it.
    Node(FileType, u32),
}

impl Dir {
    /// What a second attempt needs to know. Costs one look per name, and nothing for requests that
    /// can simply be repeated.
    pub(super) fn look_before(&self, call: &Call<'_>) -> Result<Journal, Errno> {
        let mut journal = Journal::default();
        match call.request.op {
            Op::Create { .. } if call.request.opcode == Opcode::Tmpfile => {}
            Op::Symlink { name, .. }
            | Op::Mknod { name, .. }
            | Op::Mkdir { name, .. }
            | Op::Unlink { name }
            | Op::Rmdir { name }
            | Op::Link { newname: name, .. }
            | Op::Create { name, .. } => {
                let parent = self.node(call)?;
                journal.target = self.identity_of_name(parent.as_fd(), &c_name(name)?)?;
            }
            Op::Rename { name, newname, .. } => {
                let (old, new) = (self.node(call)?, self.second_node(call)?);
                journal.source = self.identity_of_name(old.as_fd(), &c_name(name)?)?;
                journal.target = self.identity_of_name(new.as_fd(), &c_name(newname)?)?;
            }
            Op::Setattr(arg) if arg.valid & SetattrValid::SIZE.bits() != 0 => {
                journal.size = self.size_before(call)?;
            }
            Op::Open(arg) if arg.flags as i32 & libc::O_TRUNC != 0 => {
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

    /// The object the first attempt made: the name was absent, and is now what the request would
    /// have made, by this caller, after the request came, and still as it was made. Mode and gid are
    /// not compared: set-gid directories and default ACLs have a say in them.
    pub(super) fn made_before(
        &self,
        call: &Call<'_>,
        parent: BorrowedFd<'_>,
        name: &CStr,
        made: Made<'_>,
        journal: &Journal,
    ) -> Result<Option<Found>, Errno> {
        if !journal.target.is_none() {
            return Ok(None);
        }
        let found = match self.look(parent, name) {
            Err(Errno::ENOENT) => return Ok(None),
            found => found?,
        };
        let st = &found.stat;
        let euid = nix::unistd::geteuid();
        let uid = if euid.is_root() {
            call.request.header.uid
        } else {
            euid.as_raw()
        };
        let since = if st.stx_mask & StatxFlags::BTIME.bits() != 0 {
            &st.stx_btime
        } else {
            &st.stx_ctime
        };
        let file_type = FileType::from_raw_mode(st.stx_mode.into());
        let same = st.stx_uid == uid
            && not_before(since, call.annex.arrived_ns)
            && match made {
                Made::Directory => {
                    file_type == FileType::Directory && {
                        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
                        match openat(parent, name, flags | OFlags::CLOEXEC, Mode::empty()) {
                            Ok(fd) => is_empty(fd.as_fd())?,
                            // Made without the right to read it, by a user who is not root.
                            Err(rustix::io::Errno::ACCESS) => true,
                            Err(e) => return Err(e.into()),
                        }
                    }
                }
                Made::Symlink(target) => {
                    file_type == FileType::Symlink
                        && readlinkat(parent, name, Vec::new())?.as_bytes()
                            == target.as_encoded_bytes()
                }
                Made::Node(wanted, dev) => {
                    let now = encode_dev(st.stx_rdev_major, st.stx_rdev_minor);
                    let device =
                        matches!(wanted, FileType::CharacterDevice | FileType::BlockDevice);
                    file_type == wanted && st.stx_size == 0 && (!device || now == dev)
                }
            };
        Ok(same.then_some(found))
    }

    /// The first attempt at an UNLINK or RMDIR happened: the name does not refer to its victim any
    /// more.
    pub(super) fn removed_before(
        &self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        journal: &Journal,
    ) -> Result<bool, Errno> {
        Ok(!journal.target.is_none() && self.identity_of_name(parent, name)? != journal.target)
    }

    /// The first attempt at a rename happened: the new name is what the old one was, and the old one
    /// is not that any more (gone, a whiteout, another object). In an exchange, each is what the
    /// other was.
    pub(super) fn renamed_before(
        &self,
        old: (BorrowedFd<'_>, &CStr),
        new: (BorrowedFd<'_>, &CStr),
        flags: RenameFlags,
        journal: &Journal,
    ) -> Result<bool, Errno> {
        if journal.source.is_none() || self.identity_of_name(new.0, new.1)? != journal.source {
            return Ok(false);
        }
        // Two names of one inode: a rename changes nothing, however often it is done.
        if journal.source == journal.target {
            return Ok(false);
        }
        let old_now = self.identity_of_name(old.0, old.1)?;
        Ok(if flags.contains(RenameFlags::EXCHANGE) {
            old_now == journal.target
        } else {
            old_now != journal.source
        })
    }
}
