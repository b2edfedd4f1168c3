//! The reply to READDIR and READDIRPLUS.

use zerocopy::IntoBytes;

use super::{Answer, Call};
use crate::region::Identity;
use crate::region::slot::REPLY_IDS;
use crate::wire::abi::{Dirent, EntryOut, ReadIn, dirent_size, direntplus_size};
use crate::wire::{Errno, Opcode};

/// A name in a directory.
pub(super) struct Name<'n> {
    /// Inode number as the store has it.
    pub(super) ino: u64,
    /// Cookie of the entry after this one.
    pub(super) next: u64,
    /// `DT_*`.
    pub(super) file_type: u8,
    /// The name.
    pub(super) name: &'n [u8],
}

/// The entries of a reply, as many as fit.
pub(super) struct Listing {
    bytes: Vec<u8>,
    ids: Vec<Identity>,
    space: usize,
    id_space: usize,
    plus: bool,
    full: bool,
}

impl Listing {
    /// An empty one for a request.
    pub(super) fn new(call: &Call<'_>, arg: ReadIn) -> Listing {
        Listing {
            bytes: Vec::new(),
            ids: Vec::new(),
            space: (arg.size as usize).min(call.reply_space()),
            id_space: REPLY_IDS - 2,
            plus: call.request.opcode == Opcode::Readdirplus,
            full: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds an entry if it fits. For READDIRPLUS `found` says what it refers to, once there is room;
    /// `.`, `..` and what vanished meanwhile are plain names: node id 0, which the kernel does not
    /// count as a lookup.
    pub(super) fn push(
        &mut self,
        name: &Name<'_>,
        found: impl FnOnce() -> Option<(EntryOut, Identity)>,
    ) -> bool {
        let size = if self.plus {
            direntplus_size(name.name.len())
        } else {
            dirent_size(name.name.len())
        };
        let end = self.bytes.len() + size;
        if end > self.space {
            self.full = true;
            return false;
        }
        if self.plus {
            let dots = name.name == b"." || name.name == b"..";
            let mut out = EntryOut::default();
            if let Some((entry, id)) = if dots { None } else { found() } {
                let id_len = 1 + id.as_bytes_ref().len();
                if id_len > self.id_space {
                    self.full = true;
                    return false;
                }
                self.id_space -= id_len;
                self.ids.push(id);
                out = EntryOut { nodeid: 1, ..entry };
            }
            self.bytes.extend_from_slice(out.as_bytes());
        }
        let dirent = Dirent {
            ino: name.ino,
            off: name.next,
            namelen: name.name.len() as u32,
            typ: name.file_type.into(),
        };
        self.bytes.extend_from_slice(dirent.as_bytes());
        self.bytes.extend_from_slice(name.name);
        // Entries begin at multiples of eight.
        self.bytes.resize(end, 0);
        true
    }

    /// The reply.
    pub(super) fn answer(self) -> Result<Answer, Errno> {
        if self.full && self.bytes.is_empty() {
            return Err(Errno::EINVAL);
        }
        Ok(if self.plus {
            Answer::Entries(self.bytes, self.ids)
        } else {
            Answer::Data(self.bytes)
        })
    }
}
