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

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use zerocopy::FromBytes;

use super::callers::is_dying;
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
use crate::wire::{Errno, Op, Opcode, Request};

/// Bytes of requests kept outside of slots, after which the front-end stops reading. Private
/// memory, used only while a backend is away or slow.
const OUTSIDE_MAX_BYTES: usize = 256 << 20;
/// Requests kept outside.
const OUTSIDE_MAX: usize = 1 << 16;
/// Bytes of requests that were outside, after which the allocator may keep too much of them.
const SLACK_MAX: usize = 1 << 20;
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
    request_chunks: Vec<u16>,
    reply_chunks: Vec<u16>,
}

struct Outside {
    held: Held,
    bytes: Vec<u8>,
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
    /// What an application may see stale: to be invalidated by a thread that serves nothing.
    pub stale: Vec<u64>,
    needs_paths: bool,
    policy: OutagePolicy,
    slots: Vec<Option<InSlot>>,
    free_slots: Vec<SlotIndex>,
    free_chunks: Vec<u16>,
    reader_slot: SlotIndex,
    reader_chunks: Vec<u16>,
    outside: VecDeque<Outside>,
    outside_bytes: usize,
    /// Bytes that were outside since memory was given back.
    slack: usize,
    waiting: HashMap<u64, Waiting>,
    /// Requests that may have killed a backend, to be issued one at a time.
    quarantine: VecDeque<SlotIndex>,
    sequence: u64,
    root_attr: Option<AttrOut>,
    /// The root's access control list, or why there is none.
    root_acl: Option<Result<Vec<u8>, Errno>>,
    statfs: Option<Vec<u8>>,
}

/// What the tables need a connection and a region for.
pub struct Io {
    /// The session region.
    pub region: Region,
    /// The kernel connection, once there is one.
    pub fuse: std::sync::OnceLock<OwnedFd>,
}

impl Io {
    /// Writes a reply. Returns `Ok(false)` if nobody waits for it (ENOENT).
    fn send(&self, bytes: &[u8]) -> bool {
        let Some(fuse) = self.fuse.get() else {
            return false;
        };
        match nix::unistd::write(fuse, bytes) {
            Ok(_) => true,
            Err(nix::errno::Errno::ENOENT | nix::errno::Errno::ENODEV) => false,
            Err(e) => {
                // The kernel ends the request with EIO when it cannot use the reply.
                tracing::error!("reply of {} bytes refused by the kernel: {e}", bytes.len());
                true
            }
        }
    }
}

impl Core {
    /// The state of a mount that has no backend yet.
    pub fn new(tables: Tables, policy: OutagePolicy, nofile: usize) -> Core {
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
            needs_paths: false,
            policy,
            slots: (0..SLOTS).map(|_| None).collect(),
            free_slots,
            free_chunks,
            reader_slot,
            reader_chunks,
            outside: VecDeque::new(),
            outside_bytes: 0,
            slack: 0,
            waiting: HashMap::new(),
            quarantine: VecDeque::new(),
            sequence: 0,
            root_attr: None,
            root_acl: None,
            statfs: None,
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
        self.outside.len() + self.slots.iter().flatten().filter(|s| !s.answered).count()
    }

    /// Lock waiters.
    pub fn waiters(&self) -> usize {
        self.waiting.len()
    }

    /// Arrival of the oldest request that is not answered.
    pub fn oldest(&self) -> Option<u64> {
        let slots = self.slots.iter().flatten().filter(|s| !s.answered);
        let slots = slots.map(|s| s.held.arrived);
        slots
            .chain(self.outside.iter().map(|o| o.held.arrived))
            .min()
    }

    /// Something may need attention by time.
    pub fn needs_ticks(&self) -> bool {
        self.inflight() > 0 || !self.waiting.is_empty()
    }

    // ---- arrival -----------------------------------------------------------------------------

    /// A request of `len` bytes was read into the reader's slot.
    pub fn arrived(&mut self, io: &Io, len: usize) {
        self.counters.requests += 1;
        let slot = io.region.slot(self.reader_slot);
        slot.set_request(len, 0);
        slot.set_chunks(&self.reader_chunks, &[]);
        let bytes = slot.copy_request();
        let request = match Request::decode(&bytes) {
            Ok(request) => request,
            Err(e) => {
                tracing::warn!("request from the kernel: {e}");
                let unique = slot.request_header().unique;
                io.send(&error_reply(unique, Some(Errno::ENOSYS)));
                return;
            }
        };
        match request.op {
            Op::Interrupt { unique } => return self.interrupt(io, unique),
            Op::Other => {
                // DESTROY wants an answer; nothing else of these is negotiated.
                let errno = (request.opcode != Opcode::Destroy).then_some(Errno::ENOSYS);
                io.send(&error_reply(request.header.unique, errno));
                return;
            }
            _ => {}
        }
        let held = self.hold(&request, Purpose::Kernel);
        if self.answer_without_backend(io, &held, &request) {
            return;
        }
        let first_chunks = len.saturating_sub(REQUEST_SMALL).div_ceil(CHUNK);
        if self.may_start(&request, first_chunks) {
            let index = self.reader_slot;
            self.reader_slot = self.free_slots.pop().expect("may_start saw a free slot");
            let mut request_chunks = std::mem::take(&mut self.reader_chunks);
            self.reader_chunks = request_chunks.split_off(first_chunks);
            let from = self.free_chunks.len() - first_chunks;
            self.reader_chunks.extend(self.free_chunks.drain(from..));
            self.start(io, index, held, request_chunks, &request);
        } else {
            let mut bytes = Vec::with_capacity(len);
            for span in slot.request_spans() {
                bytes.extend_from_slice(&span.to_vec());
            }
            self.push_outside(held, bytes);
        }
    }

    fn hold(&mut self, request: &Request<'_>, purpose: Purpose) -> Held {
        self.sequence += 1;
        Held {
            unique: request.header.unique,
            opcode: request.opcode,
            nodeid: request.header.nodeid,
            pid: request.header.pid,
            arrived: sys::monotonic_ns(),
            arrived_ns: sys::realtime_ns(),
            sequence: self.sequence,
            purpose,
            interrupted: false,
            deaths_alone: 0,
            suspect: false,
            lock_tries: 0,
        }
    }

    fn push_outside(&mut self, held: Held, bytes: Vec<u8>) {
        self.outside_bytes += bytes.len();
        self.slack += bytes.len() + size_of::<Outside>();
        self.outside.push_back(Outside { held, bytes });
    }

    /// Issues a request of the front-end itself.
    pub fn issue_internal(&mut self, io: &Io, opcode: Opcode, nodeid: u64, args: &[u8]) {
        use zerocopy::IntoBytes;
        let header = InHeader {
            len: (size_of::<InHeader>() + args.len()) as u32,
            opcode: opcode as u32,
            nodeid,
            ..InHeader::default()
        };
        let bytes = [header.as_bytes(), args].concat();
        let Ok(request) = Request::decode(&bytes) else {
            return tracing::error!("internal {opcode} request is malformed");
        };
        let held = self.hold(&request, Purpose::Internal);
        self.push_outside(held, bytes.clone());
        self.start_outside(io);
    }

    /// A signal for the caller of a request. It only marks: the kernel sends it once, for any signal
    /// with a handler, and a live program must not see EINTR because of an outage. Only a lock waiter
    /// is meant to be interrupted.
    fn interrupt(&mut self, io: &Io, unique: u64) {
        if self.waiting.remove(&unique).is_some() {
            self.tables.remove_waiter(unique);
            io.send(&error_reply(unique, Some(Errno::EINTR)));
            return;
        }
        let waits = |o: &Outside| o.held.unique == unique && o.held.opcode == Opcode::Setlkw;
        if let Some(at) = self.outside.iter().position(waits) {
            if let Some(outside) = self.outside.remove(at) {
                self.outside_bytes -= outside.bytes.len();
            }
            io.send(&error_reply(unique, Some(Errno::EINTR)));
            return;
        }
        let slots = self.slots.iter_mut().flatten().map(|s| &mut s.held);
        let outside = self.outside.iter_mut().map(|o| &mut o.held);
        if let Some(held) = slots.chain(outside).find(|h| h.unique == unique) {
            held.interrupted = true;
        }
    }

    // ---- handing over ------------------------------------------------------------------------

    fn reply_chunks_for(request: &Request<'_>) -> usize {
        let wanted = match request.op {
            Op::Read(read) if request.opcode == Opcode::Read => read.size,
            Op::Getxattr { arg, .. } | Op::Listxattr(arg) => arg.size,
            Op::Ioctl { arg, .. } => arg.out_size.saturating_add(size_of::<IoctlOut>() as u32),
            _ => 0,
        } as usize;
        if wanted <= REPLY_SMALL {
            0
        } else {
            wanted.min(MAX_WRITE).div_ceil(CHUNK)
        }
    }

    fn may_start(&self, request: &Request<'_>, request_chunks: usize) -> bool {
        let chunks = request_chunks + Self::reply_chunks_for(request);
        self.service == Service::Serving
            && self.quarantine.is_empty()
            && !self.free_slots.is_empty()
            && self.free_chunks.len() >= chunks
            && !self.is_held_back(request)
    }

    /// An unlock that was answered in an outage is still to be told to the store. Its owner may take
    /// the lock again meanwhile, and the two must not be executed in the wrong order.
    fn is_held_back(&self, request: &Request<'_>) -> bool {
        let is_lock = |opcode| matches!(opcode, Opcode::Setlk | Opcode::Setlkw);
        is_lock(request.opcode)
            && self.slots.iter().flatten().any(|s| {
                s.held.purpose == Purpose::Internal
                    && is_lock(s.held.opcode)
                    && s.held.nodeid == request.header.nodeid
            })
    }

    /// Hands the request in `index` over for the first time.
    fn start(
        &mut self,
        io: &Io,
        index: SlotIndex,
        held: Held,
        request_chunks: Vec<u16>,
        request: &Request<'_>,
    ) {
        let from = self.free_chunks.len() - Self::reply_chunks_for(request);
        let reply_chunks: Vec<u16> = self.free_chunks.drain(from..).collect();
        let slot = io.region.slot(index);
        slot.set_chunks(&request_chunks, &reply_chunks);
        slot.set_sequence(held.sequence);
        slot.set_phase(Phase::Queued);
        self.slots[index.get() as usize] = Some(InSlot {
            held,
            at: Where::Here,
            answered: false,
            request_chunks,
            reply_chunks,
        });
        self.hand_over(io, index, request);
    }

    /// Gives a slot to the backend, for the first time or again.
    fn hand_over(&mut self, io: &Io, index: SlotIndex, request: &Request<'_>) {
        let Some(in_slot) = &mut self.slots[index.get() as usize] else {
            return;
        };
        let slot = io.region.slot(index);
        let again = slot.phase() == Some(Phase::Running);
        let reserved = if again { slot.annex().new_fh } else { 0 };
        let arrived_ns = in_slot.held.arrived_ns;
        in_slot.at = Where::Handed;
        let resolved = resolve(&mut self.tables, request, arrived_ns, self.needs_paths);
        let (mut annex, paths) = match resolved {
            Ok(resolved) => resolved,
            Err(errno) => {
                let unique = request.header.unique;
                self.answer_slot(io, index, error_reply(unique, Some(errno)));
                return;
            }
        };
        if again {
            annex.again = 1;
            if reserved != 0 {
                // The first attempt may have made the handle known to nobody; it keeps its number.
                self.tables.close_handle(annex.new_fh);
                annex.new_fh = reserved;
            }
            self.counters.reissued += 1;
        }
        annex.handle.flags |= self.vault_flags(request);
        slot.set_annex(&annex, &paths);
        slot.set_generation(self.generation);
        io.region.requests().push(index);
    }

    /// Locks the tables have forgotten (all ranges unlocked) may still have a description.
    fn vault_flags(&self, request: &Request<'_>) -> u32 {
        use crate::region::slot::HandleRef;
        match request.op {
            Op::Flush(flush) => {
                let key = VaultKey::Lock {
                    nodeid: request.header.nodeid,
                    owner: flush.lock_owner,
                    flock: false,
                };
                if self.vault.has(&key) {
                    HandleRef::OWNER_HAS_LOCKS
                } else {
                    0
                }
            }
            Op::Release(release) if self.vault.has_locks_of(release.fh) => HandleRef::HAS_LOCKS,
            _ => 0,
        }
    }

    /// Moves what waits outside into slots as far as there is room.
    fn start_outside(&mut self, io: &Io) {
        let mut at = 0;
        while at < self.outside.len() {
            let bytes = &self.outside[at].bytes;
            let first_chunks = bytes.len().saturating_sub(REQUEST_SMALL).div_ceil(CHUNK);
            let Ok(request) = Request::decode(bytes) else {
                // It was decoded when it arrived.
                self.outside.remove(at);
                continue;
            };
            if !self.may_start(&request, first_chunks) {
                if self.service != Service::Serving || self.free_slots.is_empty() {
                    return;
                }
                // Needs more chunks than there are, where a smaller one may fit, or is held back.
                at += 1;
                continue;
            }
            let Some(Outside { held, bytes }) = self.outside.remove(at) else {
                return;
            };
            self.outside_bytes -= bytes.len();
            let Some(index) = self.free_slots.pop() else {
                return;
            };
            let from = self.free_chunks.len() - first_chunks;
            let chunks: Vec<u16> = self.free_chunks.drain(from..).collect();
            let slot = io.region.slot(index);
            slot.put_request(&bytes, &chunks);
            slot.set_request(bytes.len(), 0);
            let Ok(request) = Request::decode(&bytes) else {
                return;
            };
            self.start(io, index, held, chunks, &request);
        }
    }

    // ---- completion --------------------------------------------------------------------------

    /// Takes the next reply of the backend through the tables.
    pub fn next_delivery(&mut self, io: &Io) -> Option<Delivery> {
        // Bounded: a backend that hands back nonsense for ever must not keep the lock for ever.
        for _ in 0..SLOTS {
            let index = io.region.replies().pop()?;
            if let Some(delivery) = self.settle(io, index) {
                return Some(delivery);
            }
        }
        None
    }

    fn settle(&mut self, io: &Io, index: SlotIndex) -> Option<Delivery> {
        let slot = io.region.slot(index);
        let ready = slot.phase() == Some(Phase::ReplyReady);
        let Some(in_slot) = self.slots[index.get() as usize]
            .as_mut()
            .filter(|s| s.at == Where::Handed && ready)
        else {
            self.counters.protocol_errors += 1;
            tracing::error!(
                "backend handed back slot {}, which it does not have",
                index.get()
            );
            return None;
        };
        in_slot.at = Where::Settling;
        let (answered, purpose) = (in_slot.answered, in_slot.held.purpose);
        let unique = in_slot.held.unique;
        let asked = (unique, in_slot.held.opcode, in_slot.held.nodeid);
        self.end_pause();
        match slot.replayed().load(std::sync::atomic::Ordering::Relaxed) {
            n if n == Replayed::Verified as u32 => self.counters.verified_done += 1,
            n if n == Replayed::Ambiguous as u32 => self.counters.ambiguous += 1,
            _ => {}
        }
        let bytes = slot.copy_request();
        let decoded = Request::decode(&bytes);
        let Some(request) = decoded
            .ok()
            .filter(|r| (r.header.unique, r.opcode, r.header.nodeid) == asked)
        else {
            // The backend changed the request under our hands.
            self.counters.protocol_errors += 1;
            return Some(Delivery {
                index,
                reply: Reply::Bytes(error_reply(unique, Some(Errno::EIO))),
                given: Given::default(),
                request: bytes,
            });
        };
        let Settled {
            mut reply,
            mut given,
            effects,
        } = settle::settle(&mut self.tables, &slot, &request);
        if let Op::Release(release) = request.op {
            self.vault.drop_locks_of(release.fh);
        }
        self.apply(io, &effects);
        self.remember_root(io, &request, &slot);
        if reply == Reply::Waits {
            if !answered && let Err(errno) = self.wait_for_lock(&request, index) {
                reply = Reply::Bytes(error_reply(request.header.unique, Some(errno)));
            }
        } else if reply == Reply::FromSlot {
            // The header is ours, whatever the backend wrote.
            slot.set_reply(request.header.unique, 0, slot.reply_data_len());
        }
        if answered || purpose == Purpose::Internal {
            let orphan = given.handle;
            let effects = std::mem::take(&mut given).take_back(&mut self.tables);
            self.apply(io, &effects);
            if let Some(fh) = orphan {
                self.release_orphan(io, &request, fh);
            }
            reply = Reply::None;
        }
        Some(Delivery {
            index,
            reply,
            given,
            request: bytes,
        })
    }

    /// A new generation serves: the pause that began with the death of the last one is over.
    fn end_pause(&mut self) {
        if let Some(began) = self.pause_began.take() {
            let pause = sys::monotonic_ns().saturating_sub(began);
            self.last_pause = Some(pause);
            self.longest_pause = self.longest_pause.max(pause);
        }
    }

    /// The delivery happened, or nobody waited for it.
    pub fn delivered(&mut self, io: &Io, delivery: Delivery, taken: bool) {
        if !taken && let Ok(request) = Request::decode(&delivery.request) {
            let effects = delivery.given.take_back(&mut self.tables);
            self.apply(io, &effects);
            if let Some(fh) = delivery.given.handle {
                self.release_orphan(io, &request, fh);
            }
        }
        self.free(io, delivery.index);
        self.next_suspect(io);
        self.start_outside(io);
    }

    fn release_orphan(&mut self, io: &Io, request: &Request<'_>, fh: u64) {
        use zerocopy::IntoBytes;
        let opcode = if request.opcode == Opcode::Opendir {
            Opcode::Releasedir
        } else {
            Opcode::Release
        };
        let arg = ReleaseIn {
            fh,
            ..ReleaseIn::default()
        };
        let nodeid = request.header.nodeid;
        self.issue_internal(io, opcode, nodeid, arg.as_bytes());
    }

    fn free(&mut self, io: &Io, index: SlotIndex) {
        if let Some(in_slot) = self.slots[index.get() as usize].take() {
            io.region.slot(index).set_phase(Phase::Free);
            self.free_chunks.extend(in_slot.request_chunks);
            self.free_chunks.extend(in_slot.reply_chunks);
            self.free_slots.push(index);
        }
    }

    /// Answers a request that is in a slot and not with a living backend, and frees the slot.
    fn answer_slot(&mut self, io: &Io, index: SlotIndex, reply: Vec<u8>) {
        if let Some(in_slot) = &self.slots[index.get() as usize] {
            if in_slot.held.purpose == Purpose::Kernel
                && !in_slot.answered
                && !in_slot.held.opcode.has_no_reply()
            {
                io.send(&reply);
            }
            self.free(io, index);
        }
    }

    fn apply(&mut self, io: &Io, effects: &[Effect]) {
        for &effect in effects {
            match effect {
                Effect::Forgotten(identity) => {
                    self.vault.discard(&VaultKey::Inode(identity));
                }
                Effect::Known(identity, nodeid) => {
                    if self.vault.claim(&identity) {
                        self.tables.set_vaulted(nodeid, true);
                    }
                }
                Effect::LocksGone {
                    nodeid,
                    owner,
                    flock,
                } => self.vault.discard(&VaultKey::Lock {
                    nodeid,
                    owner,
                    flock,
                }),
                Effect::LockedThrough {
                    nodeid,
                    owner,
                    flock,
                    fh,
                } => {
                    let key = VaultKey::Lock {
                        nodeid,
                        owner,
                        flock,
                    };
                    self.vault.locked_through(&key, fh);
                }
                Effect::Unlocked(nodeid) => self.serve_waiters(io, nodeid),
                Effect::OrphanHandle {
                    nodeid,
                    fh,
                    directory,
                } => {
                    use zerocopy::IntoBytes;
                    let opcode = if directory {
                        Opcode::Releasedir
                    } else {
                        Opcode::Release
                    };
                    let arg = ReleaseIn {
                        fh,
                        ..ReleaseIn::default()
                    };
                    self.issue_internal(io, opcode, nodeid, arg.as_bytes());
                }
            }
        }
    }

    /// Keeps the last attributes of the root and of the file system, to answer with in an outage.
    fn remember_root(
        &mut self,
        io: &Io,
        request: &Request<'_>,
        slot: &crate::region::slot::Slot<'_>,
    ) {
        let error = slot.reply_header().error;
        let value = || {
            let spans = slot.reply_data(slot.reply_data_len());
            spans.iter().flat_map(|s| s.to_vec()).collect::<Vec<u8>>()
        };
        let is_root = request.header.nodeid == ROOT_ID;
        match request.op {
            Op::Getxattr { arg, name } if is_root && name == ACCESS_ACL && arg.size != 0 => {
                self.root_acl = match error {
                    0 => Some(Ok(value())),
                    error => Some(Err(Errno::from_raw(error.saturating_neg()))),
                };
            }
            _ if error != 0 => {}
            Op::Getattr(_) | Op::Setattr(_) if is_root => {
                if let Ok((mut attr, _)) = AttrOut::read_from_prefix(&value()) {
                    (attr.attr_valid, attr.attr_valid_nsec) = (0, 0);
                    self.root_attr = Some(attr);
                }
                if matches!(request.op, Op::Setattr(_)) {
                    // A change of the mode changes the list.
                    self.ask_root_acl(io);
                }
            }
            Op::Setxattr { .. } | Op::Removexattr { .. } if is_root => self.ask_root_acl(io),
            Op::Statfs => self.statfs = Some(value()),
            _ => {}
        }
    }

    /// Learns the root's access control list. Until the answer is there nothing is known of it.
    pub fn ask_root_acl(&mut self, io: &Io) {
        use std::os::unix::ffi::OsStrExt;
        use zerocopy::IntoBytes;
        self.root_acl = None;
        let arg = GetxattrIn {
            size: REPLY_SMALL as u32,
            padding: 0,
        };
        let name = std::ffi::OsStr::new(ACCESS_ACL).as_bytes();
        let args = [arg.as_bytes(), name, &[0]].concat();
        self.issue_internal(io, Opcode::Getxattr, ROOT_ID, &args);
    }

    /// The attributes of root and file system are known.
    pub fn knows_root(&self) -> bool {
        self.root_attr.is_some() && self.statfs.is_some()
    }

    // ---- locks -------------------------------------------------------------------------------

    /// Puts a SETLKW that could not get its lock among the waiters, or says why not.
    fn wait_for_lock(&mut self, request: &Request<'_>, index: SlotIndex) -> Result<(), Errno> {
        let Some(in_slot) = &self.slots[index.get() as usize] else {
            return Ok(());
        };
        let mut held = in_slot.held.clone();
        if held.interrupted {
            return Err(Errno::EINTR);
        }
        let lock = lock_of(request).ok_or(Errno::EIO)?;
        let mut bytes = [0; WAITER_BYTES];
        bytes.copy_from_slice(&setlk_bytes(request));
        held.lock_tries += 1;
        if held.lock_tries == 1 && self.tables.conflict(&lock).is_none() {
            // Whoever had it unlocked it between the backend's attempt and now.
            self.push_outside(held, bytes.to_vec());
            return Ok(());
        }
        let waiter = Waiter {
            unique: held.unique,
            fd_index: 0,
            sequence: held.sequence,
            request: bytes,
        };
        let added = self.tables.add_waiter(lock.nodeid, &waiter);
        added.map_err(|_| Errno::ENOLCK)?;
        // If nobody of this mount has it, somebody outside of the mount does, who will not tell us.
        let retry_at = sys::monotonic_ns() + retry_delay(held.lock_tries);
        self.waiting.insert(held.unique, Waiting { held, retry_at });
        Ok(())
    }

    /// Lets every waiter of a node try again whom no lock of this mount hinders any more.
    fn serve_waiters(&mut self, io: &Io, nodeid: u64) {
        if self.waiting.is_empty() {
            return;
        }
        let mut served: Vec<Lock> = Vec::new();
        for waiter in self.tables.waiters_on(nodeid) {
            let Some(lock) = waiter_lock(&waiter) else {
                continue;
            };
            let hindered =
                self.tables.conflict(&lock).is_some() || served.iter().any(|s| conflicts(s, &lock));
            if !hindered {
                self.retry_waiter(waiter);
                served.push(lock);
            }
        }
        self.start_outside(io);
    }

    fn retry_waiter(&mut self, waiter: Waiter) {
        self.tables.remove_waiter(waiter.unique);
        if let Some(waiting) = self.waiting.remove(&waiter.unique) {
            self.push_outside(waiting.held, waiter.request.to_vec());
        }
    }

    /// Waiters that nobody of this mount hinders try again from time to time.
    fn retry_waiters(&mut self, io: &Io, now: u64) {
        let due: Vec<u64> = self
            .waiting
            .iter()
            .filter(|(_, w)| w.retry_at <= now)
            .map(|(&unique, _)| unique)
            .collect();
        if due.is_empty() || self.service != Service::Serving {
            return;
        }
        for waiter in self.tables.waiters() {
            if !due.contains(&waiter.unique) {
                continue;
            }
            let hindered = waiter_lock(&waiter).is_some_and(|l| self.tables.conflict(&l).is_some());
            if hindered {
                // Served when that lock goes; looked at again in case it was not that one.
                if let Some(w) = self.waiting.get_mut(&waiter.unique) {
                    w.retry_at = now + retry_delay(u32::MAX);
                }
            } else {
                self.retry_waiter(waiter);
            }
        }
        self.start_outside(io);
    }

    // ---- outage ------------------------------------------------------------------------------

    /// Answers what needs no backend: bookkeeping in an outage, and what policy refuses.
    fn answer_without_backend(&mut self, io: &Io, held: &Held, request: &Request<'_>) -> bool {
        let Service::Outage { since } = self.service else {
            // The store has not answered for the root in time, so it is not asked again until it
            // does: each of these would take a slot and half a second of somebody who only looks.
            return self.root_is_stuck() && self.answer_from_memory(io, request);
        };
        // A process that ends closes its files one after the other, each with a FLUSH. So this is
        // found out at once, not at the next tick.
        let is_last_flush = matches!(request.op, Op::Flush(_)) && is_dying(held.pid);
        if self.apply_in_outage(io, held, request, is_last_flush) {
            return true;
        }
        if self.answer_from_memory(io, request) {
            return true;
        }
        let refuse = match self.policy {
            OutagePolicy::Queue => false,
            OutagePolicy::Error => true,
            OutagePolicy::QueueFor(limit) => {
                held.arrived.saturating_sub(since) > limit.as_nanos() as u64
            }
        };
        if refuse {
            self.refuse(io, request);
        }
        refuse
    }

    /// EIO, because of an outage.
    fn refuse(&mut self, io: &Io, request: &Request<'_>) {
        if let Op::Flush(flush) = request.op {
            // The file is closed whatever the answer is, and the kernel does not unlock.
            let mut effects = Vec::new();
            let (nodeid, owner) = (request.header.nodeid, flush.lock_owner);
            settle::drop_owner(&mut self.tables, nodeid, owner, false, &mut effects);
            self.apply(io, &effects);
        }
        io.send(&self.refusal(request, Errno::EIO));
    }

    /// Requests that only end something: the tables are all that has to know, since the store loses
    /// its part with the backend.
    fn apply_in_outage(
        &mut self,
        io: &Io,
        held: &Held,
        request: &Request<'_>,
        caller_is_dying: bool,
    ) -> bool {
        let effects = match request.op {
            Op::Forget { .. } | Op::BatchForget { .. } => {
                settle::forget_all(&mut self.tables, request)
            }
            Op::Release(release) => {
                self.vault.drop_locks_of(release.fh);
                settle::release(&mut self.tables, request)
            }
            Op::Setlk(lk) if lk.lk.typ == libc::F_UNLCK as u32 && !caller_is_dying => {
                // Free for everybody here at once; the next generation tells the store.
                let flock = lk.lk_flags & LK_FLOCK != 0;
                let (start, end) = (lk.lk.start, lk.lk.end);
                let unlocked = self.tables.unlock(held.nodeid, lk.owner, flock, start, end);
                if unlocked.is_err() {
                    return false;
                }
                let mut later = held.clone();
                later.purpose = Purpose::Internal;
                self.push_outside(later, setlk_bytes(request));
                vec![Effect::Unlocked(held.nodeid)]
            }
            Op::Flush(flush) if caller_is_dying => {
                let mut effects = Vec::new();
                settle::drop_owner(
                    &mut self.tables,
                    held.nodeid,
                    flush.lock_owner,
                    false,
                    &mut effects,
                );
                effects
            }
            _ => return false,
        };
        self.apply(io, &effects);
        if !held.opcode.has_no_reply() && held.purpose == Purpose::Kernel {
            io.send(&error_reply(held.unique, None));
        }
        true
    }

    /// Answers from the last known values: the root's attributes, the file system's numbers. `df`
    /// opens its argument first, so opening the root's directory belongs to it: a handle in the tables
    /// is all it takes, which a backend restores when it is used.
    fn answer_from_memory(&mut self, io: &Io, request: &Request<'_>) -> bool {
        use zerocopy::IntoBytes;
        if !is_remembered(request.opcode, request.header.nodeid) {
            return false;
        }
        if let Op::Getxattr { arg, name } = request.op {
            return name == ACCESS_ACL && self.answer_root_acl(io, request.header.unique, arg.size);
        }
        let (Some(root), Some(statfs)) = (&self.root_attr, &self.statfs) else {
            return false;
        };
        let mut opened = None;
        let unique = request.header.unique;
        let reply = match request.op {
            Op::Statfs => data_reply(unique, None, statfs),
            Op::Getattr(_) => data_reply(unique, None, root.as_bytes()),
            // Asked instead of GETATTR by whoever wants the time of birth, too: `stat(1)`.
            Op::Statx(_) => data_reply(unique, None, statx_of(&root.attr).as_bytes()),
            Op::Access(_) => error_reply(unique, None),
            Op::Open(open) => {
                let Ok(fh) = self.tables.reserve_handle() else {
                    return false;
                };
                self.tables.open_handle(
                    fh,
                    Handle {
                        nodeid: ROOT_ID,
                        open_flags: open.flags,
                        directory: true,
                        uid: request.header.uid,
                        gid: request.header.gid,
                        pid: request.header.pid,
                    },
                );
                opened = Some(fh);
                let out = OpenOut {
                    fh,
                    ..OpenOut::default()
                };
                data_reply(unique, None, out.as_bytes())
            }
            _ => return false,
        };
        self.counters.early_answers += 1;
        if !io.send(&reply)
            && let Some(fh) = opened
        {
            self.tables.close_handle(fh);
        }
        true
    }

    /// The kernel asks for the list of the root before it lets anybody but the root's owner into it:
    /// also root, and for `df` as well.
    fn answer_root_acl(&mut self, io: &Io, unique: u64, room: u32) -> bool {
        use zerocopy::IntoBytes;
        let reply = match &self.root_acl {
            None => return false,
            Some(Err(errno)) => error_reply(unique, Some(*errno)),
            Some(Ok(list)) if room == 0 => {
                let size = GetxattrOut {
                    size: list.len() as u32,
                    padding: 0,
                };
                data_reply(unique, None, size.as_bytes())
            }
            Some(Ok(list)) if list.len() > room as usize => {
                error_reply(unique, Some(Errno::ERANGE))
            }
            Some(Ok(list)) => data_reply(unique, None, list),
        };
        self.counters.early_answers += 1;
        io.send(&reply);
        true
    }

    /// A backend serves, and a request that was answered from memory is still with it.
    fn root_is_stuck(&self) -> bool {
        let mut answered = self.slots.iter().flatten().filter(|s| s.answered);
        answered.any(|s| is_remembered(s.held.opcode, s.held.nodeid))
    }

    /// The answer to a request that is refused. A name the kernel knows is found again whatever
    /// happens: with an error it would detach what is mounted below it.
    fn refusal(&mut self, request: &Request<'_>, errno: Errno) -> Vec<u8> {
        use zerocopy::IntoBytes;
        let unique = request.header.unique;
        if let Op::Lookup { name } = request.op {
            let parent = request.header.nodeid;
            let known = if parent == ROOT_ID && (name == "." || name == "..") {
                Some(ROOT_ID)
            } else {
                self.tables.find_name(parent, name)
            };
            let found = known.and_then(|nodeid| {
                let attr = self.tables.attr(nodeid)?;
                let identity: Identity = self.tables.node(nodeid)?.identity;
                Some((nodeid, attr, identity))
            });
            if let Some((nodeid, attr, identity)) = found
                && self.tables.look_up(&identity, None, &attr).is_ok()
            {
                let entry = EntryOut {
                    nodeid,
                    attr,
                    ..EntryOut::default()
                };
                return data_reply(unique, None, entry.as_bytes());
            }
        }
        error_reply(unique, Some(errno))
    }

    /// Calling threads whose requests have waited for some time.
    pub fn callers(&self) -> Vec<u32> {
        let now = sys::monotonic_ns();
        let slots = self.slots.iter().flatten().filter(|s| !s.answered);
        let held = slots
            .map(|s| &s.held)
            .chain(self.outside.iter().map(|o| &o.held));
        held.filter(|h| h.pid != 0 && now.saturating_sub(h.arrived) >= CALLER_PATIENCE)
            .map(|h| h.pid)
            .collect()
    }

    /// Looks after what depends on time. `is_dying` says whether a caller is on its way out.
    pub fn tick(&mut self, io: &Io, is_dying: impl Fn(u32) -> bool) {
        let now = sys::monotonic_ns();
        let age = |held: &Held| Duration::from_nanos(now.saturating_sub(held.arrived));
        // What has been refused before it ran is simply dropped.
        let mut outside = std::mem::take(&mut self.outside);
        outside.retain(|o| {
            let Ok(request) = Request::decode(&o.bytes) else {
                return false;
            };
            let keep = !self.answer_early(io, &o.held, &request, age(&o.held), now, &is_dying);
            if !keep {
                self.outside_bytes -= o.bytes.len();
            }
            keep
        });
        // Answering may have put something outside.
        outside.append(&mut self.outside);
        self.outside = outside;

        for index in (0..SLOTS).filter_map(SlotIndex::new) {
            let Some(in_slot) = &self.slots[index.get() as usize] else {
                continue;
            };
            if in_slot.answered || in_slot.at == Where::Settling {
                continue;
            }
            let (held, at) = (in_slot.held.clone(), in_slot.at);
            let bytes = io.region.slot(index).copy_request();
            let Ok(request) = Request::decode(&bytes) else {
                continue;
            };
            if !self.answer_early(io, &held, &request, age(&held), now, &is_dying) {
                continue;
            }
            self.stale.push(held.nodeid);
            if at == Where::Here {
                // No backend has it: it is over.
                if held.opcode.opens_handle() {
                    self.tables
                        .close_handle(io.region.slot(index).annex().new_fh);
                }
                self.free(io, index);
            } else if let Some(in_slot) = &mut self.slots[index.get() as usize] {
                in_slot.answered = true;
            }
        }
        self.next_suspect(io);
        self.retry_waiters(io, now);
        self.start_outside(io);
    }

    /// Lets go of the room a burst of requests took outside, now that nothing is held. True if the
    /// allocator may keep some, too.
    pub fn shrink(&mut self) -> bool {
        if self.slack < SLACK_MAX || self.inflight() > 0 {
            return false;
        }
        self.slack = 0;
        self.outside = VecDeque::new();
        true
    }

    /// Answers a request before the backend does, if it must not wait longer.
    fn answer_early(
        &mut self,
        io: &Io,
        held: &Held,
        request: &Request<'_>,
        age: Duration,
        now: u64,
        is_dying: &impl Fn(u32) -> bool,
    ) -> bool {
        if held.purpose == Purpose::Internal || held.opcode.has_no_reply() {
            return false;
        }
        if age >= ROOT_PATIENCE && self.answer_from_memory(io, request) {
            return true;
        }
        let limit = match self.policy {
            OutagePolicy::Queue => None,
            OutagePolicy::QueueFor(limit) => Some(limit),
            OutagePolicy::Error => Some(ERROR_PATIENCE),
        };
        if let (Service::Outage { since }, Some(limit)) = (self.service, limit)
            && now.saturating_sub(since) > limit.as_nanos() as u64
        {
            self.counters.early_answers += 1;
            self.refuse(io, request);
            return true;
        }
        if age >= Duration::from_nanos(CALLER_PATIENCE) && held.pid != 0 && is_dying(held.pid) {
            self.counters.early_answers += 1;
            let outage = self.service != Service::Serving;
            if !(outage && self.apply_in_outage(io, held, request, true)) {
                io.send(&self.refusal(request, Errno::EINTR));
            }
            return true;
        }
        false
    }

    // ---- generations -------------------------------------------------------------------------

    /// The backend is gone (its pidfd said so). Everything it completed is delivered; the rest waits
    /// for the next generation. `own_doing`: it died of a fault, not of somebody's SIGKILL.
    pub fn backend_died(&mut self, io: &Io, own_doing: bool) {
        if self.service == Service::Serving {
            let since = sys::monotonic_ns();
            self.service = Service::Outage { since };
        }
        self.quarantine.clear();
        io.region.replies().producer_is_gone();
        io.region.requests().consumer_is_gone();
        for index in (0..SLOTS).filter_map(SlotIndex::new) {
            let handed = |s: &InSlot| s.at == Where::Handed;
            let phase = io.region.slot(index).phase();
            if self.slots[index.get() as usize]
                .as_ref()
                .is_some_and(handed)
                && phase == Some(Phase::ReplyReady)
                && let Some(delivery) = self.settle(io, index)
            {
                let taken = deliver(io, &delivery);
                self.delivered(io, delivery, taken);
            }
        }
        self.vault.drop_unclaimed();
        if let (Service::Outage { since }, None) = (self.service, self.pause_began)
            && self.generation > 0
        {
            self.pause_began = Some(since);
        }

        let mut started = Vec::new();
        for index in (0..SLOTS).filter_map(SlotIndex::new) {
            let slot = io.region.slot(index);
            let Some(in_slot) = self.slots[index.get() as usize]
                .as_mut()
                .filter(|s| s.at == Where::Handed)
            else {
                continue;
            };
            in_slot.at = Where::Here;
            in_slot.held.suspect = false;
            if in_slot.answered {
                // Its caller has an answer: never issued again.
                if in_slot.held.opcode.opens_handle() {
                    self.tables.close_handle(slot.annex().new_fh);
                }
                self.free(io, index);
                continue;
            }
            match slot.phase() {
                Some(Phase::Running) => started.push(index),
                Some(Phase::Preparing) => {
                    started.push(index);
                    self.requeue(io, index);
                }
                _ => self.requeue(io, index),
            }
        }
        if own_doing {
            self.suspect(&started);
        }
    }

    /// A slot whose request has certainly not run.
    fn requeue(&mut self, io: &Io, index: SlotIndex) {
        let slot = io.region.slot(index);
        self.tables.close_handle(slot.annex().new_fh);
        slot.set_phase(Phase::Queued);
    }

    fn suspect(&mut self, started: &[SlotIndex]) {
        let alone = started.len() == 1;
        for &index in started {
            if let Some(in_slot) = &mut self.slots[index.get() as usize] {
                in_slot.held.suspect = true;
                if alone {
                    in_slot.held.deaths_alone += 1;
                }
            }
        }
    }

    /// A new generation is ready: it gets what the last one left, then what arrived meanwhile.
    pub fn backend_ready(&mut self, io: &Io, generation: u32, needs_paths: bool) {
        self.generation = generation;
        self.needs_paths = needs_paths;
        self.service = Service::Serving;
        if self.inflight() == 0 {
            self.end_pause();
        }
        let mut left: Vec<(u64, SlotIndex, bool)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(n, s)| Some((SlotIndex::new(n as u32)?, s.as_ref()?)))
            .filter(|(_, s)| s.at == Where::Here)
            .map(|(index, s)| (s.held.sequence, index, s.held.suspect))
            .collect();
        left.sort_unstable();
        for &(_, index, suspect) in &left {
            if suspect {
                self.quarantine.push_back(index);
            }
        }
        if self.quarantine.is_empty() {
            self.issue_left(io);
        } else {
            self.issue_suspect(io);
        }
    }

    /// What may have run goes first, so that nothing new overtakes it.
    fn issue_left(&mut self, io: &Io) {
        let mut left: Vec<(bool, u64, SlotIndex)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(n, s)| Some((SlotIndex::new(n as u32)?, s.as_ref()?)))
            .filter(|(_, s)| s.at == Where::Here)
            .map(|(index, s)| {
                let ran = io.region.slot(index).phase() == Some(Phase::Running);
                (!ran, s.held.sequence, index)
            })
            .collect();
        left.sort_unstable();
        for (_, _, index) in left {
            let bytes = io.region.slot(index).copy_request();
            match Request::decode(&bytes) {
                Ok(request) => self.hand_over(io, index, &request),
                Err(e) => {
                    // The last backend wrote into it. Its caller must not wait for ever.
                    self.counters.protocol_errors += 1;
                    tracing::error!("slot {}: {e}", index.get());
                    let unique = self.slots[index.get() as usize]
                        .as_ref()
                        .map_or(0, |s| s.held.unique);
                    self.answer_slot(io, index, error_reply(unique, Some(Errno::EIO)));
                }
            }
        }
        self.start_outside(io);
    }

    /// Issues the next suspect alone, or answers it if it is poison.
    fn issue_suspect(&mut self, io: &Io) {
        while let Some(&index) = self.quarantine.front() {
            let bytes = io.region.slot(index).copy_request();
            let held = self.slots[index.get() as usize].as_ref().map(|s| &s.held);
            let (Some(held), Ok(request)) = (held, Request::decode(&bytes)) else {
                self.quarantine.pop_front();
                continue;
            };
            if held.deaths_alone < POISON_DEATHS {
                self.hand_over(io, index, &request);
                if self.slots[index.get() as usize].is_some() {
                    return;
                }
                // Its node is gone, and so it was answered.
                self.quarantine.pop_front();
                continue;
            }
            tracing::error!(
                "{} of process {} killed {} backends: answered EIO",
                held.opcode,
                held.pid,
                held.deaths_alone
            );
            self.counters.poisoned += 1;
            self.quarantine.pop_front();
            if held.opcode.opens_handle() {
                self.tables
                    .close_handle(io.region.slot(index).annex().new_fh);
            }
            let reply = self.refusal(&request, Errno::EIO);
            self.answer_slot(io, index, reply);
        }
        self.issue_left(io);
    }

    /// A suspect came back: the next one, or everything else.
    fn next_suspect(&mut self, io: &Io) {
        let Some(&index) = self.quarantine.front() else {
            return;
        };
        if self.service == Service::Serving && self.slots[index.get() as usize].is_none() {
            self.quarantine.pop_front();
            self.issue_suspect(io);
        }
    }
}

/// Writes a reply to the kernel. False if nobody waits for it.
pub fn deliver(io: &Io, delivery: &Delivery) -> bool {
    match &delivery.reply {
        Reply::None | Reply::Waits => true,
        Reply::Bytes(bytes) => io.send(bytes),
        Reply::FromSlot => {
            let Some(fuse) = io.fuse.get() else {
                return false;
            };
            let spans = io.region.slot(delivery.index).reply_spans();
            match sys::writev(fuse.as_fd(), &spans) {
                Ok(_) => true,
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => false,
                Err(e) => {
                    tracing::error!("reply refused by the kernel: {e}");
                    true
                }
            }
        }
    }
}

/// Requests of `df`, `stat` and kubelet, which are answered from memory if need be.
fn is_remembered(opcode: Opcode, nodeid: u64) -> bool {
    use Opcode::*;
    let of_root = matches!(opcode, Getattr | Statx | Access | Opendir | Getxattr);
    opcode == Statfs || nodeid == ROOT_ID && of_root
}

/// The answer to a STATX, without the time of birth, which nobody remembers.
fn statx_of(attr: &Attr) -> StatxOut {
    let time = |sec: u64, nsec| SxTime {
        sec: sec as i64,
        nsec,
        reserved: 0,
    };
    StatxOut {
        stat: Statx {
            mask: libc::STATX_BASIC_STATS,
            blksize: attr.blksize,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: attr.mode as u16,
            ino: attr.ino,
            size: attr.size,
            blocks: attr.blocks,
            atime: time(attr.atime, attr.atimensec),
            ctime: time(attr.ctime, attr.ctimensec),
            mtime: time(attr.mtime, attr.mtimensec),
            ..Statx::default()
        },
        ..StatxOut::default()
    }
}

/// Bytes of a SETLKW request.
const WAITER_BYTES: usize = size_of::<InHeader>() + size_of::<LkIn>();

/// Nanoseconds until a lock that somebody outside of the mount holds is tried again: soon, then
/// less and less often, at last once a second.
fn retry_delay(tries: u32) -> u64 {
    let ms = 20u64 << tries.min(6);
    Duration::from_millis(ms.min(1000)).as_nanos() as u64
}

fn setlk_bytes(request: &Request<'_>) -> Vec<u8> {
    use zerocopy::IntoBytes;
    let Op::Setlk(lk) = request.op else {
        return vec![0; WAITER_BYTES];
    };
    [request.header.as_bytes(), lk.as_bytes()].concat()
}

/// The lock a SETLK or SETLKW asks for.
fn lock_of(request: &Request<'_>) -> Option<Lock> {
    let Op::Setlk(lk) = request.op else {
        return None;
    };
    Some(Lock {
        nodeid: request.header.nodeid,
        owner: lk.owner,
        flock: lk.lk_flags & LK_FLOCK != 0,
        exclusive: lk.lk.typ == libc::F_WRLCK as u32,
        start: lk.lk.start,
        end: lk.lk.end,
        pid: lk.lk.pid,
        fh: lk.fh,
    })
}

fn waiter_lock(waiter: &Waiter) -> Option<Lock> {
    lock_of(&Request::decode(&waiter.request).ok()?)
}

fn conflicts(a: &Lock, b: &Lock) -> bool {
    a.flock == b.flock
        && a.owner != b.owner
        && (a.exclusive || b.exclusive)
        && a.start <= b.end
        && b.start <= a.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Region;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use zerocopy::IntoBytes;

    /// A core that serves, and the other end of its kernel connection.
    fn serving() -> (Core, Io, UnixStream) {
        let (ours, kernel) = UnixStream::pair().unwrap();
        kernel
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let io = Io {
            region: Region::create().unwrap(),
            fuse: OwnedFd::from(ours).into(),
        };
        let mut core = Core::new(Tables::create().unwrap(), OutagePolicy::Queue, 1024);
        let root = Identity::new(b"root").unwrap();
        core.tables.set_root(&root, &Attr::default());
        core.backend_ready(&io, 1, false);
        (core, io, kernel)
    }

    /// The kernel sends an OPENDIR of the root.
    fn ask(core: &mut Core, io: &Io, unique: u64) -> SlotIndex {
        let args = OpenIn::default();
        let header = InHeader {
            len: (size_of::<InHeader>() + size_of::<OpenIn>()) as u32,
            opcode: Opcode::Opendir as u32,
            unique,
            nodeid: ROOT_ID,
            ..InHeader::default()
        };
        let bytes = [header.as_bytes(), args.as_bytes()].concat();
        let (index, chunks) = core.reading();
        io.region.slot(index).put_request(&bytes, &chunks);
        core.arrived(io, bytes.len());
        assert_eq!(io.region.requests().pop(), Some(index));
        index
    }

    fn answer(kernel: &mut UnixStream) -> (u64, i32) {
        let mut bytes = [0; size_of::<OutHeader>()];
        kernel.read_exact(&mut bytes).unwrap();
        let header = OutHeader::read_from_bytes(&bytes).unwrap();
        (header.unique, header.error)
    }

    fn nothing_is_left(core: &Core) {
        assert_eq!(core.inflight(), 0);
        assert_eq!(core.free_slots.len(), SLOTS as usize - 1);
        assert_eq!(core.free_chunks.len(), CHUNKS as usize - MAX_CHUNKS);
        assert_eq!(core.tables.open_dirs(), 0);
    }

    #[test]
    fn slots_a_backend_does_not_have_are_not_taken_from_it() {
        let (mut core, io, mut kernel) = serving();
        let index = ask(&mut core, &io, 2);
        for n in (0..SLOTS).rev() {
            let slot = SlotIndex::new(n).unwrap();
            // All but its own, and that is not ready yet.
            if slot != index {
                io.region.slot(slot).set_phase(Phase::ReplyReady);
            }
            io.region.replies().push(slot);
        }
        while !io.region.replies().is_empty() {
            assert!(core.next_delivery(&io).is_none());
        }
        assert_eq!(core.counters.protocol_errors, u64::from(SLOTS));
        assert_eq!(core.inflight(), 1);
        // It answers after all, with an error that does not exist, and twice.
        let slot = io.region.slot(index);
        slot.set_reply(2, -4000, 0);
        slot.set_phase(Phase::ReplyReady);
        io.region.replies().push(index);
        io.region.replies().push(index);
        let delivery = core.next_delivery(&io).unwrap();
        assert!(core.next_delivery(&io).is_none());
        let taken = deliver(&io, &delivery);
        core.delivered(&io, delivery, taken);
        assert_eq!(answer(&mut kernel), (2, -libc::EIO));
        nothing_is_left(&core);
    }

    #[test]
    fn a_request_that_was_overwritten_by_the_backend_is_answered_when_that_is_dead() {
        let (mut core, io, mut kernel) = serving();
        for unique in [2, 4] {
            let index = ask(&mut core, &io, unique);
            io.region.slot(index).put_request(&[255; 200], &[]);
            io.region.slot(index).set_phase(Phase::Running);
        }
        core.backend_died(&io, false);
        assert_eq!(core.inflight(), 2);
        core.backend_ready(&io, 2, false);
        let mut answers = [answer(&mut kernel), answer(&mut kernel)];
        answers.sort_unstable();
        assert_eq!(answers, [(2, -libc::EIO), (4, -libc::EIO)]);
        nothing_is_left(&core);
    }
}
