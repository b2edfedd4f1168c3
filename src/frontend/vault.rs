//! The descriptors that must outlive the backend.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use crate::backend::VaultKey;
use crate::region::Identity;
use crate::wire::Errno;

/// Descriptors this process keeps free for itself (connections, a new backend's sockets).
const SPARE: usize = 64;
/// Deposits for inodes the kernel does not know yet. They become known when the reply is settled, a
/// moment later, so more than this many are leftovers of requests that failed.
const UNCLAIMED_MAX: usize = 1024;

/// A deposited descriptor.
struct Deposit {
    fd: OwnedFd,
    /// For a lock: the handle it was last locked through.
    fh: u64,
}

/// Deposits by key.
pub struct VaultStore {
    deposits: HashMap<VaultKey, Deposit>,
    /// Inodes without a node, oldest first.
    unclaimed: Vec<Identity>,
    capacity: usize,
}

impl VaultStore {
    /// A vault for a process that may have this many descriptors open.
    pub fn new(nofile: usize) -> VaultStore {
        VaultStore {
            deposits: HashMap::new(),
            unclaimed: Vec::new(),
            capacity: nofile.saturating_sub(SPARE),
        }
    }

    /// Keeps a descriptor. `known`: the kernel has a node for the inode (or it is no inode).
    pub fn deposit(&mut self, key: VaultKey, fd: OwnedFd, known: bool) -> Result<(), Errno> {
        if self.deposits.len() >= self.capacity && !self.deposits.contains_key(&key) {
            return Err(Errno::ENFILE);
        }
        let fh = self.deposits.get(&key).map_or(0, |d| d.fh);
        self.deposits.insert(key, Deposit { fd, fh });
        if let VaultKey::Inode(identity) = key
            && !known
        {
            self.unclaimed.push(identity);
            if self.unclaimed.len() > UNCLAIMED_MAX {
                let leftover = self.unclaimed.remove(0);
                self.deposits.remove(&VaultKey::Inode(leftover));
            }
        }
        Ok(())
    }

    /// The kernel got a node for this inode. True if there is a deposit for it.
    pub fn claim(&mut self, identity: &Identity) -> bool {
        if self.unclaimed.is_empty() {
            return false;
        }
        let before = self.unclaimed.len();
        self.unclaimed.retain(|id| id != identity);
        self.unclaimed.len() < before
    }

    /// Drops what a generation that died deposited for replies it never made.
    pub fn drop_unclaimed(&mut self) {
        for identity in self.unclaimed.drain(..) {
            self.deposits.remove(&VaultKey::Inode(identity));
        }
    }

    /// A duplicate of a deposit.
    pub fn withdraw(&self, key: &VaultKey) -> Result<Option<OwnedFd>, Errno> {
        let deposit = self.deposits.get(key);
        Ok(deposit.map(|d| d.fd.try_clone()).transpose()?)
    }

    /// Drops a deposit.
    pub fn discard(&mut self, key: &VaultKey) {
        self.deposits.remove(key);
    }

    /// There is a deposit under this key.
    pub fn has(&self, key: &VaultKey) -> bool {
        self.deposits.contains_key(key)
    }

    /// Notes the handle a lock was last changed through.
    pub fn locked_through(&mut self, key: &VaultKey, fh: u64) {
        if let Some(deposit) = self.deposits.get_mut(key) {
            deposit.fh = fh;
        }
    }

    /// There are locks that end with this handle.
    pub fn has_locks_of(&self, fh: u64) -> bool {
        self.deposits.values().any(|d| d.fh == fh)
    }

    /// Drops the locks that end with a handle.
    pub fn drop_locks_of(&mut self, fh: u64) {
        self.deposits.retain(|_, d| d.fh != fh);
    }
}
