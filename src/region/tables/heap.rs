//! Pages of equal blocks.
//!
//! A page of the heap belongs to one class of blocks: the classes of records, and classes of sizes
//! for names and identities. A block is referred to by its place in units of 8 bytes; 0 is none.
//! A page whose blocks are all free goes back to the free pages and gives its memory back, except
//! for one spare page per class.
//!
//! Serial numbers: the first word of an inode or handle record is its id, and stays there when the
//! record is free, so that the next id in that place is the next serial. A page that leaves its
//! class forgets them; [`SERIAL`] is then raised above them, and new places begin with it.

use super::Full;
use super::words::{
    CLASS_STATE, DESCRIPTORS_AT, FREE_PAGES, HEAP_AT, PAGE_TOP, PAGES_USED, SERIAL, Unused, Words,
};
use crate::region::PAGE;

/// Pages of the heap: 8 GiB.
const PAGES: u32 = 1 << 21;
pub(super) const HEAP_LEN: usize = PAGES as usize * PAGE;
const DESCRIPTOR: usize = 16;
pub(super) const DESCRIPTORS_LEN: usize = PAGES as usize * DESCRIPTOR;
/// Units of 8 bytes in a page.
const UNITS: u32 = PAGE as u32 / 8;
/// Bits of an id that tell the place of its record.
const PLACE_BITS: u32 = 27;
const _: () = assert!(HEAP_LEN / 64 <= 1 << PLACE_BITS);
/// Descriptors whose memory is given back together.
const DESCRIPTOR_GROUP: u32 = (16 * PAGE / DESCRIPTOR) as u32;

/// A class of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(pub(super) u8);

/// Number of classes.
pub(super) const CLASSES: usize = 44;

impl Class {
    pub(super) const INODE: Class = Class(40);
    pub(super) const HANDLE: Class = Class(41);
    pub(super) const LOCK: Class = Class(42);
    pub(super) const WAITER: Class = Class(43);
    /// Longest bytes a block can hold.
    pub(super) const MAX_BYTES: usize = PAGE;

    /// The class for so many bytes, at least one, at most [`MAX_BYTES`](Class::MAX_BYTES).
    pub(super) fn of_len(len: usize) -> Class {
        match len {
            0..=256 => Class(len.div_ceil(8).max(1) as u8),
            257..=512 => Class(33),
            513..=1024 => Class(34),
            1025..=2048 => Class(35),
            _ => Class(36),
        }
    }

    /// Bytes of a block.
    pub(super) const fn size(self) -> usize {
        match self.0 {
            0..=32 => 8 * self.0 as usize,
            33..=36 => 512 << (self.0 - 33),
            40 => 128,
            41 | 42 => 64,
            _ => 136,
        }
    }

    pub(super) fn per_page(self) -> u32 {
        (PAGE / self.size().max(8)) as u32
    }

    pub(super) fn state_at(self) -> usize {
        CLASS_STATE + 8 * usize::from(self.0)
    }

    fn has_ids(self) -> bool {
        self == Class::INODE || self == Class::HANDLE
    }
}

/// What is known of a page.
#[derive(Clone, Copy)]
pub(super) struct Page {
    pub(super) class: u16,
    /// Blocks in use.
    pub(super) used: u16,
    /// Blocks that were ever used since the page came to its class.
    pub(super) begun: u16,
    /// First free block among those, plus one.
    pub(super) free: u16,
}

/// A list of pages: where its head is. Links are page numbers plus one.
pub(super) fn next_at(page: u32) -> usize {
    DESCRIPTORS_AT + DESCRIPTOR * page as usize + 8
}

pub(super) fn prev_at(page: u32) -> usize {
    next_at(page) + 4
}

/// Address of a block.
pub(super) fn address(block: u32) -> usize {
    HEAP_AT + 8 * block as usize
}

/// The place of a record of this class in an id.
fn place_of(class: Class, block: u32) -> u64 {
    u64::from(block) / (class.size() as u64 / 8)
}

/// The block an id names. It may be none.
pub(super) fn block_of_id(class: Class, id: u64) -> u32 {
    let place = id & ((1 << PLACE_BITS) - 1);
    // 27 bits of 128 byte blocks are 31 bits of units.
    (place * (class.size() as u64 / 8)) as u32
}

impl Words {
    /// The first page belongs to inodes, so that the root is record 1; its record 0 is no one's.
    pub(super) fn make_heap(&mut self) {
        let page = Page {
            class: u16::from(Class::INODE.0),
            used: 1,
            begun: 1,
            free: 0,
        };
        self.store(PAGE_TOP, 1);
        self.store(PAGES_USED, 1);
        self.set_page(0, page);
        self.push_page(Class::INODE.state_at(), 0);
    }

    /// Bytes of heap and descriptors in use.
    pub(super) fn heap_bytes(&self) -> u64 {
        let pages = self.load(PAGES_USED).min(u64::from(PAGES));
        pages * PAGE as u64 + u64::from(self.page_top()) * DESCRIPTOR as u64
    }

    /// Pages ever used.
    pub(super) fn page_top(&self) -> u32 {
        self.load(PAGE_TOP).min(u64::from(PAGES)) as u32
    }

    pub(super) fn page(&self, page: u32) -> Page {
        let word = self.load(DESCRIPTORS_AT + DESCRIPTOR * page as usize);
        Page {
            class: word as u16,
            used: (word >> 16) as u16,
            begun: (word >> 32) as u16,
            free: (word >> 48) as u16,
        }
    }

    fn set_page(&mut self, page: u32, p: Page) {
        let word = u64::from(p.class)
            | u64::from(p.used) << 16
            | u64::from(p.begun) << 32
            | u64::from(p.free) << 48;
        self.store(DESCRIPTORS_AT + DESCRIPTOR * page as usize, word);
    }

    /// Address of a block if it is one of this class that is or was in use.
    #[inline]
    pub(super) fn block(&self, block: u32, class: Class) -> Option<usize> {
        let page = block / UNITS;
        if block == 0 || page >= PAGES {
            return None;
        }
        let p = self.page(page);
        let offset = (block % UNITS) as usize * 8;
        let slot = offset / class.size();
        (p.class == u16::from(class.0)
            && slot < usize::from(p.begun)
            && slot < class.per_page() as usize
            && offset.is_multiple_of(class.size()))
        .then(|| address(block))
    }

    /// All blocks of a class that are or were in use.
    pub(super) fn blocks(&self, class: Class) -> impl Iterator<Item = u32> + '_ {
        (0..self.page_top()).flat_map(move |page| {
            let p = self.page(page);
            let begun = match p.class == u16::from(class.0) {
                true => u32::from(p.begun).min(class.per_page()),
                false => 0,
            };
            (0..begun)
                .map(move |slot| block_at(class, page, slot))
                .filter(|&block| block != 0)
        })
    }

    /// A block to use, and whether it is the first in its place. Its contents are anything.
    fn take(&mut self, class: Class) -> Result<(u32, bool), Full> {
        let page = match self.half(class.state_at()) {
            0 => self.page_with_room(class)?,
            link => link - 1,
        };
        let mut p = self.page(page);
        let per_page = class.per_page();
        if page >= PAGES || p.class != u16::from(class.0) || u32::from(p.used) >= per_page {
            return Err(Full); // corrupt
        }
        let (slot, first) = match p.free {
            0 => (u32::from(p.begun), true),
            free => (u32::from(free) - 1, false),
        };
        if slot >= per_page {
            return Err(Full); // corrupt
        }
        let block = block_at(class, page, slot);
        match first {
            true => p.begun += 1,
            false => p.free = self.load(link_at(class, block)) as u16,
        }
        p.used += 1;
        self.set_page(page, p);
        if u32::from(p.used) == per_page {
            self.pull_page(class.state_at(), page);
        }
        Ok((block, first))
    }

    fn page_with_room(&mut self, class: Class) -> Result<u32, Full> {
        let spare = self.half(class.state_at() + 4);
        let page = if spare != 0 {
            self.store_half(class.state_at() + 4, 0);
            spare - 1
        } else {
            let page = self.free_page()?;
            let p = Page {
                class: u16::from(class.0),
                used: 0,
                begun: 0,
                free: 0,
            };
            self.set_page(page, p);
            self.add(PAGES_USED, 1);
            page
        };
        if page >= PAGES {
            return Err(Full); // corrupt
        }
        self.push_page(class.state_at(), page);
        Ok(page)
    }

    fn free_page(&mut self) -> Result<u32, Full> {
        if let Some(page) = self.half(FREE_PAGES).checked_sub(1) {
            if page >= PAGES || self.page(page).class != 0 {
                return Err(Full); // corrupt
            }
            self.pull_page(FREE_PAGES, page);
            return Ok(page);
        }
        let top = self.page_top();
        if top == PAGES {
            return Err(Full);
        }
        self.store(PAGE_TOP, u64::from(top) + 1);
        Ok(top)
    }

    /// Gives a block back.
    pub(super) fn give(&mut self, block: u32, class: Class) {
        if self.block(block, class).is_none() {
            return;
        }
        let page = block / UNITS;
        let mut p = self.page(page);
        let was_full = u32::from(p.used) == class.per_page();
        self.store(link_at(class, block), u64::from(p.free));
        p.free = ((block % UNITS) * 8 / class.size() as u32 + 1) as u16;
        p.used = p.used.saturating_sub(1);
        self.set_page(page, p);
        if was_full {
            self.push_page(class.state_at(), page);
        }
        if p.used == 0 {
            self.pull_page(class.state_at(), page);
            self.spare_page(class, page);
        }
    }

    /// Keeps an empty page as the spare one, or the spare one it has. The lower stays, so that the
    /// end of the heap can be forgotten.
    fn spare_page(&mut self, class: Class, page: u32) {
        let spare_at = class.state_at() + 4;
        let spare = self.half(spare_at);
        if spare == 0 || page < spare - 1 {
            self.store_half(spare_at, page + 1);
        }
        match spare {
            0 => {}
            _ if page < spare - 1 => self.release_page(class, spare - 1),
            _ => self.release_page(class, page),
        }
    }

    fn release_page(&mut self, class: Class, page: u32) {
        let p = self.page(page);
        if page >= PAGES || p.class != u16::from(class.0) {
            return; // corrupt
        }
        if class.has_ids() {
            let serial = (0..u32::from(p.begun).min(class.per_page()))
                .map(|slot| self.load(address(block_at(class, page, slot))) >> PLACE_BITS)
                .max();
            let next = serial.map_or(0, |s| s + 1).max(self.load(SERIAL));
            self.store(SERIAL, next);
        }
        let none = Page {
            class: 0,
            used: 0,
            begun: 0,
            free: 0,
        };
        self.set_page(page, none);
        self.add(PAGES_USED, -1);
        self.push_page(FREE_PAGES, page);
        self.not_used(Unused::HeapPage(page));
        self.lower_top();
    }

    /// Forgets free pages at the end, a few at a time.
    fn lower_top(&mut self) {
        for _ in 0..8 {
            let Some(last) = self.page_top().checked_sub(1) else {
                return;
            };
            if self.page(last).class != 0 {
                return;
            }
            self.pull_page(FREE_PAGES, last);
            self.store(PAGE_TOP, u64::from(last));
            if last.is_multiple_of(DESCRIPTOR_GROUP) {
                self.not_used(Unused::Descriptors(last));
            }
        }
    }

    pub(super) fn unused_page(&self, page: u32) -> Option<(usize, usize)> {
        (page < PAGES && self.page(page).class == 0).then(|| (HEAP_AT + page as usize * PAGE, PAGE))
    }

    pub(super) fn unused_descriptors(&self, page: u32) -> Option<(usize, usize)> {
        (page >= self.page_top() && page < PAGES).then(|| {
            let at = DESCRIPTORS_AT + DESCRIPTOR * page as usize;
            (at, DESCRIPTOR * DESCRIPTOR_GROUP as usize)
        })
    }

    /// Puts a page in front of a list.
    fn push_page(&mut self, head_at: usize, page: u32) {
        let head = self.half(head_at);
        self.store_half(next_at(page), head);
        self.store_half(prev_at(page), 0);
        if let Some(second) = head.checked_sub(1).filter(|&p| p < PAGES) {
            self.store_half(prev_at(second), page + 1);
        }
        self.store_half(head_at, page + 1);
    }

    /// Takes a page out of a list.
    fn pull_page(&mut self, head_at: usize, page: u32) {
        let (next, prev) = (self.half(next_at(page)), self.half(prev_at(page)));
        match prev.checked_sub(1).filter(|&p| p < PAGES) {
            Some(prev) => self.store_half(next_at(prev), next),
            None => self.store_half(head_at, next),
        }
        if let Some(next) = next.checked_sub(1).filter(|&p| p < PAGES) {
            self.store_half(prev_at(next), prev);
        }
        self.store(next_at(page), 0);
    }

    /// A block for bytes, with the bytes in it.
    pub(super) fn keep_bytes(&mut self, bytes: &[u8]) -> Result<u32, Full> {
        if bytes.is_empty() || bytes.len() > Class::MAX_BYTES {
            return Err(Full);
        }
        let (block, _) = self.take(Class::of_len(bytes.len()))?;
        self.store_bytes(address(block), bytes);
        Ok(block)
    }

    /// A block for a record without an id.
    pub(super) fn take_record(&mut self, class: Class) -> Result<u32, Full> {
        self.take(class).map(|(block, _)| block)
    }

    /// A block for a record, and its id.
    pub(super) fn take_with_id(&mut self, class: Class) -> Result<(u32, u64), Full> {
        let (block, first) = self.take(class)?;
        let serial = match first {
            true => self.load(SERIAL),
            false => (self.load(address(block)) >> PLACE_BITS) + 1,
        };
        if serial >= 1 << (64 - PLACE_BITS) {
            return Err(Full); // 2^37 uses of one place
        }
        Ok((block, serial << PLACE_BITS | place_of(class, block)))
    }
}

pub(super) fn block_at(class: Class, page: u32, slot: u32) -> u32 {
    page * UNITS + slot * (class.size() as u32 / 8)
}

/// The last word of a free block is the link to the next free one of its page.
pub(super) fn link_at(class: Class, block: u32) -> usize {
    address(block) + class.size() - 8
}
