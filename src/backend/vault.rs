//! Descriptors that must outlive the backend.
//!
//! A file whose last name is gone, or a lock, lives only as long as somebody holds a descriptor of
//! it. The front-end holds them: a backend *deposits* a descriptor before the operation that would
//! make it irreplaceable, and a later generation *withdraws* a duplicate when it needs it.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::region::Identity;
use crate::wire::Errno;

/// What a deposited descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VaultKey {
    /// The root of the store, held so that it stays the same directory.
    Root,
    /// An inode whose last name goes (unlink, rmdir, rename over it) or that never had one
    /// (TMPFILE). Kept until the kernel forgets it; a deposit for an inode the kernel does not know
    /// when the request is answered is dropped.
    Inode(Identity),
    /// The open file description that carries a lock owner's locks on a node.
    Lock {
        /// The node.
        nodeid: u64,
        /// The owner as the kernel names it.
        owner: u64,
        /// `flock(2)` and `fcntl(2)` locks are separate worlds.
        flock: bool,
    },
}

/// Where to deposit. The front-end's is reached over the control socket.
pub trait Vault: Send + Sync {
    /// Keeps a duplicate of `fd`. When this returns `Ok`, the front-end has it. Depositing under a
    /// key that is taken replaces the descriptor. ENFILE: no room, do not do what you were about
    /// to do.
    fn deposit(&self, key: VaultKey, fd: BorrowedFd<'_>) -> Result<(), Errno>;

    /// A duplicate of the descriptor under this key, if there is one.
    fn withdraw(&self, key: VaultKey) -> Result<Option<OwnedFd>, Errno>;

    /// Drops the descriptor under this key.
    fn discard(&self, key: VaultKey);
}

/// A vault in this process, for tests and for a backend that serves alone.
#[derive(Default)]
pub struct LocalVault(parking_lot::Mutex<std::collections::HashMap<VaultKey, OwnedFd>>);

impl Vault for LocalVault {
    fn deposit(&self, key: VaultKey, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        let fd = fd.try_clone_to_owned()?;
        self.0.lock().insert(key, fd);
        Ok(())
    }

    fn withdraw(&self, key: VaultKey) -> Result<Option<OwnedFd>, Errno> {
        let vault = self.0.lock();
        Ok(vault.get(&key).map(OwnedFd::try_clone).transpose()?)
    }

    fn discard(&self, key: VaultKey) {
        self.0.lock().remove(&key);
    }
}
