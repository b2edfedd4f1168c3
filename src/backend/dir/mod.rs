//! A local directory.
//!
//! Every operation is passed to the file system below. The kernel in front of the mount checks
//! permissions; this process acts with its own rights ([`caller`]).
//!
//! Nothing here outlives the process, and nothing has to:
//!
//! * objects are found again by their identity ([`identity`]), or in the vault when their last name
//!   is gone;
//! * open files and directories are re-opened when they are first used ([`files`], [`directory`]);
//! * locks belong to open file descriptions that lie in the vault ([`locks`]);
//! * what a dead generation may have done already is found out by comparing the store with the
//!   journal ([`verify`]).
//!
//! Read [`names`] for the operations on names, [`attributes`], [`files`] for those on data,
//! [`xattr`] and [`ioctl`] for the rest.
//!
//! Limits, all where somebody else changes the directory behind the mount's back:
//!
//! * appenders outside of the mount can write to the offset an append was given;
//! * a name that was replaced between the death of a generation and the takeover is taken for what
//!   the journal says it could be (each place says how);
//! * where objects are found by walking, one that was renamed outside is ESTALE;
//! * where a directory's cookies do not survive its re-opening (merged directories of overlayfs) and
//!   the directory changed meanwhile, a listing that spans a takeover may miss or repeat entries.

mod attributes;
mod cache;
mod caller;
mod directory;
mod files;
mod identity;
mod ioctl;
mod locks;
mod names;
#[cfg(test)]
mod tests;
mod verify;
mod xattr;

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, openat};

use self::cache::NodeCache;
use self::files::Handles;
use self::identity::{Naming, stat};
use self::locks::Locks;
use super::convert::Timeouts;
use super::{Answer, Attempt, Backend, Call, Stripes, Vault, VaultKey};
use crate::region::Identity;
use crate::region::slot::{Journal, NodeRef};
use crate::sys;
use crate::wire::abi::ROOT_ID;
use crate::wire::{Errno, Op, Opcode};

/// Most descriptors the node cache holds.
const CACHED_NODES: usize = 1024;

/// How a directory is served.
#[derive(Clone, Copy, Debug)]
pub struct DirOptions {
    /// How long the kernel may trust what it is told.
    pub timeouts: Timeouts,
    /// Find objects by walking even where file handles work. For tests; it is slower and loses
    /// objects that are renamed outside of the mount.
    pub always_walk: bool,
}

impl Default for DirOptions {
    fn default() -> DirOptions {
        DirOptions {
            timeouts: Timeouts {
                entry: Duration::from_secs(1),
                attr: Duration::from_secs(1),
            },
            always_walk: false,
        }
    }
}

/// Why a directory cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// It cannot be opened.
    #[error("cannot open source directory {path}: {error}; check that it exists and may be read")]
    Open {
        /// The source.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// It is something else.
    #[error("source {path} is not a directory; dir: serves directories only")]
    NotADirectory {
        /// The source.
        path: PathBuf,
    },
    /// An earlier generation served a directory here that is no more.
    #[error(
        "the directory that was mounted from {path} was removed or replaced ({error}); unmount and \
         mount again to serve what is there now"
    )]
    Replaced {
        /// The source.
        path: PathBuf,
        /// What the system says of the descriptor in the vault.
        error: io::Error,
    },
    /// The vault failed.
    #[error("cannot keep source directory {path} in the vault: {error}; is the front-end alive?")]
    Vault {
        /// The source.
        path: PathBuf,
        /// What the vault says.
        error: Errno,
    },
    /// `/proc` is missing: descriptors are re-opened through it.
    #[error("cannot open /proc/self/fd: {0}; mount proc on /proc where the backend runs")]
    Proc(io::Error),
}

/// A directory that is served.
pub struct Dir {
    /// `O_PATH`, of a mount of its own if this process may clone one.
    root: Arc<OwnedFd>,
    /// The root as an open directory: `open_by_handle_at(2)` and `syncfs(2)` take no `O_PATH`.
    anchor: OwnedFd,
    root_id: Identity,
    /// The mount of `root`: what lies on another one is not ours.
    mount_id: u64,
    naming: Naming,
    /// `/proc/self/fd`, where an `O_PATH` descriptor becomes a file that can be opened.
    descriptors: OwnedFd,
    options: DirOptions,
    nodes: NodeCache,
    handles: Handles,
    locks: Locks,
    /// Held over "look, then act" on one inode.
    inodes: Stripes,
}

impl Dir {
    /// Opens `source` for the first generation; later ones continue with the directory in the
    /// vault, wherever it was moved to.
    pub fn open(source: &Path, options: DirOptions, vault: &dyn Vault) -> Result<Dir, DirError> {
        let path = || source.to_path_buf();
        let vaulted = vault.withdraw(VaultKey::Root);
        let vaulted = vaulted.map_err(|error| DirError::Vault {
            path: path(),
            error,
        })?;
        let known = vaulted.is_some();
        let root = match vaulted {
            Some(root) => root,
            None => first_open(source, vault)?,
        };
        let broken = |error: io::Error| {
            let path = path();
            if known {
                DirError::Replaced { path, error }
            } else {
                DirError::Open { path, error }
            }
        };
        let from_errno = |e: Errno| broken(io::Error::from_raw_os_error(e.raw()));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let anchor = openat(&root, c".", flags, Mode::empty()).map_err(|e| broken(e.into()))?;
        let naming = if options.always_walk {
            Naming::paths(anchor.as_fd())
        } else {
            Naming::probe(anchor.as_fd())
        };
        let naming = naming.map_err(broken)?;
        let proc = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptors = rustix::fs::open(c"/proc/self/fd", proc, Mode::empty());
        Ok(Dir {
            root_id: naming.identify(root.as_fd()).map_err(from_errno)?,
            mount_id: stat(&root).map_err(from_errno)?.stx_mnt_id,
            root: Arc::new(root),
            anchor,
            naming,
            descriptors: descriptors.map_err(|e| DirError::Proc(e.into()))?,
            options,
            nodes: NodeCache::new(cache_size()),
            handles: Handles::default(),
            locks: Locks::default(),
            inodes: Stripes::default(),
        })
    }

    /// An `O_PATH` descriptor of the request's node.
    fn node(&self, call: &Call<'_>) -> Result<Arc<OwnedFd>, Errno> {
        self.descriptor(&call.annex.node, call.path(), call.vault)
    }

    /// An `O_PATH` descriptor of the request's second node.
    fn second_node(&self, call: &Call<'_>) -> Result<Arc<OwnedFd>, Errno> {
        self.descriptor(&call.annex.second, call.second_path(), call.vault)
    }

    fn descriptor(
        &self,
        node: &NodeRef,
        path: &OsStr,
        vault: &dyn Vault,
    ) -> Result<Arc<OwnedFd>, Errno> {
        if node.nodeid == ROOT_ID {
            return Ok(self.root.clone());
        }
        if let Some(fd) = self.nodes.get(node.nodeid) {
            return Ok(fd);
        }
        if node.nodeid == 0 || node.identity.is_none() {
            return Err(Errno::ESTALE);
        }
        let fd = match self.restore(node, path, vault) {
            Err(Errno::EMFILE) => {
                self.nodes.clear();
                self.restore(node, path, vault)?
            }
            fd => fd?,
        };
        Ok(self.nodes.insert(node.nodeid, fd))
    }

    fn restore(&self, node: &NodeRef, path: &OsStr, vault: &dyn Vault) -> Result<OwnedFd, Errno> {
        let kept = || vault.withdraw(VaultKey::Inode(node.identity));
        let vaulted = node.flags & NodeRef::VAULTED != 0;
        if vaulted && let Some(fd) = kept()? {
            return Ok(fd);
        }
        match self.find(&node.identity, path) {
            // The tables may not know of a deposit made just before the last generation died.
            Err(Errno::ESTALE) if !vaulted => kept()?.ok_or(Errno::ESTALE),
            fd => fd,
        }
    }

    /// Opens what an `O_PATH` descriptor stands for.
    fn reopen(&self, fd: impl AsFd, flags: i32) -> Result<OwnedFd, Errno> {
        let name = fd.as_fd().as_raw_fd().to_string();
        let open = |flags: i32| {
            let flags = OFlags::from_bits_retain((flags | libc::O_CLOEXEC) as u32);
            openat(&self.descriptors, name.as_str(), flags, Mode::empty())
        };
        match open(flags) {
            // The kernel in front allowed O_DIRECT; a store without it serves from its cache.
            Err(rustix::io::Errno::INVAL) if flags & libc::O_DIRECT != 0 => {
                Ok(open(flags & !libc::O_DIRECT)?)
            }
            Err(rustix::io::Errno::MFILE) => {
                self.nodes.clear();
                Ok(open(flags)?)
            }
            fd => Ok(fd?),
        }
    }
}

/// Opens the source and deposits it.
fn first_open(source: &Path, vault: &dyn Vault) -> Result<OwnedFd, DirError> {
    let path = || source.to_path_buf();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = match rustix::fs::open(source, flags, Mode::empty()) {
        Ok(root) => root,
        Err(rustix::io::Errno::NOTDIR) => return Err(DirError::NotADirectory { path: path() }),
        Err(error) => {
            return Err(DirError::Open {
                path: path(),
                error: error.into(),
            });
        }
    };
    // Without the privilege, or in a mount namespace that forbids it, mounts below the source are
    // refused one by one instead (`look`, `walk`).
    let root = sys::clone_tree(root.as_fd()).unwrap_or(root);
    match vault.deposit(VaultKey::Root, root.as_fd()) {
        Ok(()) => Ok(root),
        Err(error) => Err(DirError::Vault {
            path: path(),
            error,
        }),
    }
}

/// The cache takes at most a quarter of the descriptors this process may have.
fn cache_size() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(CACHED_NODES, |n| (n as usize / 4).min(CACHED_NODES))
}

/// A name as system calls take it.
fn c_name(name: &OsStr) -> Result<CString, Errno> {
    CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)
}

impl Backend for Dir {
    fn root(&self) -> Identity {
        self.root_id
    }

    fn needs_paths(&self) -> bool {
        self.naming != Naming::Handles
    }

    fn enter_thread(&self) {
        caller::enter_thread();
    }

    fn prepare(&self, call: &Call<'_>) -> Result<Journal, Errno> {
        self.look_before(call)
    }

    fn execute(&self, call: &Call<'_>, attempt: Attempt<'_>) -> Result<Answer, Errno> {
        let opcode = call.request.opcode;
        match call.request.op {
            Op::Lookup { name } => self.lookup(call, name),
            Op::Forget { .. } => {
                self.nodes.remove(call.request.header.nodeid);
                Ok(Answer::Empty)
            }
            Op::BatchForget { forgets } => {
                forgets.iter().for_each(|one| self.nodes.remove(one.nodeid));
                Ok(Answer::Empty)
            }
            Op::Getattr(_) => self.getattr(call),
            Op::Statx(arg) => self.statx(call, arg),
            Op::Setattr(arg) => self.setattr(call, arg, attempt),
            // The kernel in front decides; it asks only without default_permissions.
            Op::Access(_) => self.node(call).map(|_| Answer::Empty),
            Op::Readlink => self.readlink(call),
            Op::Symlink { name, target } => self.symlink(call, name, target, attempt),
            Op::Mknod { arg, name } => self.mknod(call, arg, name, attempt),
            Op::Mkdir { arg, name } => self.mkdir(call, arg, name, attempt),
            Op::Unlink { name } => self.remove(call, name, false, attempt),
            Op::Rmdir { name } => self.remove(call, name, true, attempt),
            Op::Rename {
                flags,
                name,
                newname,
                ..
            } => self.rename(call, flags, name, newname, attempt),
            Op::Link { newname, .. } => self.link(call, newname, attempt),
            Op::Create { arg, .. } if opcode == Opcode::Tmpfile => self.tmpfile(call, arg),
            Op::Create { arg, name } => self.create(call, arg, name, attempt),
            Op::Open(arg) => self.open_node(call, arg, attempt),
            Op::Read(arg) if opcode == Opcode::Read => self.read(call, arg),
            Op::Read(arg) => self.readdir(call, arg),
            Op::Write(arg) => self.write(call, arg, attempt),
            Op::Flush(arg) => self.flush(call, arg),
            Op::Release(_) => self.release(call),
            Op::Fsync(arg) => self.fsync(call, arg),
            Op::Fallocate(arg) => self.fallocate(call, arg),
            Op::Lseek(arg) => self.lseek(call, arg),
            Op::CopyFileRange(arg) => self.copy_file_range(call, arg),
            Op::Statfs => self.statfs(call),
            Op::Syncfs => self.syncfs(),
            Op::Setxattr { arg, name, value } => self.setxattr(call, arg, name, value, attempt),
            Op::Getxattr { arg, name } => self.getxattr(call, arg, name),
            Op::Listxattr(arg) => self.listxattr(call, arg),
            Op::Removexattr { name } => self.removexattr(call, name, attempt),
            Op::Getlk(arg) => self.getlk(call, arg),
            Op::Setlk(arg) => self.setlk(call, arg),
            Op::Ioctl { arg, input } => self.ioctl(call, arg, input),
            // For block devices and for files without contents of their own: no passthrough has
            // them, and the kernel then does without.
            Op::Bmap(_) | Op::Poll(_) => Err(Errno::ENOSYS),
            Op::Interrupt { .. } => Ok(Answer::Empty),
            Op::Other => match opcode {
                Opcode::Setupmapping | Opcode::Removemapping => Err(Errno::ENOSYS),
                Opcode::Destroy => Ok(Answer::Empty),
                _ => Err(Errno::EOPNOTSUPP),
            },
        }
    }
}
