//! The session region: what a new generation needs in order to carry on.
//!
//! Two memory files, created by the front-end and mapped by every holder:
//!
//! * the **slot memory** (this module, [`slot`], [`ring`]): a header, two rings, the slots, and a
//!   pool of payload chunks. Populated and locked before the first read.
//! * the **table memory** ([`tables`]): inodes, handles and locks. Sparse, takes memory as it fills.
//!
//! And a third for stores that can be asked to acknowledge before they are done ([`retained`]).
//!
//! Only numbers and offsets live in here, never pointers or locks. Everything read from it is
//! untrusted: copied once, checked, then used.
//!
//! Layout version history:
//! 1. first version.

pub mod identity;
pub mod memory;
pub mod retained;
pub mod ring;
pub mod slot;
pub mod tables;

use std::io;
use std::mem::offset_of;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use identity::Identity;
use memory::Memory;
use ring::Ring;
pub use slot::{Phase, SlotIndex};

/// Size of a page, and of everything aligned to one. Linux on x86-64 and most arm64.
pub const PAGE: usize = 4096;
/// Version of the layout below. Software refuses another one.
pub const LAYOUT_VERSION: u32 = 1;
/// Number of slots: requests that can be with the backend at a time.
pub const SLOTS: u32 = 96;
/// Size of a payload chunk. Small enough that a 128 KiB request does not take a 1 MiB buffer.
pub const CHUNK: usize = 64 * 1024;
/// Chunks in the pool: one read buffer of 1 MiB, and 3 MiB of payload in flight.
pub const CHUNKS: u32 = 64;
/// Largest WRITE and READ, in bytes (`max_write` of INIT).
pub const MAX_WRITE: usize = 1024 * 1024;
/// Chunks the largest request or reply takes.
pub const MAX_CHUNKS: usize = MAX_WRITE / CHUNK;

const MAGIC: u64 = u64::from_ne_bytes(*b"evrmount");
const HEADER_AT: usize = 0;
const REQUESTS_AT: usize = PAGE;
const REPLIES_AT: usize = 2 * PAGE;
const SLOTS_AT: usize = 3 * PAGE;
const CHUNKS_AT: usize = SLOTS_AT + SLOTS as usize * slot::SIZE;
const LEN: usize = CHUNKS_AT + CHUNKS as usize * CHUNK;

/// Begins the slot memory. Written before any other process maps it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    magic: u64,
    version: u32,
    slots: u32,
    chunks: u32,
    chunk_size: u32,
    /// `FUSE_*` INIT flags in force on this connection. Fixed for its life: INIT is never repeated.
    init_flags: u64,
    max_write: u32,
    reserved: u32,
}

/// The slot memory.
pub struct Region {
    memory: Memory,
}

impl Region {
    /// Creates and populates a region.
    pub fn create() -> io::Result<Region> {
        let memory = Memory::create("evermount-slots", LEN)?;
        memory.populate(0, LEN)?;
        memory.put(
            HEADER_AT,
            &Header {
                magic: MAGIC,
                version: LAYOUT_VERSION,
                slots: SLOTS,
                chunks: CHUNKS,
                chunk_size: CHUNK as u32,
                init_flags: 0,
                max_write: MAX_WRITE as u32,
                reserved: 0,
            },
        );
        Ok(Region { memory })
    }

    /// Maps the region another process created.
    pub fn open(fd: OwnedFd) -> io::Result<Region> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let memory = Memory::open(fd)?;
        if memory.len() < size_of::<Header>() {
            return Err(bad("session region is too small to have a header".into()));
        }
        let h: Header = memory.get(HEADER_AT);
        if h.magic != MAGIC {
            return Err(bad("memory is not a session region".into()));
        }
        if h.version != LAYOUT_VERSION {
            return Err(bad(format!(
                "session region has layout version {}, this program reads version {LAYOUT_VERSION}",
                h.version
            )));
        }
        if memory.len() != LEN
            || h.slots != SLOTS
            || h.chunks != CHUNKS
            || h.chunk_size != CHUNK as u32
        {
            return Err(bad(
                "session region has other sizes than its version says".into()
            ));
        }
        Ok(Region { memory })
    }

    /// The INIT flags in force on this connection.
    pub fn init_flags(&self) -> u64 {
        self.init_flags_word().load(Ordering::Relaxed)
    }

    /// Notes the INIT flags, once the connection exists.
    pub fn set_init_flags(&self, flags: u64) {
        self.init_flags_word().store(flags, Ordering::Relaxed);
    }

    fn init_flags_word(&self) -> &AtomicU64 {
        self.memory.u64(HEADER_AT + offset_of!(Header, init_flags))
    }

    /// The file behind it, to pass to another holder.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.memory)
    }

    /// Slots handed to the backend.
    pub fn requests(&self) -> Ring<'_> {
        Ring::new(&self.memory, REQUESTS_AT)
    }

    /// Slots handed back.
    pub fn replies(&self) -> Ring<'_> {
        Ring::new(&self.memory, REPLIES_AT)
    }

    /// The slot with this index.
    pub fn slot(&self, index: SlotIndex) -> slot::Slot<'_> {
        slot::Slot::new(self, index)
    }

    /// All slots.
    pub fn slots(&self) -> impl Iterator<Item = slot::Slot<'_>> {
        (0..SLOTS).filter_map(SlotIndex::new).map(|i| self.slot(i))
    }

    fn slot_at(index: SlotIndex) -> usize {
        SLOTS_AT + index.get() as usize * slot::SIZE
    }

    fn chunk_at(index: u16) -> usize {
        CHUNKS_AT + usize::from(index) * CHUNK
    }
}
