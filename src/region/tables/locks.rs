//! Locked ranges, and the requests that wait for one.
//!
//! The locks of an inode are a chain, the one taken last in front. The ranges of one owner do not
//! overlap, and those of the same kind do not touch.

use std::mem::offset_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::heap::{self, Class};
use super::index::Index;
use super::inodes::{LOCK_HEAD, WAITER_HEAD};
use super::words::{LOCKS, WAITERS};
use super::{Full, MAX_LOCKS, MAX_WAITERS, Tables};

/// A record of a lock.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Record {
    nodeid: u64,
    owner: u64,
    start: u64,
    end: u64,
    fh: u64,
    pid: u32,
    flags: u32,
    next: u32,
    prev: u32,
    reserved: u64,
}

const _: () = assert!(size_of::<Record>() == Class::LOCK.size());

const LIVE: u32 = 1;
const FLOCK: u32 = 2;
const EXCLUSIVE: u32 = 4;

/// A record of a waiter.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct WaiterRecord {
    unique: u64,
    nodeid: u64,
    sequence: u64,
    fd_index: u32,
    hash: u32,
    index_next: u32,
    live: u32,
    next: u32,
    prev: u32,
    request: [u8; 88],
}

const _: () = assert!(size_of::<WaiterRecord>() == Class::WAITER.size());

pub(super) const WAITER_INDEX_NEXT: usize = offset_of!(WaiterRecord, index_next);
pub(super) const WAITER_HASH: usize = offset_of!(WaiterRecord, hash);

/// A kind of chain that hangs on an inode.
#[derive(Clone, Copy)]
pub(super) struct Chain {
    class: Class,
    /// Offset of the first link in the inode's record.
    head: usize,
    /// Offsets in the records of the chain.
    next: usize,
    prev: usize,
    nodeid: usize,
}

pub(super) const LOCK_CHAIN: Chain = Chain {
    class: Class::LOCK,
    head: LOCK_HEAD,
    next: offset_of!(Record, next),
    prev: offset_of!(Record, prev),
    nodeid: offset_of!(Record, nodeid),
};

pub(super) const WAITER_CHAIN: Chain = Chain {
    class: Class::WAITER,
    head: WAITER_HEAD,
    next: offset_of!(WaiterRecord, next),
    prev: offset_of!(WaiterRecord, prev),
    nodeid: offset_of!(WaiterRecord, nodeid),
};

/// A locked range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The inode.
    pub nodeid: u64,
    /// The kernel's number of the owner.
    pub owner: u64,
    /// It is a `flock(2)` lock, which is of the whole file.
    pub flock: bool,
    /// It is a write lock.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// Process that took it.
    pub pid: u32,
    /// Handle it was taken through.
    pub fh: u64,
}

impl Lock {
    fn is_of(&self, owner: u64, flock: bool) -> bool {
        self.owner == owner && self.flock == flock
    }

    /// Two owners cannot have both.
    pub fn conflicts(&self, other: &Lock) -> bool {
        self.nodeid == other.nodeid
            && self.flock == other.flock
            && self.owner != other.owner
            && (self.exclusive || other.exclusive)
            && self.overlaps(other.start, other.end)
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start <= end && start <= self.end
    }

    fn touches(&self, start: u64, end: u64) -> bool {
        self.start <= end.saturating_add(1) && start <= self.end.saturating_add(1)
    }
}

/// A SETLKW request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Number of the request.
    pub unique: u64,
    /// Connection it was read from.
    pub fd_index: u32,
    /// Position in the order of arrival.
    pub sequence: u64,
    /// Its `InHeader` and `LkIn`.
    pub request: [u8; 88],
}

impl Tables {
    /// An owner locks a range: it replaces what the owner held of it.
    ///
    /// [`Full`] also if the inode is not known.
    pub fn set_lock(&mut self, lock: &Lock) -> Result<(), Full> {
        let mut lock = *lock;
        if lock.flock {
            (lock.start, lock.end) = (0, u64::MAX);
        }
        if lock.start > lock.end {
            return Ok(());
        }
        self.attempt(|t| {
            let (start, end) = (lock.start, lock.end);
            for (block, held) in t.owned(lock.nodeid, lock.owner, lock.flock) {
                if held.exclusive == lock.exclusive && held.touches(start, end) {
                    lock.start = lock.start.min(held.start);
                    lock.end = lock.end.max(held.end);
                    t.drop_lock(block);
                } else if held.overlaps(start, end) {
                    t.cut(block, &held, start, end)?;
                }
            }
            t.add_lock(&lock, 0)
        })
    }

    /// An owner unlocks a range. Splitting one may find the table full; then nothing is unlocked.
    pub fn unlock(
        &mut self,
        nodeid: u64,
        owner: u64,
        flock: bool,
        start: u64,
        end: u64,
    ) -> Result<(), Full> {
        let (start, end) = match flock {
            true => (0, u64::MAX),
            false => (start, end),
        };
        self.attempt(|t| {
            for (block, held) in t.owned(nodeid, owner, flock) {
                if held.overlaps(start, end) {
                    t.cut(block, &held, start, end)?;
                }
            }
            Ok(())
        })
    }

    /// Unlocks everything of an owner on an inode; true if there was something.
    pub fn unlock_owner(&mut self, nodeid: u64, owner: u64, flock: bool) -> bool {
        let owned = self.owned(nodeid, owner, flock);
        self.atomically(|t| owned.iter().for_each(|&(block, _)| t.drop_lock(block)));
        !owned.is_empty()
    }

    /// The owners (inode, owner, flock) whose latest lock on the handle's inode was taken through
    /// this handle.
    pub fn locks_through(&self, fh: u64) -> Vec<(u64, u64, bool)> {
        let Some(handle) = self.handle(fh) else {
            return Vec::new();
        };
        let mut seen = std::collections::HashSet::new();
        self.locks_on(handle.nodeid)
            .into_iter()
            .filter(|lock| seen.insert((lock.owner, lock.flock)) && lock.fh == fh)
            .map(|lock| (lock.nodeid, lock.owner, lock.flock))
            .collect()
    }

    /// The owner holds a lock on the inode.
    pub fn has_locks(&self, nodeid: u64, owner: u64, flock: bool) -> bool {
        self.node_locks(nodeid)
            .any(|(_, lock)| lock.is_of(owner, flock))
    }

    /// A lock of another owner that this one conflicts with.
    pub fn conflict(&self, lock: &Lock) -> Option<Lock> {
        let (start, end) = match lock.flock {
            true => (0, u64::MAX),
            false => (lock.start, lock.end),
        };
        self.node_locks(lock.nodeid)
            .map(|(_, held)| held)
            .filter(|held| {
                held.flock == lock.flock
                    && held.owner != lock.owner
                    && (held.exclusive || lock.exclusive)
                    && held.overlaps(start, end)
            })
            .min_by_key(|held| held.start)
    }

    /// All locks on an inode, the one taken last first.
    pub fn locks_on(&self, nodeid: u64) -> Vec<Lock> {
        self.node_locks(nodeid).map(|(_, lock)| lock).collect()
    }

    /// All locks of the mount. Walks the whole table.
    pub fn all_locks(&self) -> Vec<Lock> {
        self.words
            .blocks(Class::LOCK)
            .map(|block| self.words.record::<Record>(heap::address(block)))
            .filter(|record| record.flags & LIVE != 0)
            .map(|record| record.lock())
            .collect()
    }

    /// A lock request waits. [`Full`] also if the inode is not known.
    pub fn add_waiter(&mut self, nodeid: u64, waiter: &Waiter) -> Result<(), Full> {
        if self.waiters_len() >= MAX_WAITERS {
            return Err(Full);
        }
        self.attempt(|t| {
            let node = t.inode_at(nodeid).ok_or(Full)?;
            let block = t.words.take_record(Class::WAITER)?;
            let record = WaiterRecord {
                unique: waiter.unique,
                nodeid,
                sequence: waiter.sequence,
                fd_index: waiter.fd_index,
                hash: 0,
                index_next: 0,
                live: 1,
                next: 0,
                prev: 0,
                request: waiter.request,
            };
            t.words.store_record(heap::address(block), &record);
            t.link(WAITER_CHAIN, node, block, 0);
            let hash = t.words.hash(waiter.unique, &[]);
            t.words.insert(Index::Waiter, block, hash);
            t.words.add(WAITERS, 1);
            Ok(())
        })
    }

    /// Takes a waiter out of the table.
    pub fn remove_waiter(&mut self, unique: u64) -> Option<Waiter> {
        let hash = self.words.hash(unique, &[]);
        let block = self
            .words
            .search(Index::Waiter, hash, |at| self.words.load(at) == unique)?;
        let waiter = self.waiter(block)?;
        self.atomically(|t| t.drop_waiter(block));
        Some(waiter)
    }

    /// The requests that wait for a lock on an inode, in the order of arrival.
    pub fn waiters_on(&self, nodeid: u64) -> Vec<Waiter> {
        in_order(
            self.chain(WAITER_CHAIN, nodeid)
                .filter_map(|block| self.waiter(block)),
        )
    }

    /// All requests that wait for a lock, in the order of arrival. Walks the whole table.
    pub fn waiters(&self) -> Vec<Waiter> {
        in_order(
            self.words
                .blocks(Class::WAITER)
                .filter_map(|block| self.waiter(block)),
        )
    }

    /// The inode is gone.
    pub(super) fn drop_locks_and_waiters(&mut self, nodeid: u64) {
        for block in self.chain(LOCK_CHAIN, nodeid).collect::<Vec<_>>() {
            self.drop_lock(block);
        }
        for block in self.chain(WAITER_CHAIN, nodeid).collect::<Vec<_>>() {
            self.drop_waiter(block);
        }
    }

    pub(super) fn waiter(&self, block: u32) -> Option<Waiter> {
        let at = self.words.block(block, Class::WAITER)?;
        let record: WaiterRecord = self.words.record(at);
        (record.live != 0).then_some(Waiter {
            unique: record.unique,
            fd_index: record.fd_index,
            sequence: record.sequence,
            request: record.request,
        })
    }

    fn drop_waiter(&mut self, block: u32) {
        self.words.remove(Index::Waiter, block);
        self.unlink(WAITER_CHAIN, block);
        let live = heap::address(block) + offset_of!(WaiterRecord, live);
        self.words.store_half(live, 0);
        self.words.give(block, Class::WAITER);
        self.words.add(WAITERS, -1);
    }

    pub(super) fn node_locks(&self, nodeid: u64) -> impl Iterator<Item = (u32, Lock)> + '_ {
        self.chain(LOCK_CHAIN, nodeid).map(|block| {
            let record: Record = self.words.record(heap::address(block));
            (block, record.lock())
        })
    }

    fn owned(&self, nodeid: u64, owner: u64, flock: bool) -> Vec<(u32, Lock)> {
        self.node_locks(nodeid)
            .filter(|(_, lock)| lock.is_of(owner, flock))
            .collect()
    }

    /// Takes `[start, end]` out of a held range that overlaps it.
    fn cut(&mut self, block: u32, held: &Lock, start: u64, end: u64) -> Result<(), Full> {
        let before = held.start < start;
        let after = held.end > end;
        let at = heap::address(block);
        match (before, after) {
            (false, false) => self.drop_lock(block),
            (false, true) => self.words.store(at + offset_of!(Record, start), end + 1),
            (true, _) => self.words.store(at + offset_of!(Record, end), start - 1),
        }
        if before && after {
            let rest = Lock {
                start: end + 1,
                ..*held
            };
            self.add_lock(&rest, block)?;
        }
        Ok(())
    }

    /// Adds a lock to its inode's chain behind `after`, or in front.
    fn add_lock(&mut self, lock: &Lock, after: u32) -> Result<(), Full> {
        let node = self.inode_at(lock.nodeid).ok_or(Full)?;
        if self.locks() >= MAX_LOCKS {
            return Err(Full);
        }
        let block = self.words.take_record(Class::LOCK)?;
        let flock = if lock.flock { FLOCK } else { 0 };
        let exclusive = if lock.exclusive { EXCLUSIVE } else { 0 };
        let record = Record {
            nodeid: lock.nodeid,
            owner: lock.owner,
            start: lock.start,
            end: lock.end,
            fh: lock.fh,
            pid: lock.pid,
            flags: LIVE | flock | exclusive,
            next: 0,
            prev: 0,
            reserved: 0,
        };
        self.words.store_record(heap::address(block), &record);
        self.link(LOCK_CHAIN, node, block, after);
        self.words.add(LOCKS, 1);
        Ok(())
    }

    fn drop_lock(&mut self, block: u32) {
        self.unlink(LOCK_CHAIN, block);
        let flags = heap::address(block) + offset_of!(Record, flags);
        self.words.store_half(flags, 0);
        self.words.give(block, Class::LOCK);
        self.words.add(LOCKS, -1);
    }

    /// The records of an inode's chain.
    pub(super) fn chain(&self, chain: Chain, nodeid: u64) -> impl Iterator<Item = u32> + '_ {
        let node = self.inode_at(nodeid);
        let mut block = node.map_or(0, |at| self.words.half(at + chain.head));
        let mut before = 0;
        std::iter::from_fn(move || {
            let this = block;
            let at = self.words.block(this, chain.class)?;
            // A record that names another one before it ends a corrupt chain, and any circle.
            if self.words.half(at + chain.prev) != before {
                return None;
            }
            before = this;
            block = self.words.half(at + chain.next);
            Some(this)
        })
    }

    /// Links a record into the chain of the inode at `node`, behind `after` or in front.
    fn link(&mut self, chain: Chain, node: usize, block: u32, after: u32) {
        let at = heap::address(block);
        let link = match after {
            0 => node + chain.head,
            _ => heap::address(after) + chain.next,
        };
        let next = self.words.half(link);
        self.words.store_half(at + chain.next, next);
        self.words.store_half(at + chain.prev, after);
        if let Some(next) = self.words.block(next, chain.class) {
            self.words.store_half(next + chain.prev, block);
        }
        self.words.store_half(link, block);
    }

    fn unlink(&mut self, chain: Chain, block: u32) {
        let at = heap::address(block);
        let next = self.words.half(at + chain.next);
        let prev = self.words.half(at + chain.prev);
        if let Some(prev) = self.words.block(prev, chain.class) {
            self.words.store_half(prev + chain.next, next);
        } else if let Some(node) = self.inode_at(self.words.load(at + chain.nodeid)) {
            self.words.store_half(node + chain.head, next);
        }
        if let Some(next) = self.words.block(next, chain.class) {
            self.words.store_half(next + chain.prev, prev);
        }
    }
}

impl Record {
    fn lock(&self) -> Lock {
        Lock {
            nodeid: self.nodeid,
            owner: self.owner,
            flock: self.flags & FLOCK != 0,
            exclusive: self.flags & EXCLUSIVE != 0,
            start: self.start,
            end: self.end,
            pid: self.pid,
            fh: self.fh,
        }
    }
}

fn in_order(waiters: impl Iterator<Item = Waiter>) -> Vec<Waiter> {
    let mut waiters: Vec<Waiter> = waiters.collect();
    waiters.sort_by_key(|waiter| waiter.sequence);
    waiters
}
