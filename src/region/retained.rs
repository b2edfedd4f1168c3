//! Retained changes: what was acknowledged and is not durable in the store.
//!
//! A memory file of its own, created by the front-end and written by one backend at a time:
//!
//! ```text
//! page 0        header: magic, version, counters for `status`
//! then          records, 256 bytes each: what was changed, where, and how to tell later whether it
//!               still counts
//! then          data of the records, in units of 512 bytes
//! ```
//!
//! A record is written before the change is carried out, so that it is there when the change is
//! acknowledged, and it is freed when the change is durable. A later generation finds all that a dead
//! one retained ([`Log::open`]) and does it again. Sparse; takes memory as it fills.
//!
//! Layout version history:
//! 1. first version.

use std::collections::BTreeMap;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::memory::{Memory, Span, total};
use super::{Identity, PAGE};

/// Version of the layout. Software refuses another one.
const VERSION: u32 = 1;
/// Changes that can be retained at a time.
const RECORDS: u32 = 32 * 1024;
/// Bytes of data that can be retained at a time.
const CAPACITY: usize = 128 << 20;
/// Data is kept in multiples of this.
const UNIT: usize = 512;
const UNITS: u32 = (CAPACITY / UNIT) as u32;

const MAGIC: u64 = u64::from_ne_bytes(*b"evretain");
const RECORDS_AT: usize = PAGE;
const DATA_AT: usize = RECORDS_AT + RECORDS as usize * RECORD_SIZE;
const LEN: usize = DATA_AT + CAPACITY;
const RECORD_SIZE: usize = 256;
const _: () = assert!(size_of::<Record>() <= RECORD_SIZE);

/// [`Record::state`] of a record in use.
const USED: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    magic: u64,
    version: u32,
    reserved: u32,
    bytes: u64,
    conflicts: u64,
    dropped_bytes: u64,
}

/// How a file was at a moment, as its writer knew it.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Stamp {
    /// Grows with every change.
    pub version: u64,
    /// Modification time, seconds.
    pub sec: i64,
    /// And nanoseconds.
    pub nsec: u32,
    /// 0: the modification time is not known.
    pub timed: u32,
}

/// A change.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Record {
    state: u32,
    /// Bytes of its data.
    pub len: u32,
    /// Position in the order of all changes.
    pub sequence: u64,
    /// Where in the file the data belongs.
    pub offset: u64,
    /// `Record::*`: what kind of change it is.
    pub kind: u32,
    /// Not 0: somebody else wanted the file, and got it after this was flushed.
    pub given_back: u32,
    unit: u32,
    /// `Record::*`: what [`ended`](Record::ended) says.
    pub end: u32,
    /// Not 0: the change was carried out, and so it may have been acknowledged. Otherwise its request
    /// is still there, and it is the request that is done again.
    pub done: u32,
    reserved: u32,
    /// The session it was made in.
    pub session: u64,
    /// Before the change.
    pub before: Stamp,
    /// After it. Without a time: the version it has if the change was carried out.
    pub after: Stamp,
    /// How the file was when that session was about to be ended.
    pub ended: Stamp,
    /// What was changed.
    pub identity: Identity,
}

impl Record {
    /// Its data was written.
    pub const WRITE: u32 = 0;
    /// Attributes were changed; its data says how, in the store's own way.
    pub const ATTRIBUTES: u32 = 1;

    /// The session was not ended yet, as far as is known.
    pub const NOT_ENDED: u32 = 0;
    /// Somebody is about to end it.
    pub const ENDING: u32 = 1;
    /// It existed until it was ended: until then nobody else had a right to what it was writing.
    pub const ENDED: u32 = 2;
    /// It was gone before anybody looked.
    pub const GONE: u32 = 3;
}

/// The memory file.
pub struct Retained {
    memory: Memory,
}

impl Stamp {
    /// The same modification time, as far as it is known.
    pub fn is_of_same_time(self, other: Stamp) -> bool {
        let time = |stamp: Stamp| (stamp.timed != 0).then_some((stamp.sec, stamp.nsec));
        time(self).is_some() && time(self) == time(other)
    }
}

impl Retained {
    /// Creates an empty one.
    pub fn create() -> io::Result<Retained> {
        let memory = Memory::create("evermount-retained", LEN)?;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            reserved: 0,
            bytes: 0,
            conflicts: 0,
            dropped_bytes: 0,
        };
        memory.put(0, &header);
        Ok(Retained { memory })
    }

    /// Maps one another process created.
    pub fn open(fd: OwnedFd) -> io::Result<Retained> {
        let memory = Memory::open(fd)?;
        let bad = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if memory.len() != LEN {
            return bad("memory for retained changes has another size than this program's");
        }
        let header: Header = memory.get(0);
        if header.magic != MAGIC || header.version != VERSION {
            return bad("memory for retained changes has another layout than this program's");
        }
        Ok(Retained { memory })
    }

    /// The file behind it, to pass to another holder.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Bytes that are retained.
    pub fn bytes(&self) -> &AtomicU64 {
        self.memory.u64(offset_of!(Header, bytes))
    }

    /// Files whose retained changes met a change of somebody else, and were dropped.
    pub fn conflicts(&self) -> &AtomicU64 {
        self.memory.u64(offset_of!(Header, conflicts))
    }

    /// Bytes that were acknowledged and could not be written.
    pub fn dropped_bytes(&self) -> &AtomicU64 {
        self.memory.u64(offset_of!(Header, dropped_bytes))
    }

    fn state(&self, index: u32) -> &AtomicU32 {
        let at = Retained::record_at(index);
        self.memory.u32(at + offset_of!(Record, state))
    }

    fn record_at(index: u32) -> usize {
        RECORDS_AT + index as usize * RECORD_SIZE
    }

    fn data_at(unit: u32) -> usize {
        DATA_AT + unit as usize * UNIT
    }
}

/// A change to be retained.
pub struct Change<'a> {
    /// The session it is made in.
    pub session: u64,
    /// What is changed.
    pub identity: Identity,
    /// The change itself.
    pub what: What<'a>,
    /// Before it.
    pub before: Stamp,
    /// After it, as far as that is known.
    pub after: Stamp,
}

/// What is changed.
#[derive(Clone, Copy)]
pub enum What<'a> {
    /// Data is written at an offset.
    Write(&'a [Span<'a>], u64),
    /// Attributes; how is said in the store's own way.
    Attributes(&'a [u8]),
}

/// A record in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u32);

/// What only the one writer knows of the file: where there is room.
struct Space {
    records: Vec<u32>,
    /// Free units: first, and how many.
    units: BTreeMap<u32, u32>,
    /// Where to look next, so that what was freed last is taken last.
    cursor: u32,
    sequence: u64,
}

/// The writer's side. One process at a time; a dead one writes no more.
pub struct Log {
    file: Retained,
    space: Mutex<Space>,
}

impl Log {
    /// Takes the file over from whoever wrote it before. Returns what they retained, oldest first.
    /// Records that make no sense are dropped.
    pub fn open(file: Retained) -> (Log, Vec<(Entry, Record)>) {
        let mut found = Vec::new();
        let mut space = Space {
            records: Vec::new(),
            units: BTreeMap::new(),
            cursor: 0,
            sequence: 0,
        };
        for index in (0..RECORDS).rev() {
            // SYNC: pairs with the store in `add`.
            if file.state(index).load(Ordering::Acquire) == USED {
                let record: Record = file.memory.get(Retained::record_at(index));
                found.push((Entry(index), record));
            } else {
                space.records.push(index);
            }
        }
        found.sort_by_key(|(_, record)| record.unit);
        let mut next = 0;
        let mut bytes = 0;
        found.retain(|(entry, record)| {
            let end = record.unit.checked_add(units(record.len as usize));
            let Some(end) = end.filter(|end| record.unit >= next && *end <= UNITS) else {
                tracing::error!("a retained change makes no sense, and is dropped");
                file.state(entry.0).store(0, Ordering::Release);
                space.records.push(entry.0);
                return false;
            };
            if record.unit > next {
                space.units.insert(next, record.unit - next);
            }
            next = end;
            bytes += u64::from(record.len);
            true
        });
        if next < UNITS {
            space.units.insert(next, UNITS - next);
        }
        file.bytes().store(bytes, Ordering::Relaxed);
        found.sort_by_key(|(_, record)| record.sequence);
        space.sequence = found.last().map_or(0, |(_, record)| record.sequence);
        let space = Mutex::new(space);
        (Log { file, space }, found)
    }

    /// The file, for its counters.
    pub fn file(&self) -> &Retained {
        &self.file
    }

    /// More than half of the room is taken.
    pub fn is_filling(&self) -> bool {
        let bytes = self.file.bytes().load(Ordering::Relaxed);
        let records = self.space.lock().records.len();
        bytes > CAPACITY as u64 / 2 || records < RECORDS as usize / 2
    }

    /// The number of the newest record.
    pub fn newest(&self) -> u64 {
        self.space.lock().sequence
    }

    /// Retains a change that is about to be made. `None`: there is no room.
    pub fn add(&self, change: &Change<'_>) -> Option<(Entry, u64)> {
        let &Change {
            session,
            identity,
            before,
            after,
            ..
        } = change;
        let (kind, offset, len) = match change.what {
            What::Write(data, offset) => (Record::WRITE, offset, total(data)),
            What::Attributes(bytes) => (Record::ATTRIBUTES, 0, bytes.len()),
        };
        let (index, unit, sequence) = self.space.lock().take(units(len))?;
        let mut at = Retained::data_at(unit);
        match change.what {
            What::Write(data, _) => {
                for span in data {
                    self.file.memory.copy(at, span);
                    at += span.len();
                }
            }
            What::Attributes(bytes) => self.file.memory.write(at, bytes),
        }
        let record = Record {
            state: 0,
            len: len as u32,
            sequence,
            offset,
            kind,
            given_back: 0,
            unit,
            end: Record::NOT_ENDED,
            done: 0,
            reserved: 0,
            session,
            before,
            after,
            ended: Stamp::default(),
            identity,
        };
        self.file.memory.put(Retained::record_at(index), &record);
        // SYNC: all of it before the word that says so.
        self.file.state(index).store(USED, Ordering::Release);
        self.file.bytes().fetch_add(len as u64, Ordering::Relaxed);
        Some((Entry(index), sequence))
    }

    /// Other data, as long as before.
    pub fn set_data(&self, entry: Entry, bytes: &[u8]) {
        let record: Record = self.file.memory.get(Retained::record_at(entry.0));
        assert_eq!(record.len as usize, bytes.len());
        self.file
            .memory
            .write(Retained::data_at(record.unit), bytes);
    }

    /// The change was carried out, and how the file is after it.
    pub fn set_done(&self, entry: Entry, after: Stamp) {
        self.set_after(entry, after);
        let at = Retained::record_at(entry.0) + offset_of!(Record, done);
        // SYNC: the data of the change before the word that says so.
        self.file.memory.u32(at).store(1, Ordering::Release);
    }

    /// How the file is after the change.
    pub fn set_after(&self, entry: Entry, after: Stamp) {
        let at = Retained::record_at(entry.0) + offset_of!(Record, after);
        self.file.memory.put(at, &after);
    }

    /// The change is about to be made again, in another session.
    pub fn renew(&self, entry: Entry, session: u64, before: Stamp, after: Stamp) {
        let at = Retained::record_at(entry.0);
        let record: Record = self.file.memory.get(at);
        let record = Record {
            session,
            before,
            after,
            end: Record::NOT_ENDED,
            given_back: 0,
            ..record
        };
        self.file.memory.put(at, &record);
    }

    /// Somebody else gets the file, and this is flushed.
    pub fn set_given_back(&self, entry: Entry) {
        let at = Retained::record_at(entry.0) + offset_of!(Record, given_back);
        self.file.memory.u32(at).store(1, Ordering::Release);
    }

    /// The session is being ended, or was: `Record::*`, and how the file is.
    pub fn set_end(&self, entry: Entry, end: u32, ended: Stamp) {
        let at = Retained::record_at(entry.0);
        self.file.memory.put(at + offset_of!(Record, ended), &ended);
        let end_at = self.file.memory.u32(at + offset_of!(Record, end));
        end_at.store(end, Ordering::Release);
    }

    /// Less was changed than was wanted.
    pub fn shorten(&self, entry: Entry, len: usize) {
        let at = Retained::record_at(entry.0);
        let mut record: Record = self.file.memory.get(at);
        let less = record.len.saturating_sub(len as u32);
        if less == 0 {
            return;
        }
        let (unit, had) = (record.unit, units(record.len as usize));
        record.len -= less;
        self.file.memory.put(at, &record);
        let kept = units(record.len as usize);
        self.space.lock().give(unit + kept, had - kept);
        self.file.bytes().fetch_sub(less.into(), Ordering::Relaxed);
    }

    /// The data of a record.
    pub fn data(&self, record: &Record) -> Span<'_> {
        let at = Retained::data_at(record.unit);
        self.file.memory.span(at, record.len as usize)
    }

    /// The change needs not be done again. Returns its bytes.
    pub fn remove(&self, entry: Entry) -> u64 {
        let record: Record = self.file.memory.get(Retained::record_at(entry.0));
        self.file.state(entry.0).store(0, Ordering::Release);
        let len = u64::from(record.len);
        self.file.bytes().fetch_sub(len, Ordering::Relaxed);
        let mut space = self.space.lock();
        space.give(record.unit, units(record.len as usize));
        space.records.push(entry.0);
        len
    }

    /// Gives the memory of what was retained back, if nothing is.
    pub fn shrink(&self) {
        let space = self.space.lock();
        if space.records.len() == RECORDS as usize {
            self.file.memory.discard(DATA_AT, CAPACITY);
        }
    }
}

impl Space {
    /// A record and room for its data.
    fn take(&mut self, wanted: u32) -> Option<(u32, u32, u64)> {
        let fits = |(_, len): &(&u32, &u32)| **len >= wanted;
        let behind = self.units.range(self.cursor..).find(fits);
        let found = behind.or_else(|| self.units.iter().find(fits));
        let (&unit, &len) = found?;
        let index = self.records.pop()?;
        self.units.remove(&unit);
        if len > wanted {
            self.units.insert(unit + wanted, len - wanted);
        }
        self.cursor = unit + wanted;
        self.sequence += 1;
        Some((index, unit, self.sequence))
    }

    /// Room that is free again, joined with what is free beside it.
    fn give(&mut self, mut unit: u32, mut len: u32) {
        if len == 0 {
            return;
        }
        if let Some(more) = self.units.remove(&(unit + len)) {
            len += more;
        }
        if let Some((&before, &its)) = self.units.range(..unit).next_back()
            && before + its == unit
        {
            unit = before;
            len += its;
        }
        self.units.insert(unit, len);
    }
}

/// Units that hold this many bytes. At least one, so that no two records lie at the same place.
fn units(len: usize) -> u32 {
    len.div_ceil(UNIT).max(1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> Identity {
        Identity::new(&[n; 16]).unwrap()
    }

    fn add(log: &Log, from: &Memory, n: u8, len: usize) -> Option<Entry> {
        from.write(0, &vec![n; len]);
        let after = Stamp {
            version: n.into(),
            ..Stamp::default()
        };
        let data = [from.span(0, len)];
        let added = log.add(&Change {
            session: 1,
            identity: id(n),
            what: What::Write(&data, u64::from(n) * 10),
            before: Stamp::default(),
            after,
        });
        added.map(|(entry, _)| entry)
    }

    #[test]
    fn what_was_retained_is_found_in_order_by_the_next_writer() {
        let file = Retained::create().unwrap();
        let fd = file.as_fd().try_clone_to_owned().unwrap();
        let (log, found) = Log::open(file);
        assert!(found.is_empty());
        let from = Memory::create("test", 1 << 20).unwrap();
        let entries: Vec<Entry> = (0..10)
            .map(|n| add(&log, &from, n, 1000 * usize::from(n)).unwrap())
            .collect();
        assert_eq!(log.remove(entries[4]), 4000);
        log.shorten(entries[9], 100);
        let newest = log.newest();
        drop(log);

        let (log, found) = Log::open(Retained::open(fd).unwrap());
        let which: Vec<u64> = found.iter().map(|(_, r)| r.offset / 10).collect();
        assert_eq!(which, [0, 1, 2, 3, 5, 6, 7, 8, 9]);
        for (_, record) in &found {
            let n = (record.offset / 10) as u8;
            let len = if n == 9 { 100 } else { 1000 * usize::from(n) };
            assert_eq!(log.data(record).to_vec(), vec![n; len]);
            assert_eq!((record.identity, record.after.version), (id(n), n.into()));
        }
        let bytes = |log: &Log| log.file().bytes().load(Ordering::Relaxed);
        assert_eq!(bytes(&log), (1 + 2 + 3 + 5 + 6 + 7 + 8) * 1000 + 100);
        // Nothing of it is given away.
        let new = add(&log, &from, 77, 5000).unwrap();
        assert!(log.newest() > newest);
        for (_, record) in &found {
            let n = (record.offset / 10) as u8;
            assert!(log.data(record).to_vec().iter().all(|b| *b == n));
        }
        for (entry, _) in found {
            log.remove(entry);
        }
        log.remove(new);
        assert_eq!(bytes(&log), 0);
        let space = log.space.lock();
        assert_eq!(space.units, BTreeMap::from([(0, UNITS)]));
        assert_eq!(space.records.len(), RECORDS as usize);
    }

    #[test]
    fn when_there_is_no_room_nothing_is_retained() {
        let (log, _) = Log::open(Retained::create().unwrap());
        let from = Memory::create("test", 1 << 20).unwrap();
        let mut entries = Vec::new();
        while let Some(entry) = add(&log, &from, 1, 1 << 20) {
            entries.push(entry);
        }
        assert_eq!(entries.len(), CAPACITY >> 20);
        assert!(log.is_filling());
        log.remove(entries[7]);
        assert!(add(&log, &from, 2, 1 << 19).is_some());
        assert!(add(&log, &from, 3, 1 << 20).is_none());
        assert!(add(&log, &from, 3, 1 << 19).is_some());
    }

    #[test]
    fn records_that_make_no_sense_are_dropped() {
        let file = Retained::create().unwrap();
        let fd = file.as_fd().try_clone_to_owned().unwrap();
        let (log, _) = Log::open(file);
        let from = Memory::create("test", 1 << 20).unwrap();
        for n in 0..4 {
            add(&log, &from, n, 4096).unwrap();
        }
        // The second says it lies where the first is, the fourth behind the end.
        let memory = &log.file().memory;
        for (index, unit) in [(1, 3), (3, u32::MAX - 1)] {
            let at = Retained::record_at(index) + offset_of!(Record, unit);
            memory.u32(at).store(unit, Ordering::Relaxed);
        }
        drop(log);
        let (log, found) = Log::open(Retained::open(fd).unwrap());
        let which: Vec<u64> = found.iter().map(|(_, r)| r.offset / 10).collect();
        assert_eq!(which, [0, 2]);
        assert_eq!(log.space.lock().records.len(), RECORDS as usize - 2);
    }
}
