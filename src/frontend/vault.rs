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

/// The description that carries a lock owner's locks on a node.
struct LockDeposit {
    fd: OwnedFd,
    /// The handle the locks were last changed through; its end is theirs.
    fh: u64,
}

/// Deposits by key.
pub struct VaultStore {
    root: Option<OwnedFd>,
    inodes: HashMap<Identity, OwnedFd>,
    locks: HashMap<VaultKey, LockDeposit>,
    /// Inodes without a node, oldest first.
    unclaimed: Vec<Identity>,
    capacity: usize,
}

impl VaultStore {
    /// A vault for a process that may have this many descriptors open.
    pub fn new(nofile: usize) -> VaultStore {
        VaultStore {
            root: None,
            inodes: HashMap::new(),
            locks: HashMap::new(),
            unclaimed: Vec::new(),
            capacity: nofile.saturating_sub(SPARE),
        }
    }

    /// Keeps a descriptor. `known`: the kernel has a node for the inode (or it is no inode).
    pub fn deposit(&mut self, key: VaultKey, fd: OwnedFd, known: bool) -> Result<(), Errno> {
        if self.inodes.len() + self.locks.len() >= self.capacity && !self.has(&key) {
            return Err(Errno::ENFILE);
        }
        match key {
            VaultKey::Root => self.root = Some(fd),
            VaultKey::Inode(identity) => {
                self.inodes.insert(identity, fd);
                if !known {
                    self.unclaimed.push(identity);
                }
                if self.unclaimed.len() > UNCLAIMED_MAX {
                    let leftover = self.unclaimed.remove(0);
                    self.inodes.remove(&leftover);
                }
            }
            VaultKey::Lock { .. } => {
                let fh = self.locks.get(&key).map_or(0, |d| d.fh);
                self.locks.insert(key, LockDeposit { fd, fh });
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
            self.inodes.remove(&identity);
        }
    }

    fn get(&self, key: &VaultKey) -> Option<&OwnedFd> {
        match key {
            VaultKey::Root => self.root.as_ref(),
            VaultKey::Inode(identity) => self.inodes.get(identity),
            VaultKey::Lock { .. } => self.locks.get(key).map(|d| &d.fd),
        }
    }

    /// A duplicate of a deposit.
    pub fn withdraw(&self, key: &VaultKey) -> Result<Option<OwnedFd>, Errno> {
        Ok(self.get(key).map(OwnedFd::try_clone).transpose()?)
    }

    /// Drops a deposit.
    pub fn discard(&mut self, key: &VaultKey) {
        match key {
            VaultKey::Root => self.root = None,
            VaultKey::Inode(identity) => drop(self.inodes.remove(identity)),
            VaultKey::Lock { .. } => drop(self.locks.remove(key)),
        }
    }

    /// There is a deposit under this key.
    pub fn has(&self, key: &VaultKey) -> bool {
        self.get(key).is_some()
    }

    /// Notes the handle a lock was last changed through.
    pub fn locked_through(&mut self, key: &VaultKey, fh: u64) {
        if let Some(deposit) = self.locks.get_mut(key) {
            deposit.fh = fh;
        }
    }

    /// Drops the locks that end with a handle.
    pub fn drop_locks_of(&mut self, fh: u64) {
        self.locks.retain(|_, d| d.fh != fh);
    }

    /// Drops the locks nobody answers for.
    pub fn keep_locks(&mut self, wanted: impl Fn(&VaultKey) -> bool) {
        self.locks.retain(|key, _| wanted(key));
    }
}
