//! Whether the kernel may keep the pages of a file from one open to the next.
//!
//! The library tells when data it had the right to cache is old, but a moment later, and not of files
//! it has let go of. So an open compares the version of the file (which grows with every change) with
//! the one of its last close here: pages of the same version stay, all others go. A new generation has
//! seen no versions, so the first open of each file drops what may have changed unseen.
//!
//! While several clients have a file open and one of them writes, nobody has the right to cache, nobody
//! is told of changes, and two clients may count to the same version. What is read or written meanwhile
//! is taken back from the kernel at once, and no open keeps pages ([`Shared`]).

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

use super::Ceph;
use super::client::{Inode, Xattr};
use super::ffi::Vino;
use crate::wire::Errno;

/// Files whose version is remembered.
const FILES_MAX: usize = 65536;

/// Versions of files when they were last opened or closed here.
#[derive(Default)]
pub(super) struct Warm(Mutex<HashMap<Vino, u64>>);

impl Warm {
    /// A file of this version is opened. True if it is as it was when it was last opened or closed.
    fn opened(&self, vino: Vino, version: u64) -> bool {
        let mut versions = self.0.lock();
        if versions.len() >= FILES_MAX {
            // Costs each file one reading; a list by age would cost more.
            versions.clear();
        }
        versions.insert(vino, version) == Some(version)
    }

    /// A file that had the one version has the other one by a change of this client.
    fn grown(&self, vino: Vino, before: u64, after: u64) {
        if let Some(version) = self.0.lock().get_mut(&vino)
            && *version == before
        {
            *version = after;
        }
    }
}

/// Files without the right to cache, when it was last looked.
#[derive(Default)]
pub(super) struct Shared(Mutex<HashSet<Vino>>);

impl Shared {
    /// The right to cache was taken away.
    pub(super) fn add(&self, vino: Vino) {
        self.0.lock().insert(vino);
    }
}

impl Ceph {
    /// A file was opened. True if the kernel may keep its pages.
    pub(super) fn keeps_pages(&self, vino: Vino, inode: &Inode) -> bool {
        let Ok(version) = inode.version(false, &self.superuser) else {
            return false;
        };
        let same = self.warm.opened(vino, version);
        let alone = self.may_cache(inode);
        if !alone {
            self.shared.add(vino);
        }
        same && alone && !self.shared.0.lock().contains(&vino)
    }

    /// A change of our own: the version may grow by it.
    pub(super) fn changing<T>(
        &self,
        vino: Vino,
        change: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let version = || {
            let inode = self.client.cached(vino)?;
            inode.version(true, &self.superuser).ok()
        };
        let before = version();
        let done = change();
        if let (Some(before), Some(after)) = (before, version()) {
            self.warm.grown(vino, before, after);
        }
        done
    }

    /// A file is closed: what is in the kernel is of this version.
    pub(super) fn note_version(&self, vino: Vino, inode: &Inode) {
        if let Ok(version) = inode.version(true, &self.superuser) {
            self.warm.opened(vino, version);
        }
    }

    /// The kernel has bytes that were read or written in its pages. Without the right to cache they
    /// are taken back: nobody will tell when they are old.
    pub(super) fn is_in_pages(&self, vino: Vino, offset: u64, len: usize) {
        if !self.shared.0.lock().contains(&vino) {
            return;
        }
        let inode = self.client.cached(vino);
        if inode.is_some_and(|inode| self.may_cache(&inode)) {
            self.shared.0.lock().remove(&vino);
        } else {
            let identity = super::node::identity(vino);
            self.frontend.stale(&identity, offset as i64, len as i64);
        }
    }

    fn may_cache(&self, inode: &Inode) -> bool {
        may_cache(&inode.xattr(c"ceph.caps", 256, &self.superuser))
    }
}

/// The capabilities of a file, as the library writes them (`pAsLsXsFscr/0x1255`), have "cache" among
/// those of the file's data.
fn may_cache(caps: &Result<Xattr, Errno>) -> bool {
    let Ok(Xattr::Bytes(text)) = caps else {
        return false;
    };
    let file = text.split(|&b| b == b'/').next().unwrap_or_default();
    let of_file = file.split(|&b| b == b'F').nth(1).unwrap_or_default();
    of_file.contains(&b'c')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_to_cache_is_found_among_the_capabilities() {
        let caps = |text: &str| Ok(Xattr::Bytes(text.as_bytes().to_vec()));
        assert!(may_cache(&caps("pAsxLsXsxFsxcrwb/0xffff")));
        assert!(may_cache(&caps("pFc/0x1")));
        assert!(!may_cache(&caps("pAsLsXsFrw/0x1")));
        assert!(!may_cache(&caps("pAsc/0x1")));
        assert!(!may_cache(&caps("-/0x0")));
        assert!(!may_cache(&Err(Errno::ENODATA)));
    }

    #[test]
    fn pages_stay_only_with_their_version() {
        let warm = Warm::default();
        let vino = Vino { ino: 7, snapid: 1 };
        assert!(!warm.opened(vino, 3), "never seen");
        assert!(warm.opened(vino, 3));
        assert!(!warm.opened(vino, 4), "changed");
        assert!(warm.opened(vino, 4));
        warm.grown(vino, 4, 5);
        assert!(warm.opened(vino, 5), "our own change");
        warm.grown(vino, 4, 6);
        assert!(!warm.opened(vino, 6), "not from there");
    }
}
