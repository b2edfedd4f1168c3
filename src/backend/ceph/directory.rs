//! Reading directories.
//!
//! An offset is the store's cookie, made from the hash of the name, so it means the same to every
//! generation.

use parking_lot::Mutex;

use super::Ceph;
use super::client::{Directory, Entry};
use super::files::Handle;
use crate::backend::listing::{Listing, Name};
use crate::backend::{Answer, Call};
use crate::wire::Errno;
use crate::wire::abi::ReadIn;

/// An open directory, and an entry that was read and did not fit into the last reply.
pub(super) struct Stream {
    directory: Directory,
    pending: Option<Entry>,
    /// Cookie of the next entry.
    position: i64,
    started: bool,
}

impl Stream {
    pub(super) fn new(directory: Directory) -> Mutex<Stream> {
        Mutex::new(Stream {
            directory,
            pending: None,
            position: 0,
            started: false,
        })
    }

    fn seek(&mut self, cookie: i64) {
        // At the start again (`rewinddir(3)`): what was read before may be old.
        let rewinds = cookie == 0 && self.started;
        if cookie != self.position || rewinds {
            self.directory.seek(cookie);
            self.pending = None;
            self.position = cookie;
        }
        self.started = true;
    }

    fn next(&mut self) -> Result<Option<Entry>, Errno> {
        match self.pending.take() {
            Some(entry) => Ok(Some(entry)),
            None => self.directory.read(),
        }
    }
}

impl Ceph {
    pub(super) fn readdir(&self, call: &Call<'_>, arg: ReadIn) -> Result<Answer, Errno> {
        let handle = self.handle(call)?;
        let Handle::Directory(stream) = &*handle else {
            return Err(Errno::ENOTDIR);
        };
        let mut list = Listing::new(call, arg);
        let mut stream = stream.lock();
        stream.seek(arg.offset as i64);
        loop {
            let entry = match stream.next() {
                Ok(Some(entry)) => entry,
                Ok(None) => {
                    // A session that was ended ends its listings, too, and says so to nobody.
                    self.prove_session(&self.inode(&call.annex.node)?);
                    break;
                }
                // Told when it comes first: what was read before it counts.
                Err(_) if !list.is_empty() => break,
                Err(e) => return Err(e),
            };
            let name = Name {
                ino: entry.stat.ino,
                next: entry.next as u64,
                file_type: entry.file_type,
                name: entry.name.to_bytes(),
            };
            if !list.push(&name, || Some(self.entry(&entry.stat))) {
                stream.pending = Some(entry);
                break;
            }
            stream.position = entry.next;
        }
        list.answer()
    }
}
