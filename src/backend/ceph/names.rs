//! Operations on names: looking up, making, removing, renaming, linking.

use std::ffi::{CStr, OsStr};

use super::attributes::attr;
use super::client::{Inode, Perms};
use super::ffi::Statx;
use super::files::sanitized;
use super::node::{identity, vino_of};
use super::verify::Made;
use super::{Ceph, c_name};
use crate::backend::{Answer, Attempt, Call, Replayed};
use crate::region::slot::Journal;
use crate::wire::Errno;
use crate::wire::abi::{CreateIn, MkdirIn, MknodIn, ROOT_ID};

impl Ceph {
    pub(super) fn lookup(&self, call: &Call<'_>, name: &OsStr) -> Result<Answer, Errno> {
        let node = self.inode(&call.annex.node)?;
        // The parent of the root is the root: nothing above it is served.
        let itself = name == "." || name == ".." && call.annex.node.nodeid == ROOT_ID;
        let st = if itself {
            node.stat(&self.superuser)?
        } else {
            let perms = self.caller(&call.request.header)?;
            self.client.lookup(&node, &c_name(name)?, &perms)?.1
        };
        let (entry, id) = self.entry(&st);
        Ok(Answer::Entry(entry, id))
    }

    pub(super) fn readlink(&self, call: &Call<'_>) -> Result<Answer, Errno> {
        let node = self.inode(&call.annex.node)?;
        Ok(Answer::Data(node.read_link(&self.superuser)?))
    }

    pub(super) fn symlink(
        &self,
        call: &Call<'_>,
        name: &OsStr,
        target: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let to = c_name(target)?;
        let made = Made::Symlink(target);
        self.make(call, attempt, name, made, |parent, name, perms| {
            self.client.symlink(parent, name, &to, perms)
        })
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
            0 => libc::S_IFREG,
            file_type => file_type,
        };
        let mode = file_type | self.mode(arg.mode, arg.umask);
        let made = Made::Node(file_type, arg.rdev);
        self.make(call, attempt, name, made, |parent, name, perms| {
            self.client
                .mknod(parent, name, mode, arg.rdev.into(), perms)
        })
    }

    pub(super) fn mkdir(
        &self,
        call: &Call<'_>,
        arg: MkdirIn,
        name: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let mode = self.mode(arg.mode, arg.umask);
        self.make(
            call,
            attempt,
            name,
            Made::Directory,
            |parent, name, perms| self.client.mkdir(parent, name, mode, perms),
        )
    }

    /// Makes something with a name, or finds it made.
    fn make(
        &self,
        call: &Call<'_>,
        attempt: Attempt<'_>,
        name: &OsStr,
        made: Made<'_>,
        create: impl FnOnce(&Inode, &CStr, &Perms) -> Result<(Inode, Statx), Errno>,
    ) -> Result<Answer, Errno> {
        let parent = self.inode(&call.annex.node)?;
        let name = c_name(name)?;
        if let Attempt::Again(journal) = attempt {
            if let Some((_, st)) = self.made_before(call, &parent, &name, made, journal)? {
                call.note(Replayed::Verified);
                let (entry, id) = self.entry(&st);
                return Ok(Answer::Entry(entry, id));
            }
            call.note(Replayed::Reissued);
        }
        let perms = self.caller(&call.request.header)?;
        let (_, st) = create(&parent, &name, &perms)?;
        let (entry, id) = self.entry(&st);
        Ok(Answer::Entry(entry, id))
    }

    pub(super) fn create(
        &self,
        call: &Call<'_>,
        arg: CreateIn,
        name: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let parent = self.inode(&call.annex.node)?;
        let name = c_name(name)?;
        let requested = arg.flags as i32;
        let mode = self.mode(arg.mode, arg.umask);
        if let Attempt::Again(journal) = attempt {
            let made = Made::Node(libc::S_IFREG, 0);
            if let Some((inode, st)) = self.made_before(call, &parent, &name, made, journal)? {
                call.note(Replayed::Verified);
                // The mode may forbid what the creator may do.
                let file = inode.open(sanitized(requested), &self.superuser)?;
                let vino = vino_of(&st);
                let flags = self.keep(call.annex.new_fh, file, requested, vino, inode);
                let (entry, id) = self.entry(&st);
                return Ok(Answer::Created(entry, id, flags));
            }
            call.note(Replayed::Reissued);
        }
        let perms = self.caller(&call.request.header)?;
        // The kernel believes the name to be absent. When somebody else was faster, it looks again
        // and opens what is there with rules of its own (ESTALE does that): a truncation then comes
        // as a SETATTR, which can be verified.
        let how = sanitized(requested) | libc::O_CREAT | libc::O_EXCL;
        let made = self.client.create_file(&parent, &name, mode, how, &perms);
        let (inode, st, file) = match made {
            Err(Errno::EEXIST) if requested & libc::O_EXCL == 0 => return Err(Errno::ESTALE),
            made => made?,
        };
        let vino = vino_of(&st);
        let flags = self.keep(call.annex.new_fh, file, requested, vino, inode);
        let (entry, id) = self.entry(&st);
        Ok(Answer::Created(entry, id, flags))
    }

    pub(super) fn remove(
        &self,
        call: &Call<'_>,
        name: &OsStr,
        directory: bool,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let parent = self.inode(&call.annex.node)?;
        let name = c_name(name)?;
        let journal = attempt.journal();
        if attempt.is_again() {
            if self.removed_before(&parent, &name, journal)? {
                call.note(Replayed::Verified);
                return Ok(Answer::Empty);
            }
            call.note(Replayed::Reissued);
        }
        let perms = self.caller(&call.request.header)?;
        self.pin_victim(journal);
        if directory {
            parent.rmdir(&name, &perms)?;
        } else {
            parent.unlink(&name, &perms)?;
        }
        Ok(Answer::Empty)
    }

    pub(super) fn rename(
        &self,
        call: &Call<'_>,
        flags: u32,
        name: &OsStr,
        newname: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        let old = self.inode(&call.annex.node)?;
        let new = self.inode(&call.annex.second)?;
        let (name, newname) = (c_name(name)?, c_name(newname)?);
        let journal = attempt.journal();
        if attempt.is_again() {
            if self.renamed_before((&old, &name), (&new, &newname), journal)? {
                call.note(Replayed::Verified);
                return Ok(Answer::Empty);
            }
            call.note(Replayed::Reissued);
        }
        let perms = self.caller(&call.request.header)?;
        self.pin_victim(journal);
        old.rename(&name, &new, &newname, &perms)?;
        Ok(Answer::Empty)
    }

    pub(super) fn link(
        &self,
        call: &Call<'_>,
        newname: &OsStr,
        attempt: Attempt<'_>,
    ) -> Result<Answer, Errno> {
        let parent = self.inode(&call.annex.node)?;
        let inode = self.inode(&call.annex.second)?;
        let name = c_name(newname)?;
        let mut done = false;
        if let Attempt::Again(journal) = attempt {
            let now = self.identity_of_name(&parent, &name)?;
            done = journal.target.is_none() && now == call.annex.second.identity;
            call.note(if done {
                Replayed::Verified
            } else {
                Replayed::Reissued
            });
        }
        if !done {
            let perms = self.caller(&call.request.header)?;
            inode.link(&parent, &name, &perms)?;
        }
        let st = inode.stat(&self.superuser)?;
        let entry = self.timeouts.entry(attr(&st));
        Ok(Answer::Entry(entry, identity(vino_of(&st))))
    }

    /// Holds what is about to lose its last name: the kernel may still refer to it. The front-end
    /// reads the journal and says when it does not any more.
    fn pin_victim(&self, journal: &Journal) {
        if journal.flags & Journal::LAST_NAME != 0
            && let Some(vino) = super::node::vino(&journal.target)
            && let Ok(inode) = self.client.find(vino)
        {
            self.pins.insert(vino, inode);
        }
    }
}
