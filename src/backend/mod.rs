//! The replaceable side: what answers requests.
//!
//! A [`Backend`] is one store (a directory, CephFS, another FUSE daemon). It sees requests whose
//! node ids and handles the pump has already resolved to identities ([`Call`]), so it needs no
//! tables and keeps nothing that could not be found again: a new generation starts empty and
//! restores each object when it is first asked for it.
//!
//! A request is served in two steps. [`Backend::prepare`] looks at what the names refer to *before*
//! anything changes; the server stores that in the slot's journal and marks the slot `Running`. Then
//! [`Backend::execute`] does the work. When the process dies in between, the next generation calls
//! only `execute`, with the same journal and [`Attempt::Again`], and must find out whether the work
//! was done.

pub mod ceph;
pub mod convert;
pub mod dir;
pub mod fault;
mod listing;
pub mod server;
pub mod vault;

use std::cell::Cell;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, MutexGuard};

use crate::region::Identity;
use crate::region::memory::Span;
use crate::region::slot::{Annex, Journal, Slot};
use crate::wire::abi::{EntryOut, OutHeader};
use crate::wire::{Errno, Request};
pub use vault::{Vault, VaultKey};

/// A store that answers FUSE requests. All methods may be called from several threads at once.
pub trait Backend: Send + Sync {
    /// Identity of the root of the mount, node id 1. Constant over all generations of a mount: a
    /// successor that finds another root is refused.
    fn root(&self) -> Identity;

    /// Objects are found by walking from the root, so the annex must carry paths.
    fn needs_paths(&self) -> bool;

    /// Called once in each thread that will serve, before its first request.
    fn enter_thread(&self) {}

    /// Looks before the leap: what a second attempt needs to know. Changes nothing in the store
    /// (but may deposit in the vault). An error is the answer, and `execute` is not called.
    fn prepare(&self, call: &Call<'_>) -> Result<Journal, Errno>;

    /// Does the work, or finds it done.
    fn execute(&self, call: &Call<'_>, attempt: Attempt<'_>) -> Result<Answer, Errno>;

    /// The kernel does not know these objects any more, which lost their last name
    /// ([`Journal::LAST_NAME`]).
    fn unpin(&self, _identities: &[Identity]) {}

    /// The mount is gone: ends what would outlive this process, in order. Nothing is asked of the
    /// backend afterwards.
    fn retire(&self) {}
}

/// What a backend tells the front-end without being asked.
pub trait Frontend: Send + Sync {
    /// Data of an object may be old in the kernel: `len` bytes (0: all) from `off` on.
    fn stale(&self, identity: &Identity, off: i64, len: i64);

    /// This backend cannot serve any more, through no fault of a request: ends the process, so that
    /// the next generation takes over. Never returns.
    fn lost(&self, reason: &str) -> !;
}

/// Which time a request is executed.
#[derive(Clone, Copy, Debug)]
pub enum Attempt<'j> {
    /// For the first time; the journal was made a moment ago.
    First(&'j Journal),
    /// Perhaps executed before by a generation that died.
    Again(&'j Journal),
}

impl<'j> Attempt<'j> {
    /// The journal, whichever time it is.
    pub fn journal(self) -> &'j Journal {
        match self {
            Attempt::First(journal) | Attempt::Again(journal) => journal,
        }
    }

    /// An earlier generation may have done it.
    pub fn is_again(self) -> bool {
        matches!(self, Attempt::Again(_))
    }
}

/// A request with everything the backend may use to answer it.
pub struct Call<'a> {
    /// The decoded request.
    pub request: Request<'a>,
    /// What the tables know of its nodes and handles.
    pub annex: Annex,
    /// Where WRITE data lies and READ data goes.
    pub slot: Slot<'a>,
    /// Where to keep what must outlive this process.
    pub vault: &'a dyn Vault,
    paths: (Vec<u8>, Vec<u8>),
    replayed: Cell<Replayed>,
}

impl<'a> Call<'a> {
    /// Puts a call together.
    pub fn new(request: Request<'a>, slot: Slot<'a>, vault: &'a dyn Vault) -> Call<'a> {
        let annex = slot.annex();
        Call {
            request,
            annex,
            slot,
            vault,
            paths: slot.paths(&annex),
            replayed: Cell::new(Replayed::No),
        }
    }

    /// Reports how a repeated request was answered.
    pub fn note(&self, replayed: Replayed) {
        self.replayed.set(replayed);
    }

    /// What was reported.
    pub fn replayed(&self) -> Replayed {
        self.replayed.get()
    }

    /// Path of `annex.node` relative to the root ("" is the root), if paths are carried.
    pub fn path(&self) -> &OsStr {
        OsStr::from_bytes(&self.paths.0)
    }

    /// Path of `annex.second`.
    pub fn second_path(&self) -> &OsStr {
        OsStr::from_bytes(&self.paths.1)
    }

    /// The data of a WRITE.
    pub fn write_data(&self) -> Vec<Span<'a>> {
        self.slot.write_data()
    }

    /// Where the data of a READ goes: at most `len` bytes.
    pub fn read_buffer(&self, len: usize) -> Vec<Span<'a>> {
        self.slot.reply_data(len)
    }

    /// Most bytes a reply to this request can carry.
    pub fn reply_space(&self) -> usize {
        self.slot.reply_space()
    }
}

/// A successful answer. `nodeid` fields are left 0: the pump knows the node of an identity.
#[derive(Debug)]
pub enum Answer {
    /// Nothing but the header.
    Empty,
    /// As `Empty`, after the kernel has dropped the pages of the node: a lock, whose owner will look at
    /// what others wrote under theirs.
    EmptyWithoutPages,
    /// A struct or bytes.
    Data(Vec<u8>),
    /// This many bytes were put into [`Call::read_buffer`].
    Filled(usize),
    /// A LOOKUP of a name that does not exist, to be remembered as such for the entry timeout:
    /// `EntryOut` with node 0.
    Absent(EntryOut),
    /// An object: LOOKUP, SYMLINK, MKNOD, MKDIR, LINK.
    Entry(EntryOut, Identity),
    /// An open file or directory; the fh is `Annex::new_fh`. Bits of `FOPEN_*`.
    Opened(u32),
    /// CREATE and TMPFILE: an object and its open handle.
    Created(EntryOut, Identity, u32),
    /// READDIRPLUS: the bytes of the entries, and the identity of each entry whose `nodeid` is not
    /// 0, in order. A placeholder node id 1 marks an entry that has an identity.
    Entries(Vec<u8>, Vec<Identity>),
}

/// How an answer to a repeated request came about, for the counters of `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Replayed {
    /// First attempt, or nothing to report.
    No = 0,
    /// The first attempt had not happened: done now.
    Reissued = 1,
    /// The first attempt had happened: verified.
    Verified = 2,
    /// Cannot be told apart from the work of another client.
    Ambiguous = 3,
}

/// Writes an answer into the slot, up to but not including the phase.
pub(crate) fn put_answer(slot: &Slot<'_>, request: &Request<'_>, answer: Result<Answer, Errno>) {
    use crate::wire::abi::{CREATE_OUT, OpenOut};
    use zerocopy::IntoBytes;

    let unique = request.header.unique;
    let fh = slot.annex().new_fh;
    let opened = |open_flags| OpenOut {
        fh,
        open_flags,
        backing_id: 0,
    };
    let drops = matches!(answer, Ok(Answer::EmptyWithoutPages));
    slot.reply_drops_pages()
        .store(drops.into(), Ordering::Relaxed);
    let (bytes, ids) = match answer {
        Err(errno) => return slot.set_reply(unique, -errno.raw(), 0),
        Ok(Answer::Filled(len)) => return slot.set_reply(unique, 0, len),
        Ok(Answer::Empty | Answer::EmptyWithoutPages) => (Vec::new(), Vec::new()),
        Ok(Answer::Data(bytes)) => (bytes, Vec::new()),
        Ok(Answer::Absent(entry)) => (entry.as_bytes().to_vec(), Vec::new()),
        Ok(Answer::Entry(entry, id)) => (entry.as_bytes().to_vec(), vec![id]),
        Ok(Answer::Opened(flags)) => (opened(flags).as_bytes().to_vec(), Vec::new()),
        Ok(Answer::Created(entry, id, flags)) => {
            let mut bytes = Vec::with_capacity(CREATE_OUT);
            bytes.extend_from_slice(entry.as_bytes());
            bytes.extend_from_slice(opened(flags).as_bytes());
            (bytes, vec![id])
        }
        Ok(Answer::Entries(bytes, ids)) => (bytes, ids),
    };
    if bytes.len() > slot.reply_space() {
        // A backend that made more than it was asked for; ERANGE is what xattr calls expect.
        return slot.set_reply(unique, -Errno::ERANGE.raw(), 0);
    }
    slot.put_reply_data(&bytes);
    slot.set_reply_ids(&ids);
    slot.set_reply(unique, 0, bytes.len());
    debug_assert!(slot.reply_data_len() + size_of::<OutHeader>() >= bytes.len());
}

/// Locks of a fixed number, shared by whatever hashes to the same one.
struct Stripes([Mutex<()>; 64]);

impl Default for Stripes {
    fn default() -> Stripes {
        Stripes(std::array::from_fn(|_| Mutex::default()))
    }
}

impl Stripes {
    fn lock(&self, key: impl Hash) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        self.0[hasher.finish() as usize % self.0.len()].lock()
    }
}
