//! The bookkeeping of a reply.
//!
//! The reply comes from a backend and is not trusted: whatever it holds, the tables stay consistent
//! and the kernel gets a well-formed reply, at worst EIO.

use zerocopy::{FromBytes, IntoBytes};

use crate::region::Identity;
use crate::region::slot::Slot;
use crate::region::tables::{Forget, Handle, Lock, Tables};
use crate::wire::abi::*;
use crate::wire::{Errno, Op, Opcode, Request};

/// What is left to do after the tables were changed.
#[derive(Debug)]
pub struct Settled {
    /// What the kernel gets.
    pub reply: Reply,
    /// What the kernel was given with the reply, to be taken back if it refuses it (ENOENT: nobody
    /// waits for it any more).
    pub given: Given,
    /// What the owner of the vault and of the waiters has to do.
    pub effects: Vec<Effect>,
}

/// The bytes of a reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// The operation has none (FORGET).
    None,
    /// This header, and the data as it lies in the slot.
    FromSlot(OutHeader),
    /// These: header and data.
    Bytes(Vec<u8>),
    /// None now: a lock that must wait.
    Waits,
}

/// Counts and handles that come into being with a reply.
#[derive(Debug, Default)]
pub struct Given {
    /// Nodes with one more lookup each.
    pub lookups: Vec<u64>,
    /// A handle.
    pub handle: Option<u64>,
}

impl Given {
    /// Takes everything back in the tables. The caller tells the backend about a handle.
    pub fn take_back(&self, tables: &mut Tables) -> Vec<Effect> {
        if let Some(fh) = self.handle {
            tables.close_handle(fh);
        }
        let mut effects = Vec::new();
        for &nodeid in &self.lookups {
            forget(tables, nodeid, 1, &mut effects);
        }
        effects
    }
}

/// A consequence outside the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The kernel forgot a node the vault has.
    Forgotten(Identity),
    /// The kernel now knows an object of this identity under this node.
    Known(Identity, u64),
    /// A lock owner's locks on a node were last changed through this handle, whose end ends them.
    LockedThrough {
        /// The node.
        nodeid: u64,
        /// The lock owner.
        owner: u64,
        /// Of `flock(2)`.
        flock: bool,
        /// The handle.
        fh: u64,
    },
    /// Something was unlocked: waiters of this node may be served.
    Unlocked(u64),
    /// A file was created and opened in the backend, but nobody will ever use the handle.
    OrphanHandle {
        /// The node.
        nodeid: u64,
        /// The handle.
        fh: u64,
    },
}

/// The bytes of a reply without data.
pub fn error_reply(unique: u64, errno: Option<Errno>) -> Vec<u8> {
    data_reply(unique, errno, &[])
}

/// The bytes of a reply.
pub fn data_reply(unique: u64, errno: Option<Errno>, data: &[u8]) -> Vec<u8> {
    let header = OutHeader {
        len: (size_of::<OutHeader>() + data.len()) as u32,
        error: errno.map_or(0, |e| -e.raw()),
        unique,
    };
    [header.as_bytes(), data].concat()
}

/// Operations that may be answered ENOSYS: the kernel never asks for them again, so this must be the
/// same for every backend of a mount.
fn may_be_unsupported(opcode: Opcode) -> bool {
    use Opcode::*;
    matches!(opcode, Bmap | Poll | Setupmapping | Removemapping)
}

/// Changes the tables as the reply in `slot` demands. `new_fh` is the handle that was reserved for it.
pub fn settle(tables: &mut Tables, slot: &Slot<'_>, request: &Request<'_>, new_fh: u64) -> Settled {
    let mut s = Settling {
        tables,
        slot,
        request,
        unique: request.header.unique,
        nodeid: request.header.nodeid,
        new_fh,
        given: Given::default(),
        effects: Vec::new(),
    };
    let error = slot.reply_header().error;
    let reply = if request.opcode.has_no_reply() {
        s.forgets();
        Reply::None
    } else if error == 0 {
        s.success().unwrap_or_else(|errno| s.failure(errno))
    } else {
        s.failure(Errno::from_raw(error.saturating_neg()))
    };
    Settled {
        reply,
        given: s.given,
        effects: s.effects,
    }
}

/// One removal of lookups, with its effect.
pub fn forget(tables: &mut Tables, nodeid: u64, count: u64, effects: &mut Vec<Effect>) {
    if let Forget::Gone { identity, vaulted } = tables.forget(nodeid, count) {
        // Tens of thousands are forgotten at a time, and hardly any of them is in the vault.
        if vaulted {
            effects.push(Effect::Forgotten(identity));
        }
    }
}

/// What FORGET and BATCH_FORGET take back.
pub fn forget_all(tables: &mut Tables, request: &Request<'_>) -> Vec<Effect> {
    let mut effects = Vec::new();
    match request.op {
        Op::Forget { nlookup } => {
            forget(tables, request.header.nodeid, nlookup, &mut effects);
        }
        Op::BatchForget { forgets } => {
            for one in forgets.iter() {
                forget(tables, one.nodeid, one.nlookup, &mut effects);
            }
        }
        _ => {}
    }
    effects
}

/// Removes every `fcntl(2)` lock of an owner on a node.
pub fn drop_owner(tables: &mut Tables, nodeid: u64, owner: u64, effects: &mut Vec<Effect>) {
    if tables.unlock_owner(nodeid, owner, false) {
        effects.push(Effect::Unlocked(nodeid));
    }
}

/// What the end of a handle means for the tables: the locks that were last taken through it end.
/// For OFD locks the kernel sends no unlock; for a flock it does not matter what owner RELEASE names,
/// since it comes late and the number may be another open file's by then.
pub fn release(tables: &mut Tables, fh: u64) -> Vec<Effect> {
    let mut effects = Vec::new();
    for (nodeid, owner, flock) in tables.locks_through(fh) {
        if tables.unlock_owner(nodeid, owner, flock) {
            effects.push(Effect::Unlocked(nodeid));
        }
    }
    tables.close_handle(fh);
    effects
}

/// The lock a GETLK, SETLK or SETLKW asks for.
pub fn lock_of(request: &Request<'_>) -> Option<Lock> {
    let (Op::Getlk(lk) | Op::Setlk(lk)) = request.op else {
        return None;
    };
    Some(Lock {
        nodeid: request.header.nodeid,
        owner: lk.owner,
        flock: lk.lk_flags & LK_FLOCK != 0,
        exclusive: lk.lk.typ == libc::F_WRLCK as u32,
        start: lk.lk.start,
        end: lk.lk.end,
        pid: lk.lk.pid,
        fh: lk.fh,
    })
}

struct Settling<'a> {
    tables: &'a mut Tables,
    slot: &'a Slot<'a>,
    request: &'a Request<'a>,
    unique: u64,
    nodeid: u64,
    new_fh: u64,
    given: Given,
    effects: Vec<Effect>,
}

impl Settling<'_> {
    fn forgets(&mut self) {
        let effects = forget_all(self.tables, self.request);
        self.effects.extend(effects);
    }

    fn failure(&mut self, errno: Errno) -> Reply {
        let opcode = self.request.opcode;
        if opcode.opens_handle() {
            self.tables.close_handle(self.new_fh);
        }
        if let Op::Setlk(lk) = self.request.op
            && lk.lk_flags & LK_FLOCK != 0
            && errno == Errno::EAGAIN
            && self.tables.unlock_owner(self.nodeid, lk.owner, true)
        {
            // `flock(2)`: a conversion gives the old lock up before it tries for the new one.
            self.effects.push(Effect::Unlocked(self.nodeid));
        }
        if opcode == Opcode::Setlkw && errno == Errno::EAGAIN {
            return Reply::Waits;
        }
        if matches!(opcode, Opcode::Release | Opcode::Releasedir) {
            self.released();
        }
        let errno = match errno {
            Errno::ENOSYS if !may_be_unsupported(opcode) => Errno::EOPNOTSUPP,
            errno => errno,
        };
        Reply::Bytes(error_reply(self.unique, Some(errno)))
    }

    fn released(&mut self) {
        if let Op::Release(arg) = self.request.op {
            let effects = release(self.tables, arg.fh);
            self.effects.extend(effects);
        }
    }

    /// A private copy of the reply's data, which must be at least `T`.
    fn data<T: FromBytes>(&self) -> Result<T, Errno> {
        let bytes = self.copy();
        T::read_from_prefix(&bytes)
            .map(|(v, _)| v)
            .map_err(|_| Errno::EIO)
    }

    fn copy(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for span in self.slot.reply_data(self.slot.reply_data_len()) {
            bytes.extend_from_slice(&span.to_vec());
        }
        bytes
    }

    fn bytes(&self, data: &[u8]) -> Reply {
        Reply::Bytes(data_reply(self.unique, None, data))
    }

    fn success(&mut self) -> Result<Reply, Errno> {
        let opcode = self.request.opcode;
        if opcode.replies_entry() {
            return self.entry();
        }
        match self.request.op {
            Op::Open(open) => {
                let out: OpenOut = self.data()?;
                let out = self.opened(out, self.nodeid, open.flags);
                return Ok(self.bytes(out.as_bytes()));
            }
            Op::Read(_) if opcode == Opcode::Readdirplus => return self.entries(),
            Op::Unlink { name } | Op::Rmdir { name } => self.tables.drop_name(self.nodeid, name),
            Op::Rename {
                newdir,
                flags,
                name,
                newname,
            } => {
                if flags & libc::RENAME_EXCHANGE != 0 {
                    self.tables.exchange(self.nodeid, name, newdir, newname);
                } else {
                    self.tables.rename(self.nodeid, name, newdir, newname);
                }
            }
            Op::Getattr(_) | Op::Setattr(_) => {
                let out: AttrOut = self.data()?;
                self.plausible(out.attr.mode, out.attr.size)?;
                self.tables.note_attr(self.nodeid, &out.attr);
                if let Op::Setattr(arg) = self.request.op {
                    let valid = SetattrValid::from_bits_truncate(arg.valid);
                    if valid.intersects(SetattrValid::MTIME | SetattrValid::SIZE) {
                        let set = valid.contains(SetattrValid::MTIME);
                        self.tables.set_time_is_set(self.nodeid, set);
                    }
                }
                return Ok(self.bytes(out.as_bytes()));
            }
            Op::Statx(_) => {
                let out: StatxOut = self.data()?;
                self.plausible(out.stat.mode.into(), out.stat.size)?;
                return Ok(self.bytes(out.as_bytes()));
            }
            Op::Statfs => {
                let out: Kstatfs = self.data()?;
                return Ok(self.bytes(out.as_bytes()));
            }
            Op::Release(_) => self.released(),
            Op::Flush(flush) => drop_owner(
                self.tables,
                self.nodeid,
                flush.lock_owner,
                &mut self.effects,
            ),
            Op::Setlk(lk) => self.locked(&lk)?,
            Op::Getlk(_) => return self.found_lock(),
            Op::Write(write) => {
                let out: WriteOut = self.data()?;
                if out.size > write.size {
                    return Err(Errno::EIO);
                }
                self.tables.set_time_is_set(self.nodeid, false);
            }
            Op::Fallocate(_) => self.tables.set_time_is_set(self.nodeid, false),
            Op::CopyFileRange(copy) => self.tables.set_time_is_set(copy.nodeid_out, false),
            _ => {}
        }
        Ok(Reply::FromSlot(OutHeader {
            len: (size_of::<OutHeader>() + self.slot.reply_data_len()) as u32,
            error: 0,
            unique: self.unique,
        }))
    }

    /// Attributes of another kind of object, or of no possible size, would make the kernel give the
    /// inode up for good (`fuse_make_bad`).
    fn plausible(&self, mode: u32, size: u64) -> Result<(), Errno> {
        let known = self.tables.node(self.nodeid).map_or(0, |n| n.mode);
        let same = known == 0 || (known ^ mode) & libc::S_IFMT == 0;
        let sane = mode & libc::S_IFMT != 0 && i64::try_from(size).is_ok();
        if same && sane {
            Ok(())
        } else {
            Err(Errno::EIO)
        }
    }

    /// Gives the kernel a node for an object, and counts the lookup.
    fn bind(
        &mut self,
        entry: &mut EntryOut,
        identity: &Identity,
        name: Option<&std::ffi::OsStr>,
    ) -> Result<(), Errno> {
        let impossible =
            entry.attr.mode & libc::S_IFMT == 0 || i64::try_from(entry.attr.size).is_err();
        if identity.is_none() || impossible {
            return Err(Errno::EIO);
        }
        let name = name.filter(|n| *n != "." && *n != "..");
        let name = name.map(|n| (self.nodeid, n));
        let nodeid = self
            .tables
            .look_up(identity, name, &entry.attr)
            .map_err(|_| Errno::ENFILE)?;
        if nodeid == ROOT_ID && name.is_some() {
            // The root below itself would be a loop in the kernel's tree.
            self.tables.unlook_up(nodeid);
            return Err(Errno::ELOOP);
        }
        entry.nodeid = nodeid;
        self.given.lookups.push(nodeid);
        self.effects.push(Effect::Known(*identity, nodeid));
        Ok(())
    }

    fn entry(&mut self) -> Result<Reply, Errno> {
        let bytes = self.copy();
        let (mut entry, rest) = EntryOut::read_from_prefix(&bytes).map_err(|_| Errno::EIO)?;
        let ids = self.slot.reply_ids();
        let Some(identity) = ids.first() else {
            // A name that does not exist, to be remembered as such.
            if self.request.opcode != Opcode::Lookup || entry.nodeid != 0 {
                return Err(Errno::EIO);
            }
            return Ok(self.bytes(entry.as_bytes()));
        };
        let bound = self.bind(&mut entry, identity, self.request.name());
        let Op::Create { arg, .. } = self.request.op else {
            bound?;
            return Ok(self.bytes(entry.as_bytes()));
        };
        let open = OpenOut::read_from_prefix(rest).map_err(|_| Errno::EIO);
        match (bound, open) {
            (Ok(()), Ok((open, _))) => {
                let open = self.opened(open, entry.nodeid, arg.flags);
                Ok(self.bytes(&[entry.as_bytes(), open.as_bytes()].concat()))
            }
            (bound, open) => {
                // Created and opened in the store, but there is no way to say so.
                self.effects.push(Effect::OrphanHandle {
                    nodeid: self.nodeid,
                    fh: self.new_fh,
                });
                let given = std::mem::take(&mut self.given);
                self.effects.extend(given.take_back(self.tables));
                bound?;
                open?;
                Err(Errno::EIO)
            }
        }
    }

    fn opened(&mut self, mut out: OpenOut, nodeid: u64, open_flags: u32) -> OpenOut {
        let h = &self.request.header;
        let fh = self.new_fh;
        self.tables.open_handle(
            fh,
            Handle {
                nodeid,
                open_flags,
                directory: self.request.opcode == Opcode::Opendir,
                uid: h.uid,
                gid: h.gid,
                pid: h.pid,
                lost: false,
            },
        );
        self.given.handle = Some(fh);
        out.fh = fh;
        out.backing_id = 0;
        out
    }

    fn entries(&mut self) -> Result<Reply, Errno> {
        let mut bytes = self.copy();
        let ids = self.slot.reply_ids();
        let mut ids = ids.iter();
        let mut at = 0;
        while at < bytes.len() {
            let Ok((mut entry, rest)) = EntryOut::read_from_prefix(&bytes[at..]) else {
                break;
            };
            let Ok((dirent, rest)) = Dirent::read_from_prefix(rest) else {
                break;
            };
            let Some(name) = rest.get(..dirent.namelen as usize) else {
                break;
            };
            let name = name.to_vec();
            let size = direntplus_size(name.len());
            if at + size > bytes.len() || name.is_empty() || name.contains(&b'/') {
                // The kernel stops here, too, and counts nothing (`parse_dirplusfile`).
                break;
            }
            if name == b"." || name == b".." {
                // Nor does it count these.
                entry.nodeid = 0;
                bytes[at..at + size_of::<EntryOut>()].copy_from_slice(entry.as_bytes());
            }
            if entry.nodeid != 0 {
                use std::os::unix::ffi::OsStrExt;
                let name = std::ffi::OsStr::from_bytes(&name);
                let bound = match ids.next() {
                    Some(identity) => self.bind(&mut entry, identity, Some(name)),
                    None => Err(Errno::EIO),
                };
                if bound.is_err() {
                    // A plain entry: the kernel looks it up when it needs it.
                    entry = EntryOut::default();
                }
                bytes[at..at + size_of::<EntryOut>()].copy_from_slice(entry.as_bytes());
            }
            at += size;
        }
        bytes.truncate(at.min(bytes.len()));
        Ok(self.bytes(&bytes))
    }

    fn locked(&mut self, lk: &LkIn) -> Result<(), Errno> {
        let lock = lock_of(self.request).ok_or(Errno::EIO)?;
        if lk.lk.typ == libc::F_UNLCK as u32 {
            if lock.flock {
                self.tables.unlock_owner(lock.nodeid, lock.owner, true);
            } else {
                self.tables
                    .unlock(lock.nodeid, lock.owner, false, lock.start, lock.end)
                    .map_err(|_| Errno::ENOLCK)?;
            }
        } else {
            self.tables.set_lock(&lock).map_err(|_| Errno::ENOLCK)?;
        }
        self.effects.push(Effect::LockedThrough {
            nodeid: lock.nodeid,
            owner: lock.owner,
            flock: lock.flock,
            fh: lock.fh,
        });
        // Taking a lock may release too: a downgrade, or a flock conversion.
        self.effects.push(Effect::Unlocked(lock.nodeid));
        Ok(())
    }

    /// The store names no process for a lock that is held through this mount; the tables do.
    fn found_lock(&mut self) -> Result<Reply, Errno> {
        let mut out: LkOut = self.data()?;
        if out.lk.typ != libc::F_UNLCK as u32 {
            let wanted = lock_of(self.request).ok_or(Errno::EIO)?;
            if let Some(held) = self.tables.conflict(&wanted) {
                out.lk = FileLock {
                    start: held.start,
                    end: held.end,
                    typ: if held.exclusive {
                        libc::F_WRLCK as u32
                    } else {
                        libc::F_RDLCK as u32
                    },
                    pid: held.pid,
                };
            }
        }
        Ok(self.bytes(out.as_bytes()))
    }
}
