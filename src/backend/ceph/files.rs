//! Open files and their data.
//!
//! A handle is a number the kernel and the tables know; the open file behind it belongs to the
//! session. A number from an earlier generation is opened again with the rights of the superuser: the
//! caller's were decided at its own open, and a chmod since then costs nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use parking_lot::{Mutex, RwLock};
use zerocopy::IntoBytes;

use super::Ceph;
use super::client::{File, Inode, Perms};
use super::directory::Stream;
use super::ffi::Vino;
use super::node::vino;
use super::warm::{Warm, reopened};
use crate::backend::{Answer, Attempt, Call, Replayed};
use crate::region::Identity;
use crate::region::memory::{Span, total};
use crate::region::slot::{HandleRef, Journal};
use crate::wire::abi::{
    FOPEN_KEEP_CACHE, FSYNC_FDATASYNC, FallocateIn, FlushIn, FsyncIn, LseekIn, LseekOut,
    OPEN_KILL_SUIDGID, OpenIn, ReadIn, WRITE_KILL_SUIDGID, WriteIn, WriteOut,
};
use crate::wire::{Errno, Opcode};

/// Journal flag: an append was given the offset in [`Journal::offset`].
const OFFSET_TAKEN: u64 = 1;
/// `FUSE_WRITE_CACHE`: pages written back, which lie where they lie even if the file appends.
const WRITE_CACHE: u32 = 1 << 0;
/// Bytes behind the old end of a file in which an append that may have happened is looked for.
const SEARCH_MAX: u64 = 64 << 20;

/// An open file or directory.
pub(super) enum Handle {
    /// A file.
    File(OpenFile),
    /// A directory.
    Directory(Mutex<Stream>),
}

/// An open file.
pub(super) struct OpenFile {
    pub(super) file: File,
    pub(super) inode: Arc<Inode>,
    pub(super) vino: Vino,
    /// It is open for writing.
    pub(super) writes: bool,
    /// What is written is with the cluster when the library has written it.
    pub(super) synchronous: bool,
    failure: Failure,
}

impl OpenFile {
    fn new(file: File, inode: Arc<Inode>, vino: Vino, flags: i32) -> OpenFile {
        OpenFile {
            file,
            inode,
            vino,
            writes: writes(flags),
            // `O_SYNC` has the bit of `O_DSYNC`.
            synchronous: flags & (libc::O_DIRECT | libc::O_DSYNC) != 0,
            failure: Failure::default(),
        }
    }
}

/// Why something that was acknowledged through a handle could not be written; told once.
#[derive(Clone, Default)]
pub(super) struct Failure(Arc<AtomicI32>);

impl Failure {
    fn set(&self, errno: Errno) {
        self.0.store(errno.raw(), Ordering::Relaxed);
    }

    fn get(&self) -> Result<(), Errno> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(Errno::from_raw(errno)),
        }
    }

    fn take(&self) -> Result<(), Errno> {
        let told = self.get();
        self.0.store(0, Ordering::Relaxed);
        told
    }
}

/// A handle of an earlier generation that was not opened yet.
pub(super) struct Pending {
    /// The file, found before the old session ended; `None`: it was gone.
    pub(super) inode: Option<Arc<Inode>>,
    /// What it is.
    pub(super) vino: Option<Vino>,
    /// Flags it was opened with.
    pub(super) flags: i32,
    /// It is a directory.
    pub(super) directory: bool,
    /// Of what an earlier generation acknowledged.
    pub(super) failure: Failure,
}

enum Entry {
    Open(Arc<Handle>),
    Pending(Arc<Pending>),
}

/// The handles of this mount.
#[derive(Default)]
pub(super) struct Handles(RwLock<HashMap<u64, Entry>>);

impl Handles {
    fn insert(&self, fh: u64, handle: Handle) {
        let old = self.0.write().insert(fh, Entry::Open(Arc::new(handle)));
        drop(old);
    }

    /// Notes handles of an earlier generation.
    pub(super) fn expect(&self, pending: impl IntoIterator<Item = (u64, Pending)>) {
        let mut handles = self.0.write();
        for (fh, pending) in pending {
            handles.insert(fh, Entry::Pending(Arc::new(pending)));
        }
    }

    /// Handles that were not opened yet.
    pub(super) fn pending(&self) -> Vec<u64> {
        let handles = self.0.read();
        let pending = handles.iter().filter_map(|(fh, entry)| match entry {
            Entry::Pending(pending) if !pending.directory => Some(*fh),
            _ => None,
        });
        pending.collect()
    }

    fn get(&self, fh: u64) -> Option<Result<Arc<Handle>, Arc<Pending>>> {
        match self.0.read().get(&fh)? {
            Entry::Open(handle) => Some(Ok(handle.clone())),
            Entry::Pending(pending) => Some(Err(pending.clone())),
        }
    }

    /// A pending handle was opened. Of two threads that did, the first one's stays; a handle that was
    /// released meanwhile stays released.
    fn opened(&self, fh: u64, handle: Arc<Handle>) -> Result<Arc<Handle>, Errno> {
        match self.0.write().get_mut(&fh) {
            Some(Entry::Open(first)) => Ok(first.clone()),
            Some(entry) => {
                *entry = Entry::Open(handle.clone());
                Ok(handle)
            }
            None => Err(Errno::EBADF),
        }
    }

    /// What was written through any of a file's handles could not be kept.
    pub(super) fn fail(&self, vino: Vino, errno: Errno) {
        for entry in self.0.read().values() {
            match entry {
                Entry::Open(handle) => match &**handle {
                    Handle::File(open) if open.vino == vino => open.failure.set(errno),
                    _ => {}
                },
                Entry::Pending(pending) if pending.vino == Some(vino) => {
                    pending.failure.set(errno);
                }
                Entry::Pending(_) => {}
            }
        }
    }

    /// Tells that something written before could not be kept. `close(2)` tells it to whoever looks, and
    /// hardly anybody does, so a write or fsync is told as well.
    fn failure(&self, fh: u64) -> Result<(), Errno> {
        match self.get(fh) {
            Some(Ok(handle)) => match &*handle {
                Handle::File(open) => open.failure.get(),
                Handle::Directory(_) => Ok(()),
            },
            Some(Err(pending)) => pending.failure.get(),
            None => Ok(()),
        }
    }

    fn remove(&self, fh: u64) -> Option<Arc<Handle>> {
        let entry = self.0.write().remove(&fh);
        match entry {
            Some(Entry::Open(handle)) => Some(handle),
            _ => None,
        }
    }
}

/// Opens what an earlier generation had open.
pub(super) fn restore(
    handles: &Handles,
    warm: &Warm,
    superuser: &Perms,
    fh: u64,
) -> Result<Arc<Handle>, Errno> {
    let pending = match handles.get(fh) {
        Some(Ok(handle)) => return Ok(handle),
        Some(Err(pending)) => pending,
        None => return Err(Errno::EBADF),
    };
    let (Some(inode), Some(vino)) = (&pending.inode, pending.vino) else {
        return Err(Errno::ESTALE);
    };
    let handle = if pending.directory {
        Handle::Directory(Stream::new(inode.open_dir(superuser)?))
    } else {
        let file = open_file(inode, sanitized(pending.flags), superuser, superuser)?;
        // Of several that open it now one stays, and the failure is the handle's.
        Handle::File(OpenFile {
            failure: pending.failure.clone(),
            ..OpenFile::new(file, inode.clone(), vino, pending.flags)
        })
    };
    let handle = handles.opened(fh, Arc::new(handle))?;
    if let Handle::File(open) = &*handle {
        reopened(warm, vino, &open.file, open.writes);
    }
    Ok(handle)
}

/// A file opened with these flags can be written.
fn writes(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// The flags to open with. What creates, truncates or names was done by whoever opened first; an
/// append gets its offset in `write`: the library takes offsets as they are.
pub(super) fn sanitized(flags: i32) -> i32 {
    flags
        & !(libc::O_CREAT
            | libc::O_EXCL
            | libc::O_TRUNC
            | libc::O_APPEND
            | libc::O_NOFOLLOW
            | libc::O_NOCTTY
            | libc::O_ASYNC
            | libc::O_PATH)
}

/// Opens a file. One that is to be written is looked at before: when a client died that wrote it, the
/// metadata server has its old size until somebody asks, and whoever opens it for writing without
/// asking is told the old one and believed (16.2.15).
fn open_file(inode: &Inode, flags: i32, perms: &Perms, superuser: &Perms) -> Result<File, Errno> {
    if writes(flags) {
        inode.stat(superuser)?;
    }
    inode.open(flags, perms)
}

impl Ceph {
    /// What the request works through.
    pub(super) fn handle(&self, call: &Call<'_>) -> Result<Arc<Handle>, Errno> {
        let HandleRef { fh, open_flags, .. } = call.annex.handle;
        match self.handles.get(fh) {
            Some(Ok(handle)) => return Ok(handle),
            Some(Err(_)) => {}
            None if fh == 0 => return Err(Errno::EBADF),
            // The front-end itself opened it in an outage: the root's directory, for `df`.
            None => {
                let directory = matches!(
                    call.request.opcode,
                    Opcode::Readdir | Opcode::Readdirplus | Opcode::Fsyncdir
                );
                let pending = Pending {
                    inode: Some(Arc::new(self.inode(&call.annex.node)?)),
                    vino: vino(&call.annex.node.identity),
                    flags: open_flags as i32,
                    directory,
                    failure: Failure::default(),
                };
                self.handles.expect([(fh, pending)]);
            }
        }
        restore(&self.handles, &self.warm, &self.superuser, fh)
    }

    /// Does something with the open file of the request.
    fn with_file<T>(
        &self,
        call: &Call<'_>,
        work: impl FnOnce(&OpenFile) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match &*self.handle(call)? {
            Handle::File(file) => work(file),
            Handle::Directory(_) => Err(Errno::EISDIR),
        }
    }

    pub(super) fn open(&self, call: &Call<'_>, arg: OpenIn) -> Result<Answer, Errno> {
        let perms = self.caller(&call.request.header)?;
        let inode = self.inode(&call.annex.node)?;
        let fh = call.annex.new_fh;
        if call.request.opcode == Opcode::Opendir {
            let stream = Stream::new(inode.open_dir(&perms)?);
            self.handles.insert(fh, Handle::Directory(stream));
            return Ok(Answer::Opened(0));
        }
        let flags = arg.flags as i32;
        let vino = vino(&call.annex.node.identity).ok_or(Errno::ESTALE)?;
        let file = open_file(&inode, sanitized(flags), &perms, &self.superuser)?;
        if arg.open_flags & OPEN_KILL_SUIDGID != 0 {
            self.clear_setid(&inode)?;
        }
        Ok(Answer::Opened(self.keep(fh, file, flags, vino, inode)))
    }

    /// Keeps an open file. Returns the bits for the kernel.
    pub(super) fn keep(&self, fh: u64, file: File, flags: i32, vino: Vino, inode: Inode) -> u32 {
        let keeps = self.opened_now(vino, &inode, &file, writes(flags));
        let open = OpenFile::new(file, Arc::new(inode), vino, flags);
        self.handles.insert(fh, Handle::File(open));
        if keeps { FOPEN_KEEP_CACHE } else { 0 }
    }

    pub(super) fn read(&self, call: &Call<'_>, arg: ReadIn) -> Result<Answer, Errno> {
        let into = call.read_buffer(arg.size as usize);
        self.with_file(call, |open| {
            let len = open.file.read(&into, arg.offset)?;
            self.is_in_pages(open.vino, &open.file, open.writes, arg.offset, len);
            Ok(Answer::Filled(len))
        })
    }

    pub(super) fn write(
        &self,
        call: &Call<'_>,
        arg: WriteIn,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let data = call.write_data();
        let flags = arg.flags as i32;
        // One O_DIRECT write comes as several requests at a time, in any order: there the kernel's
        // offsets say what goes where.
        let placed = arg.write_flags & WRITE_CACHE != 0 || flags & libc::O_DIRECT != 0;
        let appends = flags & libc::O_APPEND != 0 && !placed;
        let written = self.with_file(call, |open| {
            open.failure.take()?;
            if attempt.is_again() {
                call.note(Replayed::Reissued);
            }
            let len = self.changing(open.vino, || {
                if appends {
                    self.append(call, arg.offset, open, &data, attempt)
                } else {
                    self.put(open, &data, arg.offset)
                }
            })?;
            self.is_in_pages(open.vino, &open.file, open.writes, arg.offset, len);
            Ok(len)
        })?;
        if arg.write_flags & WRITE_KILL_SUIDGID != 0 {
            self.clear_setid(&self.inode(&call.annex.node)?)?;
        }
        let out = WriteOut {
            size: written as u32,
            padding: 0,
        };
        Ok(Answer::Data(out.as_bytes().to_vec()))
    }

    /// Writes at an offset.
    fn put(&self, open: &OpenFile, data: &[Span<'_>], offset: u64) -> Result<usize, Errno> {
        match &self.retainer {
            Some(retainer) => retainer.write(open, data, offset),
            None => write_all(&open.file, data, offset),
        }
    }

    /// Makes durable what is retained of a file: what comes now must come after it.
    pub(super) fn settle(&self, identity: &Identity) -> Result<(), Errno> {
        match (&self.retainer, vino(identity)) {
            (Some(retainer), Some(vino)) => retainer.settle(vino),
            _ => Ok(()),
        }
    }

    /// Appends, at the end the store knows: other clients append as well. The offset goes into the
    /// journal before the first byte goes into the file. A second attempt writes to the same place,
    /// unless somebody else has written there.
    fn append(
        &self,
        call: &Call<'_>,
        kernels_offset: u64,
        open: &OpenFile,
        data: &[Span<'_>],
        attempt: Attempt<'_>,
    ) -> Result<usize, Errno> {
        let _alone = self.inodes.lock(call.annex.node.identity);
        let journal = attempt.journal();
        if !attempt.is_again() || journal.flags & OFFSET_TAKEN == 0 {
            let offset = self.size_before(call)?;
            if offset != kernels_offset {
                // Others have appended, and the kernel has the data where it does not belong.
                let from = offset.min(kernels_offset) as i64;
                self.frontend.stale(&call.annex.node.identity, from, 0);
            }
            call.slot.set_journal(&Journal {
                offset,
                flags: journal.flags | OFFSET_TAKEN,
                ..*journal
            });
            return self.put(open, data, offset);
        }
        // Another file is opened to look: nothing is retained here.
        self.settle(&call.annex.node.identity)?;
        let wanted: Vec<u8> = data.iter().flat_map(Span::to_vec).collect();
        let inode = self.inode(&call.annex.node)?;
        let there = self.read_behind(&inode, journal.offset)?;
        if memchr::memmem::find(&there, &wanted).is_some() {
            call.note(Replayed::Verified);
            return Ok(wanted.len());
        }
        // The beginning of it, or nothing: the rest is missing. Otherwise it is somebody else's.
        let (offset, done) = if wanted.starts_with(&there) {
            (journal.offset, there.len())
        } else {
            (inode.stat(&self.superuser)?.size, 0)
        };
        let file = &open.file;
        let more = file.write_bytes(&wanted[done..], offset + done as u64)?;
        if self.retainer.is_some() {
            file.sync(true)?;
        }
        Ok(done + more)
    }

    /// What lies in a file from an offset on.
    fn read_behind(&self, inode: &Inode, offset: u64) -> Result<Vec<u8>, Errno> {
        let end = inode.stat(&self.superuser)?.size;
        let len = end.saturating_sub(offset).min(SEARCH_MAX) as usize;
        let reader = inode.open(libc::O_RDONLY, &self.superuser)?;
        let mut there = vec![0; len];
        let mut done = 0;
        while done < len {
            match reader.read_bytes(&mut there[done..], offset + done as u64)? {
                0 => break,
                more => done += more,
            }
        }
        there.truncate(done);
        Ok(there)
    }

    /// Ends the caller's locks on the file, as `close(2)` does for `fcntl(2)` locks.
    pub(super) fn flush(&self, call: &Call<'_>, arg: FlushIn) -> Result<Answer, Errno> {
        self.unlock_owner(call.annex.node.nodeid, arg.lock_owner)?;
        self.handles.failure(call.annex.handle.fh)?;
        Ok(Answer::Empty)
    }

    pub(super) fn release(&self, call: &Call<'_>) -> Result<Answer, Errno> {
        let fh = call.annex.handle.fh;
        if let Some(handle) = self.handles.remove(fh)
            && let Handle::File(open) = &*handle
        {
            self.warm.closed(open.vino);
        }
        self.unlock_handle(fh)?;
        Ok(Answer::Empty)
    }

    /// FSYNC and FSYNCDIR. A success of the library counts only when the session still lives
    /// afterwards: one that was evicted has dropped what it had and says so to nobody.
    pub(super) fn fsync(&self, call: &Call<'_>, arg: FsyncIn) -> Result<Answer, Errno> {
        let data_only = arg.fsync_flags & FSYNC_FDATASYNC != 0;
        match &*self.handle(call)? {
            Handle::File(open) => {
                open.failure.take()?;
                let retained = self.retainer.as_ref();
                let retained = retained.and_then(|r| Some((r, r.newest(open.vino)?)));
                let synced = open.file.sync(data_only);
                self.prove_session(&open.inode);
                match (retained, synced) {
                    (Some((retainer, newest)), Ok(())) => retainer.durable(open.vino, newest),
                    (Some((retainer, _)), Err(errno)) => {
                        retainer.failed(open.vino, errno);
                        // This handle is told now.
                        let _ = open.failure.take();
                    }
                    (None, _) => {}
                }
                synced?;
            }
            Handle::Directory(_) => {
                let inode = self.inode(&call.annex.node)?;
                inode.sync(data_only)?;
                self.prove_session(&inode);
            }
        }
        Ok(Answer::Empty)
    }

    pub(super) fn syncfs(&self) -> Result<Answer, Errno> {
        let retained = self.retainer.as_ref();
        let newest = retained.map_or_else(Vec::new, |r| r.newest_of_all());
        self.client.sync()?;
        self.prove_session(&self.root);
        for (vino, newest) in newest {
            retained.inspect(|r| r.durable(vino, newest));
        }
        Ok(Answer::Empty)
    }

    pub(super) fn fallocate(&self, call: &Call<'_>, arg: FallocateIn) -> Result<Answer, Errno> {
        let number = |n: u64| i64::try_from(n).map_err(|_| Errno::EFBIG);
        let (offset, length) = (number(arg.offset)?, number(arg.length)?);
        self.settle(&call.annex.node.identity)?;
        self.with_file(call, |open| {
            open.file.allocate(arg.mode as i32, offset, length)?;
            // A new size is only noted down, and no object shows it.
            open.file.sync(false)
        })?;
        // With `FUSE_HANDLE_KILLPRIV_V2` the kernel leaves this to us. Whoever is not root is taken
        // to be without CAP_FSETID.
        if call.request.header.uid != 0 {
            self.clear_setid(&self.inode(&call.annex.node)?)?;
        }
        Ok(Answer::Empty)
    }

    /// The store does not tell holes from data: all is data up to the end.
    pub(super) fn lseek(&self, call: &Call<'_>, arg: LseekIn) -> Result<Answer, Errno> {
        let size = self.size_before(call)?;
        if arg.offset >= size {
            return Err(Errno::ENXIO);
        }
        let offset = match arg.whence as i32 {
            libc::SEEK_DATA => arg.offset,
            libc::SEEK_HOLE => size,
            _ => return Err(Errno::EINVAL), // the kernel does the others itself
        };
        Ok(Answer::Data(LseekOut { offset }.as_bytes().to_vec()))
    }
}

/// Writes all of it if the store has room; it takes a part only when something is wrong, and says
/// what when it gets the rest. What was written by then counts.
pub(super) fn write_all(file: &File, data: &[Span<'_>], offset: u64) -> Result<usize, Errno> {
    let mut done = file.write(data, offset)?;
    if done < total(data) {
        let rest: Vec<u8> = data.iter().flat_map(Span::to_vec).skip(done).collect();
        done += file.write_bytes(&rest, offset + done as u64).unwrap_or(0);
    }
    Ok(done)
}
