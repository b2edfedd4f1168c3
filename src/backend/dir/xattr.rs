//! Extended attributes, with POSIX ACLs among them.
//!
//! `O_PATH` descriptors have no xattr calls, so all go through `/proc/self/fd/N`. The last component
//! of that path jumps to the object itself, which may be a symbolic link, and is not followed.

use std::ffi::OsStr;

use rustix::fs::{
    XattrFlags, getxattr, getxattr_query, listxattr, listxattr_query, removexattr, setxattr,
};

use super::attributes::proc_path;
use super::identity::stat;
use super::{Answer, Attempt, Call, Dir};
use crate::backend::Replayed;
use crate::backend::convert::size_out;
use crate::wire::Errno;
use crate::wire::abi::{GetxattrIn, SETXATTR_ACL_KILL_SGID, SetxattrIn};

/// Largest value and largest list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MAX: usize = 65536;

/// Journal flag: the attribute existed before.
pub(super) const EXISTED: u64 = 1 << 1;

impl Dir {
    pub(super) fn getxattr(
        &self,
        call: &Call<'_>,
        arg: GetxattrIn,
        name: &OsStr,
    ) -> Result<Answer, Errno> {
        let node = self.node(call)?;
        let path = proc_path(&node);
        if arg.size == 0 {
            return Ok(size_out(getxattr_query(path, name)?));
        }
        let mut value = vec![0; buffer_size(call, arg)];
        let len = getxattr(path, name, &mut value[..])?;
        value.truncate(len);
        Ok(Answer::Data(value))
    }

    pub(super) fn listxattr(&self, call: &Call<'_>, arg: GetxattrIn) -> Result<Answer, Errno> {
        let node = self.node(call)?;
        let path = proc_path(&node);
        if arg.size == 0 {
            return Ok(size_out(listxattr_query(path)?));
        }
        let mut names = vec![0; buffer_size(call, arg)];
        let len = listxattr(path, &mut names[..])?;
        names.truncate(len);
        Ok(Answer::Data(names))
    }

    /// Whether the attribute is there, for the journal.
    pub(super) fn xattr_exists(&self, call: &Call<'_>, name: &OsStr) -> Result<bool, Errno> {
        let node = self.node(call)?;
        // Any other error is left to the operation itself.
        Ok(getxattr_query(proc_path(&node), name).is_ok())
    }

    pub(super) fn setxattr(
        &self,
        call: &Call<'_>,
        arg: SetxattrIn,
        name: &OsStr,
        value: &[u8],
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let node = self.node(call)?;
        let path = proc_path(&node);
        let again = attempt.is_again();
        if again {
            call.note(Replayed::Reissued);
        }
        let existed = attempt.journal().flags & EXISTED != 0;
        let flags = XattrFlags::from_bits_retain(arg.flags);
        match setxattr(path.as_str(), name, value, flags) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST)
                if again && !existed && has_value(&path, name, value)? =>
            {
                call.note(Replayed::Verified);
            }
            Err(e) => return Err(e.into()),
        }
        if arg.setxattr_flags & SETXATTR_ACL_KILL_SGID != 0 && name == "system.posix_acl_access" {
            let mode = u32::from(stat(&node)?.stx_mode);
            if mode & libc::S_ISGID != 0 {
                self.chmod(&node, mode & !libc::S_ISGID)?;
            }
        }
        Ok(Answer::Empty)
    }

    pub(super) fn removexattr(
        &self,
        call: &Call<'_>,
        name: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let node = self.node(call)?;
        let existed = attempt.journal().flags & EXISTED != 0;
        match removexattr(proc_path(&node), name) {
            Err(rustix::io::Errno::NODATA) if attempt.is_again() && existed => {
                call.note(Replayed::Verified);
            }
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

fn buffer_size(call: &Call<'_>, arg: GetxattrIn) -> usize {
    (arg.size as usize).min(MAX).min(call.reply_space())
}

fn has_value(path: &str, name: &OsStr, value: &[u8]) -> Result<bool, Errno> {
    let mut now = vec![0; value.len()];
    match getxattr(path, name, &mut now[..]) {
        Ok(len) => Ok(now.get(..len) == Some(value)),
        Err(rustix::io::Errno::RANGE | rustix::io::Errno::NODATA) => Ok(false),
        Err(e) => Err(e.into()),
    }
}
