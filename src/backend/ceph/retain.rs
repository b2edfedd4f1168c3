//! Writes that are acknowledged before the cluster has them.
//!
//! With the library's cache on, a write is fast because it stays in the memory of this process. So that
//! it outlives the process all the same, it is *retained* ([`Log`]) until the library has flushed it;
//! the next generation writes again what a dead one retained. Three questions decide what that is
//! allowed to do (all answers measured with 16.2.15):
//!
//! **May a write be retained?** Only as long as nobody else can have changed the file: with the right to
//! write without telling anybody ([`may_cache`](super::client::File::may_cache)), before the write and
//! after it, and if the version of the file grew by exactly one. Any other write is with the cluster
//! when it is acknowledged, and nothing older of its file stays retained.
//!
//! **When is a write durable?** When a flush that began after it has succeeded, and then attributes
//! could be asked of the server: a session that was evicted has dropped everything and says "done".
//! A notice that others want the file makes a flush begin at once.
//!
//! **What if the session dies?** The metadata server lets nobody change the file as long as the dead
//! session exists; before it is ended, somebody looks how the file is ([`Look`]). What was modified by
//! somebody else by then, to whom this client gave the file after flushing it, is left alone. What
//! changes after that, or after an eviction, met writes that the cluster never got: they are dropped, EIO
//! tells every handle once, and `conflicts` and `dropped_bytes` count them. So it is with a file that
//! somebody else has open for writing by now. Otherwise they are written again, in order, and the file
//! has the time of the last of them. (Not noticed is only who opens the file for writing while that
//! happens, a few milliseconds, and while a third has it open, too.)
//!
//! Changes of attributes, but for sizes, are retained in the same way: the library only notes them down
//! as well. What has still the value it had before gets the new one again; another value is somebody
//! else's, or is there already.
//!
//! A flush that fails for good (no space, quota) is told to every open handle once; what could not be
//! written is dropped and counted.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::client::{Client, Inode, Perms};
use super::ffi::{Statx, Vino, setattr};
use super::files::{Handles, OpenFile, write_all};
use super::node::{identity, vino};
use super::session::each;
use super::{ask_for_session, prove_session};
use crate::backend::{Frontend, Stripes, fault};
use crate::region::memory::Span;
use crate::region::retained::{Change, Entry, Log, Record, Stamp, What};
use crate::wire::Errno;

/// What is retained for so long is flushed. The library begins after five seconds by itself.
const AGE: Duration = Duration::from_secs(2);
/// How often ages are looked at.
const TICK: Duration = Duration::from_millis(250);
/// Of more files than this not each one is flushed, but all that this client has.
const ONE_BY_ONE: usize = 16;
/// The metadata server grants what nobody else wants within this.
const PATIENCE: Duration = Duration::from_millis(100);
/// And mostly within this.
const MOMENT: Duration = Duration::from_millis(5);

/// What is retained of a file.
struct Unflushed {
    /// Oldest first, with their sequence numbers.
    entries: VecDeque<(Entry, u64)>,
    since: Instant,
    /// The file after the last of them.
    last: Stamp,
    /// Somebody else wants the file.
    urgent: bool,
}

/// See the module.
pub(super) struct Retainer {
    log: Log,
    /// [`number`] of this session.
    session: u64,
    client: Arc<Client>,
    root: Inode,
    superuser: Arc<Perms>,
    frontend: Arc<dyn Frontend>,
    handles: Arc<Handles>,
    files: Mutex<HashMap<Vino, Unflushed>>,
    /// Something is to be flushed.
    bell: Condvar,
    /// Held over a write and what is noted of it.
    busy: Stripes,
    /// Nothing is flushed any more: the session is about to be ended.
    finished: Mutex<bool>,
}

/// What dead generations retained of one file.
pub(super) type Found = HashMap<Vino, Vec<(Entry, Record)>>;

/// What became of it.
enum Outcome {
    /// It is there, or nobody can see it any more.
    Done,
    /// Somebody else has changed the file.
    Conflict,
    /// It cannot be written.
    Failed(Errno),
}

/// Sorts what was found by file. What was not carried out is left to its request, which is still there:
/// it may be what the library died of.
pub(super) fn by_file(log: &Log, found: Vec<(Entry, Record)>) -> Found {
    let mut files = Found::new();
    for (entry, record) in found {
        if record.done == 0 {
            log.remove(entry);
            continue;
        }
        match vino(&record.identity) {
            Some(vino) => files.entry(vino).or_default().push((entry, record)),
            None => {
                tracing::error!("a retained write of no file is dropped");
                log.remove(entry);
            }
        }
    }
    files
}

/// Some of what was found is data of this file.
pub(super) fn is_written(found: &Found, vino: Vino) -> bool {
    let mut records = found.get(&vino).into_iter().flatten();
    records.any(|(_, record)| record.kind == Record::WRITE)
}

impl Retainer {
    pub(super) fn new(
        log: Log,
        session: u64,
        client: &Arc<Client>,
        superuser: &Arc<Perms>,
        frontend: &Arc<dyn Frontend>,
        handles: &Arc<Handles>,
    ) -> Result<Retainer, Errno> {
        Ok(Retainer {
            log,
            session,
            client: client.clone(),
            root: client.root()?,
            superuser: superuser.clone(),
            frontend: frontend.clone(),
            handles: handles.clone(),
            files: Mutex::default(),
            bell: Condvar::new(),
            busy: Stripes::default(),
            finished: Mutex::default(),
        })
    }

    // ---- writing -----------------------------------------------------------------------------

    /// Writes; what is not durable then is retained. Returns the bytes written.
    pub(super) fn write(
        &self,
        open: &OpenFile,
        data: &[Span<'_>],
        offset: u64,
    ) -> Result<usize, Errno> {
        let vino = open.vino;
        let _alone = self.busy.lock(vino);
        if open.synchronous || !open.file.may_cache(true) {
            return self.write_through(open, data, offset);
        }
        let before = open.inode.stamp(true, &self.superuser)?;
        if self.is_behind(vino, before) {
            self.settle(vino)?;
        }
        let (expected, added) = self.retain(vino, What::Write(data, offset), before);
        let Some((entry, sequence)) = added else {
            return self.write_through(open, data, offset);
        };
        fault::at("retaining");
        let written = write_all(&open.file, data, offset);
        match written {
            Ok(0) | Err(_) => {
                self.log.remove(entry);
                return written;
            }
            Ok(len) => self.log.shorten(entry, len),
        }
        let after = open.inode.stamp(true, &self.superuser).unwrap_or(expected);
        self.log.set_done(entry, after);
        self.note(vino, [(entry, sequence)], after);
        if after.version != expected.version || !open.file.may_cache(true) {
            self.settle(vino)?;
        } else if self.log.is_filling() {
            self.bell.notify_one();
        }
        written
    }

    /// Writes, and has the cluster have it. Nothing older stays retained: it must not be written again
    /// after this.
    fn write_through(
        &self,
        open: &OpenFile,
        data: &[Span<'_>],
        offset: u64,
    ) -> Result<usize, Errno> {
        self.settle(open.vino)?;
        let written = write_all(&open.file, data, offset)?;
        if !open.synchronous {
            let synced = open.file.sync(true);
            prove_session(&open.inode, &self.superuser, &*self.frontend);
            synced.inspect_err(|_| ask_for_session(&self.client, &*self.frontend))?;
        }
        Ok(written)
    }

    /// Changes attributes, but for the size, as far as the library is concerned. False: there is no room
    /// to retain that, and nothing was done.
    pub(super) fn set_attributes(
        &self,
        vino: Vino,
        inode: &Inode,
        st: &Statx,
        mask: i32,
        perms: &Perms,
    ) -> Result<bool, Errno> {
        let _alone = self.busy.lock(vino);
        let before = inode.known(&self.superuser)?;
        let mut change = Attributes::new(mask, &before, st);
        let what = What::Attributes(change.as_bytes());
        let (expected, added) = self.retain(vino, what, before.stamp());
        let Some((entry, sequence)) = added else {
            return Ok(false);
        };
        if let Err(errno) = inode.set_stat(st, mask, perms) {
            self.log.remove(entry);
            return Err(errno);
        }
        let mut last = expected;
        if let Ok(after) = inode.known(&self.superuser) {
            // Times that are to be now are known by now.
            change.after = Values::of(&after);
            self.log.set_data(entry, change.as_bytes());
            last = after.stamp();
        }
        self.log.set_done(entry, last);
        self.note(vino, [(entry, sequence)], last);
        Ok(true)
    }

    /// Retains a change that is about to be made, if there is room. Returns how the file is then.
    fn retain(&self, vino: Vino, what: What<'_>, before: Stamp) -> (Stamp, Option<(Entry, u64)>) {
        let after = Stamp {
            version: before.version + 1,
            ..Stamp::default()
        };
        let added = self.log.add(&Change {
            session: self.session,
            identity: identity(vino),
            what,
            before,
            after,
        });
        (after, added)
    }

    /// Something else than the last retained write has modified the file.
    fn is_behind(&self, vino: Vino, now: Stamp) -> bool {
        let files = self.files.lock();
        let last = files.get(&vino).map(|file| file.last);
        last.is_some_and(|last| last.version != now.version && !last.is_of_same_time(now))
    }

    /// Writes were carried out, and are retained.
    fn note(&self, vino: Vino, entries: impl IntoIterator<Item = (Entry, u64)>, last: Stamp) {
        let mut files = self.files.lock();
        let file = files.entry(vino).or_insert_with(|| Unflushed {
            entries: VecDeque::new(),
            since: Instant::now(),
            last,
            urgent: false,
        });
        file.entries.extend(entries);
        file.last = last;
    }

    // ---- flushing ----------------------------------------------------------------------------

    /// The newest retained write of a file, if there is one: a flush that begins now covers it.
    pub(super) fn newest(&self, vino: Vino) -> Option<u64> {
        let files = self.files.lock();
        Some(files.get(&vino)?.entries.back()?.1)
    }

    /// Makes durable what is retained of a file.
    pub(super) fn settle(&self, vino: Vino) -> Result<(), Errno> {
        let Some(newest) = self.newest(vino) else {
            return Ok(());
        };
        // What has left the library's cache has been flushed, if the session lives.
        let flushed = match self.client.cached(vino) {
            Some(inode) => inode.sync(false),
            None => Ok(()),
        };
        prove_session(&self.root, &self.superuser, &*self.frontend);
        match flushed {
            Ok(()) => self.durable(vino, newest),
            Err(errno) => self.failed(vino, errno),
        }
        flushed
    }

    /// A flush that covers the writes of a file up to this one has succeeded.
    pub(super) fn durable(&self, vino: Vino, newest: u64) {
        let mut files = self.files.lock();
        let Some(file) = files.get_mut(&vino) else {
            return;
        };
        while let Some((entry, sequence)) = file.entries.front().copied()
            && sequence <= newest
        {
            self.log.remove(entry);
            file.entries.pop_front();
        }
        file.since = Instant::now();
        file.urgent = false;
        if file.entries.is_empty() {
            files.remove(&vino);
        }
    }

    /// A flush of a file failed. It cannot be written, for good, unless the session was ended.
    pub(super) fn failed(&self, vino: Vino, errno: Errno) {
        ask_for_session(&self.client, &*self.frontend);
        let file = self.files.lock().remove(&vino);
        let Some(file) = file else {
            return;
        };
        self.handles.fail(vino, errno);
        self.drop_all(file.entries.into_iter().map(|(entry, _)| entry));
        tracing::error!(
            "writes to inode {:#x} that were acknowledged could not be written: {errno}",
            vino.ino
        );
    }

    fn drop_all(&self, entries: impl IntoIterator<Item = Entry>) {
        let dropped: u64 = entries.into_iter().map(|e| self.log.remove(e)).sum();
        let count = self.log.file().dropped_bytes();
        count.fetch_add(dropped, Ordering::Relaxed);
    }

    /// The newest retained write of every file.
    pub(super) fn newest_of_all(&self) -> Vec<(Vino, u64)> {
        let files = self.files.lock();
        let newest = files.iter().filter_map(|(vino, file)| {
            let (_, sequence) = file.entries.back()?;
            Some((*vino, *sequence))
        });
        newest.collect()
    }

    /// Somebody else gets the file, and the library has flushed what it had of it.
    pub(super) fn given_back(&self, vino: Vino) {
        if let Some(file) = self.files.lock().get_mut(&vino) {
            if let Some((entry, _)) = file.entries.front() {
                self.log.set_given_back(*entry);
            }
            file.urgent = true;
            self.bell.notify_one();
        }
    }

    /// Flushes everything, for the last time.
    pub(super) fn finish(&self) {
        let files = self.newest_of_all();
        // What cannot be written is reported and counted there.
        each(&files, |(vino, _)| self.settle(*vino));
        *self.finished.lock() = true;
    }

    /// Flushes what is old, or wanted, or too much, until [`finish`](Retainer::finish).
    pub(super) fn flush(&self) {
        loop {
            let due = self.due();
            // Held while there is something of the library in use: it must not outlive the session.
            let finished = self.finished.lock();
            if *finished {
                return;
            }
            if due.len() <= ONE_BY_ONE {
                each(&due, |vino| self.settle(*vino));
                continue;
            }
            let newest = self.newest_of_all();
            let flushed = self.client.sync();
            prove_session(&self.root, &self.superuser, &*self.frontend);
            if flushed.is_ok() {
                for (vino, newest) in newest {
                    self.durable(vino, newest);
                }
            } else {
                // Each is told its own error.
                each(&due, |vino| self.settle(*vino));
            }
        }
    }

    /// Waits for files that are to be flushed.
    fn due(&self) -> Vec<Vino> {
        let mut files = self.files.lock();
        loop {
            let everything = self.log.is_filling();
            let due = files
                .iter()
                .filter(|(_, file)| everything || file.urgent || file.since.elapsed() >= AGE);
            let due: Vec<Vino> = due.map(|(vino, _)| *vino).collect();
            if !due.is_empty() {
                return due;
            }
            if files.is_empty() {
                self.log.shrink();
                // Long enough for what comes now to be worth a look.
                self.bell.wait_for(&mut files, AGE);
            } else {
                self.bell.wait_for(&mut files, TICK);
            }
        }
    }

    // ---- after a death -----------------------------------------------------------------------

    /// Writes again what a dead generation retained.
    pub(super) fn write_again(&self, found: Found, ends: &Ends) {
        let files: Vec<(Vino, Vec<(Entry, Record)>)> = found.into_iter().collect();
        each(&files, |(vino, records)| {
            let outcome = self.write_file_again(*vino, records, ends.get(vino).copied());
            let entries = || records.iter().map(|(entry, _)| *entry);
            match outcome {
                Ok(Outcome::Done) => {}
                Ok(Outcome::Conflict) => {
                    tracing::warn!(
                        "inode {:#x} was changed by another client before what was acknowledged here \
                         was written; that is dropped",
                        vino.ino
                    );
                    let count = self.log.file().conflicts();
                    count.fetch_add(1, Ordering::Relaxed);
                    self.handles.fail(*vino, Errno::EIO);
                    self.drop_all(entries());
                }
                Ok(Outcome::Failed(errno)) | Err(errno) => {
                    ask_for_session(&self.client, &*self.frontend);
                    tracing::error!(
                        "writes to inode {:#x} that were acknowledged could not be written again: \
                         {errno}",
                        vino.ino
                    );
                    self.handles.fail(*vino, errno);
                    self.drop_all(entries());
                }
            }
        });
    }

    fn write_file_again(
        &self,
        vino: Vino,
        records: &[(Entry, Record)],
        end: Option<End>,
    ) -> Result<Outcome, Errno> {
        let release = || {
            for (entry, _) in records {
                self.log.remove(*entry);
            }
            Ok(Outcome::Done)
        };
        let inode = match self.client.find(vino) {
            Ok(inode) => inode,
            // It has no name and nobody has it.
            Err(Errno::ESTALE | Errno::ENOENT) => return release(),
            Err(errno) => return Err(errno),
        };
        let (Some(end), Some((_, first)), Some((_, last))) = (end, records.first(), records.last())
        else {
            tracing::info!("inode {:#x} was not looked at in time", vino.ino);
            return Ok(Outcome::Conflict);
        };
        let set_attributes = || {
            let mut attributes = records.iter().filter(|(_, r)| r.kind != Record::WRITE);
            attributes.try_for_each(|(_, record)| self.set_attributes_again(&inode, record))
        };
        if records.iter().all(|(_, r)| r.kind != Record::WRITE) {
            set_attributes()?;
            inode.sync(false)?;
            return release();
        }
        if let End::Seen(seen) = end
            && !is_own(records, seen)
            && seen.version > last.after.version
        {
            if first.given_back == 0 {
                // They may have set a time only, for which nothing has to be flushed.
                tracing::info!("inode {:#x} was changed while it was open here", vino.ino);
                set_attributes()?;
                return Ok(Outcome::Conflict);
            }
            // Whoever did that came after our flush. The time is a guess by now if it was open here.
            if inode.stamp(false, &self.superuser)?.version == seen.version {
                self.restore_time(&inode, seen)?;
            }
            set_attributes()?;
            inode.sync(false)?;
            return release();
        }
        // Its size, too, before it is opened for writing.
        inode.stat(&self.superuser)?;
        let now = inode.stamp(false, &self.superuser)?;
        let unchanged = match end {
            End::Seen(seen) => now.version == seen.version,
            End::Unseen => now.version == first.before.version || is_own(records, now),
        };
        if !unchanged {
            tracing::info!(
                "inode {:#x} was left as {last:?}, after {:?}, and is {now:?}",
                vino.ino,
                first.before
            );
            set_attributes()?;
            return Ok(Outcome::Conflict);
        }
        // Others may have been waiting for the dead session to end; who reads only is in nobody's way.
        // That is to be seen before it is opened for writing here.
        let reader = inode.open(libc::O_RDONLY, &self.superuser)?;
        let others_write = !within(PATIENCE, || reader.may_cache(false));
        drop(reader);
        let file = inode.open(libc::O_RDWR, &self.superuser)?;
        let patience = if others_write { PATIENCE } else { MOMENT };
        let alone = within(patience, || file.may_cache(true));
        let changed = inode.stamp(false, &self.superuser)?.version != now.version;
        if changed || others_write && !alone {
            tracing::info!("inode {:#x} is written by somebody else by now", vino.ino);
            set_attributes()?;
            return Ok(Outcome::Conflict);
        }
        if alone {
            // From now on it is this session that nobody can get past.
            for (n, (entry, _)) in records.iter().enumerate() {
                let expected = Stamp {
                    version: now.version + n as u64 + 1,
                    ..Stamp::default()
                };
                self.log.renew(*entry, self.session, now, expected);
            }
        }
        fault::at("retained");
        for (_, record) in records {
            if record.kind != Record::WRITE {
                self.set_attributes_again(&inode, record)?;
                continue;
            }
            let data = self.log.data(record);
            if write_all(&file, &[data], record.offset)? < data.len() {
                return Ok(Outcome::Failed(Errno::EIO));
            }
        }
        self.restore_time(&inode, last.after)?;
        let after = inode.stamp(true, &self.superuser)?;
        for (entry, _) in records {
            self.log.set_after(*entry, after);
        }
        let entries = records.iter().map(|(entry, r)| (*entry, r.sequence));
        self.note(vino, entries, after);
        if !alone || !file.may_cache(true) {
            // Reported, counted and dropped there.
            let _ = self.settle(vino);
        }
        Ok(Outcome::Done)
    }

    /// Gives attributes the values they were given, unless somebody else has given them others.
    fn set_attributes_again(&self, inode: &Inode, record: &Record) -> Result<(), Errno> {
        let bytes = self.log.data(record).to_vec();
        let Ok(change) = Attributes::read_from_bytes(&bytes) else {
            tracing::error!("a retained change of attributes makes no sense, and is dropped");
            return Ok(());
        };
        let (mask, st) = change.missing(&inode.stat(&self.superuser)?);
        if mask == 0 {
            return Ok(());
        }
        inode.set_stat(&st, mask, &self.superuser)
    }

    /// The file was last modified when its last write was, and not now.
    fn restore_time(&self, inode: &Inode, last: Stamp) -> Result<(), Errno> {
        if last.timed == 0 {
            return Ok(());
        }
        let mut st = inode.stat(&self.superuser)?;
        st.mtime = libc::timespec {
            tv_sec: last.sec,
            tv_nsec: last.nsec.into(),
        };
        inode.set_stat(&st, setattr::MTIME, &self.superuser)
    }
}

/// Attributes that can be given values.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Values {
    mtime: [i64; 2],
    atime: [i64; 2],
    mode: u32,
    uid: u32,
    gid: u32,
    reserved: u32,
}

impl Values {
    fn of(st: &Statx) -> Values {
        let time = |t: &libc::timespec| [t.tv_sec, t.tv_nsec];
        Values {
            mtime: time(&st.mtime),
            atime: time(&st.atime),
            mode: u32::from(st.mode) & 0o7777,
            uid: st.uid,
            gid: st.gid,
            reserved: 0,
        }
    }
}

/// A change of attributes: the data of its record.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Attributes {
    /// `ffi::setattr`, without "now".
    mask: u32,
    reserved: u32,
    before: Values,
    after: Values,
}

impl Attributes {
    fn new(mask: i32, before: &Statx, after: &Statx) -> Attributes {
        let named = [
            (setattr::MTIME_NOW, setattr::MTIME),
            (setattr::ATIME_NOW, setattr::ATIME),
        ];
        let mask = named.iter().fold(mask, |mask, (now, named)| {
            if mask & now != 0 {
                mask & !now | named
            } else {
                mask
            }
        });
        Attributes {
            mask: mask as u32,
            reserved: 0,
            before: Values::of(before),
            after: Values::of(after),
        }
    }

    /// What of it has still the value it had before, and the new values.
    fn missing(&self, now: &Statx) -> (i32, Statx) {
        let (mut mask, mut st) = (self.mask as i32, *now);
        let now = Values::of(now);
        let (before, after) = (&self.before, &self.after);
        let mut keep = |bit: i32, is_as_before: bool| {
            if !is_as_before {
                mask &= !bit;
            }
        };
        keep(setattr::MODE, now.mode == before.mode);
        keep(setattr::UID, now.uid == before.uid);
        keep(setattr::GID, now.gid == before.gid);
        keep(setattr::MTIME, now.mtime == before.mtime);
        keep(setattr::ATIME, now.atime == before.atime);
        let time = |[tv_sec, tv_nsec]: [i64; 2]| libc::timespec { tv_sec, tv_nsec };
        st.mode = after.mode as u16;
        (st.uid, st.gid) = (after.uid, after.gid);
        (st.mtime, st.atime) = (time(after.mtime), time(after.atime));
        (mask, st)
    }
}

/// A file was last modified by one of these, or before them.
fn is_own(records: &[(Entry, Record)], stamp: Stamp) -> bool {
    let own = records.iter().flat_map(|(_, r)| [r.before, r.after]);
    own.into_iter().any(|own| own.is_of_same_time(stamp))
}

/// How a file was when the session ended in which its retained writes were made.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// Like this, and until then nobody else had a right to it.
    Seen(Stamp),
    /// Nobody knows: the session was gone before anybody looked.
    Unseen,
}

/// By file.
pub(super) type Ends = HashMap<Vino, End>;

/// A look at the files of retained writes, before the sessions in which they were made are ended.
pub(super) struct Look<'a> {
    log: &'a Log,
    found: &'a Found,
    now: Vec<(Vino, Stamp)>,
    /// Keeps what has no name.
    pub(super) inodes: Vec<Inode>,
}

impl<'a> Look<'a> {
    pub(super) fn new(
        log: &'a Log,
        found: &'a Found,
        superuser: &Perms,
        find: impl Fn(Vino) -> Option<Inode> + Sync,
    ) -> Look<'a> {
        let files: Vec<Vino> = found.keys().copied().collect();
        let looked = each(&files, |vino| {
            let inode = find(*vino)?;
            let stamp = inode.stamp(true, superuser).ok()?;
            Some(((*vino, stamp), inode))
        });
        let (now, inodes) = looked.into_iter().flatten().unzip();
        let look = Look {
            log,
            found,
            now,
            inodes,
        };
        for (entry, record, stamp) in look.firsts() {
            if record.end == Record::NOT_ENDED {
                log.set_end(entry, Record::ENDING, stamp);
            }
        }
        look
    }

    /// The first record of each file says how its session ended.
    fn firsts(&self) -> impl Iterator<Item = (Entry, &Record, Stamp)> {
        self.now.iter().filter_map(|(vino, stamp)| {
            let (entry, record) = self.found.get(vino)?.first()?;
            Some((*entry, record, *stamp))
        })
    }

    /// The sessions were ended. `existed`: those that were there.
    pub(super) fn ended(self, existed: &[u64]) -> (Ends, Vec<Inode>) {
        for (entry, record, stamp) in self.firsts() {
            if record.end == Record::NOT_ENDED {
                let end = if existed.contains(&record.session) {
                    Record::ENDED
                } else {
                    Record::GONE
                };
                self.log.set_end(entry, end, stamp);
            }
        }
        let ends = self.now.iter().filter_map(|(vino, stamp)| {
            let (_, record) = self.found.get(vino)?.first()?;
            let end = match record.end {
                Record::NOT_ENDED if existed.contains(&record.session) => End::Seen(*stamp),
                Record::ENDED => End::Seen(record.ended),
                // Whoever ended it died over it. Had it been gone by then, evicted, and somebody changed
                // the file since, nobody would know; that takes two deaths and an eviction in a second.
                Record::ENDING => End::Seen(record.ended),
                _ => End::Unseen,
            };
            Some((*vino, end))
        });
        (ends.collect(), self.inodes)
    }
}

/// True if it is in time.
fn within(limit: Duration, done: impl Fn() -> bool) -> bool {
    let limit = Instant::now() + limit;
    while !done() {
        if Instant::now() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// A session's name as a number (FNV-1a).
pub(super) fn number(name: &str) -> u64 {
    let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, hash)
}
