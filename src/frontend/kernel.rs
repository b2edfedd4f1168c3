//! The two threads on the kernel connection: one reads requests, one writes replies.
//!
//! The reader never executes anything and never waits for a slot, so that there is always somebody
//! who reads: with 1 000 callers blocked, `df` is still heard. Both threads sleep when nothing
//! happens.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::{Condvar, Mutex};

use super::core::{Core, Delivery, Io, deliver};
use super::notify::{Notifier, Stale};
use crate::region::Phase;
use crate::sys;

/// A reader without room looks after this time whether there still is a mount.
const ROOM_LIMIT: Duration = Duration::from_millis(500);

/// What the threads of a front-end share.
pub struct Shared {
    /// Connection and region.
    pub io: Io,
    /// Everything else.
    pub core: Mutex<Core>,
    /// What the kernel is to be told.
    pub notifier: Notifier,
    /// Wakes the supervisor.
    pub bell: EventFd,
    /// The supervisor sleeps without a timeout and has to be told of work.
    pub supervisor_sleeps: AtomicBool,
    /// A thread is looking at callers.
    pub looking: AtomicBool,
    /// The mount is gone.
    pub ended: AtomicBool,
    /// There is room to read again.
    room: Condvar,
    /// The core changed while somebody waits for its beginning ([`super::run`]).
    pub progress: Condvar,
}

impl Shared {
    /// The shared state of a front-end.
    pub fn new(io: Io, core: Core) -> std::io::Result<Shared> {
        Ok(Shared {
            io,
            core: Mutex::new(core),
            notifier: Notifier::default(),
            bell: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            supervisor_sleeps: AtomicBool::new(false),
            looking: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            room: Condvar::new(),
            progress: Condvar::new(),
        })
    }

    /// Wakes the supervisor.
    pub fn ring(&self) {
        // Fails only when the counter is full, and then it is awake anyway.
        let _ = self.bell.write(1);
    }

    /// Lets the reader go on if it waits for room and there is some.
    pub fn made_room(&self) {
        self.room.notify_one();
    }

    /// Reads requests until the mount is gone.
    pub fn read_requests(&self) {
        let Some(fuse) = self.io.fuse.get() else {
            return;
        };
        loop {
            let (index, chunks) = {
                let mut core = self.core.lock();
                while !core.may_read() && !self.ended.load(Ordering::Acquire) {
                    // With a limit: the mount may be gone meanwhile, which only a read shows.
                    if self.room.wait_for(&mut core, ROOM_LIMIT).timed_out() {
                        break;
                    }
                }
                core.reading()
            };
            let slot = self.io.region.slot(index);
            slot.set_phase(Phase::Reading);
            match sys::readv(fuse.as_fd(), &slot.read_spans(&chunks)) {
                Ok(len) => self.core.lock().arrived(&self.io, len),
                Err(e) => match e.raw_os_error() {
                    // ENOENT: the request was taken back while it was being read.
                    Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => continue,
                    Some(libc::ENODEV) => break,
                    _ => {
                        tracing::error!("cannot read from /dev/fuse: {e}");
                        break;
                    }
                },
            }
            if self.supervisor_sleeps.swap(false, Ordering::AcqRel) {
                self.ring();
            }
        }
        self.ended.store(true, Ordering::Release);
        self.ring();
    }

    /// Tells the kernel what is old, for the life of the process.
    pub fn notify(&self) {
        loop {
            if let Some(delivery) = self.notifier.tell_next(&self.io) {
                self.deliver(delivery);
            }
        }
    }

    /// Delivers replies for the life of the process.
    pub fn write_replies(&self) {
        let replies = self.io.region.replies();
        loop {
            let delivery = self.core.lock().next_delivery(&self.io);
            let Some(delivery) = delivery else {
                replies.wait(None);
                continue;
            };
            self.hand_out(delivery);
        }
    }

    /// Delivers a reply, if need be after the kernel has dropped pages. That is done elsewhere: a
    /// notification may wait for a reply that this thread has to write.
    pub fn hand_out(&self, delivery: Delivery) {
        match delivery.drops_pages() {
            Some(nodeid) => {
                let stale = Stale::everything(nodeid);
                self.notifier.push_before(stale, delivery);
            }
            None => self.deliver(delivery),
        }
    }

    fn deliver(&self, delivery: Delivery) {
        let taken = deliver(&self.io, &delivery);
        let unpins = {
            let mut core = self.core.lock();
            core.delivered(&self.io, delivery, taken);
            core.has_news()
        };
        if unpins {
            self.ring();
        }
        self.made_room();
        self.progress.notify_all();
    }
}
