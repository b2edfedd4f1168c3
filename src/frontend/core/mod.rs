//! The state of a mount in the front-end, and the life of a request in it.
//!
//! ```text
//!            read(2)              hand over            backend             completer
//!  kernel ──────────▶ [outside] ───────────▶ slot ───────────────▶ slot ─────────────▶ kernel
//!                     waits for a slot,       Queued … Running      ReplyReady
//!                     or for a backend
//! ```
//!
//! A request that was read is owned by exactly one place until it is answered: the queue *outside*
//! (private memory; it has not run), a slot, or, for a lock that must wait, the table of waiters.
//! All of it is behind one lock; system calls that may take long happen without it.
//!
//! What a slot holds can be written by the backend at any time, so whatever decides about a request
//! is kept here, too, and compared.

mod arrival;
mod completion;
mod generations;
mod outage;
mod sessions;
mod standby;
#[cfg(test)]
mod tests;
mod waiters;

pub use completion::deliver;

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::config::OutagePolicy;
use super::vault::VaultStore;
use crate::backend::{Replayed, VaultKey};
use crate::pump::resolve::resolve;
use crate::pump::settle::{self, Effect, Given, Reply, Settled, data_reply, error_reply};
use crate::region::slot::{Phase, REPLY_SMALL, REQUEST_SMALL, SlotIndex};
use crate::region::tables::{Handle, Lock, Tables, Waiter};
use crate::region::{CHUNK, CHUNKS, Identity, MAX_CHUNKS, MAX_WRITE, Region, SLOTS};
use crate::sys;
use crate::wire::abi::*;
use crate::wire::{DecodeError, Errno, Op, Opcode, Request};
use standby::News;
use waiters::setlk_bytes;

/// Bytes of requests kept outside of slots, after which the front-end stops reading. Private
/// memory, used only while a backend is away or slow.
const OUTSIDE_MAX_BYTES: usize = 256 << 20;
/// Requests kept outside.
const OUTSIDE_MAX: usize = 1 << 16;
/// Bytes of requests that were outside, after which the allocator may keep too much of them.
const SLACK_MAX: usize = 1 << 20;
/// Nodes with stale attributes that are remembered; the kernel asks again within a second anyway.
const STALE_MAX: usize = 4096;
/// Deaths of a backend with a request as the only one running, after which it is poison.
const POISON_DEATHS: u8 = 2;

/// `df` and `stat` of the root return within a second, whatever the store does.
const ROOT_PATIENCE: Duration = Duration::from_millis(500);
/// What had been read before an outage that is an error (`--outage error`) may be carried out by the
/// next generation if it comes at once.
const ERROR_PATIENCE: Duration = Duration::from_secs(1);
/// A caller is looked at when its request is this old, nanoseconds.
const CALLER_PATIENCE: u64 = 200_000_000;

/// The attribute with the access control list of a file or directory.
const ACCESS_ACL: &str = "system.posix_acl_access";

/// What the mount does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// A backend serves.
    Serving,
    /// None does, since this time (`sys::monotonic_ns`).
    Outage {
        /// Beginning of the outage.
        since: u64,
    },
}

/// Why a request is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// The kernel waits for the reply.
    Kernel,
    /// The front-end's own; the reply only changes tables.
    Internal,
}

/// A request that was read and is not answered.
#[derive(Clone, Debug)]
pub struct Held {
    /// The kernel's number of it.
    pub unique: u64,
    /// The operation.
    pub opcode: Opcode,
    /// The node.
    pub nodeid: u64,
    /// The calling thread.
    pub pid: u32,
    /// Arrival, `sys::monotonic_ns`.
    pub arrived: u64,
    arrived_ns: u64,
    sequence: u64,
    purpose: Purpose,
    /// A signal arrived for the caller.
    interrupted: bool,
    /// Backends died while this was the only request running.
    deaths_alone: u8,
    /// Running when a backend died of its own doing.
    suspect: bool,
    /// Times a waiting lock was tried in vain.
    lock_tries: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    /// In the slot, not with a backend (between two generations).
    Here,
    /// With the backend.
    Handed,
    /// The reply is on its way to the kernel.
    Settling,
}

struct InSlot {
    held: Held,
    at: Where,
    /// Answered before the backend was done with it.
    answered: bool,
    /// The handle reserved for it, 0 if it opens none.
    new_fh: u64,
    request_chunks: Vec<u16>,
    reply_chunks: Vec<u16>,
}

struct Outside {
    held: Held,
    bytes: Vec<u8>,
    /// Payload chunks it needs.
    chunks: usize,
}

/// A lock waiter's own part; the request is in the table.
struct Waiting {
    held: Held,
    /// When to try again although nothing was unlocked here: the lock is held outside the mount.
    retry_at: u64,
}

/// A reply on its way to the kernel.
pub struct Delivery {
    index: SlotIndex,
    reply: Reply,
    given: Given,
    request: Vec<u8>,
    /// The node whose pages the kernel has to drop first.
    drops_pages: Option<u64>,
}

impl Delivery {
    /// The node whose pages the kernel has to drop before it gets the reply.
    pub fn drops_pages(&self) -> Option<u64> {
        self.drops_pages
    }
}

/// Totals for `status`.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counters {
    /// Requests that were issued again after a death.
    pub reissued: u64,
    /// Of which an earlier attempt turned out to have happened.
    pub verified_done: u64,
    /// Of which nobody can tell.
    pub ambiguous: u64,
    /// Requests answered EIO because they killed backends.
    pub poisoned: u64,
    /// Requests answered before the backend did.
    pub early_answers: u64,
    /// Requests taken from the kernel.
    pub requests: u64,
    /// Locked ranges that could not be locked again.
    pub lost_locks: u64,
    /// Objects in use that were gone.
    pub lost_files: u64,
    /// Replies of a backend that made no sense.
    pub protocol_errors: u64,
}

/// See the module.
pub struct Core {
    /// Inodes, handles, locks.
    pub tables: Tables,
    /// Deposited descriptors.
    pub vault: VaultStore,
    /// What the mount does.
    pub service: Service,
    /// Generation of the backend that serves or served last.
    pub generation: u32,
    /// Totals.
    pub counters: Counters,
    /// The first answer of a new generation ends the pause; its beginning is noted here.
    pub pause_began: Option<u64>,
    /// Pauses that ended, newest last, nanoseconds.
    pub last_pause: Option<u64>,
    /// The longest of them.
    pub longest_pause: u64,
    /// Nodes whose attributes may be stale: to be told to the kernel.
    pub stale: Vec<u64>,
    /// Objects without a name that the kernel knows, of stores with sessions.
    pinned: HashSet<Identity>,
    /// Those it does not know any more: to be told to the backend.
    pub unpin: Vec<Identity>,
    /// What the standby session, if there is one, does not know yet.
    standby: Option<News>,
    /// Objects that were gone when a backend took over, and that the kernel knows.
    gone: HashSet<Identity>,
    /// Nodes with a set time that were closed after writing, and when, oldest first.
    closed: VecDeque<(u64, u64)>,
    /// The store has sessions ([`sessions`]).
    sessions: bool,
    /// Replies of a backend that died, to be delivered when the kernel has dropped pages.
    pub after_notice: Vec<Delivery>,
    needs_paths: bool,
    policy: OutagePolicy,
    slots: Vec<Option<InSlot>>,
    free_slots: Vec<SlotIndex>,
    free_chunks: Vec<u16>,
    reader_slot: SlotIndex,
    reader_chunks: Vec<u16>,
    outside: VecDeque<Outside>,
    outside_bytes: usize,
    /// How many of them need payload chunks: the next of these goes first when there are some.
    outside_chunked: usize,
    /// Bytes that were outside since memory was given back.
    slack: usize,
    waiting: HashMap<u64, Waiting>,
    /// Requests that may have killed a backend, to be issued one at a time.
    quarantine: VecDeque<SlotIndex>,
    sequence: u64,
    root_attr: Option<AttrOut>,
    /// The root's access control list, or why there is none.
    root_acl: Option<Result<Vec<u8>, Errno>>,
    statfs: Option<Kstatfs>,
    /// Requests the present generation was given, and those it answered.
    handed: u64,
    settled: u64,
}

/// What the tables need a connection and a region for.
pub struct Io {
    /// The session region.
    pub region: Region,
    /// The kernel connection, once there is one.
    pub fuse: std::sync::OnceLock<OwnedFd>,
}

impl Io {
    /// Writes a reply. False if nobody waits for it (ENOENT).
    fn send(&self, bytes: &[u8]) -> bool {
        let Some(fuse) = self.fuse.get() else {
            return false;
        };
        match nix::unistd::write(fuse, bytes) {
            Ok(_) => true,
            Err(nix::errno::Errno::ENOENT | nix::errno::Errno::ENODEV) => false,
            Err(e) => {
                // The header is always right, so the kernel has found the request and ended it.
                tracing::error!("reply of {} bytes refused by the kernel: {e}", bytes.len());
                true
            }
        }
    }
}

impl Core {
    /// The state of a mount that has no backend yet.
    pub fn new(tables: Tables, policy: OutagePolicy, sessions: bool, nofile: usize) -> Core {
        let mut free_slots: Vec<SlotIndex> = (0..SLOTS).rev().filter_map(SlotIndex::new).collect();
        let mut free_chunks: Vec<u16> = (0..CHUNKS as u16).rev().collect();
        let reader_slot = free_slots.pop().expect("SLOTS > 0");
        let reader_chunks = free_chunks.split_off(free_chunks.len() - MAX_CHUNKS);
        Core {
            tables,
            vault: VaultStore::new(nofile),
            service: Service::Outage {
                since: sys::monotonic_ns(),
            },
            generation: 0,
            counters: Counters::default(),
            pause_began: None,
            last_pause: None,
            longest_pause: 0,
            stale: Vec::new(),
            pinned: HashSet::new(),
            unpin: Vec::new(),
            standby: None,
            gone: HashSet::new(),
            closed: VecDeque::new(),
            sessions,
            after_notice: Vec::new(),
            needs_paths: false,
            policy,
            slots: (0..SLOTS).map(|_| None).collect(),
            free_slots,
            free_chunks,
            reader_slot,
            reader_chunks,
            outside: VecDeque::new(),
            outside_bytes: 0,
            outside_chunked: 0,
            slack: 0,
            waiting: HashMap::new(),
            quarantine: VecDeque::new(),
            sequence: 0,
            root_attr: None,
            root_acl: None,
            statfs: None,
            handed: 0,
            settled: 0,
        }
    }

    /// The slot and the chunks the reader reads into next.
    pub fn reading(&self) -> (SlotIndex, Vec<u16>) {
        (self.reader_slot, self.reader_chunks.clone())
    }

    /// There is room for another request outside.
    pub fn may_read(&self) -> bool {
        self.outside_bytes < OUTSIDE_MAX_BYTES && self.outside.len() < OUTSIDE_MAX
    }

    /// Requests that were read and are not answered, without lock waiters.
    pub fn inflight(&self) -> usize {
        self.unanswered().count()
    }

    fn unanswered(&self) -> impl Iterator<Item = &Held> {
        let slots = self.slots.iter().flatten().filter(|s| !s.answered);
        let held = slots.map(|s| &s.held);
        let all = held.chain(self.outside.iter().map(|o| &o.held));
        all.filter(|held| !held.is_told_later())
    }

    /// Lock waiters.
    pub fn waiters(&self) -> usize {
        self.waiting.len()
    }

    /// Arrival of the oldest request that is not answered.
    pub fn oldest(&self) -> Option<u64> {
        self.unanswered().map(|held| held.arrived).min()
    }

    /// Something may need attention by time.
    pub fn needs_ticks(&self) -> bool {
        self.inflight() > 0 || !self.waiting.is_empty()
    }
}
