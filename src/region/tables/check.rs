//! Walks everything and panics with what is wrong; and tells all that can be seen of a table.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::heap::{self, Class};
use super::index::{self, Index};
use super::inodes::{self, Record};
use super::locks::{LOCK_CHAIN, WAITER_CHAIN};
use super::words::{self, Words};
use super::{Handle, Lock, Node, Tables, Waiter};
use crate::wire::abi::Attr;

/// An inode, its attributes and its name.
type SeenNode = (Node, Option<Attr>, Option<Vec<u8>>);

/// All that can be seen of a table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) nodes: BTreeMap<u64, SeenNode>,
    pub(super) handles: BTreeMap<u64, Handle>,
    pub(super) locks: BTreeMap<u64, Vec<Lock>>,
    pub(super) waiters: Vec<Waiter>,
    pub(super) counts: [u64; 5],
    pub(super) mark: u64,
}

impl Seen {
    pub(super) fn of(t: &Tables) -> Seen {
        let ids: BTreeSet<u64> = live_nodes(t).map(|(_, r)| r.nodeid).collect();
        Seen {
            nodes: ids
                .iter()
                .map(|&id| {
                    let name = t.name_of(id).map(|(_, n)| n.into_encoded_bytes());
                    (id, (t.node(id).unwrap(), t.attr(id), name))
                })
                .collect(),
            handles: t.handles().into_iter().collect(),
            locks: ids.iter().map(|&id| (id, t.locks_on(id))).collect(),
            waiters: t.waiters(),
            counts: [
                t.inodes(),
                t.open_files(),
                t.open_dirs(),
                t.locks(),
                t.waiters_len(),
            ],
            mark: t.marked(0),
        }
    }
}

fn live_nodes(t: &Tables) -> impl Iterator<Item = (u32, Record)> + '_ {
    t.words
        .blocks(Class::INODE)
        .map(|block| (block, t.words.record::<Record>(heap::address(block))))
        .filter(|(_, record)| record.flags & inodes::LIVE != 0)
}

/// Panics unless every structure is as it should be between two changes.
pub(super) fn check(t: &Tables) {
    let w = &t.words;
    assert_eq!(w.load(words::LOGGED), 0, "the log is not empty");
    let used = check_heap(w);
    check_inodes(t, &used);
    check_handles(t, &used);
    check_locks(t, &used);
    for index in Index::ALL {
        check_index(w, index, &used);
    }
}

/// The blocks in use by class.
fn check_heap(w: &Words) -> HashMap<u8, HashSet<u32>> {
    let mut used: HashMap<u8, HashSet<u32>> = HashMap::new();
    let mut with_room: HashMap<u8, HashSet<u32>> = HashMap::new();
    let mut pages_used = 0;
    for page in 0..w.page_top() {
        let p = w.page(page);
        with_room.entry(0).or_default();
        if p.class == 0 {
            with_room.get_mut(&0).unwrap().insert(page);
            continue;
        }
        pages_used += 1;
        let class = Class(p.class as u8);
        let mut free = HashSet::new();
        let mut slot = p.free;
        while slot != 0 {
            assert!(
                slot <= p.begun,
                "page {page}: free block that was never used"
            );
            let block = heap::block_at(class, page, u32::from(slot) - 1);
            assert!(free.insert(block), "page {page}: free list is a circle");
            slot = w.load(heap::link_at(class, block)) as u16;
        }
        let blocks: HashSet<u32> = (0..u32::from(p.begun))
            .map(|slot| heap::block_at(class, page, slot))
            .filter(|block| !free.contains(block))
            .collect();
        assert_eq!(blocks.len(), usize::from(p.used), "page {page}: used");
        if u32::from(p.used) < class.per_page() {
            with_room.entry(class.0).or_default().insert(page);
        }
        used.entry(class.0).or_default().extend(blocks);
    }
    assert_eq!(w.load(words::PAGES_USED), pages_used);
    assert_eq!(
        pages_in(w, words::FREE_PAGES),
        with_room[&0],
        "list of free pages"
    );
    for class in 1..heap::CLASSES as u8 {
        let at = Class(class).state_at();
        let mut listed = pages_in(w, at);
        for page in &listed {
            assert!(w.page(*page).used > 0, "an empty page is in the list");
        }
        if let Some(spare) = w.half(at + 4).checked_sub(1) {
            assert_eq!(w.page(spare).used, 0, "a spare page is used");
            assert!(listed.insert(spare), "a spare page is in the list");
        }
        let room = with_room.remove(&class).unwrap_or_default();
        assert_eq!(listed, room, "pages of class {class} with room");
    }
    used.entry(Class::INODE.0).or_default().remove(&0);
    used
}

fn pages_in(w: &Words, head_at: usize) -> HashSet<u32> {
    let mut pages = HashSet::new();
    let (mut link, mut before) = (w.half(head_at), 0);
    while let Some(page) = link.checked_sub(1) {
        assert!(pages.insert(page), "a list of pages is a circle");
        assert_eq!(w.half(heap::prev_at(page)), before, "link back");
        before = link;
        link = w.half(heap::next_at(page));
    }
    pages
}

fn check_inodes(t: &Tables, used: &HashMap<u8, HashSet<u32>>) {
    let live: HashMap<u32, Record> = live_nodes(t).collect();
    let blocks: HashSet<u32> = live.keys().copied().collect();
    assert_eq!(
        &blocks,
        used.get(&Class::INODE.0).unwrap_or(&HashSet::new()),
        "live inodes and used blocks"
    );
    assert_eq!(t.inodes(), live.len() as u64);
    let mut identities = HashSet::new();
    let mut names = HashSet::new();
    let mut bytes: HashMap<u8, HashSet<u32>> = HashMap::new();
    let mut own = |len: usize, block: u32| {
        let class = Class::of_len(len).0;
        assert!(
            bytes.entry(class).or_default().insert(block),
            "two owners of a block"
        );
    };
    for (&block, record) in &live {
        assert_eq!(heap::block_of_id(Class::INODE, record.nodeid), block);
        assert!(record.nlookup > 0, "a live inode nobody looked up");
        if record.identity_len > 0 {
            let identity = t.identity_of(record);
            assert_eq!(t.find(&identity), Some(record.nodeid), "by identity");
            assert!(identities.insert(identity), "two inodes are {identity:?}");
            own(record.identity_len.into(), record.identity);
        }
        if record.name != 0 {
            let name = t.name_bytes(record).unwrap();
            let os = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&name);
            assert_eq!(
                t.find_name(record.parent, os),
                Some(record.nodeid),
                "by name"
            );
            assert!(names.insert((record.parent, name)), "a name of two inodes");
            own(record.name_len.into(), record.name);
        }
    }
    for class in 1..=36 {
        assert_eq!(
            bytes.remove(&class).unwrap_or_default(),
            used.get(&class).cloned().unwrap_or_default(),
            "blocks of class {class} and their owners"
        );
    }
    assert_eq!(t.words.entries(Index::Identity), identities.len() as u64);
    assert_eq!(t.words.entries(Index::Name), names.len() as u64);
}

fn check_index(w: &Words, index: Index, used: &HashMap<u8, HashSet<u32>>) {
    let count = w.buckets(index);
    let mut entries = HashSet::new();
    for bucket in 0..count {
        for block in w.chain(index, bucket) {
            let at = heap::address(block);
            assert!(used[&index.class().0].contains(&block), "a free record");
            assert!(entries.insert(block), "twice in {index:?}");
            let hash = w.half(at + index.hash());
            assert_eq!(index::bucket_of(hash, count), bucket, "bucket");
        }
    }
    assert_eq!(w.entries(index), entries.len() as u64);
    for bucket in count..count + 64 {
        assert_eq!(w.half(Words::head_at(index, bucket)), 0, "beyond the end");
    }
}

fn check_handles(t: &Tables, used: &HashMap<u8, HashSet<u32>>) {
    let open = t.handles();
    let dirs = open.iter().filter(|(_, h)| h.directory).count() as u64;
    assert_eq!(t.open_dirs(), dirs);
    assert_eq!(t.open_files(), open.len() as u64 - dirs);
    for (fh, handle) in &open {
        assert_eq!(t.handle(*fh).as_ref(), Some(handle));
    }
    let blocks = used.get(&Class::HANDLE.0).map_or(0, HashSet::len);
    assert!(open.len() <= blocks);
}

fn check_locks(t: &Tables, used: &HashMap<u8, HashSet<u32>>) {
    let none = HashSet::new();
    let (mut locks, mut waiters) = (HashSet::new(), HashSet::new());
    for (_, record) in live_nodes(t) {
        let id = record.nodeid;
        locks.extend(t.chain(LOCK_CHAIN, id));
        waiters.extend(t.chain(WAITER_CHAIN, id));
        let held = t.locks_on(id);
        for (n, a) in held.iter().enumerate() {
            assert!(a.nodeid == id && a.start <= a.end);
            for b in &held[n + 1..] {
                if a.owner == b.owner && a.flock == b.flock {
                    let apart = a.end < b.start || b.end < a.start;
                    assert!(apart, "ranges of one owner overlap: {a:?} {b:?}");
                    let touch =
                        a.end.wrapping_add(1) == b.start || b.end.wrapping_add(1) == a.start;
                    assert!(!touch || a.exclusive != b.exclusive, "not merged");
                }
            }
        }
    }
    assert_eq!(&locks, used.get(&Class::LOCK.0).unwrap_or(&none), "locks");
    assert_eq!(t.locks(), locks.len() as u64);
    assert_eq!(t.all_locks().len(), locks.len());
    assert_eq!(&waiters, used.get(&Class::WAITER.0).unwrap_or(&none));
    assert_eq!(t.waiters_len(), waiters.len() as u64);
    assert_eq!(t.words.entries(Index::Waiter), waiters.len() as u64);
    assert_eq!(t.waiters().len(), waiters.len());
    for block in waiters {
        let waiter = t.waiter(block).unwrap();
        assert!(!t.waiters_on_any(waiter.unique).is_empty(), "by unique");
    }
}

impl Tables {
    /// All inodes in the order of their records.
    pub(super) fn node_ids(&self) -> Vec<u64> {
        live_nodes(self).map(|(_, record)| record.nodeid).collect()
    }

    fn waiters_on_any(&self, unique: u64) -> Vec<u32> {
        let hash = self.words.hash(unique, &[]);
        self.words
            .search(Index::Waiter, hash, |at| self.words.load(at) == unique)
            .into_iter()
            .collect()
    }
}
