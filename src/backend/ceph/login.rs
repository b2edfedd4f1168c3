//! Connecting to a cluster: where it is, who asks, and why it was refused.
//!
//! Every refusal is one sentence that says what was wanted, of whom, and what to do.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zeroize::Zeroizing;

use super::client::{Client, ClientError, Perms};
use crate::control::blob;
use crate::control::message::{CephOptions, CephSource, Secret, Secrets, Writes};
use crate::control::sessions;
use crate::wire::Errno;

/// The library gives up connecting after this time.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(20);

/// After an attempt to mount that failed it waits this long for the metadata servers to say that there
/// is no session any more. They are probably not there.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The library's own limit for it, seconds: it has to write back what it has.
pub(super) const CLOSE_DEFAULT: &str = "30";

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

pub(super) fn c_string(text: &str, what: &'static str) -> Result<CString, CephError> {
    CString::new(text).map_err(|_| CephError::Nul { what })
}

/// A client that knows where and as whom to begin a session.
pub(super) struct Connected {
    pub(super) client: Arc<Client>,
    /// The library reads the key while it connects.
    key: Option<OwnedFd>,
    /// How long to wait for the cluster.
    limit: Duration,
    /// The library waits only [`CLOSE_LIMIT`] for the end of a session.
    pub(super) hurried: bool,
}

impl Connected {
    /// Begins the session in a thread. With `nobody`, the name of a session that never was, it returns
    /// when the metadata servers are reached: asked for an object earlier, the library divides by
    /// the number of servers it does not know yet (16.2.15).
    pub(super) fn mount(self, path: &str, nobody: Option<&str>) -> Result<Mounting, CephError> {
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
pub(super) struct Login<'a> {
    source: &'a CephSource,
    options: &'a CephOptions,
    secrets: &'a Secrets,
    id: &'a str,
    began: Instant,
}

impl<'a> Login<'a> {
    pub(super) fn new(
        source: &'a CephSource,
        options: &'a CephOptions,
        secrets: &'a Secrets,
    ) -> Login<'a> {
        Login {
            source,
            options,
            secrets,
            id: entity(options),
            began: Instant::now(),
        }
    }

    /// A client that the monitors have accepted, and the key it was given.
    pub(super) fn connect(&self, name: &str) -> Result<Connected, CephError> {
        let client = Client::create(Some(&c_string(self.id, "--id")?))?;
        configure(&client, self.options, self.secrets)?;
        // A write that is acknowledged is with the store, or it is retained: this process may die at
        // any time.
        let cache = match self.options.writes {
            Writes::Stored => "false",
            Writes::Retained => "true",
        };
        set(&client, "client_oc", cache)?;
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
    pub(super) fn check_root(&self, client: &Arc<Client>) -> Result<(), CephError> {
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

    pub(super) fn mount_error(&self, errno: Errno) -> CephError {
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

pub(super) fn set(client: &Client, option: &str, value: &str) -> Result<(), CephError> {
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
pub(super) struct Mounting(Mutex<State>);

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
    pub(super) fn is_over(&self) -> bool {
        self.take(Duration::ZERO).is_some()
    }

    /// How it ended. Waits for it; the library gives up by itself, and the front-end kills a backend
    /// that takes too long.
    pub(super) fn outcome(&self) -> Result<(), Errno> {
        self.take(Duration::MAX).unwrap_or(Err(Errno::ETIMEDOUT))
    }
}
