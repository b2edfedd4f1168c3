//! A place for one request and its reply.
//!
//! ```text
//! page 0   head | annex | journal | .......... | request header and argument (last 80 bytes)
//! page 1-2 request data, continued in chunks   (page aligned: WRITE data starts on a page)
//! page 3   reply identities | ................ | reply header (last 16 bytes)
//! page 4-5 reply data, or chunks instead       (page aligned)
//! page 6-7 paths of the annex, for backends that find objects by walking
//! ```
//!
//! Who writes what: the pump writes head, annex and paths before the slot is handed over; the kernel
//! writes the request; the backend writes the journal before it executes and the reply before
//! [`Phase::ReplyReady`]. A reply never overwrites its own request, so that the request can be issued
//! again at any time.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::memory::{Memory, Span, limit};
use super::{CHUNK, CHUNKS, Identity, MAX_CHUNKS, PAGE, Region, SLOTS};
use crate::wire::abi::{InHeader, OutHeader, WriteIn};

/// Bytes of a slot.
pub const SIZE: usize = 8 * PAGE;
/// Header and argument of a WRITE: what lies before page-aligned data.
pub const REQUEST_HEAD: usize = size_of::<InHeader>() + size_of::<WriteIn>();
/// Request bytes that lie in the slot itself. Every name fits; the rest goes to chunks.
pub const REQUEST_SMALL: usize = REQUEST_HEAD + 2 * PAGE;
/// Reply data that lies in the slot itself.
pub const REPLY_SMALL: usize = 2 * PAGE;
/// Bytes for the identities of a reply.
pub const REPLY_IDS: usize = PAGE - size_of::<OutHeader>();
/// Bytes for the paths of an annex.
pub const PATHS: usize = 2 * PAGE;

const ANNEX_AT: usize = 512;
const JOURNAL_AT: usize = 2048;
const REQUEST_AT: usize = PAGE - REQUEST_HEAD;
const IDS_AT: usize = 3 * PAGE;
const REPLY_AT: usize = 4 * PAGE - size_of::<OutHeader>();
const REPLY_DATA_AT: usize = 4 * PAGE;
const PATHS_AT: usize = 6 * PAGE;
const _: () = assert!(ANNEX_AT + size_of::<Annex>() <= JOURNAL_AT);
const _: () = assert!(JOURNAL_AT + size_of::<Journal>() <= REQUEST_AT);

/// Index of a slot, always below [`SLOTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotIndex(u32);

impl SlotIndex {
    /// The index, if there is such a slot.
    pub fn new(index: u32) -> Option<SlotIndex> {
        (index < SLOTS).then_some(SlotIndex(index))
    }

    /// As a number.
    pub fn get(self) -> u32 {
        self.0
    }
}

/// How far a request has come. `Free → Reading → Queued → Preparing → Running → ReplyReady → Free`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// Nothing in it.
    Free = 0,
    /// A reader is in `read(2)`. If its header is complete, as `Queued`.
    Reading = 1,
    /// Read, and certainly not executed.
    Queued = 2,
    /// Taken by the backend, which looks at the store but has changed nothing in it.
    Preparing = 5,
    /// Perhaps executed: the journal says what was there before.
    Running = 3,
    /// Executed; the reply is complete.
    ReplyReady = 4,
}

impl Phase {
    fn from_raw(raw: u32) -> Option<Phase> {
        use Phase::*;
        [Free, Reading, Queued, Preparing, Running, ReplyReady]
            .into_iter()
            .find(|p| *p as u32 == raw)
    }
}

/// What the tables know of a node a request names.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct NodeRef {
    /// The kernel's node id, 0 if the request has no such node.
    pub nodeid: u64,
    /// `NodeRef::*` bits.
    pub flags: u32,
    /// Bytes of the node's path in the path area (walking backends only).
    pub path_len: u32,
    /// The backend's identity of it.
    pub identity: Identity,
}

impl NodeRef {
    /// The vault keeps a descriptor of it: its last name is gone.
    pub const VAULTED: u32 = 1;
}

/// What the tables know of a file handle a request names.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct HandleRef {
    /// The handle, 0 if the request has none.
    pub fh: u64,
    /// `open(2)` flags of the handle as the kernel sent them.
    pub open_flags: u32,
    /// `HandleRef::*` bits.
    pub flags: u32,
}

impl HandleRef {
    /// The lock owner of this request holds locks on this node.
    pub const OWNER_HAS_LOCKS: u32 = 1;
}

/// What the pump adds to a request so that the backend needs no table.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Annex {
    /// The node of the request's header.
    pub node: NodeRef,
    /// New directory of a rename, inode of a link, destination of a copy.
    pub second: NodeRef,
    /// The handle the request works through.
    pub handle: HandleRef,
    /// Destination handle of a copy.
    pub second_handle: HandleRef,
    /// The handle an OPEN, OPENDIR, CREATE or TMPFILE gets if it succeeds.
    pub new_fh: u64,
    /// Arrival of the request, nanoseconds since the epoch.
    pub arrived_ns: u64,
    /// Issued before: an earlier generation died while it was `Running`.
    pub again: u32,
    /// Zero.
    pub reserved: u32,
}

/// What the backend found before it executed. Written before `Running`, never changed by a re-issue.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Journal {
    /// What the name (or new name of a rename or link) referred to; none = absent.
    pub target: Identity,
    /// What the old name of a rename referred to.
    pub source: Identity,
    /// Size before a truncation or an append, bytes.
    pub size: u64,
    /// Offset an append was given.
    pub offset: u64,
    /// Backend's own, but for [`Journal::LAST_NAME`].
    pub flags: u64,
    /// Backend's own.
    pub extra: u64,
}

impl Journal {
    /// Bit of `flags` that means the same for all backends: the operation takes the last name of
    /// `target`. As long as the kernel knows it, each generation has to find it by its identity before
    /// it does anything else.
    pub const LAST_NAME: u64 = 1 << 63;
}

const PHASE: usize = 0;
const SEQUENCE: usize = 8;
const REQUEST_LEN: usize = 16;
const REPLY_LEN: usize = 20;
const REPLY_SPACE: usize = 28;
const REPLAYED: usize = 36;
const REPLY_DROPS: usize = 40;
const REQUEST_CHUNKS: usize = 64;
const REPLY_CHUNKS: usize = REQUEST_CHUNKS + 2 * (MAX_CHUNKS + 1);
const _: () = assert!(REPLY_CHUNKS + 2 * (MAX_CHUNKS + 1) <= ANNEX_AT);

/// A view of one slot.
#[derive(Clone, Copy)]
pub struct Slot<'r> {
    region: &'r Region,
    index: SlotIndex,
}

impl<'r> Slot<'r> {
    pub(super) fn new(region: &'r Region, index: SlotIndex) -> Slot<'r> {
        Slot { region, index }
    }

    /// Its index.
    pub fn index(&self) -> SlotIndex {
        self.index
    }

    fn memory(&self) -> &'r Memory {
        &self.region.memory
    }

    fn at(&self, offset: usize) -> usize {
        Region::slot_at(self.index) + offset
    }

    fn word(&self, offset: usize) -> &'r AtomicU32 {
        self.memory().u32(self.at(offset))
    }

    /// The phase; `None` if the word holds none (a broken or hostile peer).
    pub fn phase(&self) -> Option<Phase> {
        // SYNC: whoever stored the phase wrote the slot's contents before.
        Phase::from_raw(self.word(PHASE).load(Ordering::Acquire))
    }

    /// Sets the phase after everything that belongs to it was written.
    pub fn set_phase(&self, phase: Phase) {
        // SYNC: pairs with the load in `phase`.
        self.word(PHASE).store(phase as u32, Ordering::Release);
    }

    /// Position in the order of arrival.
    pub fn sequence(&self) -> u64 {
        self.sequence_word().load(Ordering::Relaxed)
    }

    /// Notes the position in the order of arrival.
    pub fn set_sequence(&self, sequence: u64) {
        self.sequence_word().store(sequence, Ordering::Relaxed);
    }

    fn sequence_word(&self) -> &'r AtomicU64 {
        self.memory().u64(self.at(SEQUENCE))
    }

    /// How a repeated request was answered (a number of `backend::Replayed`).
    pub fn replayed(&self) -> &'r AtomicU32 {
        self.word(REPLAYED)
    }

    /// Not 0: before the caller gets the reply, the kernel has to drop the pages of the node, because
    /// the caller will look at them with the right to see what others wrote.
    pub fn reply_drops_pages(&self) -> &'r AtomicU32 {
        self.word(REPLY_DROPS)
    }

    /// Bytes of the request, at most what a slot can hold.
    pub fn request_len(&self) -> usize {
        let max = REQUEST_SMALL + MAX_CHUNKS * CHUNK;
        (self.word(REQUEST_LEN).load(Ordering::Relaxed) as usize).min(max)
    }

    /// Notes the bytes of the request.
    pub fn set_request_len(&self, len: usize) {
        self.word(REQUEST_LEN).store(len as u32, Ordering::Relaxed);
    }

    fn chunk_list(&self, list: usize) -> Vec<u16> {
        let count = usize::from(self.half(list).load(Ordering::Relaxed)).min(MAX_CHUNKS);
        (0..count)
            .map(|n| self.half(list + 2 + 2 * n).load(Ordering::Relaxed))
            .filter(|&c| u32::from(c) < CHUNKS)
            .collect()
    }

    fn set_chunk_list(&self, list: usize, chunks: &[u16]) {
        for (n, &chunk) in chunks.iter().take(MAX_CHUNKS).enumerate() {
            self.half(list + 2 + 2 * n).store(chunk, Ordering::Relaxed);
        }
        let count = chunks.len().min(MAX_CHUNKS) as u16;
        self.half(list).store(count, Ordering::Relaxed);
    }

    fn half(&self, offset: usize) -> &'r AtomicU16 {
        self.memory().u16(self.at(offset))
    }

    /// Attaches payload chunks to the request and the reply.
    pub fn set_chunks(&self, request: &[u16], reply: &[u16]) {
        self.set_chunk_list(REQUEST_CHUNKS, request);
        self.set_chunk_list(REPLY_CHUNKS, reply);
        let space = if reply.is_empty() {
            REPLY_SMALL
        } else {
            reply.len() * CHUNK
        };
        self.word(REPLY_SPACE)
            .store(space as u32, Ordering::Relaxed);
    }

    fn chunk_spans(&self, list: usize, spans: &mut Vec<Span<'r>>) {
        let chunks = self.chunk_list(list);
        spans.extend(
            chunks
                .into_iter()
                .map(|c| self.memory().span(Region::chunk_at(c), CHUNK)),
        );
    }

    /// Where a request is read to: the slot, then `chunks`.
    pub fn read_spans(&self, chunks: &[u16]) -> Vec<Span<'r>> {
        let mut spans = vec![self.memory().span(self.at(REQUEST_AT), REQUEST_SMALL)];
        spans.extend(
            chunks
                .iter()
                .map(|&c| self.memory().span(Region::chunk_at(c), CHUNK)),
        );
        spans
    }

    /// All bytes of the request.
    pub fn request_spans(&self) -> Vec<Span<'r>> {
        let mut spans = vec![self.memory().span(self.at(REQUEST_AT), REQUEST_SMALL)];
        self.chunk_spans(REQUEST_CHUNKS, &mut spans);
        limit(&mut spans, self.request_len());
        spans
    }

    /// The data of a WRITE, as scattered as it lies. Every part but the last is whole pages.
    pub fn write_data(&self) -> Vec<Span<'r>> {
        let len = self.request_len().saturating_sub(REQUEST_HEAD);
        let mut spans = vec![self.memory().span(self.at(PAGE), 2 * PAGE)];
        self.chunk_spans(REQUEST_CHUNKS, &mut spans);
        limit(&mut spans, len);
        spans
    }

    /// A private copy of the request for [`crate::wire::Request::decode`]: all of it, or only header
    /// and argument of a WRITE.
    pub fn copy_request(&self) -> Vec<u8> {
        let header: InHeader = self.memory().get(self.at(REQUEST_AT));
        let mut spans = self.request_spans();
        if header.opcode == crate::wire::Opcode::Write as u32 {
            limit(&mut spans, REQUEST_HEAD);
        }
        let mut bytes = Vec::with_capacity(super::memory::total(&spans));
        for span in spans {
            bytes.extend_from_slice(&span.to_vec());
        }
        bytes
    }

    /// Puts a request in from private memory (one that waited outside, or an internal one).
    pub fn put_request(&self, bytes: &[u8], chunks: &[u16]) {
        let mut rest = bytes;
        for span in self.read_spans(chunks) {
            span.fill(rest);
            rest = &rest[rest.len().min(span.len())..];
        }
    }

    /// The request's header.
    pub fn request_header(&self) -> InHeader {
        self.memory().get(self.at(REQUEST_AT))
    }

    /// The annex.
    pub fn annex(&self) -> Annex {
        self.memory().get(self.at(ANNEX_AT))
    }

    /// Writes the annex and its paths: that of `node`, then that of `second`.
    pub fn set_annex(&self, annex: &Annex, paths: &[u8]) {
        self.memory().put(self.at(ANNEX_AT), annex);
        let len = paths.len().min(PATHS);
        self.memory().write(self.at(PATHS_AT), &paths[..len]);
    }

    /// The paths of the annex' nodes, relative to the root of the mount.
    pub fn paths(&self, annex: &Annex) -> (Vec<u8>, Vec<u8>) {
        let first = (annex.node.path_len as usize).min(PATHS);
        let second = (annex.second.path_len as usize).min(PATHS - first);
        let mut bytes = vec![0; first + second];
        self.memory().read(self.at(PATHS_AT), &mut bytes);
        let second = bytes.split_off(first);
        (bytes, second)
    }

    /// The journal.
    pub fn journal(&self) -> Journal {
        self.memory().get(self.at(JOURNAL_AT))
    }

    /// Writes the journal.
    pub fn set_journal(&self, journal: &Journal) {
        self.memory().put(self.at(JOURNAL_AT), journal);
    }

    /// Bytes a reply can carry after its header.
    pub fn reply_space(&self) -> usize {
        (self.word(REPLY_SPACE).load(Ordering::Relaxed) as usize).min(MAX_CHUNKS * CHUNK)
    }

    /// Where reply data goes, `len` bytes or what fits.
    pub fn reply_data(&self, len: usize) -> Vec<Span<'r>> {
        let mut spans = Vec::new();
        self.chunk_spans(REPLY_CHUNKS, &mut spans);
        if spans.is_empty() {
            spans.push(self.memory().span(self.at(REPLY_DATA_AT), REPLY_SMALL));
        }
        limit(&mut spans, len);
        spans
    }

    /// Puts reply data in from private memory; what does not fit is cut off.
    pub fn put_reply_data(&self, bytes: &[u8]) {
        let mut rest = bytes;
        for span in self.reply_data(bytes.len()) {
            span.fill(rest);
            rest = &rest[span.len()..];
        }
    }

    /// Completes the reply: its header, and how many bytes of data follow it.
    pub fn set_reply(&self, unique: u64, error: i32, data_len: usize) {
        let len = size_of::<OutHeader>() + data_len.min(self.reply_space());
        let header = OutHeader {
            len: len as u32,
            error,
            unique,
        };
        self.memory().put(self.at(REPLY_AT), &header);
        self.word(REPLY_LEN).store(len as u32, Ordering::Relaxed);
    }

    /// The reply's header as the backend wrote it.
    pub fn reply_header(&self) -> OutHeader {
        self.memory().get(self.at(REPLY_AT))
    }

    /// Data bytes of the reply, at most what the slot can hold.
    pub fn reply_data_len(&self) -> usize {
        let len = self.word(REPLY_LEN).load(Ordering::Relaxed) as usize;
        len.saturating_sub(size_of::<OutHeader>())
            .min(self.reply_space())
    }

    /// The whole reply as `writev(2)` takes it.
    pub fn reply_spans(&self) -> Vec<Span<'r>> {
        let mut spans = vec![
            self.memory()
                .span(self.at(REPLY_AT), size_of::<OutHeader>()),
        ];
        spans.extend(self.reply_data(self.reply_data_len()));
        spans
    }

    /// Writes the identities of the objects a reply names, in the order of its entries.
    pub fn set_reply_ids(&self, ids: &[Identity]) {
        let mut bytes = vec![0u8; 2];
        for id in ids {
            let id = id.as_bytes_ref();
            bytes.push(id.len() as u8);
            bytes.extend_from_slice(id);
        }
        assert!(
            bytes.len() <= REPLY_IDS,
            "identities of a reply were not bounded"
        );
        let count = ids.len() as u16;
        bytes[..2].copy_from_slice(&count.to_ne_bytes());
        self.memory().write(self.at(IDS_AT), &bytes);
    }

    /// The identities of the objects a reply names. Malformed ones end the list.
    pub fn reply_ids(&self) -> Vec<Identity> {
        let mut bytes = vec![0; REPLY_IDS];
        self.memory().read(self.at(IDS_AT), &mut bytes);
        let count = u16::from_ne_bytes([bytes[0], bytes[1]]);
        let mut rest = &bytes[2..];
        let mut ids = Vec::new();
        for _ in 0..count {
            let Some((&len, tail)) = rest.split_first() else {
                break;
            };
            let Some(id) = tail.get(..usize::from(len)).and_then(Identity::new) else {
                break;
            };
            rest = &tail[usize::from(len)..];
            ids.push(id);
        }
        ids
    }
}
