//! Open files and directories.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::heap::{self, Class};
use super::words::{DIRS, FILES};
use super::{Full, Tables};

/// A record of the table.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Record {
    /// The handle; in a free record the last one.
    fh: u64,
    nodeid: u64,
    open_flags: u32,
    state: u32,
    uid: u32,
    gid: u32,
    pid: u32,
    lost: u32,
    reserved: [u32; 6],
}

const _: () = assert!(size_of::<Record>() == Class::HANDLE.size());

const RESERVED: u32 = 1;
const FILE: u32 = 2;
const DIRECTORY: u32 = 3;

/// An open file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The inode.
    pub nodeid: u64,
    /// `open(2)` flags as the kernel sent them.
    pub open_flags: u32,
    /// It is a directory's.
    pub directory: bool,
    /// Who opened it.
    pub uid: u32,
    /// The opener's group.
    pub gid: u32,
    /// The opener's process.
    pub pid: u32,
    /// A lock that was taken through it is lost: it works no more.
    pub lost: bool,
}

impl Tables {
    /// Sets a handle's number aside for an open that is under way. Never 0.
    pub fn reserve_handle(&mut self) -> Result<u64, Full> {
        self.attempt(|t| {
            let (block, fh) = t.words.take_with_id(Class::HANDLE)?;
            t.put_handle(block, fh, RESERVED, None);
            Ok(fh)
        })
    }

    /// The handle is open. Without effect if it was not reserved.
    pub fn open_handle(&mut self, fh: u64, handle: Handle) {
        let Some((block, record)) = self.handle_record(fh) else {
            return;
        };
        let state = match handle.directory {
            true => DIRECTORY,
            false => FILE,
        };
        self.atomically(|t| {
            t.count_handle(record.state, -1);
            t.put_handle(block, fh, state, Some(handle));
            t.count_handle(state, 1);
        });
    }

    /// An open handle; `None` if it is only reserved.
    pub fn handle(&self, fh: u64) -> Option<Handle> {
        let (_, record) = self.handle_record(fh)?;
        record.handle()
    }

    /// A lock that was taken through the handle is lost.
    pub fn lose_handle(&mut self, fh: u64) {
        if let Some(handle) = self.handle(fh) {
            let lost = true;
            self.open_handle(fh, Handle { lost, ..handle });
        }
    }

    /// All open handles. Walks the whole table.
    pub fn handles(&self) -> Vec<(u64, Handle)> {
        self.words
            .blocks(Class::HANDLE)
            .map(|block| self.words.record::<Record>(heap::address(block)))
            .filter_map(|record| Some((record.fh, record.handle()?)))
            .collect()
    }

    /// Closes a handle, or gives a reserved one back (then `None`).
    pub fn close_handle(&mut self, fh: u64) -> Option<Handle> {
        let (block, record) = self.handle_record(fh)?;
        self.atomically(|t| {
            t.count_handle(record.state, -1);
            t.put_handle(block, fh, 0, None);
            t.words.give(block, Class::HANDLE);
        });
        record.handle()
    }

    #[cfg(test)]
    pub(super) fn reserved_handles(&self) -> Vec<u64> {
        self.words
            .blocks(Class::HANDLE)
            .map(|block| self.words.record::<Record>(heap::address(block)))
            .filter(|record| record.state == RESERVED)
            .map(|record| record.fh)
            .collect()
    }

    fn handle_record(&self, fh: u64) -> Option<(u32, Record)> {
        let block = heap::block_of_id(Class::HANDLE, fh);
        let at = self.words.block(block, Class::HANDLE)?;
        let record: Record = self.words.record(at);
        (record.fh == fh && record.state != 0).then_some((block, record))
    }

    fn put_handle(&mut self, block: u32, fh: u64, state: u32, handle: Option<Handle>) {
        let record = Record {
            fh,
            nodeid: handle.map_or(0, |h| h.nodeid),
            open_flags: handle.map_or(0, |h| h.open_flags),
            state,
            uid: handle.map_or(0, |h| h.uid),
            gid: handle.map_or(0, |h| h.gid),
            pid: handle.map_or(0, |h| h.pid),
            lost: handle.is_some_and(|h| h.lost).into(),
            reserved: [0; 6],
        };
        self.words.store_record(heap::address(block), &record);
    }

    fn count_handle(&mut self, state: u32, delta: i64) {
        match state {
            FILE => self.words.add(FILES, delta),
            DIRECTORY => self.words.add(DIRS, delta),
            _ => {}
        }
    }
}

impl Record {
    fn handle(&self) -> Option<Handle> {
        matches!(self.state, FILE | DIRECTORY).then_some(Handle {
            nodeid: self.nodeid,
            open_flags: self.open_flags,
            directory: self.state == DIRECTORY,
            uid: self.uid,
            gid: self.gid,
            pid: self.pid,
            lost: self.lost != 0,
        })
    }
}
