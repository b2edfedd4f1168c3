//! Callers that wait for a lock. They hold no slot, so any number may wait and the unlock still gets
//! through; they survive every backend.

use super::*;

impl Core {
    /// Puts a SETLKW that could not get its lock among the waiters, or says why not.
    pub(super) fn wait_for_lock(
        &mut self,
        request: &Request<'_>,
        index: SlotIndex,
    ) -> Result<(), Errno> {
        let Some(in_slot) = &self.slots[index.get() as usize] else {
            return Ok(());
        };
        let mut held = in_slot.held.clone();
        if held.interrupted {
            return Err(Errno::EINTR);
        }
        let lock = settle::lock_of(request).ok_or(Errno::EIO)?;
        let mut bytes = [0; WAITER_BYTES];
        bytes.copy_from_slice(&setlk_bytes(request));
        held.lock_tries += 1;
        if held.lock_tries == 1 && self.tables.conflict(&lock).is_none() {
            // Whoever had it unlocked it between the backend's attempt and now.
            self.push_outside(held, bytes.to_vec());
            return Ok(());
        }
        let waiter = Waiter {
            unique: held.unique,
            fd_index: 0,
            sequence: held.sequence,
            request: bytes,
        };
        let added = self.tables.add_waiter(lock.nodeid, &waiter);
        added.map_err(|_| Errno::ENOLCK)?;
        // If nobody of this mount has it, somebody outside of the mount does, who will not tell us.
        let retry_at = sys::monotonic_ns() + retry_delay(held.lock_tries);
        self.waiting.insert(held.unique, Waiting { held, retry_at });
        Ok(())
    }

    /// Lets every waiter of a node try again whom no lock of this mount hinders any more.
    pub(super) fn serve_waiters(&mut self, io: &Io, nodeid: u64) {
        if self.waiting.is_empty() {
            return;
        }
        let mut served: Vec<Lock> = Vec::new();
        for waiter in self.tables.waiters_on(nodeid) {
            let Some(lock) = waiter_lock(&waiter) else {
                continue;
            };
            let hindered =
                self.tables.conflict(&lock).is_some() || served.iter().any(|s| s.conflicts(&lock));
            if !hindered {
                self.retry_waiter(waiter);
                served.push(lock);
            }
        }
        self.start_outside(io);
    }

    pub(super) fn retry_waiter(&mut self, waiter: Waiter) {
        self.tables.remove_waiter(waiter.unique);
        if let Some(waiting) = self.waiting.remove(&waiter.unique) {
            self.push_outside(waiting.held, waiter.request.to_vec());
        }
    }

    /// Waiters that nobody of this mount hinders try again from time to time.
    pub(super) fn retry_waiters(&mut self, io: &Io, now: u64) {
        let due: Vec<u64> = self
            .waiting
            .iter()
            .filter(|(_, w)| w.retry_at <= now)
            .map(|(&unique, _)| unique)
            .collect();
        if due.is_empty() || self.service != Service::Serving {
            return;
        }
        for waiter in self.tables.waiters() {
            if !due.contains(&waiter.unique) {
                continue;
            }
            let hindered = waiter_lock(&waiter).is_some_and(|l| self.tables.conflict(&l).is_some());
            if hindered {
                // Served when that lock goes; looked at again in case it was not that one.
                if let Some(w) = self.waiting.get_mut(&waiter.unique) {
                    w.retry_at = now + retry_delay(u32::MAX);
                }
            } else {
                self.retry_waiter(waiter);
            }
        }
        self.start_outside(io);
    }
}

/// Bytes of a SETLKW request.
const WAITER_BYTES: usize = size_of::<InHeader>() + size_of::<LkIn>();

/// Nanoseconds until a lock that somebody outside of the mount holds is tried again: soon, then
/// less and less often, at last once a second.
pub(super) fn retry_delay(tries: u32) -> u64 {
    let ms = 20u64 << tries.min(6);
    Duration::from_millis(ms.min(1000)).as_nanos() as u64
}

pub(super) fn setlk_bytes(request: &Request<'_>) -> Vec<u8> {
    use zerocopy::IntoBytes;
    let Op::Setlk(lk) = request.op else {
        return vec![0; WAITER_BYTES];
    };
    [request.header.as_bytes(), lk.as_bytes()].concat()
}

pub(super) fn waiter_lock(waiter: &Waiter) -> Option<Lock> {
    settle::lock_of(&Request::decode(&waiter.request).ok()?)
}
