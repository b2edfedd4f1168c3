//! Whether the kernel may have pages of a file.
//!
//! With the right to cache a file this client is told when somebody else is about to change it
//! ([`Client::listen`](super::client::Client::listen)); until then what the kernel has is right. While several clients
//! have a file open and one of them writes, nobody has that right and nobody is told. So it is asked
//! for ([`File::may_cache`]) when a file is opened, and as long as it is not there, what is read or
//! written is taken back from the kernel at once.
//!
//! An open keeps the kernel's pages if the right was there all the time and the version of the file
//! (which grows with every change) is the one this client knew; notices come a moment later than the
//! changes they tell of. A new generation knows nothing, so its first open drops what may have changed
//! unseen. For the same reason a lock is granted only after the kernel has dropped what may be old.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::Ceph;
use super::client::{File, Inode};
use super::ffi::Vino;
use crate::wire::Errno;

/// Files that are remembered after their last close.
const CLOSED_MAX: usize = 65536;

#[derive(Clone, Copy, Default)]
struct Known {
    opens: u32,
    /// There was the right to cache when it was last looked, and nobody has told otherwise.
    alone: bool,
    /// As this client knew it last, its own changes counted.
    version: u64,
}

/// What is known of files that are or were open.
#[derive(Default)]
pub(super) struct Warm(Mutex<HashMap<Vino, Known>>);

impl Warm {
    /// The right to cache a file is gone.
    pub(super) fn shared(&self, vino: Vino) {
        if let Some(known) = self.0.lock().get_mut(&vino) {
            known.alone = false;
        }
    }

    fn is_alone(&self, vino: Vino) -> bool {
        self.0.lock().get(&vino).is_some_and(|known| known.alone)
    }

    /// An open file was looked at. True if the kernel's pages are as the store has them.
    fn seen(&self, vino: Vino, version: u64, may_cache: bool, opens: u32) -> bool {
        let mut files = self.0.lock();
        if files.len() > CLOSED_MAX {
            files.retain(|_, known| known.opens > 0);
        }
        let known = files.entry(vino).or_default();
        let before = std::mem::replace(
            known,
            Known {
                opens: known.opens + opens,
                alone: may_cache,
                version,
            },
        );
        before.alone && may_cache && before.version == version
    }

    /// A file was opened to look only.
    pub(super) fn looked_at(&self, vino: Vino, file: &File) {
        self.seen(vino, 0, file.may_cache(false), 0);
    }

    /// A file that had the one version has the other one by a change of this client.
    fn grown(&self, vino: Vino, before: u64, after: u64) {
        if let Some(known) = self.0.lock().get_mut(&vino)
            && known.version == before
        {
            known.version = after;
        }
    }

    /// A handle was closed.
    pub(super) fn closed(&self, vino: Vino) {
        if let Some(known) = self.0.lock().get_mut(&vino) {
            known.opens = known.opens.saturating_sub(1);
        }
    }
}

/// As `Ceph::opened_now`, for a handle of an earlier generation.
pub(super) fn reopened(warm: &Warm, vino: Vino, file: &File, writes: bool) {
    let may_cache = warm.is_alone(vino) || file.may_cache(writes);
    warm.seen(vino, 0, may_cache, 1);
}

impl Ceph {
    /// A file was opened. True if the kernel may keep its pages.
    pub(super) fn opened_now(&self, vino: Vino, inode: &Inode, file: &File, writes: bool) -> bool {
        self.looked_at(vino, inode, file, writes, 1)
    }

    /// True if what the kernel has of an open file is as the store has it.
    pub(super) fn is_fresh(&self, vino: Vino, inode: &Inode, file: &File, writes: bool) -> bool {
        self.looked_at(vino, inode, file, writes, 0)
    }

    fn looked_at(&self, vino: Vino, inode: &Inode, file: &File, writes: bool, opens: u32) -> bool {
        // Asks the server if this client may not know it, after others have written back.
        let version = inode.version(false, &self.superuser);
        let may_cache = self.warm.is_alone(vino) || file.may_cache(writes);
        let Ok(version) = version else {
            self.warm.seen(vino, 0, false, opens);
            return false;
        };
        self.warm.seen(vino, version, may_cache, opens)
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

    /// The kernel has bytes that were read or written in its pages. Without the right to cache they
    /// are taken back: nobody will tell when they are old.
    pub(super) fn is_in_pages(
        &self,
        vino: Vino,
        file: &File,
        writes: bool,
        offset: u64,
        len: usize,
    ) {
        if self.warm.is_alone(vino) {
            return;
        }
        if file.may_cache(writes) {
            // From the next byte on; these were transferred before.
            self.warm.seen(vino, 0, true, 0);
        }
        let identity = super::node::identity(vino);
        self.frontend.stale(&identity, offset as i64, len as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_stay_only_with_their_version_and_the_right_to_have_them() {
        let warm = Warm::default();
        let vino = Vino { ino: 7, snapid: 1 };
        assert!(!warm.seen(vino, 3, true, 1), "never seen");
        assert!(warm.seen(vino, 3, true, 1));
        assert!(!warm.seen(vino, 4, true, 1), "changed");
        assert!(warm.seen(vino, 4, true, 1));
        warm.grown(vino, 4, 5);
        assert!(warm.seen(vino, 5, true, 1), "our own change");
        warm.grown(vino, 4, 6);
        assert!(!warm.seen(vino, 6, true, 1), "not from there");
        warm.shared(vino);
        assert!(!warm.is_alone(vino));
        assert!(!warm.seen(vino, 6, true, 1), "was shared");
        assert!(warm.seen(vino, 6, true, 1));
        assert!(!warm.seen(vino, 6, false, 1), "is shared");
    }
}
