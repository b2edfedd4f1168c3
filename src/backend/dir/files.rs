//! Open files and their data.
//!
//! A handle is a number the kernel and the tables know; the open file behind it is this process's
//! own. A number from an earlier generation gets a file again when it is first used, opened with this
//! process's rights: the caller's were decided at its own open, and a chmod since then costs nothing.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rustix::fs::{FallocateFlags, SeekFrom};
use zerocopy::IntoBytes;

use super::directory::Stream;
use super::identity::stat;
use super::{Answer, Attempt, Call, Dir};
use crate::backend::Replayed;
use crate::region::memory::{Span, total};
use crate::region::slot::{HandleRef, Journal, NodeRef};
use crate::sys;
use crate::wire::abi::{
    CopyFileRangeIn, CopyFileRangeOut, FSYNC_FDATASYNC, FallocateIn, FlushIn, FsyncIn, Kstatfs,
    LseekIn, LseekOut, OPEN_KILL_SUIDGID, OpenIn, ReadIn, WRITE_KILL_SUIDGID, WriteIn, WriteOut,
};
use crate::wire::{Errno, Opcode};

/// Journal flag: an append was given the offset in [`Journal::offset`].
const OFFSET_TAKEN: u64 = 1;
/// `FUSE_WRITE_CACHE`: pages written back, which lie where they lie even if the file appends.
const WRITE_CACHE: u32 = 1 << 0;
/// Most bytes of one COPY_FILE_RANGE, below the limit of the system call (`MAX_RW_COUNT`).
const COPY_MAX: u64 = 1 << 30;

/// An open file or directory.
pub(super) struct Handle {
    pub(super) fd: OwnedFd,
    /// Flags it was opened with, as the kernel sent them.
    flags: i32,
    /// The store appends, wherever we write: a file marked append-only opens in no other way.
    append_only: bool,
    /// Where a directory is being read.
    pub(super) stream: Mutex<Stream>,
}

impl Handle {
    pub(super) fn new(fd: OwnedFd, flags: i32) -> Handle {
        Handle {
            fd,
            flags,
            append_only: false,
            stream: Mutex::default(),
        }
    }
}

/// The open files of this process by handle.
#[derive(Default)]
pub(super) struct Handles(RwLock<HashMap<u64, Arc<Handle>>>);

impl Handles {
    pub(super) fn get(&self, fh: u64) -> Option<Arc<Handle>> {
        self.0.read().get(&fh).cloned()
    }

    /// Keeps a newly opened file.
    pub(super) fn insert(&self, fh: u64, handle: Handle) {
        self.0.write().insert(fh, Arc::new(handle));
    }

    /// Keeps a restored file; when another thread was faster, its file is the one.
    fn restore(&self, fh: u64, handle: Handle) -> Arc<Handle> {
        let mut handles = self.0.write();
        handles
            .entry(fh)
            .or_insert_with(|| Arc::new(handle))
            .clone()
    }

    fn remove(&self, fh: u64) {
        // Dropped after the lock: closing may take long.
        let _handle = self.0.write().remove(&fh);
    }
}

/// The flags to open with. What creates, truncates or names was done by whoever opened first; an
/// append gets its offset in `write`, so that it can be repeated; signals and terminals are not ours.
pub(super) fn sanitized(flags: i32) -> i32 {
    const TMPFILE: i32 = libc::O_TMPFILE & !libc::O_DIRECTORY;
    let flags = flags
        & !(libc::O_CREAT
            | libc::O_EXCL
            | libc::O_TRUNC
            | libc::O_APPEND
            | libc::O_NOFOLLOW
            | libc::O_NOCTTY
            | libc::O_ASYNC
            | libc::O_PATH);
    if flags & TMPFILE != 0 {
        flags & !libc::O_TMPFILE
    } else {
        flags
    }
}

impl Dir {
    /// Opens what a node descriptor stands for, as somebody asked with these flags.
    fn open_handle(&self, node: impl AsFd, flags: i32) -> Result<Handle, Errno> {
        match self.reopen(&node, sanitized(flags)) {
            Err(Errno::EPERM) if flags & libc::O_APPEND != 0 => {
                let fd = self.reopen(&node, sanitized(flags) | libc::O_APPEND)?;
                Ok(Handle {
                    append_only: true,
                    ..Handle::new(fd, flags)
                })
            }
            fd => Ok(Handle::new(fd?, flags)),
        }
    }

    /// The file the request works through.
    pub(super) fn file(&self, call: &Call<'_>) -> Result<Arc<Handle>, Errno> {
        self.file_of(call, &call.annex.handle, &call.annex.node, call.path())
    }

    fn file_of(
        &self,
        call: &Call<'_>,
        handle: &HandleRef,
        node: &NodeRef,
        path: &OsStr,
    ) -> Result<Arc<Handle>, Errno> {
        if let Some(file) = self.handles.get(handle.fh) {
            return Ok(file);
        }
        if handle.fh == 0 {
            return Err(Errno::EBADF);
        }
        let file = self
            .descriptor(node, path, call.vault)
            .and_then(|node| self.open_handle(node, handle.open_flags as i32))
            .map_err(|e| match e {
                // Passing; the handle is not lost.
                Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::EINTR => e,
                _ => Errno::ESTALE,
            })?;
        Ok(self.handles.restore(handle.fh, file))
    }

    pub(super) fn open_node(
        &self,
        call: &Call<'_>,
        arg: OpenIn,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let node = self.node(call)?;
        let requested = arg.flags as i32;
        let file = if call.request.opcode == Opcode::Opendir {
            self.open_handle(&node, requested | libc::O_DIRECTORY)?
        } else {
            self.open_handle(&node, requested)?
        };
        // Not sent as long as FUSE_ATOMIC_O_TRUNC is not negotiated.
        if requested & libc::O_TRUNC != 0 {
            self.truncate(call, 0, attempt)?;
            if arg.open_flags & OPEN_KILL_SUIDGID != 0 {
                self.clear_setid(&node)?;
            }
        }
        self.handles.insert(call.annex.new_fh, file);
        Ok(Answer::Opened(0))
    }

    pub(super) fn read(&self, call: &Call<'_>, arg: ReadIn) -> Result<Answer, Errno> {
        let file = self.file(call)?;
        let into = call.read_buffer(arg.size as usize);
        let len = sys::preadv(file.fd.as_fd(), &into, arg.offset)?;
        Ok(Answer::Filled(len))
    }

    pub(super) fn write(
        &self,
        call: &Call<'_>,
        arg: WriteIn,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let file = self.file(call)?;
        let flags = arg.flags as i32;
        let data = call.write_data();
        // One O_DIRECT write comes as several requests at a time, in any order: there the kernel's
        // offsets say what goes where.
        let placed = arg.write_flags & WRITE_CACHE != 0 || flags & libc::O_DIRECT != 0;
        let written = if flags & libc::O_APPEND != 0 && !placed {
            self.append(call, &file, &data, attempt)?
        } else {
            if attempt.is_again() {
                call.note(Replayed::Reissued);
            }
            write_all(&file, &data, arg.offset)?
        };
        if arg.write_flags & WRITE_KILL_SUIDGID != 0 {
            self.clear_setid(&file.fd)?;
        }
        // O_SYNC may have been set after the open, or for this write alone (`pwritev2(2)`).
        if flags & libc::O_DSYNC != 0 && file.flags & libc::O_DSYNC == 0 {
            if flags & libc::O_SYNC == libc::O_SYNC {
                rustix::fs::fsync(&file.fd)?;
            } else {
                rustix::fs::fdatasync(&file.fd)?;
            }
        }
        let out = WriteOut {
            size: written as u32,
            padding: 0,
        };
        Ok(Answer::Data(out.as_bytes().to_vec()))
    }

    /// Appends. The offset goes into the journal before the first byte goes into the file, so that a
    /// second attempt writes to the same place. No other append may get in between.
    fn append(
        &self,
        call: &Call<'_>,
        file: &Handle,
        data: &[Span<'_>],
        attempt: Attempt<'_>,
    ) -> Result<usize, Errno> {
        let _alone = self.inodes.lock(call.annex.node.identity);
        let journal = attempt.journal();
        if file.append_only && attempt.is_again() && journal.flags & OFFSET_TAKEN != 0 {
            return self.append_rest(call, file, data, journal.offset);
        }
        let offset = if attempt.is_again() && journal.flags & OFFSET_TAKEN != 0 {
            journal.offset
        } else {
            let offset = stat(&file.fd)?.stx_size;
            call.slot.set_journal(&Journal {
                offset,
                flags: journal.flags | OFFSET_TAKEN,
                ..*journal
            });
            offset
        };
        if attempt.is_again() {
            call.note(Replayed::Reissued);
        }
        write_all(file, data, offset)
    }

    /// A second attempt on a file the store appends to itself: what lies at the offset says how much
    /// of the first one was written.
    fn append_rest(
        &self,
        call: &Call<'_>,
        file: &Handle,
        data: &[Span<'_>],
        offset: u64,
    ) -> Result<usize, Errno> {
        // The handle may be open for writing only.
        let reader = self.reopen(self.node(call)?, libc::O_RDONLY)?;
        let wanted: Vec<u8> = data.iter().flat_map(Span::to_vec).collect();
        let mut there = vec![0; wanted.len()];
        let mut len = 0;
        while len < there.len() {
            match rustix::io::pread(&reader, &mut there[len..], offset + len as u64)? {
                0 => break,
                more => len += more,
            }
        }
        let written = if there[..len] == wanted[..len] {
            len
        } else {
            0
        };
        if written == wanted.len() {
            call.note(Replayed::Verified);
            return Ok(written);
        }
        call.note(Replayed::Reissued);
        Ok(written + rustix::io::write(&file.fd, &wanted[written..])?)
    }

    /// Lets the store say what it could not write: closing a duplicate is what `close(2)` would do.
    pub(super) fn flush(&self, call: &Call<'_>, arg: FlushIn) -> Result<Answer, Errno> {
        if call.annex.handle.flags & HandleRef::OWNER_HAS_LOCKS != 0 {
            self.unlock_owner(call, arg.lock_owner)?;
        }
        if let Some(file) = self.handles.get(call.annex.handle.fh) {
            nix::unistd::close(file.fd.try_clone()?)?;
        }
        Ok(Answer::Empty)
    }

    pub(super) fn release(&self, call: &Call<'_>) -> Result<Answer, Errno> {
        self.handles.remove(call.annex.handle.fh);
        self.unlock_handle(call)?;
        Ok(Answer::Empty)
    }

    pub(super) fn fsync(&self, call: &Call<'_>, arg: FsyncIn) -> Result<Answer, Errno> {
        let file = self.file(call)?;
        if arg.fsync_flags & FSYNC_FDATASYNC != 0 {
            rustix::fs::fdatasync(&file.fd)?;
        } else {
            rustix::fs::fsync(&file.fd)?;
        }
        Ok(Answer::Empty)
    }

    pub(super) fn syncfs(&self) -> Result<Answer, Errno> {
        rustix::fs::syncfs(&self.anchor)?;
        Ok(Answer::Empty)
    }

    pub(super) fn statfs(&self, call: &Call<'_>) -> Result<Answer, Errno> {
        let st = rustix::fs::fstatfs(self.node(call)?)?;
        let out = Kstatfs {
            blocks: st.f_blocks as u64,
            bfree: st.f_bfree as u64,
            bavail: st.f_bavail as u64,
            files: st.f_files as u64,
            ffree: st.f_ffree as u64,
            bsize: st.f_bsize as u32,
            namelen: st.f_namelen as u32,
            frsize: st.f_frsize as u32,
            ..Default::default()
        };
        Ok(Answer::Data(out.as_bytes().to_vec()))
    }

    pub(super) fn fallocate(&self, call: &Call<'_>, arg: FallocateIn) -> Result<Answer, Errno> {
        let file = self.file(call)?;
        let mode = FallocateFlags::from_bits_retain(arg.mode);
        // The kernel lets through only modes that can be repeated (`fuse_file_fallocate`).
        if mode.intersects(FallocateFlags::COLLAPSE_RANGE | FallocateFlags::INSERT_RANGE) {
            return Err(Errno::EOPNOTSUPP);
        }
        rustix::fs::fallocate(&file.fd, mode, arg.offset, arg.length)?;
        self.modified(call, &file)?;
        Ok(Answer::Empty)
    }

    /// Takes the set-id bits away after a change the kernel sends without a flag that says so: with
    /// `FUSE_HANDLE_KILLPRIV_V2` it leaves this to us, and the store does not do it for our rights.
    fn modified(&self, call: &Call<'_>, file: &Handle) -> Result<(), Errno> {
        // Whoever is not root is taken to be without CAP_FSETID.
        if call.request.header.uid == 0 {
            return Ok(());
        }
        self.clear_setid(&file.fd)
    }

    pub(super) fn lseek(&self, call: &Call<'_>, arg: LseekIn) -> Result<Answer, Errno> {
        let file = self.file(call)?;
        let whence = match arg.whence as i32 {
            libc::SEEK_DATA => SeekFrom::Data(arg.offset),
            libc::SEEK_HOLE => SeekFrom::Hole(arg.offset),
            _ => return Err(Errno::EINVAL), // the kernel does the others itself
        };
        let out = LseekOut {
            offset: rustix::fs::seek(&file.fd, whence)?,
        };
        Ok(Answer::Data(out.as_bytes().to_vec()))
    }

    pub(super) fn copy_file_range(
        &self,
        call: &Call<'_>,
        arg: CopyFileRangeIn,
    ) -> Result<Answer, Errno> {
        let from = self.file(call)?;
        let annex = &call.annex;
        let to = self.file_of(
            call,
            &annex.second_handle,
            &annex.second,
            call.second_path(),
        )?;
        let (mut off_in, mut off_out) = (arg.off_in, arg.off_out);
        let len = arg.len.min(COPY_MAX) as usize;
        let copied = rustix::fs::copy_file_range(
            &from.fd,
            Some(&mut off_in),
            &to.fd,
            Some(&mut off_out),
            len,
        )?;
        self.modified(call, &to)?;
        Ok(Answer::Data(
            if call.request.opcode == Opcode::CopyFileRange64 {
                let bytes_copied = copied as u64;
                CopyFileRangeOut { bytes_copied }.as_bytes().to_vec()
            } else {
                let (size, padding) = (copied as u32, 0);
                WriteOut { size, padding }.as_bytes().to_vec()
            },
        ))
    }
}

/// Writes all of it if the store has room. A store that takes only a part gets the rest again, until
/// it says why; what was written by then counts.
fn write_all(file: &Handle, data: &[Span<'_>], offset: u64) -> Result<usize, Errno> {
    let fd = file.fd.as_fd();
    let all = total(data);
    let mut done = sys::pwritev(fd, data, offset)?;
    if done < all {
        // Rare, so the rest is copied rather than cut out of the spans.
        let rest: Vec<u8> = data.iter().flat_map(Span::to_vec).skip(done).collect();
        let mut rest = &rest[..];
        while !rest.is_empty() {
            match rustix::io::pwrite(fd, rest, offset + done as u64) {
                Ok(0) | Err(_) => break,
                Ok(len) => {
                    rest = &rest[len..];
                    done += len;
                }
            }
        }
    }
    Ok(done)
}
