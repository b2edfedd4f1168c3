//! Locks.
//!
//! The kernel in front names an owner with each lock; the store knows open file descriptions. So each
//! owner gets a description of its own per node, which carries its locks and lies in the vault: when
//! this process dies the locks are still held, by the same description, and the next generation works
//! on with it. Other clients of the store see them all the time.
//!
//! Nothing blocks here: a lock that cannot be had is EAGAIN, and the front-end lets the caller wait.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::FlockOperation;
use zerocopy::IntoBytes;

use super::{Answer, Call, Dir, Stripes, VaultKey};
use crate::backend::convert::{LOCK_END, from_flock, to_flock};
use crate::sys;
use crate::wire::Errno;
use crate::wire::abi::{FileLock, LK_FLOCK, LkIn, LkOut};

/// Who holds a lock on what.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Owner {
    nodeid: u64,
    owner: u64,
    flock: bool,
}

impl Owner {
    fn key(self) -> VaultKey {
        VaultKey::Lock {
            nodeid: self.nodeid,
            owner: self.owner,
            flock: self.flock,
        }
    }
}

/// The descriptions this process has in hand; the vault may have more.
#[derive(Default)]
pub(super) struct Locks {
    descriptions: Mutex<HashMap<Owner, Description>>,
    /// Held over a whole operation of one owner, the trip to the vault included.
    owners: Stripes,
}

#[derive(Clone)]
struct Description {
    fd: Arc<OwnedFd>,
    /// The handle its last lock was taken through.
    fh: u64,
}

impl Dir {
    pub(super) fn setlk(&self, call: &Call<'_>, arg: LkIn) -> Result<Answer, Errno> {
        let owner = owner_of(call, &arg);
        let lock = to_flock(&arg.lk)?;
        let _alone = self.locks.owners.lock(owner);
        let known = self.description(call, owner)?;
        if i32::from(lock.l_type) == libc::F_UNLCK {
            let Some(fd) = known else {
                return Ok(Answer::Empty);
            };
            let whole = owner.flock || (lock.l_start == 0 && lock.l_len == 0);
            return if whole {
                self.unlock_all(call, owner, &fd)
            } else {
                sys::ofd_lock(&fd, false, lock)
                    .map(|_| Answer::Empty)
                    .map_err(Errno::from)
            };
        }
        let fresh = known.is_none();
        let fd = match known {
            Some(fd) => fd,
            None => self.new_description(call, owner)?,
        };
        let locked = if owner.flock {
            flock(&fd, lock.l_type)
        } else {
            sys::ofd_lock(&fd, false, lock)
                .map(drop)
                .map_err(Errno::from)
        };
        match locked {
            Ok(()) => {
                let fh = call.annex.handle.fh;
                let mut descriptions = self.locks.descriptions.lock();
                descriptions.insert(owner, Description { fd, fh });
                Ok(Answer::Empty)
            }
            Err(error) => {
                if fresh {
                    // It carries nothing.
                    self.forget(call, owner);
                }
                // fcntl(2) may say either.
                Err(if error == Errno::EACCES {
                    Errno::EAGAIN
                } else {
                    error
                })
            }
        }
    }

    pub(super) fn getlk(&self, call: &Call<'_>, arg: LkIn) -> Result<Answer, Errno> {
        let owner = owner_of(call, &arg);
        let lock = to_flock(&arg.lk)?;
        let _alone = self.locks.owners.lock(owner);
        // The owner's own locks are no conflict, so ask through its description.
        let fd = match self.description(call, owner)? {
            Some(fd) => fd,
            None => Arc::new(self.open_for_locks(call)?),
        };
        let found = sys::ofd_lock(&fd, true, lock)?;
        // Owners of descriptions have no pid: whoever has the lock table knows it.
        let lk = from_flock(&found, &arg.lk);
        Ok(Answer::Data(LkOut { lk }.as_bytes().to_vec()))
    }

    /// Drops all `fcntl(2)` locks an owner has on the request's node.
    pub(super) fn unlock_owner(&self, call: &Call<'_>, owner: u64) -> Result<(), Errno> {
        let owner = Owner {
            nodeid: call.annex.node.nodeid,
            owner,
            flock: false,
        };
        let _alone = self.locks.owners.lock(owner);
        if let Some(fd) = self.description(call, owner)? {
            self.unlock_all(call, owner, &fd)?;
        }
        Ok(())
    }

    /// Drops the locks that were last taken through a handle: its flock, and those its open file
    /// description owned, for which the kernel sends no unlock. Which owners that are is not asked
    /// of the request: a RELEASE comes late, and its owner's number may be somebody else's by then.
    /// Descriptions of an earlier generation lie in the vault alone, which drops them itself.
    pub(super) fn unlock_handle(&self, call: &Call<'_>) -> Result<(), Errno> {
        let fh = call.annex.handle.fh;
        let mine: Vec<Owner> = {
            let descriptions = self.locks.descriptions.lock();
            let mine = descriptions.iter().filter(|(_, d)| d.fh == fh);
            mine.map(|(owner, _)| *owner).collect()
        };
        for owner in mine {
            let _alone = self.locks.owners.lock(owner);
            let still = self.locks.descriptions.lock().get(&owner).cloned();
            if let Some(description) = still.filter(|d| d.fh == fh) {
                self.unlock_all(call, owner, &description.fd)?;
            }
        }
        Ok(())
    }

    /// The owner's description, if it has one: here, or in the vault from an earlier generation.
    fn description(&self, call: &Call<'_>, owner: Owner) -> Result<Option<Arc<OwnedFd>>, Errno> {
        if let Some(known) = self.locks.descriptions.lock().get(&owner) {
            return Ok(Some(known.fd.clone()));
        }
        let Some(fd) = call.vault.withdraw(owner.key())? else {
            return Ok(None);
        };
        let fd = Arc::new(fd);
        let description = Description {
            fd: fd.clone(),
            // Where it matters (`unlock_handle`), the owner is the handle's own description, so it
            // is this one that the locks were taken through.
            fh: call.annex.handle.fh,
        };
        self.locks.descriptions.lock().insert(owner, description);
        Ok(Some(fd))
    }

    /// A description for an owner without one, in the vault before it carries a lock.
    fn new_description(&self, call: &Call<'_>, owner: Owner) -> Result<Arc<OwnedFd>, Errno> {
        let fd = self.open_for_locks(call)?;
        call.vault.deposit(owner.key(), fd.as_fd())?;
        Ok(Arc::new(fd))
    }

    /// Write locks need a description that may write; what cannot be written (a directory, a
    /// read-only store, a program that runs) can have read locks.
    fn open_for_locks(&self, call: &Call<'_>) -> Result<OwnedFd, Errno> {
        let node = self.node(call)?;
        let writable = match self.reopen(&node, libc::O_RDWR) {
            // Marked append-only, perhaps.
            Err(Errno::EPERM) => self.reopen(&node, libc::O_RDWR | libc::O_APPEND),
            fd => fd,
        };
        match writable {
            Err(Errno::EISDIR | Errno::EACCES | Errno::EPERM | Errno::EROFS | Errno::ETXTBSY) => {
                self.reopen(&node, libc::O_RDONLY)
            }
            fd => fd,
        }
    }

    /// Unlocks, since the vault's duplicate would keep the locks, and drops the description.
    fn unlock_all(
        &self,
        call: &Call<'_>,
        owner: Owner,
        fd: &Arc<OwnedFd>,
    ) -> Result<Answer, Errno> {
        if owner.flock {
            rustix::fs::flock(fd, FlockOperation::Unlock)?;
        } else {
            let everything = FileLock {
                start: 0,
                end: LOCK_END,
                typ: libc::F_UNLCK as u32,
                pid: 0,
            };
            sys::ofd_lock(fd, false, to_flock(&everything)?)?;
        }
        self.forget(call, owner);
        Ok(Answer::Empty)
    }

    fn forget(&self, call: &Call<'_>, owner: Owner) {
        self.locks.descriptions.lock().remove(&owner);
        call.vault.discard(owner.key());
    }
}

fn owner_of(call: &Call<'_>, arg: &LkIn) -> Owner {
    Owner {
        nodeid: call.annex.node.nodeid,
        owner: arg.owner,
        flock: arg.lk_flags & LK_FLOCK != 0,
    }
}

fn flock(fd: &OwnedFd, kind: libc::c_short) -> Result<(), Errno> {
    let operation = match i32::from(kind) {
        libc::F_RDLCK => FlockOperation::NonBlockingLockShared,
        _ => FlockOperation::NonBlockingLockExclusive,
    };
    Ok(rustix::fs::flock(fd, operation)?)
}
