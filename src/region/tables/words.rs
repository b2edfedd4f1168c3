//! The one door to the table memory: words of eight bytes, and a log to take changes back.
//!
//! A change logs the old value of each word before it stores the new one. When the change is done
//! the log is emptied by one store: that store is the commit. Whoever finds a log that is not empty
//! puts the old values back, last first; doing so twice does no harm.
//!
//! Every store is a release store: the compiler may not move it before an earlier one, and a killed
//! process has done a prefix of its stores.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{MARKS, TABLES_VERSION, heap, index};
use crate::region::PAGE;
use crate::region::memory::Memory;

const MAGIC: u64 = u64::from_ne_bytes(*b"evtables");
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const LEN_AT: usize = 16;
const KEY_AT: usize = 24;
/// Number of entries in the log.
pub(super) const LOGGED: usize = 32;

/// Begin of what a change may store to in the header.
const STATE_AT: usize = 64;
pub(super) const INODES: usize = STATE_AT;
pub(super) const FILES: usize = STATE_AT + 8;
pub(super) const DIRS: usize = STATE_AT + 16;
pub(super) const LOCKS: usize = STATE_AT + 24;
pub(super) const WAITERS: usize = STATE_AT + 32;
/// Serial number of the next record that is the first in its place. See [`heap`].
pub(super) const SERIAL: usize = STATE_AT + 40;
pub(super) const PAGE_TOP: usize = STATE_AT + 48;
pub(super) const FREE_PAGES: usize = STATE_AT + 56;
pub(super) const PAGES_USED: usize = STATE_AT + 64;
/// Per index: number of buckets, number of entries.
pub(super) const INDEX_STATE: usize = 256;
/// Per class of blocks: first page with room, spare page.
pub(super) const CLASS_STATE: usize = 512;
const MARKS_AT: usize = 2048;
const _: () = assert!(CLASS_STATE + 8 * heap::CLASSES <= MARKS_AT);
const _: () = assert!(MARKS_AT + 8 * MARKS as usize <= PAGE);

const LOG_AT: usize = PAGE;
const LOG_ENTRY: usize = 16;
/// More than the largest change takes: giving back 2^20 locks, at a dozen stores each.
const LOG_ENTRIES: usize = 1 << 25;
/// Entries whose memory is kept after a change.
const LOG_KEPT: usize = 16 * PAGE / LOG_ENTRY;
pub(super) const DESCRIPTORS_AT: usize = LOG_AT + LOG_ENTRY * LOG_ENTRIES;
pub(super) const BUCKETS_AT: usize = DESCRIPTORS_AT + heap::DESCRIPTORS_LEN;
pub(super) const HEAP_AT: usize = BUCKETS_AT + index::BUCKETS_LEN;
const LEN: usize = HEAP_AT + heap::HEAP_LEN;
const _: () = assert!(DESCRIPTORS_AT.is_multiple_of(PAGE) && HEAP_AT.is_multiple_of(PAGE));

pub(super) fn mark_at(which: u32) -> usize {
    MARKS_AT + 8 * which as usize
}

/// Memory that is not used any more once the change that says so is done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unused {
    /// A page of the heap.
    HeapPage(u32),
    /// Descriptors of heap pages from this page on.
    Descriptors(u32),
    /// Buckets of an index from this one on.
    Buckets(index::Index, u32),
}

/// The table memory.
pub(super) struct Words {
    memory: Memory,
    /// Hash key, against names chosen to collide.
    key: u64,
    /// Entries in the log.
    logged: usize,
    /// Most entries in the log since the last commit.
    most_logged: usize,
    /// Changes within changes.
    depth: u32,
    unused: Vec<Unused>,
    /// Stores until this process "is killed".
    #[cfg(test)]
    pub(super) stop_after: std::cell::Cell<u64>,
}

/// A word of the used beginnings of the memory's areas, for a test that corrupts it.
#[cfg(test)]
pub(super) fn anywhere(area: u64, word: u64) -> usize {
    let (from, len) = match area % 5 {
        0 => (STATE_AT, PAGE / 4),
        1 => (LOGGED, 8),
        2 => (DESCRIPTORS_AT, 16 * 30),
        3 => (BUCKETS_AT, 512),
        _ => (HEAP_AT, 20 * PAGE),
    };
    from + 8 * (word as usize % (len / 8))
}

/// What a test's killed writer unwinds with.
#[cfg(test)]
pub(super) struct Killed;

/// Where a change (in a change) began.
pub(super) struct Start {
    logged: usize,
    unused: usize,
}

impl Words {
    fn new(memory: Memory) -> Words {
        Words {
            key: memory.u64(KEY_AT).load(Ordering::Relaxed),
            memory,
            logged: 0,
            most_logged: 0,
            depth: 0,
            unused: Vec::new(),
            #[cfg(test)]
            stop_after: std::cell::Cell::new(u64::MAX),
        }
    }

    pub(super) fn create() -> io::Result<Words> {
        let memory = Memory::create("evermount-tables", LEN)?;
        let key = {
            use std::hash::{BuildHasher, Hasher};
            std::hash::RandomState::new().build_hasher().finish()
        };
        memory.u64(KEY_AT).store(key, Ordering::Relaxed);
        memory.u64(LEN_AT).store(LEN as u64, Ordering::Relaxed);
        let mut words = Words::new(memory);
        words.begin();
        words.make_indexes();
        words.make_heap();
        words.end();
        words.put(VERSION_AT, TABLES_VERSION);
        words.put(MAGIC_AT, MAGIC);
        Ok(words)
    }

    pub(super) fn attach(fd: OwnedFd) -> io::Result<Words> {
        let memory = Memory::open(fd)?;
        if memory.len() != LEN {
            return Err(invalid(format!(
                "table memory has {} bytes, not {LEN}",
                memory.len()
            )));
        }
        let word = |at| memory.u64(at).load(Ordering::Acquire);
        if word(MAGIC_AT) != MAGIC || word(LEN_AT) != LEN as u64 {
            return Err(invalid("this memory file does not hold tables".into()));
        }
        let version = word(VERSION_AT);
        if version != TABLES_VERSION {
            return Err(invalid(format!(
                "tables have version {version}, this program knows {TABLES_VERSION}"
            )));
        }
        Ok(Words::new(memory))
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Takes back what the log says was under way.
    pub(super) fn recover(&mut self) {
        // A count that is too large (corrupt) ends where no entry was ever written.
        let count = (self.load(LOGGED) as usize).min(LOG_ENTRIES);
        self.logged = (0..count)
            .find(|n| self.load(LOG_AT + LOG_ENTRY * n) == 0)
            .unwrap_or(count);
        self.depth = 0;
        self.unused.clear();
        if count > 0 {
            self.begin();
            self.take_back(Start {
                logged: 0,
                unused: 0,
            });
            self.end();
        }
    }

    /// Begins a change, or a part of one.
    pub(super) fn begin(&mut self) -> Start {
        self.depth += 1;
        Start {
            logged: self.logged,
            unused: self.unused.len(),
        }
    }

    /// Undoes everything since `start`.
    pub(super) fn take_back(&mut self, start: Start) {
        for n in (start.logged..self.logged).rev() {
            let entry = LOG_AT + LOG_ENTRY * n;
            let at = self.load(entry) as usize;
            if (STATE_AT..PAGE).contains(&at) || at >= DESCRIPTORS_AT {
                self.put(at, self.load(entry + 8));
            }
        }
        self.unused.truncate(start.unused);
        if self.load(LOGGED) > start.logged as u64 {
            self.most_logged = self.most_logged.max(self.logged);
            self.logged = start.logged;
            self.put(LOGGED, start.logged as u64);
        }
    }

    /// Ends a change; the outermost end commits.
    pub(super) fn end(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        if self.depth == 0 {
            self.commit();
        }
    }

    fn commit(&mut self) {
        if self.logged > 0 {
            self.put(LOGGED, 0);
            self.most_logged = self.most_logged.max(self.logged);
            self.logged = 0;
        }
        if self.most_logged > LOG_KEPT {
            self.give_log_back();
        }
        self.most_logged = 0;
        while let Some(unused) = self.unused.pop() {
            #[cfg(test)]
            self.may_stop();
            if let Some((at, len)) = self.still_unused(unused) {
                self.memory.discard(at, len);
            }
        }
    }

    /// A large log does not keep its memory.
    fn give_log_back(&self) {
        let from = LOG_AT + LOG_ENTRY * LOG_KEPT;
        let to = (LOG_AT + LOG_ENTRY * self.most_logged).next_multiple_of(PAGE);
        self.memory.discard(from, to - from);
    }

    /// Notes memory to give back after the commit.
    pub(super) fn not_used(&mut self, unused: Unused) {
        self.unused.push(unused);
    }

    /// The range to give back, unless a later part of the same change has used it again.
    fn still_unused(&self, unused: Unused) -> Option<(usize, usize)> {
        match unused {
            Unused::HeapPage(page) => self.unused_page(page),
            Unused::Descriptors(page) => self.unused_descriptors(page),
            Unused::Buckets(index, from) => self.unused_buckets(index, from),
        }
    }

    /// The word at `at`; 0 outside of the memory.
    #[inline]
    pub(super) fn load(&self, at: usize) -> u64 {
        if at < LEN && at.is_multiple_of(8) {
            self.memory.u64(at).load(Ordering::Relaxed)
        } else {
            0
        }
    }

    /// The half word at `at`.
    #[inline]
    pub(super) fn half(&self, at: usize) -> u32 {
        let word = self.load(at & !7).to_ne_bytes();
        let [a, b, c, d, e, f, g, h] = word;
        u32::from_ne_bytes(if at & 4 == 0 {
            [a, b, c, d]
        } else {
            [e, f, g, h]
        })
    }

    /// A struct of whole words.
    pub(super) fn record<T: FromBytes + IntoBytes>(&self, at: usize) -> T {
        self.memory.get(at)
    }

    /// Bytes, as [`store_bytes`](Words::store_bytes) stored them.
    pub(super) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at, &mut bytes);
        bytes
    }

    /// The bytes at `at` are these.
    #[inline]
    pub(super) fn same_bytes(&self, at: usize, bytes: &[u8]) -> bool {
        let mut at = at;
        for chunk in bytes.chunks(8) {
            if self.load(at) != word_of(chunk) {
                return false;
            }
            at += 8;
        }
        true
    }

    /// Stores a word of the change under way.
    #[inline]
    pub(super) fn store(&mut self, at: usize, value: u64) {
        let old = self.load(at);
        if old == value {
            return;
        }
        debug_assert!(self.depth > 0, "a store outside of a change");
        if self.logged == LOG_ENTRIES {
            // No change is that large. Should one be, its begin is final.
            self.put(LOGGED, 0);
            self.most_logged = self.logged;
            self.logged = 0;
        }
        let entry = LOG_AT + LOG_ENTRY * self.logged;
        self.put(entry, at as u64);
        self.put(entry + 8, old);
        self.logged += 1;
        self.put(LOGGED, self.logged as u64);
        self.put(at, value);
    }

    /// Stores a half word.
    #[inline]
    pub(super) fn store_half(&mut self, at: usize, value: u32) {
        let mut word = self.load(at & !7).to_ne_bytes();
        word[at & 4..][..4].copy_from_slice(&value.to_ne_bytes());
        self.store(at & !7, u64::from_ne_bytes(word));
    }

    /// Stores a struct of whole words.
    pub(super) fn store_record<T: IntoBytes + Immutable>(&mut self, at: usize, value: &T) {
        self.store_bytes(at, value.as_bytes());
    }

    /// Stores bytes, padded with zeros to whole words.
    pub(super) fn store_bytes(&mut self, at: usize, bytes: &[u8]) {
        for (n, chunk) in bytes.chunks(8).enumerate() {
            self.store(at + 8 * n, word_of(chunk));
        }
    }

    /// Adds to a counter.
    pub(super) fn add(&mut self, at: usize, delta: i64) {
        self.store(at, self.load(at).saturating_add_signed(delta));
    }

    /// The door: all stores to the memory are made here.
    #[inline]
    fn put(&self, at: usize, value: u64) {
        #[cfg(test)]
        self.may_stop();
        if at < LEN && at.is_multiple_of(8) {
            // SYNC: ordered after all earlier stores for the successor, which reads them once this
            // process is dead.
            self.memory.u64(at).store(value, Ordering::Release);
        }
    }

    #[cfg(test)]
    fn may_stop(&self) {
        let left = self.stop_after.get();
        if left == 0 {
            std::panic::resume_unwind(Box::new(Killed));
        }
        self.stop_after.set(left - 1);
    }

    /// Keyed hash of a number and bytes.
    #[inline]
    pub(super) fn hash(&self, number: u64, bytes: &[u8]) -> u32 {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        fn fold(a: u64, b: u64) -> u64 {
            let product = u128::from(a) * u128::from(b);
            product as u64 ^ (product >> 64) as u64
        }
        let mut state = fold(self.key ^ number, ODD) ^ bytes.len() as u64;
        for chunk in bytes.chunks(8) {
            state = fold(state ^ word_of(chunk), self.key | 1).wrapping_add(ODD);
        }
        (fold(state, ODD) >> 32) as u32
    }
}

#[inline]
fn word_of(chunk: &[u8]) -> u64 {
    match chunk.try_into() {
        Ok(word) => u64::from_ne_bytes(word),
        Err(_) => {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        }
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
