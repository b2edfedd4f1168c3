//! Operations on names: looking up, making, removing, renaming, linking.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use parking_lot::MutexGuard;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, linkat, mkdirat, mknodat, openat, readlinkat,
    renameat_with, symlinkat, unlinkat,
};

use super::caller::Acting;
use super::files::{Handle, sanitized};
use super::identity::{Found, Naming, stat};
use super::verify::Made;
use super::{Answer, Attempt, Call, Dir, VaultKey, c_name};
use crate::backend::Replayed;
use crate::backend::convert::decode_dev;
use crate::region::Identity;
use crate::wire::Errno;
use crate::wire::abi::{CreateIn, MkdirIn, MknodIn, ROOT_ID};

const PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// An inode that may lose its last name, kept before it does.
struct Victim<'a> {
    deposited: Option<Identity>,
    /// Two unlinks of two names of one inode must not both see the other name.
    _alone: Option<MutexGuard<'a, ()>>,
}

impl Dir {
    pub(super) fn lookup(&self, call: &Call<'_>, name: &OsStr) -> Result<Answer, Errno> {
        let node = self.node(call)?;
        let found = if name == "." {
            self.describe(node.as_fd())?
        } else if name == ".." {
            // The parent of the root is the root: nothing above it is served.
            if call.annex.node.nodeid == ROOT_ID {
                self.describe(self.root.as_fd())?
            } else {
                self.describe(openat(&node, c"..", PATH, Mode::empty())?.as_fd())?
            }
        } else {
            self.look(node.as_fd(), &c_name(name)?)?
        };
        Ok(Answer::Entry(self.entry(&found), found.id))
    }

    /// Identity and attributes of an open object.
    fn describe(&self, fd: BorrowedFd<'_>) -> Result<Found, Errno> {
        Ok(Found {
            id: self.naming.identify(fd)?,
            stat: stat(fd)?,
        })
    }

    pub(super) fn readlink(&self, call: &Call<'_>) -> Result<Answer, Errno> {
        let node = self.node(call)?;
        let target = readlinkat(&node, c"", Vec::new()).map_err(|e| match e {
            // Of an empty path the system says ENOENT where it means that this is no link.
            rustix::io::Errno::NOENT => Errno::EINVAL,
            e => e.into(),
        })?;
        Ok(Answer::Data(target.into_bytes()))
    }

    pub(super) fn symlink(
        &self,
        call: &Call<'_>,
        name: &OsStr,
        target: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        self.make(
            call,
            attempt,
            name,
            Made::Symlink(target),
            |parent, name| {
                let _caller = Acting::as_caller(&call.request.header, 0);
                Ok(symlinkat(target, parent, name)?)
            },
        )
    }

    pub(super) fn mknod(
        &self,
        call: &Call<'_>,
        arg: MknodIn,
        name: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        // A type of 0 means a regular file.
        let file_type = match arg.mode & libc::S_IFMT {
            0 => FileType::RegularFile,
            _ => FileType::from_raw_mode(arg.mode),
        };
        let mode = Mode::from_raw_mode(arg.mode & 0o7777);
        let made = Made::Node(file_type, arg.rdev);
        self.make(call, attempt, name, made, |parent, name| {
            let _caller = Acting::as_caller(&call.request.header, arg.umask);
            Ok(mknodat(
                parent,
                name,
                file_type,
                mode,
                decode_dev(arg.rdev),
            )?)
        })
    }

    pub(super) fn mkdir(
        &self,
        call: &Call<'_>,
        arg: MkdirIn,
        name: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        self.make(call, attempt, name, Made::Directory, |parent, name| {
            let _caller = Acting::as_caller(&call.request.header, arg.umask);
            Ok(mkdirat(
                parent,
                name,
                Mode::from_raw_mode(arg.mode & 0o7777),
            )?)
        })
    }

    /// Makes something with a name, or finds it made.
    fn make(
        &self,
        call: &Call<'_>,
        attempt: Attempt<'_>,
        name: &OsStr,
        made: Made<'_>,
        create: impl FnOnce(BorrowedFd<'_>, &CStr) -> Result<(), Errno>,
    ) -> Result<Answer, Errno> {
        let parent = self.node(call)?;
        let parent = parent.as_fd();
        let name = c_name(name)?;
        if let Attempt::Again(journal) = attempt {
            if let Some(found) = self.made_before(call, parent, &name, made, journal)? {
                call.note(Replayed::Verified);
                return Ok(Answer::Entry(self.entry(&found), found.id));
            }
            call.note(Replayed::Reissued);
        }
        create(parent, &name)?;
        let found = self.look(parent, &name)?;
        Ok(Answer::Entry(self.entry(&found), found.id))
    }

    pub(super) fn create(
        &self,
        call: &Call<'_>,
        arg: CreateIn,
        name: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let parent = self.node(call)?;
        let name = c_name(name)?;
        let requested = arg.flags as i32;
        if let Attempt::Again(journal) = attempt {
            let made = Made::Node(FileType::RegularFile, 0);
            if let Some(found) = self.made_before(call, parent.as_fd(), &name, made, journal)? {
                // The mode may forbid what the creator may do (`open(2)` with O_RDWR and mode 0400),
                // but not to this process.
                let fd = openat(&parent, name.as_c_str(), PATH, Mode::empty())?;
                if self.naming.identify(fd.as_fd())? == found.id {
                    call.note(Replayed::Verified);
                    let fd = self.reopen(&fd, sanitized(requested))?;
                    return Ok(self.created(call, &found, fd, requested));
                }
            }
            call.note(Replayed::Reissued);
        }
        // O_DIRECT is set afterwards: a store without it would make the file and then fail.
        let how = sanitized(requested) & !libc::O_DIRECT
            | libc::O_CREAT
            | libc::O_EXCL
            | libc::O_NOFOLLOW
            | libc::O_CLOEXEC;
        let fd = {
            let _caller = Acting::as_caller(&call.request.header, arg.umask);
            openat(
                &parent,
                name.as_c_str(),
                OFlags::from_bits_retain(how as u32),
                Mode::from_raw_mode(arg.mode & 0o7777),
            )
        };
        let fd = match fd {
            Ok(fd) => fd,
            Err(rustix::io::Errno::EXIST) if requested & libc::O_EXCL == 0 => {
                let fd = openat(&parent, name.as_c_str(), PATH, Mode::empty())?;
                return self.open_existing(call, fd, requested);
            }
            Err(e) => return Err(e.into()),
        };
        if requested & libc::O_DIRECT != 0 {
            let flags = rustix::fs::fcntl_getfl(&fd)? | OFlags::DIRECT;
            let _ = rustix::fs::fcntl_setfl(&fd, flags);
        }
        let found = self.describe(fd.as_fd())?;
        Ok(self.created(call, &found, fd, requested))
    }

    /// A CREATE of a name the kernel believed to be absent: somebody else was faster. The kernel has
    /// not checked whether the caller may open that file, so only its owner gets it here. ESTALE
    /// makes the kernel look the name up again and open it with all checks (`do_filp_open`); so too
    /// for O_TRUNC, which then comes as a SETATTR with rules of its own for a second attempt.
    fn open_existing(&self, call: &Call<'_>, fd: OwnedFd, requested: i32) -> Result<Answer, Errno> {
        let found = self.describe(fd.as_fd())?;
        let file_type = FileType::from_raw_mode(found.stat.stx_mode.into());
        if file_type != FileType::RegularFile
            || found.stat.stx_uid != call.request.header.uid
            || requested & libc::O_TRUNC != 0
        {
            return Err(Errno::ESTALE);
        }
        let fd = self.reopen(&fd, sanitized(requested))?;
        Ok(self.created(call, &found, fd, requested))
    }

    fn created(&self, call: &Call<'_>, found: &Found, fd: OwnedFd, flags: i32) -> Answer {
        self.handles
            .insert(call.annex.new_fh, Handle::new(fd, flags));
        Answer::Created(self.entry(found), found.id, 0)
    }

    /// A file without a name. It goes to the vault before anybody knows of it, since nothing else
    /// could bring it back; a second attempt makes another one, the first died with its only opener.
    pub(super) fn tmpfile(&self, call: &Call<'_>, arg: CreateIn) -> Result<Answer, Errno> {
        let parent = self.node(call)?;
        let requested = arg.flags as i32;
        // O_EXCL means here that it may never get a name (`linkat(2)`), so it is passed on.
        let how = sanitized(requested) & !libc::O_DIRECT
            | requested & libc::O_EXCL
            | libc::O_TMPFILE
            | libc::O_CLOEXEC;
        let fd = {
            let _caller = Acting::as_caller(&call.request.header, arg.umask);
            openat(
                &parent,
                c".",
                OFlags::from_bits_retain(how as u32),
                Mode::from_raw_mode(arg.mode & 0o7777),
            )?
        };
        let found = self.describe(fd.as_fd())?;
        // Not the file itself: kept open for writing it could never be executed.
        let kept = self.reopen(&fd, libc::O_PATH)?;
        call.vault
            .deposit(VaultKey::Inode(found.id), kept.as_fd())?;
        Ok(self.created(call, &found, fd, requested))
    }

    pub(super) fn remove(
        &self,
        call: &Call<'_>,
        name: &OsStr,
        directory: bool,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let parent = self.node(call)?;
        let name = c_name(name)?;
        if let Attempt::Again(journal) = attempt {
            if self.removed_before(parent.as_fd(), &name, journal)? {
                call.note(Replayed::Verified);
                return Ok(Answer::Empty);
            }
            call.note(Replayed::Reissued);
        }
        let flags = if directory {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        let victim = self.keep_victim(call, parent.as_fd(), &name, &Identity::NONE)?;
        let done = unlinkat(&parent, name.as_c_str(), flags);
        self.settle_victim(call, victim, done)
    }

    pub(super) fn rename(
        &self,
        call: &Call<'_>,
        flags: u32,
        name: &OsStr,
        newname: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let flags = RenameFlags::from_bits_retain(flags);
        let (old, new) = (self.node(call)?, self.second_node(call)?);
        let (name, newname) = (c_name(name)?, c_name(newname)?);
        let journal = attempt.journal();
        if attempt.is_again() {
            let (from, to) = ((old.as_fd(), &*name), (new.as_fd(), &*newname));
            if self.renamed_before(from, to, flags, journal)? {
                call.note(Replayed::Verified);
                return Ok(Answer::Empty);
            }
            call.note(Replayed::Reissued);
        }
        // Neither of these takes a name away from anything.
        let victim = if flags.intersects(RenameFlags::EXCHANGE | RenameFlags::NOREPLACE) {
            Victim::none()
        } else {
            self.keep_victim(call, new.as_fd(), &newname, &journal.source)?
        };
        // A whiteout is a new object, the caller's.
        let caller = flags
            .contains(RenameFlags::WHITEOUT)
            .then(|| Acting::as_caller(&call.request.header, 0));
        let done = renameat_with(&old, name.as_c_str(), &new, newname.as_c_str(), flags);
        drop(caller);
        self.settle_victim(call, victim, done)
    }

    pub(super) fn link(
        &self,
        call: &Call<'_>,
        newname: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let (parent, inode) = (self.node(call)?, self.second_node(call)?);
        let name = c_name(newname)?;
        let id = self.naming.identify(inode.as_fd())?;
        let journal = attempt.journal();
        let again = attempt.is_again();
        if again && journal.target.is_none() && self.identity_of_name(parent.as_fd(), &name)? == id
        {
            call.note(Replayed::Verified);
        } else {
            if again {
                call.note(Replayed::Reissued);
            }
            // AT_EMPTY_PATH would do, but not without CAP_DAC_READ_SEARCH.
            let from = inode.as_raw_fd().to_string();
            linkat(
                &self.descriptors,
                from.as_str(),
                &parent,
                name.as_c_str(),
                AtFlags::SYMLINK_FOLLOW,
            )?;
        }
        let found = Found {
            id,
            stat: stat(&inode)?,
        };
        Ok(Answer::Entry(self.entry(&found), id))
    }

    /// Deposits what `name` refers to if this is its last name: afterwards no path and, on most file
    /// systems, no handle leads to it. `spared` is not a victim: renaming it onto itself is nothing.
    fn keep_victim(
        &self,
        call: &Call<'_>,
        parent: BorrowedFd<'_>,
        name: &CStr,
        spared: &Identity,
    ) -> Result<Victim<'_>, Errno> {
        let fd = match openat(parent, name, PATH, Mode::empty()) {
            Ok(fd) => fd,
            // The operation itself knows the right answer.
            Err(rustix::io::Errno::NOENT) => return Ok(Victim::none()),
            Err(e) => return Err(e.into()),
        };
        let id = self.naming.identify(fd.as_fd())?;
        if id == *spared {
            return Ok(Victim::none());
        }
        let alone = self.inodes.lock(id);
        let st = stat(&fd)?;
        let directory = FileType::from_raw_mode(st.stx_mode.into()) == FileType::Directory;
        // Where objects are found by path, the kernel may know this one by the path that goes.
        let last = directory || st.stx_nlink <= 1 || self.naming != Naming::Handles;
        if last {
            call.vault.deposit(VaultKey::Inode(id), fd.as_fd())?;
        }
        Ok(Victim {
            deposited: last.then_some(id),
            _alone: Some(alone),
        })
    }

    /// Takes a needless deposit back: the victim kept its name. Where objects are found by path it
    /// may have been deposited before, under another name that went, and stays.
    fn settle_victim(
        &self,
        call: &Call<'_>,
        victim: Victim<'_>,
        done: rustix::io::Result<()>,
    ) -> Result<Answer, Errno> {
        // Where objects are found by path, an earlier removal of another name may need it.
        if done.is_err()
            && self.naming == Naming::Handles
            && let Some(id) = victim.deposited
        {
            call.vault.discard(VaultKey::Inode(id));
        }
        done?;
        Ok(Answer::Empty)
    }
}

impl Victim<'_> {
    fn none() -> Self {
        Victim {
            deposited: None,
            _alone: None,
        }
    }
}
