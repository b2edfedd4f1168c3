//! `fcntl(2)` locks. They are the session's, cluster-wide, under the owner the kernel names.
//!
//! The library drops the locks taken through an open file when that is closed, so they are taken
//! through a file of their own, one for each inode with locks. Nothing waits here: a lock that cannot
//! be had is EAGAIN, and the front-end lets the caller wait.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::Ceph;
use super::client::{File, Inode};
use super::files::Handle;
use super::node::vino;
use crate::backend::convert::{LOCK_END, from_flock, to_flock};
use crate::backend::{Answer, Call, Stripes};
use crate::control::message::{HeldLock, LostLock};
use crate::wire::Errno;
use crate::wire::abi::{FileLock, LK_FLOCK, LkIn, LkOut};

/// The locks of an inode.
struct Node {
    file: Arc<File>,
    /// Owners, and the handle each took its last lock through.
    owners: HashMap<u64, u64>,
}

/// The inodes with locks, by node id.
#[derive(Default)]
pub(super) struct Locks {
    nodes: Mutex<HashMap<u64, Node>>,
    /// Held over a whole operation on one inode's locks.
    busy: Stripes,
}

impl Locks {
    fn file(&self, nodeid: u64) -> Option<Arc<File>> {
        Some(self.nodes.lock().get(&nodeid)?.file.clone())
    }

    fn locked(&self, nodeid: u64, file: Arc<File>, owner: u64, fh: u64) {
        let mut nodes = self.nodes.lock();
        let owners = HashMap::new();
        let node = nodes.entry(nodeid).or_insert(Node { file, owners });
        node.owners.insert(owner, fh);
    }

    /// An owner has no lock on the inode any more. The file goes with the last one.
    fn unlocked(&self, nodeid: u64, owner: u64) {
        let gone = {
            let mut nodes = self.nodes.lock();
            match nodes.get_mut(&nodeid) {
                Some(node) => {
                    node.owners.remove(&owner);
                    node.owners.is_empty().then(|| nodes.remove(&nodeid))
                }
                None => None,
            }
        };
        drop(gone);
    }

    /// Owners whose last lock was taken through a handle.
    fn through(&self, fh: u64) -> Vec<(u64, u64)> {
        let nodes = self.nodes.lock();
        let owners = nodes.iter().flat_map(|(nodeid, node)| {
            let mine = node.owners.iter().filter(|(_, through)| **through == fh);
            mine.map(|(owner, _)| (*nodeid, *owner))
        });
        owners.collect()
    }
}

impl Ceph {
    pub(super) fn setlk(&self, call: &Call<'_>, arg: LkIn) -> Result<Answer, Errno> {
        let nodeid = call.annex.node.nodeid;
        let mut lock = lock_of(&arg)?;
        lock.l_pid = arg.lk.pid as i32;
        let _alone = self.locks.busy.lock(nodeid);
        let known = self.locks.file(nodeid);
        if i32::from(lock.l_type) == libc::F_UNLCK {
            let Some(file) = known else {
                return Ok(Answer::Empty);
            };
            file.lock(lock, arg.owner)?;
            if lock.l_start == 0 && lock.l_len == 0 {
                self.locks.unlocked(nodeid, arg.owner);
            }
            return Ok(Answer::Empty);
        }
        let file = match known {
            Some(file) => file,
            None => Arc::new(self.file_for_locks(&self.inode(&call.annex.node)?)?),
        };
        file.lock(lock, arg.owner)?;
        self.locks
            .locked(nodeid, file, arg.owner, call.annex.handle.fh);
        // Notices of what others changed come a moment later than the lock they gave up.
        let vino = vino(&call.annex.node.identity).ok_or(Errno::ESTALE)?;
        let inode = self.inode(&call.annex.node)?;
        let fresh = match &*self.handle(call)? {
            Handle::File(open) => self.is_fresh(vino, &inode, &open.file, open.writes),
            Handle::Directory(_) => true,
        };
        Ok(if fresh {
            Answer::Empty
        } else {
            Answer::EmptyWithoutPages
        })
    }

    pub(super) fn getlk(&self, call: &Call<'_>, arg: LkIn) -> Result<Answer, Errno> {
        let nodeid = call.annex.node.nodeid;
        let lock = lock_of(&arg)?;
        let file = match self.locks.file(nodeid) {
            Some(file) => file,
            None => Arc::new(self.file_for_locks(&self.inode(&call.annex.node)?)?),
        };
        let lk = from_flock(&file.test_lock(lock, arg.owner)?, &arg.lk);
        Ok(Answer::Data(LkOut { lk }.as_bytes().to_vec()))
    }

    /// Locks need no right to read or write: the kernel has looked at how the caller's file is open.
    fn file_for_locks(&self, inode: &Inode) -> Result<File, Errno> {
        inode.open(libc::O_RDONLY, &self.superuser)
    }

    /// Drops all locks an owner has on a node.
    pub(super) fn unlock_owner(&self, nodeid: u64, owner: u64) -> Result<(), Errno> {
        let _alone = self.locks.busy.lock(nodeid);
        let owns = {
            let nodes = self.locks.nodes.lock();
            let node = nodes.get(&nodeid);
            node.filter(|n| n.owners.contains_key(&owner))
                .map(|n| n.file.clone())
        };
        if let Some(file) = owns {
            let everything = FileLock {
                start: 0,
                end: LOCK_END,
                typ: libc::F_UNLCK as u32,
                pid: 0,
            };
            file.lock(to_flock(&everything)?, owner)?;
            self.locks.unlocked(nodeid, owner);
        }
        Ok(())
    }

    /// Drops the locks whose owners took their last one through a handle that is closed: those an
    /// open file description owns, for which the kernel sends no unlock.
    pub(super) fn unlock_handle(&self, fh: u64) -> Result<(), Errno> {
        for (nodeid, owner) in self.locks.through(fh) {
            self.unlock_owner(nodeid, owner)?;
        }
        Ok(())
    }

    /// Takes the locks of the last generation again. Returns those that somebody else has now.
    pub(super) fn restore_locks(&self, held: &[HeldLock]) -> Vec<LostLock> {
        let mut lost = Vec::new();
        for lock in held {
            if let Err(e) = self.restore_lock(lock) {
                tracing::warn!("a lock on node {} is lost: {e}", lock.nodeid);
                let one = LostLock {
                    nodeid: lock.nodeid,
                    owner: lock.owner,
                };
                if !lost.contains(&one) {
                    lost.push(one);
                }
            }
        }
        // What is left of an owner that lost a range is of no use to it.
        for one in &lost {
            if let Err(e) = self.unlock_owner(one.nodeid, one.owner) {
                tracing::warn!("locks on node {} stay with nobody: {e}", one.nodeid);
            }
        }
        lost
    }

    fn restore_lock(&self, lock: &HeldLock) -> Result<(), Errno> {
        let file = match self.locks.file(lock.nodeid) {
            Some(file) => file,
            None => {
                let vino = vino(&lock.identity).ok_or(Errno::ESTALE)?;
                let file = self.file_for_locks(&self.client.find(vino)?)?;
                // The only open file of it so far: later it cannot be asked.
                self.warm.looked_at(vino, &file);
                Arc::new(file)
            }
        };
        let typ = if lock.exclusive {
            libc::F_WRLCK
        } else {
            libc::F_RDLCK
        };
        let mut range = to_flock(&FileLock {
            start: lock.start,
            end: lock.end,
            typ: typ as u32,
            pid: lock.pid,
        })?;
        range.l_pid = lock.pid as i32;
        file.lock(range, lock.owner)?;
        self.locks.locked(lock.nodeid, file, lock.owner, lock.fh);
        Ok(())
    }
}

/// The range a request is about. `flock(2)` is the kernel's own here and never asked for.
fn lock_of(arg: &LkIn) -> Result<libc::flock, Errno> {
    if arg.lk_flags & LK_FLOCK != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    to_flock(&arg.lk)
}
