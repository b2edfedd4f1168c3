//! What a store without a memory of its own has to be told when the next generation begins, and what
//! it is told in between. (`dir:` needs nothing of this: its objects, files and locks lie in the
//! vault.)

use zerocopy::IntoBytes;

use super::*;
use crate::control::message::{HeldHandle, HeldLock, LostLock, Restore};
use crate::region::slot::{Journal, Slot};

impl Core {
    /// Everything the last generation held.
    pub fn restore(&self) -> Restore {
        let identity = |nodeid| self.tables.node(nodeid).map(|node| node.identity);
        let handles = self
            .tables
            .handles()
            .into_iter()
            .filter_map(|(fh, handle)| {
                Some(HeldHandle {
                    fh,
                    identity: identity(handle.nodeid)?,
                    open_flags: handle.open_flags,
                    directory: handle.directory,
                })
            });
        let locks = self.tables.all_locks().into_iter().filter_map(|lock| {
            (!lock.flock).then_some(HeldLock {
                nodeid: lock.nodeid,
                identity: identity(lock.nodeid)?,
                owner: lock.owner,
                exclusive: lock.exclusive,
                start: lock.start,
                end: lock.end,
                pid: lock.pid,
                fh: lock.fh,
            })
        });
        Restore {
            handles: handles.collect(),
            pinned: self.pinned.iter().copied().collect(),
            locks: locks.collect(),
        }
    }

    /// A request that takes the last name of an object was executed, or may have been.
    pub(super) fn note_last_name(&mut self, slot: &Slot<'_>, request: &Request<'_>, done: bool) {
        if !matches!(
            request.op,
            Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. }
        ) {
            return;
        }
        let journal = slot.journal();
        if journal.flags & Journal::LAST_NAME == 0 || journal.target.is_none() {
            return;
        }
        match self.tables.find(&journal.target) {
            Some(nodeid) if done => {
                self.tables.set_vaulted(nodeid, true);
                self.pinned.insert(journal.target);
            }
            // The kernel never knew it, or it has kept its name.
            _ if !self.pinned.contains(&journal.target) => self.unpin.push(journal.target),
            _ => {}
        }
    }

    /// The kernel knows an object without a name no more.
    pub(super) fn forget_pinned(&mut self, identity: Identity) {
        if self.pinned.remove(&identity) {
            self.unpin.push(identity);
        }
    }

    /// Nodes whose pages the kernel may have from an earlier generation while nobody told it of
    /// changes: those of open files. What is closed is dropped when it is opened again.
    pub fn open_nodes(&self) -> Vec<u64> {
        let handles = self.tables.handles().into_iter();
        let files = handles.filter(|(_, handle)| !handle.directory);
        let mut nodes: Vec<u64> = files.map(|(_, handle)| handle.nodeid).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Locks could not be taken again. Whoever believes to hold one learns it: the handles it was
    /// taken through work no more.
    pub fn lose_locks(&mut self, io: &Io, lost: &[LostLock]) {
        for one in lost {
            let locks = self.tables.locks_on(one.nodeid);
            let mine = locks.iter().filter(|l| l.owner == one.owner && !l.flock);
            for lock in mine {
                self.counters.lost_locks += 1;
                self.tables.lose_handle(lock.fh);
            }
            self.tables.unlock_owner(one.nodeid, one.owner, false);
            self.serve_waiters(io, one.nodeid);
        }
    }

    /// Something ended in an outage and the kernel has its answer. A generation that is just
    /// beginning may have been told of it as something to restore, so it is told of the end, too.
    pub(super) fn tell_later(&mut self, held: &Held, request: &Request<'_>) {
        if !self.sessions {
            return;
        }
        let bytes = match request.op {
            Op::Release(release) => [request.header.as_bytes(), release.as_bytes()].concat(),
            Op::Flush(flush) => [request.header.as_bytes(), flush.as_bytes()].concat(),
            _ => return,
        };
        let later = Held {
            purpose: Purpose::Internal,
            ..held.clone()
        };
        self.push_outside(later, bytes);
    }
}
