//! Beginning a session, and ending those of generations that died.
//!
//! The order decides what survives (measured with 16.2.15):
//!
//! 1. A **new session** begins, under a name of its own. Beginning it may block on what the dead one
//!    holds, so it happens in a thread.
//! 2. What the dead generation **held** is looked up by number: open files, and objects without a
//!    name. It does not block, and from then on they live. Later they would be gone: the metadata
//!    server purges a file without a name when the last session lets go of it. A second session, the
//!    [`Keeper`], does that and ends as soon as the first has found them as well: what is looked up
//!    while a mount is under way the library takes for the root or for its parents (16.2.15), and then
//!    it serves another directory, or goes round in circles when it looks for quotas.
//! 3. **Locks** are asked for while the dead session has them still, so that nobody can have one in
//!    between ([`queue`](super::queue)).
//! 4. The **dead sessions are ended** by name. Their client is blocklisted, so that no late write of
//!    it can reach the store; what it held is free.
//! 5. The **locks** are there, before anything is read or written. Somebody who waited for one before
//!    has it by now: it is lost, and those who believe to have it must know.
//! 6. The backend serves. Files are opened when they are used, and the rest in the background.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::caller::Callers;
use super::client::{Client, Inode, Perms};
use super::ffi::{Vino, setattr};
use super::files::{Failure, Handles, Pending, restore};
use super::locks::{Locks, Mark};
use super::login::{CLOSE_DEFAULT, CONNECT_LIMIT, CephError, Login, Mounting, c_string, set};
use super::node::{Pins, identity, vino, vino_of};
use super::queue::Queue;
use super::retain::{self, Ends, Found, Look, Retainer};
use super::warm::Warm;
use super::{Ceph, prove_session};
use crate::backend::convert::Timeouts;
use crate::backend::{Frontend, Stripes};
use crate::control::message::{
    CephOptions, CephSource, HeldHandle, HeldTime, LostLock, Restore, Secrets, SessionNames,
};
use crate::control::sessions;
use crate::region::Identity;
use crate::region::retained::{Log, Retained};
use crate::wire::Errno;

/// How often an idle session is looked at. Mostly that costs nothing: the answer is known here.
pub(super) const WATCH: Duration = Duration::from_secs(1);
/// Many objects are dealt with by this many threads: each waits for the metadata server.
const THREADS: usize = 8;

/// What a session is begun with.
pub struct Start<'a> {
    /// File system and directory.
    pub source: &'a CephSource,
    /// How to connect.
    pub options: &'a CephOptions,
    /// How long the kernel may trust what it is told.
    pub timeouts: Timeouts,
    /// Names of this session and of those to end.
    pub names: &'a SessionNames,
    /// Configuration and key.
    pub secrets: Secrets,
    /// What the last generation held.
    pub restore: Restore,
    /// Of a mount whose writes are acknowledged early.
    pub retained: Option<Retained>,
    /// Whom to tell.
    pub frontend: Arc<dyn Frontend>,
}

/// A store that is open.
pub struct Opened {
    /// The store.
    pub ceph: Ceph,
    /// Locks that somebody else has now.
    pub lost_locks: Vec<LostLock>,
    /// What was in use and is not there any more.
    pub gone: Vec<Identity>,
    /// Those of [`SessionNames::abandoned`] that were there.
    pub ended: Vec<String>,
}

/// Begins a session and takes over what earlier ones held.
pub fn open(mut start: Start<'_>) -> Result<Opened, CephError> {
    let retained = start.retained.take().map(|file| {
        let (log, found) = Log::open(file);
        let found = retain::by_file(&log, found);
        (log, found)
    });
    let (log, found) = retained.unzip();
    let found = found.unwrap_or_default();
    let start = &start;
    let pins = Arc::new(Pins::default());
    let warm = Arc::new(Warm::default());
    let retainer: Arc<OnceLock<Arc<Retainer>>> = Arc::default();
    let login = Login::new(start.source, start.options, &start.secrets);
    let connected = login.connect(&start.names.own)?;
    let (client, hurried) = (connected.client.clone(), connected.hurried);
    let listening = client.listen({
        let (frontend, warm) = (start.frontend.clone(), warm.clone());
        let retainer = retainer.clone();
        move |vino, off, len| {
            warm.shared(vino);
            // Of a part: it was truncated, for which nothing has to be flushed.
            if let Some(retainer) = retainer.get()
                && (off, len) == (0, 0)
            {
                retainer.given_back(vino);
            }
            frontend.stale(&identity(vino), off, len);
        }
    });
    listening.map_err(|errno| login.mount_error(errno))?;
    let mounting = Arc::new(connected.mount(&start.source.path, None)?);
    let mark = Mark::of(&start.names.own);
    let queue = Queue::begin(&client, &mounting, &start.restore.locks, mark);
    let asks = queue.is_some();
    let kept = if start.names.old.is_empty() && start.names.abandoned.is_empty() {
        Ok((None, Ended::default()))
    } else {
        Keeper::begin(start, &login, log.as_ref(), &found, queue.as_ref())
            .map(|(keeper, ended)| (Some(keeper), ended))
    };
    mounting
        .outcome()
        .map_err(|errno| login.mount_error(errno))?;
    let begun = kept.and_then(|(keeper, ended)| {
        login.check_root(&client)?;
        if hurried {
            // From now on the session may take its time to end: it has something to write.
            set(&client, "client_shutdown_timeout", CLOSE_DEFAULT)?;
        }
        let begun = Begun {
            client: &client,
            keeper,
            queue,
            pins,
            warm,
            retained: log.map(|log| (log, found)),
        };
        let (ceph, lost_locks, gone) =
            begin(begun, start).map_err(|errno| login.mount_error(errno))?;
        if let Some(flusher) = &ceph.retainer {
            let _ = retainer.set(flusher.clone());
        }
        Ok(Opened {
            ceph,
            lost_locks,
            gone,
            ended: ended.abandoned,
        })
    });
    // The session has begun; without this it would stay for minutes. With locks that are waited for the
    // end would wait for them; then it is the next generation that ends it.
    if begun.is_err() && !asks {
        let _ = client.unmount();
    }
    begun
}

/// Sessions that were ended.
#[derive(Default)]
pub(super) struct Ended {
    /// Of those of dead generations the ones that were there ([`retain::number`]).
    existed: Vec<u64>,
    /// Those of dead mounts that were there.
    abandoned: Vec<String>,
}

/// Ends sessions of dead generations and of dead mounts, and those of the keepers of what died early.
pub(super) fn end_sessions(
    client: &Client,
    names: &SessionNames,
    mounting: &Mounting,
) -> Result<Ended, CephError> {
    let mut ended = Ended::default();
    for old in &names.old {
        for name in [old, &keeper_of(old)] {
            match client.reclaim(&c_string(name, "a session's name")?) {
                Ok(()) => ended.existed.push(retain::number(name)),
                Err(Errno::ENOENT) => {}
                // Before the mount has come so far the cluster's own answer says more.
                Err(_) if mounting.outcome().is_err() => return Ok(ended),
                Err(errno) => return Err(CephError::Reclaim(errno)),
            }
        }
    }
    for abandoned in &names.abandoned {
        for name in [abandoned, &keeper_of(abandoned)] {
            match client.reclaim(&c_string(name, "a session's name")?) {
                Ok(()) => ended.abandoned.push(abandoned.clone()),
                // Of another cluster, or gone.
                Err(Errno::ENOENT) => {}
                Err(_) if mounting.outcome().is_err() => return Ok(ended),
                Err(errno) => {
                    tracing::warn!("cannot end the session {name} of a dead mount: {errno}");
                }
            }
        }
    }
    Ok(ended)
}

/// Ends sessions of a dead mount whose file system nobody mounts here any more. Returns those that
/// were there.
pub fn end_abandoned(
    source: &CephSource,
    options: &CephOptions,
    secrets: &Secrets,
    abandoned: Vec<String>,
) -> Result<Vec<String>, CephError> {
    let login = Login::new(source, options, secrets);
    let names = SessionNames {
        own: sessions::random_name().map_err(CephError::Secrets)?,
        old: Vec::new(),
        abandoned,
    };
    let connected = login.connect(&names.own)?;
    let client = connected.client.clone();
    let mounting = connected.mount(&source.path, Some(&format!("{}-nobody", names.own)))?;
    let ended = end_sessions(&client, &names, &mounting);
    mounting
        .outcome()
        .map_err(|errno| login.mount_error(errno))?;
    let _ = client.unmount();
    Ok(ended?.abandoned)
}

/// What a session has that is about to take over.
struct Begun<'a> {
    client: &'a Arc<Client>,
    keeper: Option<Keeper>,
    queue: Option<Queue>,
    pins: Arc<Pins>,
    warm: Arc<Warm>,
    retained: Option<(Log, Found)>,
}

/// What it takes to end the session of this generation from another one.
pub(super) struct End {
    source: CephSource,
    options: CephOptions,
    secrets: Secrets,
    own: String,
}

impl End {
    fn of(start: &Start<'_>) -> End {
        End {
            source: start.source.clone(),
            options: start.options.clone(),
            secrets: start.secrets.clone(),
            own: start.names.own.clone(),
        }
    }

    /// As [`end_abandoned`], for this one.
    pub(super) fn end(&self) -> Result<(), CephError> {
        let own = vec![self.own.clone()];
        end_abandoned(&self.source, &self.options, &self.secrets, own).map(drop)
    }
}

/// Takes over in a session that has begun.
fn begin(
    begun: Begun<'_>,
    start: &Start<'_>,
) -> Result<(Ceph, Vec<LostLock>, Vec<Identity>), Errno> {
    let Begun {
        client,
        keeper,
        queue,
        pins,
        warm,
        retained,
    } = begun;
    let superuser = Arc::new(Perms::new(client, 0, 0, &[])?);
    let root = client.root()?;
    if let Err(e) = client.enable_may_cache() {
        tracing::warn!(
            "nothing will be cached by the kernel: the library refuses delegations: {e}"
        );
    }
    let root_id = identity(vino_of(&root.stat(&superuser)?));
    let acls = client
        .conf(c"client_acl_type")
        .is_ok_and(|kind| kind == "posix_acl");
    let handles: Arc<Handles> = Arc::default();
    let mut found = Found::new();
    let retainer = match retained {
        None => None,
        Some((log, before)) => {
            found = before;
            let session = retain::number(&start.names.own);
            let new = Retainer::new(log, session, client, &superuser, &start.frontend, &handles)?;
            Some(Arc::new(new))
        }
    };
    let ceph = Ceph {
        client: client.clone(),
        root,
        root_id,
        superuser,
        callers: Callers::default(),
        timeouts: start.timeouts,
        acls,
        handles,
        pins,
        directories: OnceLock::new(),
        warm,
        locks: Locks::new(Mark::of(&start.names.own)),
        retainer,
        inodes: Stripes::default(),
        frontend: start.frontend.clone(),
        keeper: Mutex::default(),
        end: OnceLock::new(),
    };
    // At once: until then anybody can take those that are not waited for.
    let lost = ceph.restore_locks(&start.restore.locks, queue);
    if ceph.locks.are_waited_for() {
        let _ = ceph.end.set(End::of(start));
    }
    let held = Held::find(&start.restore, |vino| find(client, vino));
    let gone = held.gone(&start.restore.pinned);
    held.hand_over(&ceph.handles, &ceph.pins);
    let times = keeper.as_ref().map(|keeper| &keeper.times);
    let mut times = times.unwrap_or(&start.restore.times).clone();
    // What is written again brings its time along.
    times.retain(|time| !vino(&time.identity).is_some_and(|vino| retain::is_written(&found, vino)));
    set_times(client, &times, &ceph.superuser);
    if let Some(retainer) = &ceph.retainer {
        let ends = keeper.as_ref().map(|keeper| &keeper.ends);
        retainer.write_again(found, ends.unwrap_or(&Ends::new()));
        spawn("flush", {
            let retainer = retainer.clone();
            move || retainer.flush()
        });
    }
    let directories = each(&start.restore.directories, |id| find(client, vino(id)?));
    let _ = ceph
        .directories
        .set(directories.into_iter().flatten().collect());
    *ceph.keeper.lock() = keeper.map(Keeper::let_go);
    ceph.open_pending();
    ceph.watch_session();
    Ok((ceph, lost, gone))
}

/// A session that keeps what a dead generation held, and ends the dead ones.
struct Keeper {
    client: Arc<Client>,
    mounting: Mounting,
    found: Vec<Inode>,
    /// How the files of retained writes were when the dead sessions were ended.
    ends: Ends,
    /// [`Restore::times`], as the metadata server knew them then: somebody may have set others since.
    times: Vec<HeldTime>,
}

impl Keeper {
    /// Returns the sessions that it ended, too.
    fn begin(
        start: &Start<'_>,
        login: &Login<'_>,
        log: Option<&Log>,
        retained: &Found,
        queue: Option<&Queue>,
    ) -> Result<(Keeper, Ended), CephError> {
        let name = keeper_of(&start.names.own);
        let connected = login.connect(&name)?;
        let client = connected.client.clone();
        let mounting = connected.mount(&start.source.path, Some(&format!("{name}-nobody")))?;
        let held = Held::find(&start.restore, |vino| find_early(&client, vino, &mounting));
        let superuser = Perms::new(&client, 0, 0, &[]).map_err(|errno| login.mount_error(errno))?;
        let find = |vino| find_early(&client, vino, &mounting);
        let look = log.map(|log| Look::new(log, retained, &superuser, find));
        let opened = held.handles.into_iter().filter_map(|(_, inode)| inode);
        let pinned = held.pinned.into_iter().map(|(_, inode)| inode);
        let mut keeper = Keeper {
            found: opened.chain(pinned).collect(),
            ends: Ends::new(),
            times: each(&start.restore.times, |time| {
                let known = vino(&time.identity).and_then(find);
                let known = known.and_then(|inode| inode.stamp(true, &superuser).ok());
                known.map_or(time.clone(), |known| HeldTime {
                    sec: known.sec as u64,
                    nsec: known.nsec,
                    ..time.clone()
                })
            }),
            client,
            mounting,
        };
        if let Some(queue) = queue {
            queue.wait();
        }
        let ended = end_sessions(&keeper.client, start.names, &keeper.mounting)?;
        if ended.existed.is_empty() {
            // What it knew was its guess already.
            keeper.times.clone_from(&start.restore.times);
        }
        if let Some(look) = look {
            let (ends, inodes) = look.ended(&ended.existed);
            keeper.ends = ends;
            keeper.found.extend(inodes);
        }
        Ok((keeper, ended))
    }

    /// Ends the session, in a thread: nobody needs to wait for it but who ends the process.
    fn let_go(self) -> std::thread::JoinHandle<()> {
        std::thread::spawn(move || {
            let Keeper {
                client,
                mounting,
                found,
                ..
            } = self;
            drop(found);
            if mounting.outcome().is_ok()
                && let Err(e) = client.unmount()
            {
                tracing::warn!("a session did not end in order: {e}");
            }
            if let Some(client) = Arc::into_inner(client) {
                client.release();
            }
        })
    }
}

/// Name of the session that keeps things for another.
fn keeper_of(name: &str) -> String {
    format!("{name}-keeper")
}

/// What the last generation held, found.
pub(super) struct Held<'a> {
    handles: Vec<(&'a HeldHandle, Option<Inode>)>,
    pub(super) pinned: Vec<(Vino, Inode)>,
}

impl<'a> Held<'a> {
    pub(super) fn find(
        restore: &'a Restore,
        find: impl Fn(Vino) -> Option<Inode> + Sync,
    ) -> Held<'a> {
        let find = |id: &Identity| vino(id).and_then(&find);
        let opened = each(&restore.handles, |handle| find(&handle.identity));
        let pinned = each(&restore.pinned, find);
        Held {
            handles: restore.handles.iter().zip(opened).collect(),
            pinned: (restore.pinned.iter().zip(pinned))
                .filter_map(|(id, inode)| Some((vino(id)?, inode?)))
                .collect(),
        }
    }

    /// What is not there any more, each once.
    fn gone(&self, pinned: &[Identity]) -> Vec<Identity> {
        let found: HashSet<Vino> = self.pinned.iter().map(|(vino, _)| *vino).collect();
        let is_found = |id: &&Identity| vino(id).is_some_and(|vino| found.contains(&vino));
        let closed = self.handles.iter().filter(|(_, inode)| inode.is_none());
        let gone: HashSet<Identity> = closed
            .map(|(handle, _)| handle.identity)
            .chain(pinned.iter().filter(|id| !is_found(id)).copied())
            .collect();
        gone.into_iter().collect()
    }

    fn hand_over(self, handles: &Handles, pins: &Pins) {
        handles.expect(self.handles.into_iter().map(|(handle, inode)| {
            let pending = Pending {
                inode: inode.map(Arc::new),
                vino: vino(&handle.identity),
                flags: handle.open_flags as i32,
                directory: handle.directory,
                failure: Failure::default(),
            };
            (handle.fh, pending)
        }));
        for (vino, inode) in self.pinned {
            pins.insert(vino, inode);
        }
    }
}

/// Gives files the times they were given by calls: after the death of a client that wrote them the
/// metadata server takes the times of their objects.
fn set_times(client: &Arc<Client>, times: &[HeldTime], superuser: &Perms) {
    each(times, |time| {
        if let Err(e) = set_time(client, time, superuser) {
            tracing::warn!("the time of a file is not what it was set to: {e}");
        }
    });
}

fn set_time(client: &Arc<Client>, time: &HeldTime, superuser: &Perms) -> Result<(), Errno> {
    let vino = vino(&time.identity).ok_or(Errno::ESTALE)?;
    let inode = client.find(vino)?;
    let mut st = inode.stat(superuser)?;
    let (sec, nsec) = (time.sec as i64, time.nsec.into());
    if (st.mtime.tv_sec, st.mtime.tv_nsec) == (sec, nsec) {
        return Ok(());
    }
    st.mtime = libc::timespec {
        tv_sec: sec,
        tv_nsec: nsec,
    };
    inode.set_stat(&st, setattr::MTIME, superuser)?;
    inode.sync(false)
}

/// Does something with each of many, several at a time, in order.
pub(super) fn each<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let share = all.len().div_ceil(THREADS).max(1);
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = all
            .chunks(share)
            .map(|part| scope.spawn(move || part.iter().map(work).collect::<Vec<R>>()))
            .collect();
        let done = threads.into_iter().map(|thread| thread.join());
        done.flat_map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Looks an object up.
fn find(client: &Arc<Client>, vino: Vino) -> Option<Inode> {
    let found = client.find(vino);
    found.map_err(|e| not_found(vino, e)).ok()
}

/// Looks an object up as soon as the session has begun far enough.
pub(super) fn find_early(client: &Arc<Client>, vino: Vino, mounting: &Mounting) -> Option<Inode> {
    let deadline = Instant::now() + CONNECT_LIMIT;
    loop {
        match client.find(vino) {
            Ok(inode) => return Some(inode),
            Err(Errno::ENOTCONN) if !mounting.is_over() && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_micros(500));
            }
            Err(e) => {
                not_found(vino, e);
                return None;
            }
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().name(name.into());
    if let Err(e) = thread.spawn(work) {
        tracing::warn!("cannot start a thread: {e}");
    }
}

fn not_found(vino: Vino, errno: Errno) {
    tracing::warn!(
        "inode {:#x}, which was in use, is not found: {errno}",
        vino.ino
    );
}

impl Ceph {
    /// Notices that the session was ended also while nothing is asked of it: locks are lost, and
    /// whoever has them must know.
    fn watch_session(&self) {
        let (client, root, superuser, frontend) = (
            self.client.clone(),
            self.root_id,
            self.superuser.clone(),
            self.frontend.clone(),
        );
        let work = move || {
            let Some(root) = vino(&root).and_then(|vino| client.cached(vino)) else {
                return;
            };
            loop {
                std::thread::sleep(WATCH);
                prove_session(&root, &superuser, &*frontend);
            }
        };
        spawn("watch", work);
    }

    /// Opens the files of the last generation in the background. What is used earlier is opened
    /// earlier.
    fn open_pending(&self) {
        let pending = self.handles.pending();
        if pending.is_empty() {
            return;
        }
        let (handles, warm, superuser) = (
            self.handles.clone(),
            self.warm.clone(),
            self.superuser.clone(),
        );
        let work = move || {
            for fh in pending {
                // An error is told to whoever uses the handle.
                let _ = restore(&handles, &warm, &superuser, fh);
            }
        };
        spawn("reopen", work);
    }
}
