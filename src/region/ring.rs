//! A queue of slot indexes from one process to another, with a doorbell.
//!
//! One process produces, one consumes; inside of each, threads take turns by a lock of their own (no
//! lock lives in shared memory). The consumer sleeps on a futex and is woken only if it said so.
//! Indexes and counters are untrusted on the reading side: whatever the peer wrote, `pop` yields an
//! index below [`SLOTS`] or nothing, and never loops.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use super::memory::Memory;
use super::{SLOTS, SlotIndex};
use crate::sys;

/// Entries; more than slots, so a ring is never full while each slot is in it at most once.
const CAPACITY: u32 = 128;
const _: () = assert!(CAPACITY > SLOTS && CAPACITY.is_power_of_two());

const TAIL: usize = 0;
const HEAD: usize = 64;
const SLEEPERS: usize = 128;
const ENTRIES: usize = 192;

/// A view of one ring.
#[derive(Clone, Copy)]
pub struct Ring<'m> {
    memory: &'m Memory,
    at: usize,
}

impl<'m> Ring<'m> {
    pub(super) fn new(memory: &'m Memory, at: usize) -> Ring<'m> {
        Ring { memory, at }
    }

    fn tail(&self) -> &'m AtomicU32 {
        self.memory.u32(self.at + TAIL)
    }

    fn head(&self) -> &'m AtomicU32 {
        self.memory.u32(self.at + HEAD)
    }

    fn sleepers(&self) -> &'m AtomicU32 {
        self.memory.u32(self.at + SLEEPERS)
    }

    fn entry(&self, n: u32) -> &'m AtomicU32 {
        self.memory
            .u32(self.at + ENTRIES + (n % CAPACITY) as usize * 4)
    }

    /// Producer: forgets what a dead consumer left and that it slept. Only between two generations.
    pub fn consumer_is_gone(&self) {
        let tail = self.tail().load(Ordering::Relaxed);
        self.sleepers().store(0, Ordering::Relaxed);
        self.head().store(tail, Ordering::Release);
    }

    /// Consumer: forgets what a dead producer left. Only between two generations.
    ///
    /// Wakes a sleeping consumer, which announces itself again: the dead producer may have wiped
    /// the first announcement out. Head and tail move by one, so that a consumer that is about to
    /// sleep on the old tail does not.
    pub fn producer_is_gone(&self) {
        let head = self.head().load(Ordering::Relaxed).wrapping_add(1);
        self.head().store(head, Ordering::Relaxed);
        self.sleepers().store(0, Ordering::Relaxed);
        self.tail().store(head, Ordering::SeqCst);
        self.wake_all();
    }

    /// Appends an index and rings the bell if the consumer sleeps. One producer at a time.
    pub fn push(&self, index: SlotIndex) {
        let tail = self.tail().load(Ordering::Relaxed);
        self.entry(tail).store(index.get(), Ordering::Relaxed);
        // SYNC: the entry and the slot's contents become visible to the consumer's load in `pop`.
        self.tail().store(tail.wrapping_add(1), Ordering::Release);
        // SYNC: either this load sees the sleeper that announced itself in `wait`, or that
        // sleeper's check of the tail sees the store above.
        fence(Ordering::SeqCst);
        if self.sleepers().load(Ordering::Relaxed) > 0 {
            sys::futex_wake(self.tail(), 1);
        }
    }

    /// Takes the oldest index. One consumer at a time.
    ///
    /// An entry that is no slot index is skipped; a distance that cannot be counts as empty.
    pub fn pop(&self) -> Option<SlotIndex> {
        for _ in 0..CAPACITY {
            let head = self.head().load(Ordering::Relaxed);
            // SYNC: pairs with the store of the tail in `push`.
            let waiting = self.tail().load(Ordering::Acquire).wrapping_sub(head);
            if waiting == 0 || waiting > CAPACITY {
                return None;
            }
            let entry = self.entry(head).load(Ordering::Relaxed);
            self.head().store(head.wrapping_add(1), Ordering::Release);
            if let Some(index) = SlotIndex::new(entry) {
                return Some(index);
            }
        }
        None
    }

    /// Entries waiting.
    pub fn len(&self) -> usize {
        let head = self.head().load(Ordering::Relaxed);
        let tail = self.tail().load(Ordering::Relaxed);
        (tail.wrapping_sub(head) as usize).min(CAPACITY as usize)
    }

    /// No entry is waiting.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sleeps until an entry may have arrived, or the timeout is over. May return for no reason.
    pub fn wait(&self, timeout: Option<Duration>) {
        self.sleepers().fetch_add(1, Ordering::Relaxed);
        // SYNC: pairs with the fence in `push`.
        fence(Ordering::SeqCst);
        let tail = self.tail().load(Ordering::Relaxed);
        let waiting = tail.wrapping_sub(self.head().load(Ordering::Relaxed));
        if waiting == 0 || waiting > CAPACITY {
            sys::futex_wait(self.tail(), tail, timeout);
        }
        // Not below 0: it may have been reset meanwhile.
        let one_less = |n: u32| n.checked_sub(1);
        let _ = self
            .sleepers()
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }

    fn wake_all(&self) {
        sys::futex_wake(self.tail(), i32::MAX as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PAGE;

    #[test]
    fn entries_come_out_in_order_over_many_rounds() {
        let memory = Memory::create("test", PAGE).unwrap();
        let ring = Ring::new(&memory, 0);
        for n in 0..1000 {
            ring.push(SlotIndex::new(n % SLOTS).unwrap());
            ring.push(SlotIndex::new((n + 1) % SLOTS).unwrap());
            assert_eq!(ring.pop().unwrap().get(), n % SLOTS);
            assert_eq!(ring.pop().unwrap().get(), (n + 1) % SLOTS);
            assert_eq!(ring.pop(), None);
        }
    }

    #[test]
    fn a_hostile_peer_can_not_make_pop_loop_or_invent_a_slot() {
        let memory = Memory::create("test", PAGE).unwrap();
        let ring = Ring::new(&memory, 0);
        ring.tail().store(5000, Ordering::Relaxed);
        assert_eq!(ring.pop(), None);
        ring.producer_is_gone();
        for n in 0..CAPACITY {
            ring.entry(n).store(SLOTS + n, Ordering::Relaxed);
        }
        let head = ring.head().load(Ordering::Relaxed);
        ring.tail().store(head + CAPACITY, Ordering::Relaxed);
        assert_eq!(ring.pop(), None);
    }

    #[test]
    fn a_sleeping_consumer_gets_every_entry() {
        let memory = Memory::create("test", PAGE).unwrap();
        let (requests, replies) = (Ring::new(&memory, 0), Ring::new(&memory, 2048));
        std::thread::scope(|s| {
            s.spawn(|| {
                for _ in 0..20_000 {
                    let index = loop {
                        match requests.pop() {
                            Some(index) => break index,
                            None => requests.wait(None),
                        }
                    };
                    replies.push(index);
                }
            });
            for n in 0..20_000 {
                requests.push(SlotIndex::new(n % SLOTS).unwrap());
                let back = loop {
                    match replies.pop() {
                        Some(index) => break index,
                        None => replies.wait(None),
                    }
                };
                assert_eq!(back.get(), n % SLOTS);
            }
        });
    }
}
