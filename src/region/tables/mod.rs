//! The tables of inodes, handles and locks: what a successor has to know of the mount.
//!
//! They live in a memory file of their own, sparse, of a large virtual size: a page takes memory
//! when it is first used and gives it back when nothing in it is used any more.
//!
//! ```text
//!  header │ undo log │ page descriptors │ three hash indexes │ heap of 4 KiB pages
//! ```
//!
//! * [`words`]: the one door to the memory, and the undo log that makes every change atomic.
//! * [`heap`]: pages of equal blocks: records, names, identities.
//! * [`index`]: linear hashing of identities, of names, and of waiters.
//! * [`inodes`], [`handles`], [`locks`]: the tables.
//!
//! **One process writes at a time.** There is no lock and no pointer in here. A writer may be killed
//! between any two stores; whoever opens the tables next takes back the one change that was under
//! way ([`Tables::recover`], in time proportional to that change). What is read is checked: a
//! corrupt table gives wrong answers, never a panic or an endless walk.
//!
//! **Node ids and handles are never used twice**: an id is a serial number and the place of its
//! record, so finding it is one array access, and an old one does not match.

mod handles;
mod heap;
mod index;
mod inodes;
mod locks;
mod words;

#[cfg(test)]
mod check;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use handles::Handle;
pub use inodes::{Forget, Node};
pub use locks::{Lock, Waiter};
use words::Words;

/// Version of the layout. Software refuses another one.
///
/// 1. first version.
pub const TABLES_VERSION: u64 = 1;
/// Ranges that can be locked at a time, on all files together.
pub const MAX_LOCKS: u64 = 1 << 20;
/// Lock requests that can wait at a time.
pub const MAX_WAITERS: u64 = 1 << 20;
/// Number of [`Tables::mark`]s.
pub const MARKS: u32 = 256;

/// There is no room for one more record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the session tables are full")]
pub struct Full;

/// The tables of a mount.
pub struct Tables {
    words: Words,
}

impl Tables {
    /// Makes empty tables.
    pub fn create() -> io::Result<Tables> {
        Ok(Tables {
            words: Words::create()?,
        })
    }

    /// Opens the tables of a writer that is no more, and takes back the change it was killed in.
    pub fn open(fd: OwnedFd) -> io::Result<Tables> {
        let mut tables = Tables::attach(fd)?;
        tables.recover();
        Ok(tables)
    }

    /// Opens tables that another process still writes to. Until that has ended and
    /// [`recover`](Tables::recover) was called, nothing may be changed, and what is read may be
    /// half of a change.
    pub fn attach(fd: OwnedFd) -> io::Result<Tables> {
        Ok(Tables {
            words: Words::attach(fd)?,
        })
    }

    /// Takes back the change a killed writer left half done. For the new writer, before anything else.
    pub fn recover(&mut self) {
        self.words.recover();
    }

    /// The memory file, to pass to a successor.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.words.memory().as_fd()
    }

    /// Makes all changes of `change` one: a successor finds all of them or none.
    ///
    /// With a [`mark`](Tables::mark) among them it can tell which.
    pub fn atomically<R>(&mut self, change: impl FnOnce(&mut Tables) -> R) -> R {
        self.words.begin();
        let result = change(self);
        self.words.end();
        result
    }

    /// Sets mark `which`, a number of the caller's own. Without effect beyond [`MARKS`].
    pub fn mark(&mut self, which: u32, value: u64) {
        if which < MARKS {
            self.atomically(|t| t.words.store(words::mark_at(which), value));
        }
    }

    /// Value of mark `which`, at first 0.
    pub fn marked(&self, which: u32) -> u64 {
        match which {
            0..MARKS => self.words.load(words::mark_at(which)),
            _ => 0,
        }
    }

    /// As [`atomically`](Tables::atomically), and an error takes everything back.
    fn attempt<R>(
        &mut self,
        change: impl FnOnce(&mut Tables) -> Result<R, Full>,
    ) -> Result<R, Full> {
        let start = self.words.begin();
        let result = change(self);
        if result.is_err() {
            self.words.take_back(start);
        }
        self.words.end();
        result
    }

    /// Inodes the kernel knows, the root among them.
    pub fn inodes(&self) -> u64 {
        self.words.load(words::INODES)
    }

    /// Open files.
    pub fn open_files(&self) -> u64 {
        self.words.load(words::FILES)
    }

    /// Open directories.
    pub fn open_dirs(&self) -> u64 {
        self.words.load(words::DIRS)
    }

    /// Locked ranges.
    pub fn locks(&self) -> u64 {
        self.words.load(words::LOCKS)
    }

    /// Lock requests that wait.
    pub fn waiters_len(&self) -> u64 {
        self.words.load(words::WAITERS)
    }

    /// Memory in use, in bytes.
    pub fn bytes_in_use(&self) -> u64 {
        self.words.heap_bytes() + self.words.index_bytes()
    }
}
