//! Inodes the kernel knows: how often, by which name, and what the backend calls them.

use std::ffi::{OsStr, OsString};
use std::mem::offset_of;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::heap::{self, Class};
use super::index::Index;
use super::words::INODES;
use super::{Full, Tables};
use crate::region::Identity;
use crate::wire::abi::{Attr, ROOT_ID};

/// Depth to which [`Tables::path`] climbs: no path of the system calls is deeper.
const MAX_DEPTH: usize = 4096;

/// A record of the table.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Record {
    /// The node id; in a free record the last one.
    pub(super) nodeid: u64,
    pub(super) nlookup: u64,
    /// Node id of the directory of the name.
    pub(super) parent: u64,
    pub(super) identity_next: u32,
    pub(super) name_next: u32,
    /// Blocks of the bytes.
    pub(super) name: u32,
    pub(super) identity: u32,
    /// First lock and first waiter of the inode.
    pub(super) locks: u32,
    pub(super) waiters: u32,
    pub(super) name_len: u16,
    pub(super) identity_len: u8,
    pub(super) flags: u8,
    pub(super) identity_hash: u32,
    pub(super) name_hash: u32,
    pub(super) reserved: u32,
    pub(super) attr: Remembered,
}

/// The attributes that are remembered.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Remembered {
    ino: u64,
    size: u64,
    mtime: u64,
    ctime: u64,
    mtimensec: u32,
    ctimensec: u32,
    mode: u32,
    uid: u32,
    gid: u32,
    nlink: u32,
    rdev: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<Record>() == Class::INODE.size());

/// The record is in use.
pub(super) const LIVE: u8 = 1;
/// The vault has it.
const VAULTED: u8 = 2;
/// The modification time was set by a call, and nothing was written since.
const TIME_SET: u8 = 4;

const NLOOKUP: usize = offset_of!(Record, nlookup);
const PARENT: usize = offset_of!(Record, parent);
const NAME: usize = offset_of!(Record, name);
const IDENTITY: usize = offset_of!(Record, identity);
/// Length of the name in the first half, of the identity in the third byte.
const LENGTHS: usize = offset_of!(Record, name_len);
const _: () = assert!(offset_of!(Record, identity_len) == LENGTHS + 2);
const ATTR: usize = offset_of!(Record, attr);
pub(super) const IDENTITY_NEXT: usize = offset_of!(Record, identity_next);
pub(super) const NAME_NEXT: usize = offset_of!(Record, name_next);
pub(super) const IDENTITY_HASH: usize = offset_of!(Record, identity_hash);
pub(super) const NAME_HASH: usize = offset_of!(Record, name_hash);
pub(super) const LOCK_HEAD: usize = offset_of!(Record, locks);
pub(super) const WAITER_HEAD: usize = offset_of!(Record, waiters);

impl Remembered {
    fn of(attr: &Attr) -> Remembered {
        Remembered {
            ino: attr.ino,
            size: attr.size,
            mtime: attr.mtime,
            ctime: attr.ctime,
            mtimensec: attr.mtimensec,
            ctimensec: attr.ctimensec,
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            nlink: attr.nlink,
            rdev: attr.rdev,
            reserved: 0,
        }
    }

    fn attr(&self) -> Attr {
        Attr {
            ino: self.ino,
            size: self.size,
            blocks: self.size.div_ceil(512),
            atime: self.mtime,
            mtime: self.mtime,
            ctime: self.ctime,
            atimensec: self.mtimensec,
            mtimensec: self.mtimensec,
            ctimensec: self.ctimensec,
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// What the table knows of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The kernel's name of it.
    pub nodeid: u64,
    /// How often the kernel looked it up and has not forgotten it.
    pub nlookup: u64,
    /// Node id of the directory of its name; 0 if it has none.
    pub parent: u64,
    /// The backend's name of it.
    pub identity: Identity,
    /// File type and permissions as last seen.
    pub mode: u32,
    /// The vault keeps it.
    pub vaulted: bool,
}

/// What became of an inode the kernel forgot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Forget {
    /// There is none with this node id.
    Unknown,
    /// The kernel still knows it.
    Remains,
    /// It is gone from the table.
    Gone {
        /// The backend's name of it.
        identity: Identity,
        /// The vault keeps it, for no one now.
        vaulted: bool,
    },
}

impl Tables {
    /// Makes the root of the mount: node id 1, looked up once, never forgotten.
    ///
    /// Called again it changes the root's identity.
    pub fn set_root(&mut self, identity: &Identity, attr: &Attr) {
        let set = self.attempt(|t| {
            let (block, record) = match t.inode(ROOT_ID) {
                Some((block, record)) => {
                    t.drop_identity(block, &record);
                    (block, record)
                }
                None => {
                    let (block, nodeid) = t.words.take_with_id(Class::INODE)?;
                    if nodeid != ROOT_ID {
                        return Err(Full);
                    }
                    t.words.add(INODES, 1);
                    (block, Record::new(nodeid))
                }
            };
            t.keep(
                block,
                Record {
                    nlookup: record.nlookup.max(1),
                    attr: Remembered::of(attr),
                    ..record
                },
                identity,
            )
        });
        // The root is the first inode of a table: its record is free, and the heap is not full.
        debug_assert!(set.is_ok());
    }

    /// What is known of an inode.
    pub fn node(&self, nodeid: u64) -> Option<Node> {
        let (_, record) = self.inode(nodeid)?;
        Some(Node {
            nodeid,
            nlookup: record.nlookup,
            parent: match record.name {
                0 => 0,
                _ => record.parent,
            },
            identity: self.identity_of(&record),
            mode: record.attr.mode,
            vaulted: record.flags & VAULTED != 0,
        })
    }

    /// The directory and the name an inode was last looked up by, unless that name is gone.
    pub fn name_of(&self, nodeid: u64) -> Option<(u64, OsString)> {
        let (_, record) = self.inode(nodeid)?;
        let name = self.name_bytes(&record)?;
        Some((record.parent, OsString::from_vec(name)))
    }

    /// The inode the backend calls `identity`.
    pub fn find(&self, identity: &Identity) -> Option<u64> {
        let block = self.find_identity(identity)?;
        Some(self.words.load(heap::address(block)))
    }

    /// The inode that was last looked up as `name` in `parent`.
    pub fn find_name(&self, parent: u64, name: &OsStr) -> Option<u64> {
        let block = self.find_named(parent, name.as_bytes())?;
        Some(self.words.load(heap::address(block)))
    }

    /// The kernel is told of an inode: finds or makes it and counts one lookup. Remembers the name,
    /// which is no other inode's from now on, and the attributes.
    pub fn look_up(
        &mut self,
        identity: &Identity,
        name: Option<(u64, &OsStr)>,
        attr: &Attr,
    ) -> Result<u64, Full> {
        self.attempt(|t| {
            let (block, nodeid) = match t.find_identity(identity) {
                Some(block) => {
                    let at = heap::address(block);
                    let nlookup = t.words.load(at + NLOOKUP).saturating_add(1);
                    t.words.store(at + NLOOKUP, nlookup);
                    t.words.store_record(at + ATTR, &Remembered::of(attr));
                    (block, t.words.load(at))
                }
                None => {
                    let (block, nodeid) = t.words.take_with_id(Class::INODE)?;
                    let record = Record {
                        nlookup: 1,
                        attr: Remembered::of(attr),
                        ..Record::new(nodeid)
                    };
                    t.keep(block, record, identity)?;
                    t.words.add(INODES, 1);
                    (block, nodeid)
                }
            };
            if let Some((parent, name)) = name {
                t.give_name(block, parent, name.as_bytes())?;
            }
            Ok(nodeid)
        })
    }

    /// Takes one lookup back: the kernel did not take the reply that told it.
    pub fn unlook_up(&mut self, nodeid: u64) -> Forget {
        self.forget(nodeid, 1)
    }

    /// The kernel forgets `n` lookups of an inode.
    pub fn forget(&mut self, nodeid: u64, n: u64) -> Forget {
        let Some((block, record)) = self.inode(nodeid) else {
            return Forget::Unknown;
        };
        let left = record.nlookup.saturating_sub(n);
        if nodeid == ROOT_ID || left > 0 {
            let left = left.max(1);
            self.atomically(|t| t.words.store(heap::address(block) + NLOOKUP, left));
            return Forget::Remains;
        }
        let gone = Forget::Gone {
            identity: self.identity_of(&record),
            vaulted: record.flags & VAULTED != 0,
        };
        self.atomically(|t| {
            t.drop_locks_and_waiters(nodeid);
            t.take_name(block);
            t.drop_identity(block, &record);
            let free = Record {
                nodeid,
                ..Record::new_zeroed()
            };
            t.words.store_record(heap::address(block), &free);
            t.words.give(block, Class::INODE);
            t.words.add(INODES, -1);
        });
        gone
    }

    /// A name is gone: unlink or rmdir.
    pub fn drop_name(&mut self, parent: u64, name: &OsStr) {
        if let Some(block) = self.find_named(parent, name.as_bytes()) {
            self.atomically(|t| t.take_name(block));
        }
    }

    /// A name was renamed; what the new name referred to has lost it.
    pub fn rename(&mut self, parent: u64, name: &OsStr, newparent: u64, newname: &OsStr) {
        if (parent, name) == (newparent, newname) {
            return;
        }
        self.atomically(|t| {
            let moved = t.find_named(parent, name.as_bytes());
            if let Some(replaced) = t.find_named(newparent, newname.as_bytes()) {
                t.take_name(replaced);
            }
            if let Some(moved) = moved {
                t.give_or_take_name(moved, newparent, newname.as_bytes());
            }
        });
    }

    /// Two names were exchanged.
    pub fn exchange(&mut self, parent: u64, name: &OsStr, newparent: u64, newname: &OsStr) {
        if (parent, name) == (newparent, newname) {
            return;
        }
        self.atomically(|t| {
            let one = t.find_named(parent, name.as_bytes());
            let other = t.find_named(newparent, newname.as_bytes());
            for block in [one, other].into_iter().flatten() {
                t.take_name(block);
            }
            if let Some(one) = one {
                t.give_or_take_name(one, newparent, newname.as_bytes());
            }
            if let Some(other) = other {
                t.give_or_take_name(other, parent, name.as_bytes());
            }
        });
    }

    /// Notes whether the vault keeps an inode.
    pub fn set_vaulted(&mut self, nodeid: u64, vaulted: bool) {
        self.set_flag(nodeid, VAULTED, vaulted);
    }

    /// Notes that the modification time was set by a call (`utimensat(2)`), or that something was
    /// written and the time is the store's again.
    pub fn set_time_is_set(&mut self, nodeid: u64, set: bool) {
        self.set_flag(nodeid, TIME_SET, set);
    }

    /// The modification time, if a call has set it and nothing was written since: seconds and
    /// nanoseconds.
    pub fn set_time(&self, nodeid: u64) -> Option<(u64, u32)> {
        let (_, record) = self.inode(nodeid)?;
        let attr = record.attr;
        (record.flags & TIME_SET != 0).then_some((attr.mtime, attr.mtimensec))
    }

    fn set_flag(&mut self, nodeid: u64, flag: u8, on: bool) {
        let Some((block, mut record)) = self.inode(nodeid) else {
            return;
        };
        if (record.flags & flag != 0) == on {
            return;
        }
        record.flags ^= flag;
        self.atomically(|t| t.words.store_record(heap::address(block), &record));
    }

    /// Remembers attributes of an inode.
    pub fn note_attr(&mut self, nodeid: u64, attr: &Attr) {
        if let Some(at) = self.inode_at(nodeid) {
            let attr = Remembered::of(attr);
            self.atomically(|t| t.words.store_record(at + ATTR, &attr));
        }
    }

    /// The attributes as last seen. Blocks are computed from the size, the access time is the
    /// modification time.
    pub fn attr(&self, nodeid: u64) -> Option<Attr> {
        let (_, record) = self.inode(nodeid)?;
        Some(record.attr.attr())
    }

    /// Path of an inode from the root, by the names last seen; empty for the root. `None` if a name
    /// is not known, or it were longer than `max` bytes.
    pub fn path(&self, nodeid: u64, max: usize) -> Option<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut len = 0;
        let mut nodeid = nodeid;
        while nodeid != ROOT_ID {
            let (_, record) = self.inode(nodeid)?;
            let name = self.name_bytes(&record)?;
            len += name.len() + usize::from(!names.is_empty());
            if len > max || names.len() == MAX_DEPTH {
                return None;
            }
            names.push(name);
            nodeid = record.parent;
        }
        self.inode(ROOT_ID)?;
        names.reverse();
        Some(names.join(&b'/'))
    }

    /// Address of a live record.
    pub(super) fn inode_at(&self, nodeid: u64) -> Option<usize> {
        self.inode(nodeid).map(|(block, _)| heap::address(block))
    }

    fn inode(&self, nodeid: u64) -> Option<(u32, Record)> {
        let block = heap::block_of_id(Class::INODE, nodeid);
        let at = self.words.block(block, Class::INODE)?;
        if self.words.load(at) != nodeid {
            return None;
        }
        let record: Record = self.words.record(at);
        (record.flags & LIVE != 0).then_some((block, record))
    }

    fn record(&self, block: u32) -> Record {
        self.words.record(heap::address(block))
    }

    fn find_identity(&self, identity: &Identity) -> Option<u32> {
        if identity.is_none() {
            return None;
        }
        let bytes = identity.as_bytes_ref();
        let hash = self.words.hash(0, bytes);
        self.words.search(Index::Identity, hash, |at| {
            let (_, len) = self.lengths(at);
            len == bytes.len() && self.same_bytes(self.words.half(at + IDENTITY), bytes)
        })
    }

    fn find_named(&self, parent: u64, name: &[u8]) -> Option<u32> {
        let hash = self.words.hash(parent, name);
        self.words.search(Index::Name, hash, |at| {
            self.words.load(at + PARENT) == parent && self.is_name(at, name)
        })
    }

    /// The record at `at` has this name, in whatever directory.
    #[inline]
    fn is_name(&self, at: usize, name: &[u8]) -> bool {
        let (len, _) = self.lengths(at);
        len == name.len() && self.same_bytes(self.words.half(at + NAME), name)
    }

    /// Lengths of the name and the identity of the record at `at`.
    #[inline]
    fn lengths(&self, at: usize) -> (usize, usize) {
        let [a, b, identity, _] = self.words.half(at + LENGTHS).to_ne_bytes();
        (u16::from_ne_bytes([a, b]).into(), identity.into())
    }

    #[inline]
    fn same_bytes(&self, block: u32, bytes: &[u8]) -> bool {
        self.words
            .block(block, Class::of_len(bytes.len()))
            .is_some_and(|at| self.words.same_bytes(at, bytes))
    }

    pub(super) fn identity_of(&self, record: &Record) -> Identity {
        let len = usize::from(record.identity_len);
        self.words
            .block(record.identity, Class::of_len(len))
            .and_then(|at| Identity::new(&self.words.bytes(at, len)))
            .unwrap_or_default()
    }

    pub(super) fn name_bytes(&self, record: &Record) -> Option<Vec<u8>> {
        let len = usize::from(record.name_len);
        if len > Class::MAX_BYTES {
            return None;
        }
        let at = self.words.block(record.name, Class::of_len(len))?;
        Some(self.words.bytes(at, len))
    }

    /// Makes a record live under an identity. One without is not found by it.
    fn keep(&mut self, block: u32, record: Record, identity: &Identity) -> Result<(), Full> {
        let bytes = identity.as_bytes_ref();
        let kept = match bytes.len() {
            0 => 0,
            _ => self.words.keep_bytes(bytes)?,
        };
        let record = Record {
            identity: kept,
            identity_len: bytes.len() as u8,
            flags: record.flags | LIVE,
            ..record
        };
        self.words.store_record(heap::address(block), &record);
        if kept != 0 {
            let hash = self.words.hash(0, bytes);
            self.words.insert(Index::Identity, block, hash);
        }
        Ok(())
    }

    fn drop_identity(&mut self, block: u32, record: &Record) {
        if record.identity_len > 0 {
            self.words.remove(Index::Identity, block);
            let class = Class::of_len(usize::from(record.identity_len));
            self.words.give(record.identity, class);
        }
    }

    /// Gives an inode a name, and takes it from whoever had it. One that is too long is not kept.
    fn give_name(&mut self, block: u32, parent: u64, name: &[u8]) -> Result<(), Full> {
        let at = heap::address(block);
        if self.words.load(at + PARENT) == parent && self.is_name(at, name) {
            return Ok(());
        }
        self.take_name(block);
        if let Some(other) = self.find_named(parent, name) {
            self.take_name(other);
        }
        if name.is_empty() || name.len() > Class::MAX_BYTES {
            return Ok(());
        }
        let kept = self.words.keep_bytes(name)?;
        let named = Record {
            name: kept,
            name_len: name.len() as u16,
            parent,
            ..self.record(block)
        };
        self.words.store_record(heap::address(block), &named);
        let hash = self.words.hash(parent, name);
        self.words.insert(Index::Name, block, hash);
        Ok(())
    }

    /// As [`give_name`](Tables::give_name); without room for it the inode has no name.
    fn give_or_take_name(&mut self, block: u32, parent: u64, name: &[u8]) {
        if self.attempt(|t| t.give_name(block, parent, name)).is_err() {
            self.take_name(block);
        }
    }

    fn take_name(&mut self, block: u32) {
        let record = self.record(block);
        if record.name == 0 {
            return;
        }
        self.words.remove(Index::Name, block);
        let class = Class::of_len(usize::from(record.name_len));
        self.words.give(record.name, class);
        let unnamed = Record {
            name: 0,
            name_len: 0,
            parent: 0,
            ..self.record(block)
        };
        self.words.store_record(heap::address(block), &unnamed);
    }
}

impl Record {
    fn new(nodeid: u64) -> Record {
        Record {
            nodeid,
            flags: LIVE,
            ..Record::new_zeroed()
        }
    }

    fn new_zeroed() -> Record {
        zerocopy::FromZeros::new_zeroed()
    }
}
