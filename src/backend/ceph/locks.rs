//! `fcntl(2)` locks. They are the session's, cluster-wide, under the owner the kernel names.
//!
//! The library drops the locks taken through an open file when that is closed, so they are taken
//! through a file of their own, one for each inode with locks. Nothing waits here: a lock that cannot
//! be had is EAGAIN, and the front-end lets the caller wait. Only the locks of a dead generation are
//! waited for, before this one serves ([`queue`](super::queue)).

use std::collections::{HashMap, HashSet};
use std::iter::repeat;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::Ceph;
use super::client::{File, Inode, Perms};
use super::files::Handle;
use super::node::vino;
use super::queue::{Calls, Outcome, Queue};
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
pub(super) struct Locks {
    nodes: Mutex<HashMap<u64, Node>>,
    /// Held over a whole operation on one inode's locks.
    busy: Stripes,
    /// Owners, each on an inode, that have another number with the metadata server.
    aliases: Mutex<HashSet<(u64, u64)>>,
    /// Calls that wait for locks which are lost.
    late: OnceLock<Arc<Calls>>,
    mark: Mark,
}

/// What the locks of this mount are known by.
///
/// The metadata server tells who has a lock by the number of a process, and processes of different
/// nodes, or of one node with two mounts, may have the same. So some bits that no number of a process
/// has (`PID_MAX_LIMIT`) are those of the mount.
#[derive(Clone, Copy)]
pub(super) struct Mark(i32);

impl Mark {
    const SHIFT: u32 = 22;
    const MAX: u32 = (1 << (31 - Self::SHIFT)) - 1;

    /// That of the mount a session is of.
    pub(super) fn of(session: &str) -> Mark {
        // A random name, and the number of the generation.
        let mount = session.rsplit_once('-').map_or(session, |(mount, _)| mount);
        let sum = |sum: u32, byte: u8| sum.wrapping_mul(31).wrapping_add(byte.into());
        let mark = mount.bytes().fold(0, sum) % Self::MAX + 1;
        Mark((mark << Self::SHIFT) as i32)
    }

    /// The number of a process, marked.
    pub(super) fn on(self, pid: u32) -> i32 {
        self.0 | Self::off(pid as i32)
    }

    /// The number of a process, without the mark of whatever mount.
    fn off(pid: i32) -> i32 {
        pid & ((1 << Self::SHIFT) - 1)
    }
}

impl Locks {
    pub(super) fn new(mark: Mark) -> Locks {
        Locks {
            nodes: Mutex::default(),
            busy: Stripes::default(),
            aliases: Mutex::default(),
            late: OnceLock::new(),
            mark,
        }
    }

    /// A lock that is lost may come late, and is given back then: with it would go what its owner has
    /// taken since, and so the owner has another number from now on.
    pub(super) fn alias(&self, nodeid: u64, owner: u64) {
        self.aliases.lock().insert((nodeid, owner));
    }

    /// The number the metadata server knows an owner by.
    fn owner(&self, nodeid: u64, owner: u64) -> u64 {
        // The library takes the highest bit for itself; the kernel's numbers are random.
        const OTHER: u64 = 1 << 62;
        if self.aliases.lock().contains(&(nodeid, owner)) {
            owner ^ OTHER
        } else {
            owner
        }
    }

    /// Some call waits for a lock. The session cannot be ended in order then: that would wait, too.
    pub(super) fn are_waited_for(&self) -> bool {
        self.late.get().is_some_and(|calls| calls.any())
    }

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
        lock.l_pid = self.locks.mark.on(arg.lk.pid);
        let _alone = self.locks.busy.lock(nodeid);
        let known = self.locks.file(nodeid);
        if i32::from(lock.l_type) == libc::F_UNLCK {
            let Some(file) = known else {
                return Ok(Answer::Empty);
            };
            file.lock(lock, self.locks.owner(nodeid, arg.owner))?;
            if lock.l_start == 0 && lock.l_len == 0 {
                self.locks.unlocked(nodeid, arg.owner);
            }
            return Ok(Answer::Empty);
        }
        let file = match known {
            Some(file) => file,
            None => Arc::new(open_for_locks(
                &self.inode(&call.annex.node)?,
                &self.superuser,
            )?),
        };
        file.lock(lock, self.locks.owner(nodeid, arg.owner))?;
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
            None => Arc::new(open_for_locks(
                &self.inode(&call.annex.node)?,
                &self.superuser,
            )?),
        };
        let owner = self.locks.owner(nodeid, arg.owner);
        let mut found = file.test_lock(lock, owner)?;
        found.l_pid = Mark::off(found.l_pid);
        let lk = from_flock(&found, &arg.lk);
        Ok(Answer::Data(LkOut { lk }.as_bytes().to_vec()))
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
            file.lock(to_flock(&everything)?, self.locks.owner(nodeid, owner))?;
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
    pub(super) fn restore_locks(&self, held: &[HeldLock], queue: Option<Queue>) -> Vec<LostLock> {
        let outcomes = queue.map_or_else(Vec::new, |queue| {
            let (outcomes, calls) = queue.finish();
            let _ = self.locks.late.set(calls);
            outcomes
        });
        let outcomes = outcomes.into_iter().chain(repeat(Outcome::Unasked));
        let mut lost = Vec::new();
        for (lock, outcome) in held.iter().zip(outcomes) {
            let taken = match outcome {
                Outcome::Held(file) => self.adopt(lock, file),
                Outcome::Lost(errno) => Err(errno),
                Outcome::Unasked => self.restore_lock(lock),
            };
            if let Err(e) = taken {
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
            self.locks.alias(one.nodeid, one.owner);
        }
        lost
    }

    fn restore_lock(&self, lock: &HeldLock) -> Result<(), Errno> {
        let file = match self.locks.file(lock.nodeid) {
            Some(file) => file,
            None => {
                let vino = vino(&lock.identity).ok_or(Errno::ESTALE)?;
                let inode = self.client.find(vino)?;
                Arc::new(open_for_locks(&inode, &self.superuser)?)
            }
        };
        file.lock(range_of(lock, self.locks.mark)?, lock.owner)?;
        self.adopt(lock, file)
    }

    /// A lock of the last generation is ours again.
    fn adopt(&self, lock: &HeldLock, file: Arc<File>) -> Result<(), Errno> {
        if self.locks.file(lock.nodeid).is_none() {
            let vino = vino(&lock.identity).ok_or(Errno::ESTALE)?;
            // The only open file of it so far: later it cannot be asked.
            self.warm.looked_at(vino, &file);
        }
        self.locks.locked(lock.nodeid, file, lock.owner, lock.fh);
        Ok(())
    }
}

/// Locks need no right to read or write: the kernel has looked at how the caller's file is open.
pub(super) fn open_for_locks(inode: &Inode, superuser: &Perms) -> Result<File, Errno> {
    inode.open(libc::O_RDONLY, superuser)
}

/// A lock as the library takes it.
pub(super) fn range_of(lock: &HeldLock, mark: Mark) -> Result<libc::flock, Errno> {
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
    range.l_pid = mark.on(lock.pid);
    Ok(range)
}

/// The range a request is about. `flock(2)` is the kernel's own here and never asked for.
fn lock_of(arg: &LkIn) -> Result<libc::flock, Errno> {
    if arg.lk_flags & LK_FLOCK != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    to_flock(&arg.lk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_the_mounts_and_comes_off() {
        let mark = Mark::of("0123abcd-7");
        for pid in [1, 4711, (1 << 22) - 1] {
            let marked = mark.on(pid);
            assert!(marked > 1 << 22);
            assert_eq!(Mark::off(marked), pid as i32);
            assert_eq!(Mark::of("0123abcd-8").on(pid), marked);
            assert_ne!(Mark::of("0123abce-8").on(pid), marked);
        }
    }
}
