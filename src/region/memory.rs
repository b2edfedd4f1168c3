//! Sealed memory files and their mappings: the only place that turns shared memory into references.
//!
//! Another process may write to this memory at any time, so nothing here hands out `&[u8]`: words are
//! atomics, everything else is copied in or out, and payload is passed to system calls by address.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// A memfd of fixed size, mapped shared.
///
/// The file is sealed against resizing and against further seals: without `F_SEAL_SEAL` a peer
/// could add `F_SEAL_FUTURE_WRITE` and every later generation would fail to map it.
pub struct Memory {
    file: File,
    map: MmapRaw,
}

impl Memory {
    /// Creates a memory file of `len` bytes. It is sparse: pages take memory when they are touched.
    pub fn create(name: &str, len: usize) -> io::Result<Memory> {
        let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        let file = File::from(fd);
        file.set_len(len as u64)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        Memory::map(file)
    }

    /// Maps a memory file another process created. Refuses one that could still change its size.
    pub fn open(fd: OwnedFd) -> io::Result<Memory> {
        let file = File::from(fd);
        let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SEALS) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "region memory is not sealed against resizing",
            ));
        }
        Memory::map(file)
    }

    fn map(file: File) -> io::Result<Memory> {
        let map = MmapOptions::new().map_raw(&file)?;
        map.advise(Advice::DontFork)?;
        Ok(Memory { file, map })
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Gives every page of `[offset, offset + len)` memory and, if the limit allows, locks it there.
    ///
    /// The kernel answers a request with EIO when its reader is killed while a page of the buffer
    /// has to be faulted in, so buffers are populated before the first read.
    pub fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let ptr = self.at(offset, len);
        // SAFETY: `at` checked that the range lies inside the mapping, which stays valid for the
        // call; MADV_POPULATE_WRITE and mlock only fault pages in.
        unsafe {
            if libc::madvise(ptr.cast(), len, libc::MADV_POPULATE_WRITE) != 0 {
                return Err(io::Error::last_os_error());
            }
            // Best effort: RLIMIT_MEMLOCK may be smaller. Without swap it changes nothing.
            libc::mlock(ptr.cast(), len);
        }
        Ok(())
    }

    /// Gives the memory of whole pages in `[offset, offset + len)` back; they read as zeros.
    pub fn discard(&self, offset: usize, len: usize) {
        let _ = nix::fcntl::fallocate(
            &self.file,
            nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE
                | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE,
            offset as i64,
            len as i64,
        );
    }

    /// Address of a range of the mapping. Panics outside of it: offsets are computed from a
    /// validated layout, so that would be a bug of this program and not of its input.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len()),
            "range {offset}+{len} is outside of a memory of {} bytes",
            self.len()
        );
        self.map.as_mut_ptr().wrapping_add(offset)
    }

    /// The 16-bit word at `offset`, which must be a multiple of 2.
    pub fn u16(&self, offset: usize) -> &AtomicU16 {
        assert!(offset.is_multiple_of(2));
        // SAFETY: as for `u32`.
        unsafe { AtomicU16::from_ptr(self.at(offset, 2).cast()) }
    }

    /// The 32-bit word at `offset`, which must be a multiple of 4.
    pub fn u32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: in bounds (`at`), aligned (the mapping is page aligned), alive as long as `self`;
        // all access by all processes is atomic or by the copies below, which race by design.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// The 64-bit word at `offset`, which must be a multiple of 8.
    pub fn u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: as for `u32`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    /// Copies bytes out. If another process writes meanwhile, the copy may be a mixture.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: source in bounds, destination a unique borrow of private memory.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes in.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: destination in bounds, source private memory that does not overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies a range of a memory in.
    pub fn copy(&self, offset: usize, from: &Span<'_>) {
        let to = self.at(offset, from.len());
        // SAFETY: both in bounds of live mappings (a span is only made by `span`); they may be the same
        // memory, so the ranges may overlap.
        unsafe { std::ptr::copy(from.iov.iov_base.cast::<u8>(), to, from.len()) }
    }

    /// Copies a struct out.
    pub fn get<T: FromBytes + IntoBytes + FromZeros>(&self, offset: usize) -> T {
        let mut value = T::new_zeroed();
        self.read(offset, value.as_mut_bytes());
        value
    }

    /// Copies a struct in.
    pub fn put<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.write(offset, value.as_bytes());
    }

    /// A range to hand to a system call.
    pub fn span(&self, offset: usize, len: usize) -> Span<'_> {
        Span {
            iov: libc::iovec {
                iov_base: self.at(offset, len).cast(),
                iov_len: len,
            },
            memory: PhantomData,
        }
    }
}

const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_SEAL);

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A range of shared memory as a system call takes it (`struct iovec`).
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Span<'m> {
    iov: libc::iovec,
    memory: PhantomData<&'m Memory>,
}

impl Span<'_> {
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.iov.iov_len
    }

    pub(crate) fn iovec(&self) -> libc::iovec {
        self.iov
    }

    /// Copies the bytes out, for data that has to be looked at.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        // SAFETY: a span is only made by `Memory::span`, in bounds and bound to its lifetime.
        unsafe {
            std::ptr::copy_nonoverlapping(self.iov.iov_base.cast(), bytes.as_mut_ptr(), self.len());
        }
        bytes
    }

    /// Copies bytes in, at most the span's length.
    pub fn fill(&self, bytes: &[u8]) {
        let len = bytes.len().min(self.len());
        // SAFETY: as for `to_vec`; `len` is within both.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.iov.iov_base.cast(), len) }
    }

    /// The first `len` bytes, or all if there are fewer.
    pub fn first(mut self, len: usize) -> Self {
        self.iov.iov_len = self.iov.iov_len.min(len);
        self
    }
}

/// Cuts a list of spans to `len` bytes in all.
pub fn limit(spans: &mut Vec<Span<'_>>, mut len: usize) {
    spans.retain_mut(|span| {
        *span = span.first(len);
        len -= span.len();
        span.len() > 0
    });
}

/// Total length of a list of spans.
pub fn total(spans: &[Span<'_>]) -> usize {
    spans.iter().map(Span::len).sum()
}

/// The list as `readv(2)` and its relatives take it.
pub(crate) fn iovecs(spans: &[Span<'_>]) -> *const libc::iovec {
    // `Span` is a transparent iovec.
    spans.as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_can_not_be_resized_or_sealed_further() {
        let memory = Memory::create("test", 8192).unwrap();
        assert!(memory.file.set_len(4096).is_err());
        let more = FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_FUTURE_WRITE);
        assert!(fcntl(&memory.file, more).is_err());
    }

    #[test]
    fn an_unsealed_memory_is_refused() {
        let fd = memfd_create("test", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&fd, 4096).unwrap();
        assert!(Memory::open(fd).is_err());
    }

    #[test]
    fn spans_are_cut_to_a_length() {
        let memory = Memory::create("test", 8192).unwrap();
        let mut spans = vec![memory.span(0, 100), memory.span(4096, 100)];
        limit(&mut spans, 150);
        assert_eq!(total(&spans), 150);
        limit(&mut spans, 100);
        assert_eq!(spans.len(), 1);
    }
}
