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
//! 3. The **dead sessions are ended** by name. Their client is blocklisted, so that no late write of
//!    it can reach the store; what it held is free.
//! 4. **Locks** are taken again, before anything is read or written. Somebody who waited for one may
//!    have it by now: it is lost, and those who believe to have it must know.
//! 5. The backend serves. Files are opened when they are used, and the rest in the background.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zeroize::Zeroizing;

use super::caller::Callers;
use super::client::{Client, ClientError, Inode, Perms};
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
use crate::control::sessions;
use crate::region::Identity;
use crate::wire::Errno;

/// The library gives up connecting after this time.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// After an attempt to mount that failed it waits this long for the metadata servers to say that there
/// is no session any more. They are probably not there.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// The library's own limit for it, seconds: it has to write back what it has.
const CLOSE_DEFAULT: &str = "30";
/// How often an idle session is looked at. Mostly that costs nothing: the answer is known here.
const WATCH: Duration = Duration::from_secs(1);
/// Many objects are dealt with by this many threads: each waits for the metadata server.
const THREADS: usize = 8;

/// Of the configuration, if none is given.
const DEFAULT_PLACES: &str = " in the default places (/etc/ceph/ceph.conf, ~/.ceph/ceph.conf)";

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
    #[error("cannot read the Ceph configuration{place}: {errno}; check --conf")]
    Conf {
        /// Where it is, if it is not known to whoever gave it.
        place: &'static str,
        /// What the library says.
        errno: Errno,
    },
    /// The library does not know an option, or its value.
    #[error("Ceph refuses the option {option}: {errno}; `ceph config help NAME` knows all options")]
    Option {
        /// Its name.
        option: String,
        /// What the library says.
        errno: Errno,
    },
    /// Conf or key cannot be passed on.
    #[error("cannot pass configuration and key to the library: {0}")]
    Secrets(#[source] std::io::Error),
    /// Nobody to connect to.
    #[error(
        "no monitors of the Ceph cluster are known{place}; give --conf FILE or --mon ADDRESSES"
    )]
    NoMonitors {
        /// Where they were looked for.
        place: &'static str,
    },
    /// They cannot be connected to.
    #[error("'{mon}' are no addresses of Ceph monitors; check --mon, or 'mon host' in --conf")]
    MonitorAddresses {
        /// What there is.
        mon: String,
    },
    /// Nobody answers.
    #[error(
        "no monitor of the Ceph cluster answers at {mon} within {} s; check --mon, or 'mon host' in \
         --conf, and the network", limit.as_secs()
    )]
    Silent {
        /// Their addresses.
        mon: String,
        /// How long this waited.
        limit: Duration,
    },
    /// There is no key.
    #[error(
        "there is no key for client.{id}: none of the keyrings {place} can be read; give --keyring \
         FILE or --keyfile FILE"
    )]
    NoKeyring {
        /// The entity.
        id: String,
        /// Where the library looks.
        place: String,
    },
    /// A keyring without the key.
    #[error("the keyring has no key for client.{id}; check --id and --keyring")]
    NoKey {
        /// The entity.
        id: String,
    },
    /// Something that is no keyring.
    #[error(
        "the keyring cannot be read: {0}; it must have the form that `ceph auth get client.ID` prints \
         (--keyfile takes the bare key)"
    )]
    Keyring(Errno),
    /// The cluster did not accept this client.
    #[error(
        "the Ceph monitors at {mon} do not accept client.{id}: {errno}; check that there is such a \
         client, that its key is the one given, and that it has rights (`ceph auth get client.{id}`)"
    )]
    Refused {
        /// Addresses of the monitors.
        mon: String,
        /// The entity.
        id: String,
        /// What the library says.
        errno: Errno,
    },
    /// Something else.
    #[error(
        "cannot connect to the Ceph cluster at {mon} as client.{id}: {errno}; check --conf, --id and \
         the key"
    )]
    Connect {
        /// Addresses of the monitors.
        mon: String,
        /// The entity.
        id: String,
        /// What the library says.
        errno: Errno,
    },
    /// The file system is not there, or not for this client.
    #[error(
        "there is no {file_system} that client.{id} may use; `ceph fs ls` lists those there are, \
         `ceph auth get client.{id}` what it may use"
    )]
    NoFileSystem {
        /// Which.
        file_system: String,
        /// The entity.
        id: String,
    },
    /// The directory is not there.
    #[error(
        "there is no directory {path} in the {file_system}; make it first, or mount another one"
    )]
    NoDirectory {
        /// Its path.
        path: String,
        /// In what.
        file_system: String,
    },
    /// It is none.
    #[error("{path} of the {file_system} is {what}; {advice}")]
    NoSuchType {
        /// Its path.
        path: String,
        /// In what.
        file_system: String,
        /// What it is.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// This client has no right to it.
    #[error(
        "client.{id} may not use {path} of the {file_system}: {errno}; its rights are shown by `ceph \
         auth get client.{id}` and made by `ceph fs authorize FS client.{id} {path} rw`"
    )]
    NotPermitted {
        /// Its path.
        path: String,
        /// In what.
        file_system: String,
        /// The entity.
        id: String,
        /// What the library says.
        errno: Errno,
    },
    /// No metadata server.
    #[error(
        "no metadata server (MDS) of the {file_system} answers within {} s, though the monitors do; \
         `ceph fs status` shows whether there is an active one", limit.as_secs()
    )]
    NoServer {
        /// Of what.
        file_system: String,
        /// How long this waited.
        limit: Duration,
    },
    /// Something else.
    #[error(
        "client.{id} cannot use {path} of the {file_system}: {errno}; check --conf, --id and the key"
    )]
    Mount {
        /// Its path.
        path: String,
        /// In what.
        file_system: String,
        /// The entity.
        id: String,
        /// What the library says.
        errno: Errno,
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

fn c_string(text: &str, what: &'static str) -> Result<CString, CephError> {
    CString::new(text).map_err(|_| CephError::Nul { what })
}

/// A store that is open.
pub struct Opened {
    /// The store.
    pub ceph: Ceph,
    /// Locks that somebody else has now.
    pub lost_locks: Vec<LostLock>,
    /// Those of [`SessionNames::abandoned`] that were there.
    pub ended: Vec<String>,
}

/// Begins a session and takes over what earlier ones held.
pub fn open(start: &Start<'_>) -> Result<Opened, CephError> {
    let pins = Arc::new(Pins::default());
    let warm = Arc::new(Warm::default());
    let login = Login::new(start.source, start.options, &start.secrets);
    let connected = login.connect(&start.names.own)?;
    let (client, hurried) = (connected.client.clone(), connected.hurried);
    client.listen({
        let (frontend, warm) = (start.frontend.clone(), warm.clone());
        move |vino, off, len| {
            warm.shared(vino);
            frontend.stale(&identity(vino), off, len);
        }
    });
    let mounting = connected.mount(&start.source.path, None)?;
    let kept = if start.names.old.is_empty() && start.names.abandoned.is_empty() {
        Ok((None, Vec::new()))
    } else {
        Keeper::begin(start, &login).map(|(keeper, ended)| (Some(keeper), ended))
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
        let (ceph, lost_locks) =
            begin(&client, start, keeper, pins, warm).map_err(|errno| login.mount_error(errno))?;
        Ok(Opened {
            ceph,
            lost_locks,
            ended,
        })
    });
    if begun.is_err() {
        // The session has begun; without this it would stay for minutes.
        let _ = client.unmount();
    }
    begun
}

/// Ends sessions of dead generations and of dead mounts, and those of the keepers of what died early.
/// Returns those of dead mounts that were there.
fn end_sessions(
    client: &Client,
    names: &SessionNames,
    mounting: &Mounting,
) -> Result<Vec<String>, CephError> {
    for old in &names.old {
        for name in [old, &keeper_of(old)] {
            match client.reclaim(&c_string(name, "a session's name")?) {
                Ok(()) | Err(Errno::ENOENT) => {}
                // Before the mount has come so far the cluster's own answer says more.
                Err(_) if mounting.outcome().is_err() => return Ok(Vec::new()),
                Err(errno) => return Err(CephError::Reclaim(errno)),
            }
        }
    }
    let mut ended = Vec::new();
    for abandoned in &names.abandoned {
        for name in [abandoned, &keeper_of(abandoned)] {
            match client.reclaim(&c_string(name, "a session's name")?) {
                Ok(()) => ended.push(abandoned.clone()),
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
    ended
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
    if let Err(e) = client.enable_may_cache() {
        tracing::warn!(
            "nothing will be cached by the kernel: the library refuses delegations: {e}"
        );
    }
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
        directories: OnceLock::new(),
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
    let directories = each(&start.restore.directories, |id| find(client, vino(id)?));
    let _ = ceph
        .directories
        .set(directories.into_iter().flatten().collect());
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
    /// How long to wait for the cluster.
    limit: Duration,
    /// The library waits only [`CLOSE_LIMIT`] for the end of a session.
    hurried: bool,
}

impl Connected {
    /// Begins the session in a thread. With `nobody`, the name of a session that never was, it returns
    /// when the metadata servers are reached: asked for an object earlier, the library divides by
    /// the number of servers it does not know yet (16.2.15).
    fn mount(self, path: &str, nobody: Option<&str>) -> Result<Mounting, CephError> {
        let root = c_string(path, "the path of the source")?;
        let nobody = nobody
            .map(|name| c_string(name, "the session's name"))
            .transpose()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let (reached, wait) = mpsc::sync_channel::<()>(1);
        let limit = self.limit;
        let work = move || {
            let Connected { client, key, .. } = self;
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
        let late = wait.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
        Ok(Mounting(Mutex::new(State {
            receiver,
            outcome: late.then_some(Err(Errno::ETIMEDOUT)),
        })))
    }
}

/// How this client comes to its file system.
struct Login<'a> {
    source: &'a CephSource,
    options: &'a CephOptions,
    secrets: &'a Secrets,
    id: &'a str,
    began: Instant,
}

impl<'a> Login<'a> {
    fn new(source: &'a CephSource, options: &'a CephOptions, secrets: &'a Secrets) -> Login<'a> {
        Login {
            source,
            options,
            secrets,
            id: entity(options),
            began: Instant::now(),
        }
    }

    /// A client that the monitors have accepted, and the key it was given.
    fn connect(&self, name: &str) -> Result<Connected, CephError> {
        let client = Client::create(Some(&c_string(self.id, "--id")?))?;
        configure(&client, self.options, self.secrets)?;
        // A write that is acknowledged is with the store: this process may die at any time.
        set(&client, "client_oc", "false")?;
        // The library's look whether a pool may be used at all writes to it, and so a new session waits
        // with its first read until a full pool is not full any more. Each write is told its own error
        // anyway.
        set(&client, "client_check_pool_perm", "false")?;
        // The front-end replaces a backend whose session was ended, with everything it held.
        set(&client, "client_reconnect_stale", "false")?;
        bound(&client, c"client_mount_timeout", "300", CONNECT_LIMIT)?;
        let hurried = bound(
            &client,
            c"client_shutdown_timeout",
            CLOSE_DEFAULT,
            CLOSE_LIMIT,
        )?;
        let key = provide_key(&client, self.secrets)?;
        let mut limit = seconds_of(&client, c"client_mount_timeout");
        client
            .init()
            .map_err(|errno| self.connect_error(&client, errno, limit))?;
        // The limit is for all of it.
        let left = limit.saturating_sub(self.began.elapsed());
        if left + Duration::from_secs(1) < limit {
            limit = left.max(CLOSE_LIMIT);
            set(
                &client,
                "client_mount_timeout",
                &limit.as_secs().to_string(),
            )?;
        }
        if !self.source.fs.is_empty() {
            let name = c_string(&self.source.fs, "the name of the file system")?;
            client
                .select_file_system(&name)
                .map_err(|errno| self.mount_error(errno))?;
        }
        client.set_uuid(&c_string(name, "the session's name")?);
        Ok(Connected {
            client,
            key,
            limit,
            hurried,
        })
    }

    /// The library mounts whatever there is at the path.
    fn check_root(&self, client: &Arc<Client>) -> Result<(), CephError> {
        let kind = Perms::new(client, 0, 0, &[])
            .and_then(|superuser| client.root()?.stat(&superuser))
            .map_err(|errno| self.mount_error(errno))?
            .mode;
        let (what, advice) = match u32::from(kind) & libc::S_IFMT {
            libc::S_IFDIR => return Ok(()),
            libc::S_IFLNK => ("a symbolic link", "mount the directory it leads to"),
            _ => ("no directory", "mount the directory it is in"),
        };
        Err(CephError::NoSuchType {
            path: self.source.path.clone(),
            file_system: self.file_system(),
            what,
            advice,
        })
    }

    fn file_system(&self) -> String {
        match self.source.fs.as_str() {
            "" => "default file system".into(),
            name => format!("file system '{name}'"),
        }
    }

    fn connect_error(&self, client: &Client, errno: Errno, limit: Duration) -> CephError {
        let id = self.id.to_owned();
        let mon = client.conf(c"mon_host").unwrap_or_default();
        match errno {
            Errno::ETIMEDOUT => CephError::Silent { mon, limit },
            Errno::ENOENT if mon.is_empty() => CephError::NoMonitors {
                place: match &self.secrets.conf {
                    Some(_) => " by the configuration",
                    None => DEFAULT_PLACES,
                },
            },
            Errno::ENOENT => CephError::NoKeyring {
                id,
                place: client.conf(c"keyring").unwrap_or_default(),
            },
            Errno::EINVAL => CephError::MonitorAddresses { mon },
            Errno::EIO if matches!(self.secrets.key, Some(Secret::Keyring(_))) => {
                CephError::Keyring(errno)
            }
            Errno::EACCES | Errno::EPERM => match &self.secrets.key {
                Some(Secret::Keyring(text)) if !has_key(text, &id) => CephError::NoKey { id },
                _ => CephError::Refused { mon, id, errno },
            },
            _ => CephError::Connect { mon, id, errno },
        }
    }

    fn mount_error(&self, errno: Errno) -> CephError {
        let (id, path) = (self.id.to_owned(), self.source.path.clone());
        let file_system = self.file_system();
        match errno {
            Errno::ENOENT if self.source.path != "/" && self.finds_file_system() => {
                CephError::NoDirectory { path, file_system }
            }
            Errno::ENOENT => CephError::NoFileSystem { file_system, id },
            Errno::ENOTDIR => CephError::NoSuchType {
                path,
                file_system,
                what: "below something that is no directory",
                advice: "check the path",
            },
            Errno::EPERM | Errno::EACCES => CephError::NotPermitted {
                path,
                file_system,
                id,
                errno,
            },
            Errno::ETIMEDOUT => CephError::NoServer {
                file_system,
                limit: self.began.elapsed(),
            },
            _ => CephError::Mount {
                path,
                file_system,
                id,
                errno,
            },
        }
    }

    /// The library has one error for a file system and a directory that are missing, so this looks
    /// whether there is a root.
    fn finds_file_system(&self) -> bool {
        let root = CephSource {
            fs: self.source.fs.clone(),
            path: "/".into(),
        };
        let login = Login {
            source: &root,
            ..*self
        };
        let name = sessions::random_name();
        let Some(connected) = name.ok().and_then(|name| login.connect(&name).ok()) else {
            return false;
        };
        match connected.client.mount(c"/") {
            Ok(()) => {
                let _ = connected.client.unmount();
                true
            }
            // One that may use a directory of it only.
            Err(errno) => errno != Errno::ENOENT,
        }
    }
}

/// The client's name, without `client.`.
fn entity(options: &CephOptions) -> &str {
    options.id.as_deref().unwrap_or("admin")
}

/// A keyring has a section for the client.
fn has_key(keyring: &str, id: &str) -> bool {
    let section = format!("[client.{id}]");
    keyring.lines().any(|line| line.trim() == section)
}

/// A session that keeps what a dead generation held, and ends the dead ones.
struct Keeper {
    client: Arc<Client>,
    mounting: Mounting,
    found: Vec<Inode>,
}

impl Keeper {
    /// Returns the sessions of dead mounts that it ended, too.
    fn begin(start: &Start<'_>, login: &Login<'_>) -> Result<(Keeper, Vec<String>), CephError> {
        let name = keeper_of(&start.names.own);
        let connected = login.connect(&name)?;
        let client = connected.client.clone();
        let mounting = connected.mount(&start.source.path, Some(&format!("{name}-nobody")))?;
        let held = Held::find(&start.restore, |vino| find_early(&client, vino, &mounting));
        let opened = held.handles.into_iter().filter_map(|(_, inode)| inode);
        let found = opened.chain(held.pinned.into_iter().map(|(_, inode)| inode));
        let keeper = Keeper {
            found: found.collect(),
            client,
            mounting,
        };
        let ended = end_sessions(&keeper.client, start.names, &keeper.mounting)?;
        Ok((keeper, ended))
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

/// Configuration in the order of its weight: file, then the command line. What must be so comes later.
fn configure(client: &Client, options: &CephOptions, secrets: &Secrets) -> Result<(), CephError> {
    let (read, place) = match &secrets.conf {
        Some(text) => {
            // The library refuses a last line without an end.
            let mut whole = Zeroizing::new(String::with_capacity(text.len() + 1));
            whole.push_str(text);
            whole.push('\n');
            let file = blob::seal("ceph.conf", whole.as_bytes()).map_err(CephError::Secrets)?;
            (client.read_conf(Some(&path_of(&file))), "")
        }
        // A missing one is no error: everything may be on the command line.
        None => match client.read_conf(None) {
            Err(Errno::ENOENT) => (Ok(()), ""),
            read => (read, DEFAULT_PLACES),
        },
    };
    read.map_err(|errno| CephError::Conf { place, errno })?;
    if let Some(mon) = &options.mon {
        set(client, "mon_host", mon)?;
    }
    for (option, value) in &options.conf {
        set(client, option, value)?;
    }
    Ok(())
}

fn set(client: &Client, option: &str, value: &str) -> Result<(), CephError> {
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
}

/// Sets a time, unless the configuration says something else than the library's default. True if it
/// was set.
fn bound(
    client: &Client,
    option: &CStr,
    default: &str,
    limit: Duration,
) -> Result<bool, CephError> {
    let is_default = seconds_of(client, option) == seconds(default);
    if is_default {
        let limit = limit.as_secs().to_string();
        set(client, &option.to_string_lossy(), &limit)?;
    }
    Ok(is_default)
}

/// The value of an option that is a time.
fn seconds_of(client: &Client, option: &CStr) -> Duration {
    client
        .conf(option)
        .map_or(Duration::ZERO, |text| seconds(&text))
}

fn seconds(text: &str) -> Duration {
    let number = text.parse().ok();
    let time = number.and_then(|n| Duration::try_from_secs_f64(n).ok());
    time.unwrap_or_default()
}

/// Gives the key to the library in a file that only this process has.
fn provide_key(client: &Client, secrets: &Secrets) -> Result<Option<OwnedFd>, CephError> {
    let (option, text) = match &secrets.key {
        None => return Ok(None),
        Some(Secret::Keyring(text)) => ("keyring", text),
        Some(Secret::Key(text)) => ("keyfile", text),
    };
    let file = blob::seal("ceph.key", text.as_bytes()).map_err(CephError::Secrets)?;
    // Each of these weighs more than those after it, so one in the configuration would win.
    for option in ["key", "keyfile", "keyring"] {
        set(client, option, "")?;
    }
    set(client, option, &path_of(&file).to_string_lossy())?;
    Ok(Some(file))
}

/// What the library would take as the key, if none is given: it may be gone when the next backend
/// starts. None: there is none, or it stands in the configuration itself.
pub fn find_key(options: &CephOptions, conf: Option<&Zeroizing<String>>) -> Option<Secret> {
    let secrets = Secrets {
        conf: conf.cloned(),
        key: None,
    };
    let client = Client::create(Some(&c_string(entity(options), "--id").ok()?)).ok()?;
    configure(&client, options, &secrets).ok()?;
    let value = |option| client.conf(option).unwrap_or_default();
    if !Zeroizing::new(value(c"key")).is_empty() {
        return None;
    }
    let text = |path: &str| {
        let text = blob::read_secret(File::open(path).ok()?).ok()?;
        Some(Zeroizing::new(std::str::from_utf8(&text).ok()?.to_owned()))
    };
    let keyfile = value(c"keyfile");
    if !keyfile.is_empty() {
        return text(&keyfile).map(Secret::Key);
    }
    let places = value(c"keyring");
    let mut places = places
        .split([',', ';', ' ', '\t'])
        .filter(|p| !p.is_empty());
    places.find_map(text).map(Secret::Keyring)
}

fn path_of(file: &OwnedFd) -> CString {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    CString::new(path).expect("a path of digits has no NUL")
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
