//! Telling the kernel what is old.
//!
//! A notification waits for requests on the same inode, which may wait for a backend. So it is sent
//! by threads that do nothing else, and nothing waits for them.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};
use zerocopy::IntoBytes;

use super::core::{Delivery, Io};
use crate::wire::abi::{NotifyInvalInode, OutHeader, notify};

/// One that waits must not keep all others waiting.
pub const THREADS: usize = 3;

/// Something of an inode that the kernel has is old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// The node.
    pub nodeid: u64,
    /// First byte; negative: attributes only.
    pub off: i64,
    /// Bytes; 0: all that follow.
    pub len: i64,
}

impl Stale {
    /// Its attributes.
    pub fn attributes(nodeid: u64) -> Stale {
        let (off, len) = (-1, 0);
        Stale { nodeid, off, len }
    }

    /// Its attributes and all its pages.
    pub fn everything(nodeid: u64) -> Stale {
        let (off, len) = (0, 0);
        Stale { nodeid, off, len }
    }
}

/// What the kernel is to be told, and a reply that waits for it.
type Notice = (Stale, Option<Delivery>);

/// What the kernel is to be told.
#[derive(Default)]
pub struct Notifier {
    queue: Mutex<VecDeque<Notice>>,
    bell: Condvar,
}

impl Notifier {
    /// Adds something. What is there already is not added again.
    pub fn push(&self, stale: impl IntoIterator<Item = Stale>) {
        let mut queue = self.queue.lock();
        for one in stale {
            // The last few: bursts are of one file.
            let mut last = queue.iter().rev().take(16);
            if !last.any(|(there, _)| *there == one) {
                queue.push_back((one, None));
            }
        }
        drop(queue);
        self.bell.notify_all();
    }

    /// Has a reply delivered when the kernel has been told.
    pub fn push_before(&self, stale: Stale, delivery: Delivery) {
        self.queue.lock().push_back((stale, Some(delivery)));
        self.bell.notify_one();
    }

    /// Tells the kernel of the next notice. Returns a reply that waited for it.
    pub fn tell_next(&self, io: &Io) -> Option<Delivery> {
        let (stale, delivery) = {
            let mut queue = self.queue.lock();
            loop {
                match queue.pop_front() {
                    Some(notice) => break notice,
                    None => self.bell.wait(&mut queue),
                }
            }
        };
        if let Some(fuse) = io.fuse.get() {
            let body = NotifyInvalInode {
                ino: stale.nodeid,
                off: stale.off,
                len: stale.len,
            };
            let header = OutHeader {
                len: (size_of::<OutHeader>() + size_of::<NotifyInvalInode>()) as u32,
                error: notify::INVAL_INODE,
                unique: 0,
            };
            // ENOENT: the kernel does not know it any more.
            let _ = nix::unistd::write(fuse, &[header.as_bytes(), body.as_bytes()].concat());
        }
        delivery
    }
}
