//! Hash indexes that grow and shrink by one bucket at a time (linear hashing).
//!
//! A bucket is the reference of its first record; the records are linked through a half word of
//! their own, and remember their hash.

use super::heap::Class;
use super::words::{BUCKETS_AT, INDEX_STATE, Unused, Words};
use super::{inodes, locks};
use crate::region::PAGE;

/// Buckets an index has at least. A power of two.
const MIN_BUCKETS: u32 = 64;
/// Longest chain that is followed. With a keyed hash and one record per bucket none is near it.
const WALK: usize = 4096;
const INODE_BUCKETS: u32 = 1 << 26;
const WAITER_BUCKETS: u32 = 1 << 20;
pub(super) const BUCKETS_LEN: usize = 4 * (2 * INODE_BUCKETS as usize + WAITER_BUCKETS as usize);
/// Buckets whose memory is given back together.
const GROUP: u32 = (16 * PAGE / 4) as u32;

/// An index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Index {
    /// Inodes by identity.
    Identity,
    /// Inodes by parent and name.
    Name,
    /// Waiters by the `unique` of their request.
    Waiter,
}

impl Index {
    pub(super) const ALL: [Index; 3] = [Index::Identity, Index::Name, Index::Waiter];

    fn buckets_at(self) -> usize {
        let before = match self {
            Index::Identity => 0,
            Index::Name => INODE_BUCKETS as usize,
            Index::Waiter => 2 * INODE_BUCKETS as usize,
        };
        BUCKETS_AT + 4 * before
    }

    fn max_buckets(self) -> u32 {
        match self {
            Index::Waiter => WAITER_BUCKETS,
            _ => INODE_BUCKETS,
        }
    }

    fn count_at(self) -> usize {
        INDEX_STATE + 16 * self as usize
    }

    fn entries_at(self) -> usize {
        self.count_at() + 8
    }

    pub(super) fn class(self) -> Class {
        match self {
            Index::Waiter => Class::WAITER,
            _ => Class::INODE,
        }
    }

    /// Offset of the link in the record.
    fn link(self) -> usize {
        match self {
            Index::Identity => inodes::IDENTITY_NEXT,
            Index::Name => inodes::NAME_NEXT,
            Index::Waiter => locks::WAITER_INDEX_NEXT,
        }
    }

    /// Offset of the hash in the record.
    pub(super) fn hash(self) -> usize {
        match self {
            Index::Identity => inodes::IDENTITY_HASH,
            Index::Name => inodes::NAME_HASH,
            Index::Waiter => locks::WAITER_HASH,
        }
    }
}

/// The bucket of a hash among `count`.
pub(super) fn bucket_of(hash: u32, count: u32) -> u32 {
    let size = count.next_power_of_two();
    match hash & (size - 1) {
        bucket if bucket < count => bucket,
        bucket => bucket & (size / 2 - 1),
    }
}

/// The bucket that bucket `last` was split from.
fn parent_of(last: u32) -> u32 {
    last - (last + 1).next_power_of_two() / 2
}

impl Words {
    pub(super) fn make_indexes(&mut self) {
        for index in Index::ALL {
            self.store(index.count_at(), u64::from(MIN_BUCKETS));
        }
    }

    /// Bytes of the buckets in use.
    pub(super) fn index_bytes(&self) -> u64 {
        Index::ALL
            .iter()
            .map(|&i| 4 * u64::from(self.buckets(i)))
            .sum()
    }

    /// Number of buckets.
    pub(super) fn buckets(&self, index: Index) -> u32 {
        let max = u64::from(index.max_buckets());
        self.load(index.count_at())
            .clamp(u64::from(MIN_BUCKETS), max) as u32
    }

    /// Number of records in the index.
    pub(super) fn entries(&self, index: Index) -> u64 {
        self.load(index.entries_at())
    }

    pub(super) fn head_at(index: Index, bucket: u32) -> usize {
        index.buckets_at() + 4 * bucket as usize
    }

    /// The records of a bucket, at most [`WALK`].
    pub(super) fn chain(&self, index: Index, bucket: u32) -> impl Iterator<Item = u32> + '_ {
        let mut block = self.half(Words::head_at(index, bucket));
        std::iter::from_fn(move || {
            let this = block;
            let at = self.block(this, index.class())?;
            block = self.half(at + index.link());
            Some(this)
        })
        .take(WALK)
    }

    /// The first record with this hash that `is` the one; it is asked with the record's address.
    #[inline]
    pub(super) fn search(
        &self,
        index: Index,
        hash: u32,
        is: impl Fn(usize) -> bool,
    ) -> Option<u32> {
        let bucket = bucket_of(hash, self.buckets(index));
        self.chain(index, bucket).find(|&block| {
            let at = super::heap::address(block);
            self.half(at + index.hash()) == hash && is(at)
        })
    }

    /// Puts a record in.
    pub(super) fn insert(&mut self, index: Index, block: u32, hash: u32) {
        let at = super::heap::address(block);
        let count = self.buckets(index);
        let head = Words::head_at(index, bucket_of(hash, count));
        self.store_half(at + index.hash(), hash);
        self.store_half(at + index.link(), self.half(head));
        self.store_half(head, block);
        self.add(index.entries_at(), 1);
        if self.entries(index) > u64::from(count) && count < index.max_buckets() {
            self.split(index, count);
        }
    }

    /// Takes a record out.
    pub(super) fn remove(&mut self, index: Index, block: u32) {
        let Some(at) = self.block(block, index.class()) else {
            return;
        };
        let count = self.buckets(index);
        let bucket = bucket_of(self.half(at + index.hash()), count);
        let mut link = Words::head_at(index, bucket);
        let before = self.chain(index, bucket).take_while(|&b| b != block).last();
        if let Some(before) = before {
            link = super::heap::address(before) + index.link();
        }
        if self.half(link) != block {
            return; // corrupt
        }
        self.store_half(link, self.half(at + index.link()));
        self.store_half(at + index.link(), 0);
        self.add(index.entries_at(), -1);
        // At most two: half as many entries are then half as many buckets.
        for last in [count.saturating_sub(1), count.saturating_sub(2)] {
            if last >= MIN_BUCKETS && self.entries(index) <= u64::from(last / 2) {
                self.join(index, last);
            }
        }
    }

    /// Adds bucket `new` and moves to it what belongs there.
    fn split(&mut self, index: Index, new: u32) {
        let chain: Vec<u32> = self.chain(index, parent_of(new)).collect();
        let (mut stay, mut go) = (
            Words::head_at(index, parent_of(new)),
            Words::head_at(index, new),
        );
        for block in chain {
            let at = super::heap::address(block);
            let hash = self.half(at + index.hash());
            let end = match bucket_of(hash, new + 1) == new {
                true => &mut go,
                false => &mut stay,
            };
            let link = std::mem::replace(end, at + index.link());
            self.store_half(link, block);
        }
        self.store_half(stay, 0);
        self.store_half(go, 0);
        self.store(index.count_at(), u64::from(new) + 1);
    }

    /// Moves the records of the last bucket to the one it was split from, and drops it.
    fn join(&mut self, index: Index, last: u32) {
        let from = Words::head_at(index, last);
        let first = self.half(from);
        if first != 0 {
            let parent = parent_of(last);
            let end = match self.chain(index, parent).last() {
                Some(block) => super::heap::address(block) + index.link(),
                None => Words::head_at(index, parent),
            };
            self.store_half(end, first);
            self.store_half(from, 0);
        }
        self.store(index.count_at(), u64::from(last));
        if last.is_multiple_of(GROUP) {
            self.not_used(Unused::Buckets(index, last));
        }
    }

    pub(super) fn unused_buckets(&self, index: Index, from: u32) -> Option<(usize, usize)> {
        (from >= self.buckets(index) && from < index.max_buckets())
            .then(|| (Words::head_at(index, from), 4 * GROUP as usize))
    }
}
