//! Finding objects.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::Ceph;
use super::client::{Inode, Perms};
use super::ffi::{Statx, Vino};
use crate::region::Identity;
use crate::region::slot::NodeRef;
use crate::wire::Errno;

/// The identity of an object: inode and snapshot number, 8 bytes each, little endian.
pub(super) fn identity(vino: Vino) -> Identity {
    let bytes = [vino.ino.to_le_bytes(), vino.snapid.to_le_bytes()].concat();
    Identity::new(&bytes).unwrap_or(Identity::NONE)
}

/// The object of an identity; `None` if it is no identity of this store.
pub(super) fn vino(identity: &Identity) -> Option<Vino> {
    let (ino, rest) = identity.as_bytes_ref().split_first_chunk()?;
    let snapid = rest.try_into().ok()?;
    Some(Vino {
        ino: u64::from_le_bytes(*ino),
        snapid: u64::from_le_bytes(snapid),
    })
}

/// The object attributes are of. The library reports the snapshot as the device.
pub(super) fn vino_of(st: &Statx) -> Vino {
    Vino {
        ino: st.ino,
        snapid: st.dev,
    }
}

impl Ceph {
    /// The request's node.
    pub(super) fn inode(&self, node: &NodeRef) -> Result<Inode, Errno> {
        let vino = vino(&node.identity).ok_or(Errno::ESTALE)?;
        self.client.find(vino)
    }

    /// What a name in a directory is, if it is anything.
    pub(super) fn look(
        &self,
        parent: &Inode,
        name: &std::ffi::CStr,
        perms: &Perms,
    ) -> Result<Option<(Inode, Statx)>, Errno> {
        match self.client.lookup(parent, name, perms) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Objects without a name that the kernel knows: alive only as long as somebody refers to them.
#[derive(Default)]
pub(super) struct Pins(Mutex<HashMap<Vino, Inode>>);

impl Pins {
    /// Refers to an object until [`remove`](Pins::remove).
    pub(super) fn insert(&self, vino: Vino, inode: Inode) {
        // Giving a reference back takes the library's lock, so not with ours.
        let old = self.0.lock().insert(vino, inode);
        drop(old);
    }

    /// Lets go of objects.
    pub(super) fn remove(&self, identities: &[Identity]) {
        let gone: Vec<Inode> = {
            let mut pins = self.0.lock();
            let vinos = identities.iter().filter_map(vino);
            vinos.filter_map(|vino| pins.remove(&vino)).collect()
        };
        drop(gone);
    }

    /// Lets go of all.
    pub(super) fn clear(&self) {
        let gone = std::mem::take(&mut *self.0.lock());
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ffi::{NOSNAP, SNAPDIR};
    use super::*;

    #[test]
    fn an_identity_names_inode_and_snapshot() {
        for snapid in [NOSNAP, SNAPDIR, 1, 77] {
            let one = Vino {
                ino: 0x100_0000_0123,
                snapid,
            };
            assert_eq!(vino(&identity(one)), Some(one));
        }
        for bad in [&b""[..], b"1234567", b"12345678", b"12345678901234567"] {
            assert_eq!(vino(&Identity::new(bad).unwrap()), None);
        }
    }
}
