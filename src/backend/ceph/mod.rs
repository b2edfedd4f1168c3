//! CephFS, through the low-level API of libcephfs.
//!
//! A backend is one *session* with the metadata server, which holds everything this client is
//! granted: capabilities, open files, locks. A session cannot be inherited; when the process dies
//! the metadata server keeps it, and everybody else waits for what it holds, for a minute. So the
//! next generation begins a session of its own and has the dead one ended, in an order in which
//! nothing is lost ([`session`]). What only a session keeps alive can be kept by a second one, in a
//! process of its own, while there is no backend ([`standby`]).
//!
//! While it serves, little is kept here that the tables do not have:
//!
//! * objects are found by inode and snapshot number, which never change and are never reused;
//!   nothing that is merely known to the kernel is held, so the metadata server can have back
//!   whatever it wants ([`node`]);
//! * open files and directories, by handle ([`files`], [`directory`]);
//! * `fcntl(2)` locks, in the session, with the files they were taken through ([`locks`]);
//! * whether the kernel may have pages of a file ([`warm`]).
//!
//! A write is with the object store when it is acknowledged (`client_oc = false`), or it is retained
//! until it is ([`retain`]): a death loses none.
//!
//! Permissions are checked by the library, with the caller's uid, gid and groups ([`caller`]), as
//! `ceph-fuse` does it.
//!
//! Limits:
//!
//! * `flock(2)` locks are known to this mount only: the low-level API has none. The kernel keeps
//!   them, and they survive a backend.
//! * Renames with flags (`RENAME_NOREPLACE`, `RENAME_EXCHANGE`) and files without a name
//!   (`O_TMPFILE`) are refused; the protocol of CephFS has none.
//! * A lock another client waited for when a session died is lost to it: the holder's handles get
//!   EIO until they are closed ([`queue`]).
//! * A file that another client unlinked while this mount knew it only by `O_PATH` or as a working
//!   directory is gone once the library lets go of it.

mod attributes;
mod caller;
mod client;
mod directory;
pub mod ffi;
mod files;
mod locks;
pub mod login;
mod names;
mod node;
mod queue;
mod retain;
pub mod session;
pub mod standby;
mod verify;
mod warm;
mod xattr;

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::Mutex;

pub use client::version;

use self::caller::Callers;
use self::client::{Client, Inode, Perms};
use self::files::Handles;
use self::locks::Locks;
use self::node::Pins;
use self::retain::Retainer;
use self::warm::Warm;
use super::convert::Timeouts;
use super::{Answer, Attempt, Backend, Call, Frontend, Stripes};
use crate::region::Identity;
use crate::region::slot::Journal;
use crate::wire::{Errno, Op, Opcode};

/// A file system that is served.
pub struct Ceph {
    client: Arc<Client>,
    root: Inode,
    root_id: Identity,
    /// The superuser: for what was decided before, and for looking.
    superuser: Arc<Perms>,
    callers: Callers,
    timeouts: Timeouts,
    /// The library applies the umask itself where it knows ACLs.
    acls: bool,
    handles: Arc<Handles>,
    pins: Arc<Pins>,
    /// Directories above files that were open when this generation began: the library looks for a
    /// quota only in directories it knows, and these files may never be looked up again.
    directories: OnceLock<Vec<Inode>>,
    warm: Arc<Warm>,
    locks: Locks,
    /// Of a mount whose writes are acknowledged early.
    retainer: Option<Arc<Retainer>>,
    /// Held over "look, then act" on one inode.
    inodes: Stripes,
    frontend: Arc<dyn Frontend>,
    /// Ends the session that helped to take over.
    keeper: Mutex<Option<JoinHandle<()>>>,
    /// Ends the session of this one from another. Only if a lock is lost.
    end: OnceLock<session::End>,
}

impl Ceph {
    /// An answer of the library, unless it only says that the session is gone.
    ///
    /// After an eviction the errors of what was under way are of all kinds. Attributes of the root
    /// are asked of the server once the capability for them is lost, so the answer is the proof; with
    /// a live session they cost nothing.
    fn judge<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        match result {
            Err(Errno::ESHUTDOWN) => {
                ask_for_session(&self.client, &*self.frontend);
                Err(Errno::ESHUTDOWN)
            }
            Err(
                errno @ (Errno::ENOTCONN
                | Errno::EIO
                | Errno::EPERM
                | Errno::EACCES
                | Errno::ESTALE
                | Errno::ETIMEDOUT
                | Errno::EBADF),
            ) => {
                self.prove_session(&self.root);
                Err(errno)
            }
            result => result,
        }
    }

    fn prove_session(&self, inode: &Inode) {
        prove_session(inode, &self.superuser, &*self.frontend);
    }
}

const EVICTED: &str =
    "the metadata server has ended this client's session (evicted or blocklisted)";

/// Returns if the session lives. Otherwise the process ends, every request in it unanswered, and the
/// next generation does them.
fn prove_session(inode: &Inode, superuser: &Perms, frontend: &dyn Frontend) {
    if inode.has_lost_its_session(superuser) {
        frontend.lost(EVICTED);
    }
}

/// As [`prove_session`], of a session that may have ended without this client knowing it yet: the
/// servers of the data may be faster to say so.
fn ask_for_session(client: &Client, frontend: &dyn Frontend) {
    if !client.is_ending() && !client.has_a_session() {
        frontend.lost(EVICTED);
    }
}

/// A name as the library takes it.
fn c_name(name: &OsStr) -> Result<CString, Errno> {
    CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)
}

impl Backend for Ceph {
    fn root(&self) -> Identity {
        self.root_id
    }

    fn needs_paths(&self) -> bool {
        false
    }

    fn prepare(&self, call: &Call<'_>) -> Result<Journal, Errno> {
        self.judge(self.look_before(call))
    }

    fn execute(&self, call: &Call<'_>, attempt: Attempt<'_>) -> Result<Answer, Errno> {
        self.judge(self.answer(call, attempt))
    }

    fn unpin(&self, identities: &[Identity]) {
        self.pins.remove(identities);
    }

    fn retire(&self) {
        self.pins.clear();
        let keeper = self.keeper.lock().take();
        if keeper.is_some_and(|keeper| keeper.join().is_err()) {
            tracing::warn!("the session of the keeper did not end in order");
        }
        if let Some(retainer) = &self.retainer {
            retainer.finish();
        }
        let ended = match self.end.get() {
            // In order would be when the locks that are waited for have come.
            Some(end) if self.locks.are_waited_for() => {
                self.client.will_end();
                end.end().map_err(|e| e.to_string())
            }
            _ => self.client.unmount().map_err(|e| e.to_string()),
        };
        if let Err(e) = ended {
            tracing::warn!("the session did not end in order: {e}");
        }
    }
}

impl Ceph {
    fn answer(&self, call: &Call<'_>, attempt: Attempt<'_>) -> Result<Answer, Errno> {
        let opcode = call.request.opcode;
        match call.request.op {
            Op::Lookup { name } => self.lookup(call, name),
            // Nothing is held for the kernel's knowledge of a node.
            Op::Forget { .. } | Op::BatchForget { .. } => Ok(Answer::Empty),
            Op::Getattr(_) => self.getattr(call),
            Op::Statx(arg) => self.statx(call, arg),
            Op::Setattr(arg) => self.setattr(call, arg, attempt),
            Op::Access(arg) => self.access(call, arg),
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
            Op::Create { .. } if opcode == Opcode::Tmpfile => Err(Errno::EOPNOTSUPP),
            Op::Create { arg, name } => self.create(call, arg, name, attempt),
            Op::Open(arg) => self.open(call, arg),
            Op::Read(arg) if opcode == Opcode::Read => self.read(call, arg),
            Op::Read(arg) => self.readdir(call, arg),
            Op::Write(arg) => self.write(call, arg, attempt),
            Op::Flush(arg) => self.flush(call, arg),
            Op::Release(_) => self.release(call),
            Op::Fsync(arg) => self.fsync(call, arg),
            Op::Fallocate(arg) => self.fallocate(call, arg),
            Op::Lseek(arg) => self.lseek(call, arg),
            Op::Statfs => self.statfs(),
            Op::Syncfs => self.syncfs(),
            Op::Setxattr { arg, name, value } => self.setxattr(call, arg, name, value, attempt),
            Op::Getxattr { arg, name } => self.getxattr(call, arg, name),
            Op::Listxattr(arg) => self.listxattr(call, arg),
            Op::Removexattr { name } => self.removexattr(call, name, attempt),
            Op::Getlk(arg) => self.getlk(call, arg),
            Op::Setlk(arg) => self.setlk(call, arg),
            Op::Ioctl { .. } => Err(Errno::ENOTTY),
            Op::Bmap(_) | Op::Poll(_) => Err(Errno::ENOSYS),
            Op::Interrupt { .. } => Ok(Answer::Empty),
            // The kernel copies by reading and writing instead.
            Op::CopyFileRange(_) => Err(Errno::EOPNOTSUPP),
            Op::Other => match opcode {
                Opcode::Setupmapping | Opcode::Removemapping => Err(Errno::ENOSYS),
                Opcode::Destroy => Ok(Answer::Empty),
                _ => Err(Errno::EOPNOTSUPP),
            },
        }
    }
}
