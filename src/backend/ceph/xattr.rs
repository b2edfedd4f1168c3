//! Extended attributes, with `ceph.*` (layouts, quotas, recursive statistics) among them.

use std::ffi::OsStr;

use super::client::Xattr;
use super::{Ceph, c_name};
use crate::backend::convert::size_out;
use crate::backend::{Answer, Attempt, Call, Replayed};
use crate::wire::Errno;
use crate::wire::abi::{GetxattrIn, SetxattrIn};

/// Largest value and largest list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MAX: usize = 65536;

/// Journal flag: the attribute existed before.
pub(super) const EXISTED: u64 = 1 << 1;

fn answer(found: Xattr) -> Answer {
    match found {
        Xattr::Bytes(bytes) => Answer::Data(bytes),
        Xattr::Len(len) => size_out(len),
    }
}

impl Ceph {
    pub(super) fn getxattr(
        &self,
        call: &Call<'_>,
        arg: GetxattrIn,
        name: &OsStr,
    ) -> Result<Answer, Errno> {
        let perms = self.caller(&call.request.header)?;
        let inode = self.inode(&call.annex.node)?;
        let room = (arg.size as usize).min(MAX).min(call.reply_space());
        Ok(answer(inode.xattr(&c_name(name)?, room, &perms)?))
    }

    pub(super) fn listxattr(&self, call: &Call<'_>, arg: GetxattrIn) -> Result<Answer, Errno> {
        let perms = self.caller(&call.request.header)?;
        let inode = self.inode(&call.annex.node)?;
        let room = (arg.size as usize).min(MAX).min(call.reply_space());
        Ok(answer(inode.xattrs(room, &perms)?))
    }

    /// Whether the attribute is there, for the journal.
    pub(super) fn xattr_exists(&self, call: &Call<'_>, name: &OsStr) -> Result<bool, Errno> {
        let inode = self.inode(&call.annex.node)?;
        // Any other error is left to the operation itself.
        Ok(inode.xattr(&c_name(name)?, 0, &self.superuser).is_ok())
    }

    pub(super) fn setxattr(
        &self,
        call: &Call<'_>,
        arg: SetxattrIn,
        name: &OsStr,
        value: &[u8],
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let perms = self.caller(&call.request.header)?;
        let inode = self.inode(&call.annex.node)?;
        let name = c_name(name)?;
        let again = attempt.is_again();
        if again {
            call.note(Replayed::Reissued);
        }
        let existed = attempt.journal().flags & EXISTED != 0;
        match inode.set_xattr(&name, value, arg.flags as i32, &perms) {
            Err(Errno::EEXIST) if again && !existed => {
                match inode.xattr(&name, MAX, &self.superuser)? {
                    Xattr::Bytes(now) if now == value => call.note(Replayed::Verified),
                    _ => return Err(Errno::EEXIST),
                }
            }
            done => done?,
        }
        Ok(Answer::Empty)
    }

    pub(super) fn removexattr(
        &self,
        call: &Call<'_>,
        name: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let perms = self.caller(&call.request.header)?;
        let inode = self.inode(&call.annex.node)?;
        let existed = attempt.journal().flags & EXISTED != 0;
        match inode.remove_xattr(&c_name(name)?, &perms) {
            Err(Errno::ENODATA) if attempt.is_again() && existed => call.note(Replayed::Verified),
            done => {
                if attempt.is_again() {
                    call.note(Replayed::Reissued);
                }
                done?;
            }
        }
        Ok(Answer::Empty)
    }
}
