//! Acting for a caller.
//!
//! The kernel in front of the mount has decided whether the caller may do what it asks
//! (`default_permissions`), with groups and capabilities this process never learns. So the backend
//! acts with its own rights, and takes the caller's uid, gid and file mode mask only while it creates
//! something, to make it the caller's.

use std::cell::Cell;
use std::marker::PhantomData;

use nix::unistd::{Gid, Uid, getegid, geteuid, setfsgid, setfsuid};
use rustix::fs::Mode;
use rustix::process::umask;

use crate::sys;
use crate::wire::abi::InHeader;

thread_local! {
    static PREPARED: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread fit to act for callers: a file mode mask of its own, and capabilities that stay
/// when the file system uid changes. Without privileges the second is refused, and never needed.
pub(super) fn enter_thread() {
    PREPARED.with(|prepared| {
        if !prepared.replace(true) {
            let _ = sys::unshare_fs();
            let _ = sys::keep_capabilities();
        }
    });
}

/// While this lives, the thread creates objects for a caller.
pub(super) struct Acting {
    switched: bool,
    old_mask: Mode,
    /// The credentials are the thread's.
    not_send: PhantomData<*const ()>,
}

impl Acting {
    /// Takes the caller's identity and mask. The store applies the mask or, instead of it, the
    /// parent's default ACL (`FUSE_DONT_MASK`).
    pub(super) fn as_caller(caller: &InHeader, mask: u32) -> Acting {
        // Not only in `enter_thread`: in a thread that shares its mask, others would create with it.
        enter_thread();
        let switched = geteuid().is_root() && (caller.uid != 0 || caller.gid != 0);
        if switched {
            setfsgid(Gid::from_raw(caller.gid));
            setfsuid(Uid::from_raw(caller.uid));
        }
        Acting {
            switched,
            old_mask: umask(Mode::from_raw_mode(mask & 0o777)),
            not_send: PhantomData,
        }
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        umask(self.old_mask);
        if self.switched {
            setfsuid(geteuid());
            setfsgid(getegid());
        }
    }
}
