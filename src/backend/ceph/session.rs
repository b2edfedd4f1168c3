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
//!    it serves another directory.
//! 3. The **dead sessions are ended** by name. Their client is blocklisted, so that no late write of
//!    it can reach the store; what it held is free.
//! 4. **Locks** are taken again, before anything is read or written. Somebody who waited for one may
//!    have it by now: it is lost, and those who believe to have it must know.
//! 5. The backend serves. Files are opened when they are used, and the rest in the background.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::caller::Callers;
use super::client::{Client, ClientError, Event, Inode, Perms};
use super::ffi::{Vino, setattr};
use super::files::{Handles, Pending, restore};
use super::locks::Locks;
use super::node::{Pins, identity, vino, vino_of};
use super::warm::Warm;
use super::{Ceph, prove_session};
use crate::backend::convert::Timeouts;
use crate::backend::{Frontend, Stripes};
use crate::control::blob;
use crate::control::message::{
    CephOptions, CephSource, HeldHandle, HeldTime, LostLock, Restore, Secret, Secrets, SessionNames,
};
use crate::region::Identity;
use crate::wire::Errno;

/// The library gives up connecting after this time.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// How often an idle session is looked at. Mostly that costs nothing: the answer is known here.
const WATCH: Duration = Duration::from_secs(1);
/// Many objects are dealt with by this many threads: each waits for the metadata server.
const THREADS: usize = 8;

/// Why a session could not begin.
#[derive(Debug, thiserror::Error)]
pub enum CephError {
    /// The library is missing or refused to make an instance.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Something a string cannot say.
    #[error("{what} contains a NUL byte")]
    Nul {
        /// What.
        what: &'static str,
    },
    /// The configuration cannot be used.
    #[error("cannot read the Ceph configuration{path}: {errno}; check --conf")]
    Conf {
        /// Which, if it is known.
        path: String,
        /// What the library says.
        errno: Errno,
    },
    /// The library does not know an option.
    #[error("Ceph refuses option {option}: {errno}")]
    Option {
        /// Its name.
        option: String,
        /// What the library says.
        errno: Errno,
    },
    /// Conf or key cannot be passed on.
    #[error("cannot pass configuration and key to the library: {0}")]
    Secrets(#[source] std::io::Error),
    /// The cluster did not accept this client.
    #[error("cannot connect to the Ceph cluster as client.{id}: {errno}; {advice}")]
    Connect {
        /// The entity.
        id: String,
        /// What the library says.
        errno: Errno,
        /// What to do.
        advice: &'static str,
    },
    /// The file system or the directory cannot be mounted.
    #[error("cannot mount {source_name} as client.{id}: {errno}; {advice}")]
    Mount {
        /// The source.
        source_name: String,
        /// The entity.
        id: String,
        /// What the library says.
        errno: Errno,
        /// What to do.
        advice: &'static str,
    },
    /// The session of a dead generation is still there.
    #[error("cannot end the session of an earlier backend: {0}; it ends by itself after a minute")]
    Reclaim(Errno),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

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
    /// Whom to tell.
    pub frontend: Arc<dyn Frontend>,
}

impl Start<'_> {
    fn id(&self) -> &str {
        self.options.id.as_deref().unwrap_or("admin")
    }

    fn refused(&self, errno: Errno) -> CephError {
        mount_error(self.source, self.id(), errno)
    }
}

fn c_string(text: &str, what: &'static str) -> Result<CString, CephError> {
    CString::new(text).map_err(|_| CephError::Nul { what })
}

/// Begins a session and takes over what earlier ones held. Returns the locks that are lost.
pub fn open(start: &Start<'_>) -> Result<(Ceph, Vec<LostLock>), CephError> {
    let pins = Arc::new(Pins::default());
    let warm = Arc::new(Warm::default());
    let connected = Connected::connect(start, &start.names.own)?;
    let client = connected.client.clone();
    client.listen({
        let (frontend, warm) = (start.frontend.clone(), warm.clone());
        move |event| hear(&*frontend, &warm, event)
    });
    let mounting = connected.mount(start, None)?;
    let keeper = if start.names.old.is_empty() {
        None
    } else {
        let keeper = Keeper::begin(start)?;
        keeper.end_the_dead(start)?;
        Some(keeper)
    };
    mounting.outcome().map_err(|errno| start.refused(errno))?;
    begin(&client, start, keeper, pins, warm).map_err(|errno| {
        // The session has begun; without this it would stay for minutes.
        let _ = client.unmount();
        start.refused(errno)
    })
}

/// Takes over in a session that has begun.
fn begin(
    client: &Arc<Client>,
    start: &Start<'_>,
    keeper: Option<Keeper>,
    pins: Arc<Pins>,
    warm: Arc<Warm>,
) -> Result<(Ceph, Vec<LostLock>), Errno> {
    let superuser = Arc::new(Perms::new(client, 0, 0, &[])?);
    let root = client.root()?;
    let root_id = identity(vino_of(&root.stat(&superuser)?));
    let acls = client
        .conf(c"client_acl_type")
        .is_ok_and(|kind| kind == "posix_acl");
    let ceph = Ceph {
        client: client.clone(),
        root,
        root_id,
        superuser,
        callers: Callers::default(),
        timeouts: start.timeouts,
        acls,
        handles: Arc::default(),
        pins,
        warm,
        locks: Locks::default(),
        inodes: Stripes::default(),
        frontend: start.frontend.clone(),
        keeper: Mutex::default(),
    };
    // At once: until then anybody can take them.
    let lost = ceph.restore_locks(&start.restore.locks);
    set_times(client, &start.restore.times, &ceph.superuser);
    let held = Held::find(&start.restore, |vino| find(client, vino));
    held.hand_over(&ceph.handles, &ceph.pins);
    *ceph.keeper.lock() = keeper.map(Keeper::let_go);
    ceph.open_pending();
    ceph.watch_session();
    Ok((ceph, lost))
}

/// A client that knows where and as whom to begin a session.
struct Connected {
    client: Arc<Client>,
    /// The library reads the key while it connects.
    key: Option<OwnedFd>,
}

impl Connected {
    fn connect(start: &Start<'_>, name: &str) -> Result<Connected, CephError> {
        let id = start.id();
        let client = Client::create(Some(&c_string(id, "--id")?))?;
        configure(&client, start)?;
        let key = provide_key(&client, &start.secrets)?;
        client.init().map_err(|errno| CephError::Connect {
            id: id.to_owned(),
            errno,
            advice: "check the monitors' addresses in --conf or --mon",
        })?;
        if !start.source.fs.is_empty() {
            let fs = c_string(&start.source.fs, "the name of the file system")?;
            client
                .select_file_system(&fs)
                .map_err(|errno| start.refused(errno))?;
        }
        client.set_uuid(&c_string(name, "the session's name")?);
        Ok(Connected { client, key })
    }

    /// Begins the session in a thread. With `nobody`, the name of a session that never was, it returns
    /// when the metadata servers are reached: asked for an object earlier, the library divides by
    /// the number of servers it does not know yet (16.2.15).
    fn mount(self, start: &Start<'_>, nobody: Option<&str>) -> Result<Mounting, CephError> {
        let root = c_string(&start.source.path, "the path of the source")?;
        let nobody = nobody
            .map(|name| c_string(name, "the session's name"))
            .transpose()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let (reached, wait) = mpsc::sync_channel::<()>(1);
        let work = move || {
            let Connected { client, key } = self;
            // All servers are asked, and say that there is none.
            match nobody.map_or(Ok(()), |nobody| client.reclaim(&nobody)) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(errno) => return sender.send(Err(errno)),
            }
            drop(reached);
            let outcome = client.mount(&root);
            drop((client, key));
            sender.send(outcome)
        };
        std::thread::Builder::new()
            .name("mount".into())
            .spawn(work)
            .map_err(CephError::Thread)?;
        // Ends by itself when the channel is dropped, in whatever way.
        let late = wait.recv_timeout(CONNECT_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout);
        Ok(Mounting(Mutex::new(State {
            receiver,
            outcome: late.then_some(Err(Errno::ETIMEDOUT)),
        })))
    }
}

/// A session that keeps what a dead generation held, and ends the dead ones.
struct Keeper {
    client: Arc<Client>,
    mounting: Mounting,
    found: Vec<Inode>,
}

impl Keeper {
    fn begin(start: &Start<'_>) -> Result<Keeper, CephError> {
        let name = keeper_of(&start.names.own);
        let connected = Connected::connect(start, &name)?;
        let client = connected.client.clone();
        let mounting = connected.mount(start, Some(&format!("{name}-nobody")))?;
        let held = Held::find(&start.restore, |vino| find_early(&client, vino, &mounting));
        let opened = held.handles.into_iter().filter_map(|(_, inode)| inode);
        let found = opened.chain(held.pinned.into_iter().map(|(_, inode)| inode));
        Ok(Keeper {
            found: found.collect(),
            client,
            mounting,
        })
    }

    /// Ends the sessions of earlier generations, and of the keepers of those that died early.
    fn end_the_dead(&self, start: &Start<'_>) -> Result<(), CephError> {
        for old in &start.names.old {
            for name in [old, &keeper_of(old)] {
                match self.client.reclaim(&c_string(name, "a session's name")?) {
                    Ok(()) | Err(Errno::ENOENT) => {}
                    // Before the mount has come so far the cluster's own answer says more.
                    Err(errno) => match self.mounting.outcome() {
                        Err(cause) => return Err(start.refused(cause)),
                        Ok(()) => return Err(CephError::Reclaim(errno)),
                    },
                }
            }
        }
        Ok(())
    }

    /// Ends the session, in a thread: nobody needs to wait for it but who ends the process.
    fn let_go(self) -> std::thread::JoinHandle<()> {
        std::thread::spawn(move || {
            let Keeper {
                client,
                mounting,
                found,
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

/// Configuration in the order of its weight: file, then the command line, then what must be so.
fn configure(client: &Client, start: &Start<'_>) -> Result<(), CephError> {
    let read = match &start.secrets.conf {
        Some(text) => {
            // The library refuses a last line without an end.
            let text = [text.as_bytes(), b"\n"].concat();
            let file = blob::seal("ceph.conf", &text).map_err(CephError::Secrets)?;
            client.read_conf(Some(&path_of(&file)))
        }
        // A missing one is no error: everything may be on the command line.
        None => match client.read_conf(None) {
            Err(Errno::ENOENT) => Ok(()),
            read => read,
        },
    };
    read.map_err(|errno| CephError::Conf {
        path: String::new(),
        errno,
    })?;
    let set = |option: &str, value: &str| -> Result<(), CephError> {
        let (name, text) = (
            c_string(option, "an option")?,
            c_string(value, "an option")?,
        );
        client
            .set_conf(&name, &text)
            .map_err(|errno| CephError::Option {
                option: option.to_owned(),
                errno,
            })
    };
    // Bounded, unless the file says otherwise: the library's own limit is five minutes.
    if client.conf(c"client_mount_timeout").as_deref() == Ok("300") {
        set("client_mount_timeout", &CONNECT_LIMIT.as_secs().to_string())?;
    }
    if let Some(mon) = &start.options.mon {
        set("mon_host", mon)?;
    }
    for (option, value) in &start.options.conf {
        set(option, value)?;
    }
    // A write that is acknowledged is with the store: this process may die at any time.
    set("client_oc", "false")?;
    // The front-end replaces a backend whose session was ended, with everything it held.
    set("client_reconnect_stale", "false")?;
    Ok(())
}

/// Gives the key to the library in a file that only this process has.
fn provide_key(client: &Client, secrets: &Secrets) -> Result<Option<OwnedFd>, CephError> {
    let (option, text) = match &secrets.key {
        None => return Ok(None),
        Some(Secret::Keyring(text)) => (c"keyring", text),
        Some(Secret::Key(text)) => (c"keyfile", text),
    };
    let file = blob::seal("ceph.key", text.as_bytes()).map_err(CephError::Secrets)?;
    client
        .set_conf(option, &path_of(&file))
        .map_err(|errno| CephError::Option {
            option: option.to_string_lossy().into_owned(),
            errno,
        })?;
    Ok(Some(file))
}

fn path_of(file: &OwnedFd) -> CString {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    CString::new(path).expect("a path of digits has no NUL")
}

fn hear(frontend: &dyn Frontend, warm: &Warm, event: Event) {
    match event {
        Event::Data { vino, off, len } => frontend.stale(&identity(vino), off, len),
        Event::Unlinked(vino) => warm.doom(vino),
        Event::Release(vino) => warm.release(vino),
    }
}

/// A mount that is under way in its own thread.
struct Mounting(Mutex<State>);

struct State {
    receiver: mpsc::Receiver<Result<(), Errno>>,
    outcome: Option<Result<(), Errno>>,
}

impl Mounting {
    fn take(&self, wait: Duration) -> Option<Result<(), Errno>> {
        let mut state = self.0.lock();
        if state.outcome.is_none() {
            state.outcome = match state.receiver.recv_timeout(wait) {
                Ok(outcome) => Some(outcome),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => Some(Err(Errno::EIO)),
            };
        }
        state.outcome
    }

    /// It has ended, well or not.
    fn is_over(&self) -> bool {
        self.take(Duration::ZERO).is_some()
    }

    /// How it ended. Waits for it; the library gives up by itself, and the front-end kills a backend
    /// that takes too long.
    fn outcome(&self) -> Result<(), Errno> {
        self.take(Duration::MAX).unwrap_or(Err(Errno::ETIMEDOUT))
    }
}

/// What the last generation held, found.
struct Held<'a> {
    handles: Vec<(&'a HeldHandle, Option<Inode>)>,
    pinned: Vec<(Vino, Inode)>,
}

impl<'a> Held<'a> {
    fn find(restore: &'a Restore, find: impl Fn(Vino) -> Option<Inode> + Sync) -> Held<'a> {
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

    fn hand_over(self, handles: &Handles, pins: &Pins) {
        handles.expect(self.handles.into_iter().map(|(handle, inode)| {
            let pending = Pending {
                inode,
                vino: vino(&handle.identity),
                flags: handle.open_flags as i32,
                directory: handle.directory,
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
fn each<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
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
fn find_early(client: &Arc<Client>, vino: Vino, mounting: &Mounting) -> Option<Inode> {
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

fn not_found(vino: Vino, errno: Errno) {
    tracing::warn!(
        "inode {:#x}, which was in use, is not found: {errno}",
        vino.ino
    );
}

fn mount_error(source: &CephSource, id: &str, errno: Errno) -> CephError {
    let advice = match errno {
        Errno::ENOENT => {
            "check that the file system (`ceph fs ls`) and the directory exist, and that there is a \
             key for this client"
        }
        Errno::EPERM | Errno::EACCES => {
            "check --id and the key, and its rights (`ceph auth get client.ID`; \
             `ceph fs authorize FS client.ID PATH rw` makes them)"
        }
        Errno::ETIMEDOUT => {
            "check that the monitors of --conf or --mon can be reached and that the file system has \
             an active MDS (`ceph fs status`)"
        }
        _ => "check --conf, --id and the key",
    };
    CephError::Mount {
        source_name: source.to_string(),
        id: id.to_owned(),
        errno,
        advice,
    }
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
        let thread = std::thread::Builder::new().name("watch".into());
        if let Err(e) = thread.spawn(work) {
            tracing::warn!("cannot start a thread: {e}");
        }
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
        let thread = std::thread::Builder::new().name("reopen".into());
        if let Err(e) = thread.spawn(work) {
            tracing::warn!("cannot start a thread: {e}");
        }
    }
}
