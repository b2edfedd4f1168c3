//! Reading directories.
//!
//! An offset is the store's own cookie, so it means the same to a directory that was opened again by
//! another generation: it seeks there, and every entry that was there all the time comes once.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::SeekFrom;

use super::{Answer, Call, Dir};
use crate::backend::listing::{Listing, Name};
use crate::sys;
use crate::wire::Errno;
use crate::wire::abi::ReadIn;

/// Bytes read from the store at a time.
const BUFFER: usize = 32 * 1024;

/// Where a directory is being read: entries that were read ahead, and the cookie of the first.
#[derive(Default)]
pub(super) struct Stream {
    buffer: Vec<u8>,
    at: usize,
    end: usize,
    position: u64,
    /// Something was read through this open directory.
    started: bool,
}

/// `struct linux_dirent64`.
struct Entry<'b> {
    ino: u64,
    /// Cookie of the entry after this one.
    next: u64,
    file_type: u8,
    name: &'b CStr,
    len: usize,
}

impl<'b> Entry<'b> {
    fn parse(bytes: &'b [u8]) -> Option<Entry<'b>> {
        let (ino, rest) = bytes.split_first_chunk()?;
        let (next, rest) = rest.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (&file_type, _) = rest.split_first()?;
        let len = usize::from(u16::from_ne_bytes(*len));
        Some(Entry {
            ino: u64::from_ne_bytes(*ino),
            next: u64::from_ne_bytes(*next),
            file_type,
            name: CStr::from_bytes_until_nul(bytes.get(19..len)?).ok()?,
            len,
        })
    }
}

impl Stream {
    /// Goes to an offset; for the one where it is, nothing.
    fn seek(&mut self, directory: BorrowedFd<'_>, offset: u64) -> Result<(), Errno> {
        // `rewinddir(3)` at the start: what was read ahead may be old.
        let rewinds = offset == 0 && self.started;
        if offset == self.position && !rewinds {
            return Ok(());
        }
        if !self.started {
            // ext4 takes a directory that was opened, put to its end, read, and put to its start
            // for one that is still at its end (`ext4_dx_readdir` compares the position with a
            // `last_pos` that is 0 until something was read). So read something first.
            self.fill(directory)?;
        }
        rustix::fs::seek(directory, SeekFrom::Start(offset))?;
        self.position = offset;
        (self.at, self.end) = (0, 0);
        Ok(())
    }

    fn fill(&mut self, directory: BorrowedFd<'_>) -> Result<(), Errno> {
        self.buffer.resize(BUFFER, 0);
        (self.at, self.end) = (0, 0);
        self.end = sys::getdents64(directory, &mut self.buffer)?;
        self.started = true;
        Ok(())
    }

    /// The entry at the position, which stays where it is. `None`: the end.
    fn peek(&mut self, directory: BorrowedFd<'_>) -> Result<Option<Entry<'_>>, Errno> {
        if self.at == self.end {
            self.fill(directory)?;
            if self.end == 0 {
                // A listed directory is often kept open; its buffer need not be.
                self.buffer = Vec::new();
                return Ok(None);
            }
        }
        let entry = Entry::parse(&self.buffer[self.at..self.end]);
        entry.map(Some).ok_or(Errno::EIO)
    }

    fn advance(&mut self, len: usize, next: u64) {
        self.at = (self.at + len).min(self.end);
        self.position = next;
    }
}

impl Dir {
    pub(super) fn readdir(&self, call: &Call<'_>, arg: ReadIn) -> Result<Answer, Errno> {
        let handle = self.file(call)?;
        let directory = handle.fd.as_fd();
        let mut list = Listing::new(call, arg);
        let mut stream = handle.stream.lock();
        stream.seek(directory, arg.offset)?;
        loop {
            let entry = match stream.peek(directory) {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                // Told when it comes first: what was read before it counts.
                Err(_) if !list.is_empty() => break,
                Err(e) => return Err(e),
            };
            let name = Name {
                ino: entry.ino,
                next: entry.next,
                file_type: entry.file_type,
                name: entry.name.to_bytes(),
            };
            let found = || {
                // What is not ours is a plain name, too.
                let found = self.look(directory, entry.name).ok()?;
                Some((self.entry(&found), found.id))
            };
            if !list.push(&name, found) {
                break;
            }
            let (len, next) = (entry.len, entry.next);
            stream.advance(len, next);
        }
        list.answer()
    }
}

/// Nothing but `.` and `..` is in it.
pub(super) fn is_empty(directory: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut stream = Stream::default();
    while let Some(entry) = stream.peek(directory)? {
        if entry.name != c"." && entry.name != c".." {
            return Ok(false);
        }
        let (len, next) = (entry.len, entry.next);
        stream.advance(len, next);
    }
    Ok(true)
}
