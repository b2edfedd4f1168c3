//! What a store without a memory of its own has to be told when the next generation begins, and what
//! it is told in between. (`dir:` needs nothing of this: its objects, files and locks lie in the
//! vault.)

use zerocopy::IntoBytes;

use super::*;
use crate::control::message::{HeldHandle, HeldLock, HeldTime, LostLock, Restore};
use crate::region::slot::{Journal, Slot};

/// A session has told the store everything of a file this long after its close, nanoseconds.
const CLOSE_NS: u64 = 5_000_000_000;

fn writes(handle: &Handle) -> bool {
    !handle.directory && handle.open_flags as i32 & libc::O_ACCMODE != libc::O_RDONLY
}

/// The end of some locks of a node, which was asked for.
enum LockEnd {
    /// By SETLK.
    Range(Lock),
    /// Of all of an owner, by FLUSH.
    Owner(u64, u64),
    /// Of all that were taken through a handle, by RELEASE.
    Handle(u64),
}

fn ends_locks(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::Setlk | Opcode::Setlkw | Opcode::Flush | Opcode::Release
    )
}

impl LockEnd {
    fn of(request: &Request<'_>) -> Option<LockEnd> {
        match request.op {
            Op::Setlk(lk) if lk.lk.typ == libc::F_UNLCK as u32 => {
                settle::lock_of(request).map(LockEnd::Range)
            }
            Op::Flush(flush) => Some(LockEnd::Owner(request.header.nodeid, flush.lock_owner)),
            Op::Release(release) => Some(LockEnd::Handle(release.fh)),
            _ => None,
        }
    }

    fn covers(&self, lock: &Lock) -> bool {
        match self {
            LockEnd::Range(end) => {
                (end.nodeid, end.owner) == (lock.nodeid, lock.owner)
                    && end.start <= lock.start
                    && lock.end <= end.end
            }
            LockEnd::Owner(nodeid, owner) => (*nodeid, *owner) == (lock.nodeid, lock.owner),
            LockEnd::Handle(fh) => *fh == lock.fh,
        }
    }
}

impl Held {
    /// An end its caller had its answer for in an outage ([`Core::tell_later`]).
    pub(super) fn is_told_later(&self) -> bool {
        let end = matches!(
            self.opcode,
            Opcode::Flush | Opcode::Release | Opcode::Releasedir
        );
        end && self.purpose == Purpose::Internal
    }
}

impl Core {
    /// Everything the last generation held.
    pub fn restore(&self, io: &Io) -> Restore {
        let ends = self.lock_ends(io);
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
            let ends = ends.iter().any(|end| end.covers(&lock));
            (!lock.flock && !ends).then_some(HeldLock {
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
        let times = self.set_times().into_iter().filter_map(|nodeid| {
            let (sec, nsec) = self.tables.set_time(nodeid)?;
            let identity = identity(nodeid)?;
            Some(HeldTime {
                identity,
                sec,
                nsec,
            })
        });
        Restore {
            times: times.collect(),
            handles: handles.collect(),
            directories: self.directories_in_use(),
            pinned: self.pinned.iter().copied().collect(),
            locks: locks.collect(),
        }
    }

    /// Directories above open files, each once.
    fn directories_in_use(&self) -> Vec<Identity> {
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        for nodeid in self.open_nodes() {
            let parent = |nodeid| self.tables.node(nodeid).map_or(0, |node| node.parent);
            let mut above = parent(nodeid);
            // Ends at the root, whose parent is nothing, and where somebody has been before.
            while seen.insert(above)
                && let Some(node) = self.tables.node(above)
            {
                found.push(node.identity);
                above = node.parent;
            }
        }
        found
    }

    /// Locks that callers are just giving back. The store may have done it, and somebody else may
    /// have them by now: that is no loss.
    fn lock_ends(&self, io: &Io) -> Vec<LockEnd> {
        let mut ends = Vec::new();
        let mut note = |bytes: &[u8]| {
            ends.extend(Request::decode(bytes).ok().and_then(|r| LockEnd::of(&r)));
        };
        for index in (0..SLOTS).filter_map(SlotIndex::new) {
            let held = self.slots[index.get() as usize].as_ref().map(|s| &s.held);
            if held.is_some_and(|held| ends_locks(held.opcode)) {
                note(&io.region.slot(index).copy_request());
            }
        }
        for outside in &self.outside {
            if ends_locks(outside.held.opcode) {
                note(&outside.bytes);
            }
        }
        ends
    }

    /// Nodes that are, or were a moment ago, open for writing: when the session that wrote them dies,
    /// their times are the store's guess.
    fn set_times(&self) -> Vec<u64> {
        let handles = self.tables.handles().into_iter();
        let open = handles.filter(|(_, handle)| writes(handle));
        let mut nodes: Vec<u64> = open.map(|(_, handle)| handle.nodeid).collect();
        let recent = sys::monotonic_ns().saturating_sub(CLOSE_NS);
        let closed = self.closed.iter().filter(|(at, _)| *at >= recent);
        nodes.extend(closed.map(|(_, nodeid)| *nodeid));
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// A handle is about to be closed.
    pub(super) fn note_close(&mut self, fh: u64) {
        let handle = self.tables.handle(fh).filter(|_| self.sessions);
        let Some(handle) = handle.filter(writes) else {
            return;
        };
        if self.tables.set_time(handle.nodeid).is_none() {
            return;
        }
        let now = sys::monotonic_ns();
        while (self.closed.front()).is_some_and(|(at, _)| at + CLOSE_NS < now) {
            self.closed.pop_front();
        }
        self.closed.push_back((now, handle.nodeid));
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
                if let Some(news) = &mut self.standby {
                    news.pin(journal.target);
                }
            }
            // The kernel never knew it, or it has kept its name.
            _ if !self.pinned.contains(&journal.target) => self.unpin.push(journal.target),
            _ => {}
        }
    }

    /// The kernel knows an object without a name no more.
    pub(super) fn forget_pinned(&mut self, identity: Identity) {
        self.gone.remove(&identity);
        if self.pinned.remove(&identity) {
            self.unpin.push(identity);
            if let Some(news) = &mut self.standby {
                news.unpin(identity);
            }
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
