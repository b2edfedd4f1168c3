//! What the processes say to each other.
//!
//! Every message is a JSON object. A field that a reader does not know is ignored and one that may
//! be missing has a default, so a field can be added without a new protocol version; anything else
//! needs one ([`PROTOCOL`]).

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::backend::VaultKey;
use crate::region::Identity;

/// Versions of the conversation between backend and front-end that this program can hold, oldest
/// and newest. The front-end chooses the newest both sides have.
///
/// Version history:
/// 1. first version.
pub const PROTOCOL: (u32, u32) = (1, 1);

/// The newest version in both ranges, if they overlap.
pub fn common_protocol(ours: (u32, u32), theirs: (u32, u32)) -> Option<u32> {
    let newest = ours.1.min(theirs.1);
    (newest >= ours.0.max(theirs.0)).then_some(newest)
}

/// From a backend to its front-end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum BackendMessage {
    /// The first message: who is there. Nothing is given to a backend before it.
    Hello {
        /// Versions it can speak ([`PROTOCOL`]).
        protocol: (u32, u32),
        /// Version of its program.
        version: String,
        /// Its process.
        pid: u32,
    },
    /// The store is open and the backend serves from now on.
    Ready {
        /// Identity of the root. A successor with another root is refused.
        root: Identity,
        /// Requests must carry paths.
        needs_paths: bool,
        /// Locks of the last generation that somebody else has now.
        #[serde(default)]
        lost_locks: Vec<LostLock>,
        /// Those of [`SessionNames::abandoned`] that were there and are ended.
        #[serde(default)]
        ended: Vec<String>,
    },
    /// The standby session has begun and keeps what it was told to.
    Keeping,
    /// Objects that the kernel knows are gone from the store. Before `Ready`, not answered.
    Gone {
        /// Which; several messages if they are many.
        identities: Vec<Identity>,
    },
    /// Data of objects may be old in the kernel. Not answered.
    Stale {
        /// Which, and what of them.
        ranges: Vec<StaleRange>,
    },
    /// Keep the descriptor beside this message. Answered.
    Deposit {
        /// Number of the call; the answer repeats it.
        id: u64,
        /// Under which key.
        key: VaultKey,
    },
    /// Give back a duplicate of what is kept. Answered.
    Withdraw {
        /// Number of the call; the answer repeats it.
        id: u64,
        /// Under which key.
        key: VaultKey,
    },
    /// Drop what is kept. Not answered.
    Discard {
        /// Under which key.
        key: VaultKey,
    },
    /// This backend cannot serve and is about to exit.
    Failed {
        /// Why, for the person who reads `status`.
        reason: String,
    },
}

/// From a front-end to its backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum FrontendMessage {
    /// Serve this mount. The descriptors beside it are the slot memory of the session region and then
    /// one for each of `attachments`.
    Attach {
        /// The version both speak.
        protocol: u32,
        /// Number of this start of a backend.
        generation: u32,
        /// What to serve.
        source: Source,
        /// How.
        #[serde(default)]
        options: Box<BackendOptions>,
        /// Names for the sessions of stores that have them.
        #[serde(default)]
        session: SessionNames,
        /// What the descriptors are.
        #[serde(default)]
        attachments: Vec<Attachment>,
    },
    /// Serve nothing: hold a standby session, which keeps objects without a name while no backend
    /// does. The descriptors beside it are those of `attachments`.
    Keep {
        /// The version both speak.
        protocol: u32,
        /// Where the session is to be.
        source: Source,
        /// How.
        #[serde(default)]
        options: Box<BackendOptions>,
        /// Names for the session and for those of earlier standbys.
        #[serde(default)]
        session: SessionNames,
        /// What the descriptors are.
        #[serde(default)]
        attachments: Vec<Attachment>,
    },
    /// To a standby: these objects have lost their last name, and the kernel knows them.
    Pin {
        /// Which.
        identities: Vec<Identity>,
    },
    /// The kernel does not know these objects any more, which lost their last name.
    Unpin {
        /// Which.
        identities: Vec<Identity>,
    },
    /// The outcome of a `Deposit` or `Withdraw`.
    Answer {
        /// Number of the call.
        id: u64,
        /// 0, or why it failed.
        errno: i32,
        /// The descriptor that was asked for is beside this message.
        found: bool,
    },
    /// Finish what runs, take nothing new, exit.
    Retire,
}

/// How a backend is to serve. Every field added needs a default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackendOptions {
    /// How long the kernel may trust a name; the default is the store's.
    pub entry_timeout: Option<Duration>,
    /// How long the kernel may trust attributes; the default is the store's.
    pub attr_timeout: Option<Duration>,
    /// Bytes of private memory a backend may have.
    pub memory_limit: Option<u64>,
    /// How long an unmount may take to write what was acknowledged, and to end sessions of a store.
    pub umount_flush: Option<Duration>,
    /// For a `ceph:` source.
    pub ceph: CephOptions,
}

impl BackendOptions {
    /// How long a backend may take to end what would outlive it.
    pub fn retire_limit(&self) -> Duration {
        self.umount_flush.unwrap_or(Duration::from_secs(60))
    }
}

/// How to connect to a Ceph cluster. Nothing secret is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CephOptions {
    /// The entity is `client.ID`; the default is `admin`.
    pub id: Option<String>,
    /// Addresses of the monitors, instead of those in the configuration.
    pub mon: Option<String>,
    /// Further options of the client, by name.
    pub conf: Vec<(String, String)>,
    /// When a write is acknowledged.
    pub writes: Writes,
}

/// When a write to a store on the network is acknowledged. Either way no death of a backend loses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Writes {
    /// When the store has it.
    #[default]
    Stored,
    /// When it is retained in memory, until the store has it.
    Retained,
}

/// Where configuration and key were read from, if it was said. They may be gone by now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SecretFiles {
    /// The configuration.
    pub conf: Option<PathBuf>,
    /// A keyring.
    pub keyring: Option<PathBuf>,
    /// The bare key.
    pub keyfile: Option<PathBuf>,
}

/// What a descriptor beside an [`Attach`](FrontendMessage::Attach) is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attachment {
    /// A sealed memory file with a [`Restore`].
    Restore,
    /// A sealed memory file with [`Secrets`].
    Secrets,
    /// The memory of [`region::retained`](crate::region::retained).
    Retained,
}

/// Names of a store's sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionNames {
    /// For this backend's own.
    pub own: String,
    /// Those of earlier backends that may still be there, to be ended.
    pub old: Vec<String>,
    /// Those of mounts all of whose processes died, to be ended if they are of this store.
    pub abandoned: Vec<String>,
}

/// What the last generation held and a store without a memory has to be told: the contents of an
/// attachment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Restore {
    /// Open files and directories.
    pub handles: Vec<HeldHandle>,
    /// Directories above open files: a store may have rules for all that is below one (quotas).
    pub directories: Vec<Identity>,
    /// Objects without a name that the kernel knows.
    pub pinned: Vec<Identity>,
    /// Locks, of `fcntl(2)` only.
    pub locks: Vec<HeldLock>,
    /// Modification times that calls gave to files that are or were a moment ago open for writing.
    pub times: Vec<HeldTime>,
}

/// An open file or directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldHandle {
    /// The handle.
    pub fh: u64,
    /// What it is of.
    pub identity: Identity,
    /// `open(2)` flags as the kernel sent them.
    pub open_flags: u32,
    /// It is a directory's.
    pub directory: bool,
}

/// A time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldTime {
    /// The file.
    pub identity: Identity,
    /// Its modification time, seconds.
    pub sec: u64,
    /// And nanoseconds.
    pub nsec: u32,
}

/// A lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLock {
    /// The inode.
    pub nodeid: u64,
    /// The inode, as the store calls it.
    pub identity: Identity,
    /// The kernel's number of the owner.
    pub owner: u64,
    /// It is a write lock.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// Process that took it.
    pub pid: u32,
    /// Handle it was taken through.
    pub fh: u64,
}

/// A lock owner that lost what it had on an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostLock {
    /// The inode.
    pub nodeid: u64,
    /// The kernel's number of the owner.
    pub owner: u64,
}

/// Data that may be old.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StaleRange {
    /// The object.
    pub identity: Identity,
    /// First byte.
    pub off: i64,
    /// Number of bytes; 0: all that follow.
    pub len: i64,
}

/// Configuration and key of a store: the contents of an attachment, and in no other place.
///
/// Not as JSON: a parser would copy the text, with its line ends replaced, through buffers of its own
/// that nobody overwrites.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets {
    /// Text of the configuration file; none: the library looks for one.
    pub conf: Option<Zeroizing<String>>,
    /// The key; none: the library looks for one.
    pub key: Option<Secret>,
}

/// A key.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// Text of a keyring.
    Keyring(Zeroizing<String>),
    /// The bare key.
    Key(Zeroizing<String>),
}

/// The first line of the attachment: how long the parts are that follow it, without a gap.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct SecretsHead {
    conf: Option<usize>,
    keyring: Option<usize>,
    key: Option<usize>,
}

impl Secrets {
    /// As the contents of an attachment.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let (keyring, key) = match &self.key {
            Some(Secret::Keyring(text)) => (Some(text), None),
            Some(Secret::Key(text)) => (None, Some(text)),
            None => (None, None),
        };
        let length = |part: Option<&Zeroizing<String>>| part.map(|text| text.len());
        let head = SecretsHead {
            conf: length(self.conf.as_ref()),
            keyring: length(keyring),
            key: length(key),
        };
        let head = serde_json::to_vec(&head).expect("numbers can be written");
        let parts = [self.conf.as_ref(), keyring, key];
        let total: usize = parts.iter().filter_map(|part| length(*part)).sum();
        // All at once: a buffer that grows would leave copies behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(head.len() + 1 + total));
        bytes.extend_from_slice(&head);
        bytes.push(b'\n');
        for part in parts.into_iter().flatten() {
            bytes.extend_from_slice(part.as_bytes());
        }
        bytes
    }

    /// From the contents of an attachment.
    pub fn from_bytes(bytes: &[u8]) -> Result<Secrets, SecretsError> {
        let end = memchr::memchr(b'\n', bytes).ok_or(SecretsError)?;
        let head: SecretsHead = serde_json::from_slice(&bytes[..end]).map_err(|_| SecretsError)?;
        let mut rest = &bytes[end + 1..];
        let mut take = |length: Option<usize>| {
            let Some(length) = length else {
                return Ok(None);
            };
            let (part, after) = rest.split_at_checked(length).ok_or(SecretsError)?;
            rest = after;
            let text = std::str::from_utf8(part).map_err(|_| SecretsError)?;
            Ok(Some(Zeroizing::new(text.to_owned())))
        };
        let conf = take(head.conf)?;
        let keyring = take(head.keyring)?.map(Secret::Keyring);
        let key = take(head.key)?.map(Secret::Key);
        Ok(Secrets {
            conf,
            key: key.or(keyring),
        })
    }
}

/// Configuration and key cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("configuration and key are not in their form; use the same release for all processes")]
pub struct SecretsError;

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets { .. }")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret { .. }")
    }
}

/// What a mount shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Source {
    /// A local directory, `dir:/path`.
    Dir(PathBuf),
    /// A directory of a CephFS, `ceph:[FSNAME]/path`.
    Ceph(CephSource),
}

/// A directory of a CephFS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CephSource {
    /// The file system; empty: the cluster's default one.
    pub fs: String,
    /// The directory, from `/` on.
    pub path: String,
}

impl fmt::Display for CephSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ceph:{}{}", self.fs, self.path)
    }
}

/// Why a source cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// No kind before the first colon.
    #[error(
        "source '{0}' has no kind; write dir:/path for a local directory, ceph:[FSNAME]/path for CephFS"
    )]
    NoKind(String),
    /// A kind that is planned.
    #[error(
        "source '{0}': the {1} backend is not built in yet; use dir:/path or ceph:[FSNAME]/path"
    )]
    NotBuiltIn(String, &'static str),
    /// A kind nobody knows.
    #[error("source '{0}': there is no backend '{1}'; use dir:/path or ceph:[FSNAME]/path")]
    UnknownKind(String, String),
    /// Nothing after the colon.
    #[error("source '{0}' names no directory; write dir:/path")]
    Empty(String),
    /// No absolute path.
    #[error("source '{0}' names no directory of the file system; write ceph:[FSNAME]/path")]
    CephPath(String),
}

impl FromStr for Source {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Source, SourceError> {
        let all = || text.to_owned();
        match text.split_once(':') {
            Some(("dir", "")) => Err(SourceError::Empty(all())),
            Some(("dir", path)) => Ok(Source::Dir(path.into())),
            Some(("ceph", rest)) => match rest.find('/') {
                Some(at) => Ok(Source::Ceph(CephSource {
                    fs: rest[..at].to_owned(),
                    path: rest[at..].to_owned(),
                })),
                None => Err(SourceError::CephPath(all())),
            },
            Some(("exec", _)) => Err(SourceError::NotBuiltIn(all(), "exec")),
            // A path may have a colon in it; then this is no kind but a forgotten one.
            Some((kind, _)) if !kind.contains('/') => {
                Err(SourceError::UnknownKind(all(), kind.to_owned()))
            }
            _ => Err(SourceError::NoKind(all())),
        }
    }
}

impl TryFrom<String> for Source {
    type Error = SourceError;

    fn try_from(text: String) -> Result<Source, SourceError> {
        text.parse()
    }
}

impl From<Source> for String {
    fn from(source: Source) -> String {
        source.to_string()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Dir(path) => write!(f, "dir:{}", path.display()),
            Source::Ceph(ceph) => ceph.fmt(f),
        }
    }
}

impl Source {
    /// The local path behind it, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Source::Dir(path) => Some(path),
            Source::Ceph(_) => None,
        }
    }

    /// The store keeps what a backend holds in a session that dies with it.
    pub fn has_sessions(&self) -> bool {
        matches!(self, Source::Ceph(_))
    }
}

/// How requests reach the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Channel {
    /// The front-end reads the kernel's requests and hands them over in shared memory.
    #[default]
    Relay,
    /// The backend reads them itself, through a duplicate of the kernel's descriptor.
    Lease,
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Channel::Relay => "relay",
            Channel::Lease => "lease",
        })
    }
}

impl FromStr for Channel {
    type Err = ChannelError;

    fn from_str(text: &str) -> Result<Channel, ChannelError> {
        match text {
            "relay" => Ok(Channel::Relay),
            "lease" => Ok(Channel::Lease),
            _ => Err(ChannelError(text.to_owned())),
        }
    }
}

/// A channel nobody knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("channel '{0}' is not known; write relay or lease")]
pub struct ChannelError(String);

/// From a client (`evermount status`) to a front-end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "command")]
pub enum Command {
    /// How is the mount? Answered by [`CommandAnswer::Status`].
    Status,
    /// A command of a newer client. Answered by [`CommandAnswer::Failed`].
    #[serde(other)]
    Unknown,
}

/// From a front-end to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum CommandAnswer {
    /// How the mount is.
    Status(Box<Status>),
    /// The command was not carried out.
    Failed {
        /// Why, and what to do.
        reason: String,
    },
}

/// Whether a mount is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// A backend serves.
    Serving,
    /// A planned replacement is under way.
    Handover,
    /// No backend serves; the next one is being started.
    #[default]
    Outage,
    /// The mount can never be served again (its root is gone, for example).
    Failed,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Serving => "serving",
            State::Handover => "handover",
            State::Outage => "outage",
            State::Failed => "failed",
        })
    }
}

/// How a mount is: the object `evermount status --json` prints. Its field names are a contract with
/// scripts; fields are only ever added.
///
/// Counters count since the mount was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// What is mounted.
    pub source: String,
    /// Whether it is served.
    pub state: State,
    /// Why it is not served, or why the last backend ended.
    pub reason: Option<String>,
    /// Number of the backend that serves or served last; the first is 1.
    pub generation: u32,
    /// How requests reach the backend.
    pub channel: Channel,
    /// The front-end.
    pub frontend_pid: u32,
    /// The backend, while there is one.
    pub backend_pid: Option<u32>,
    /// The standby session's process, while it keeps what it should (`--standby`).
    pub standby_pid: Option<u32>,
    /// Version of the front-end's program.
    pub version: String,
    /// Version of the backend's program.
    pub backend_version: Option<String>,
    /// Backends that took over from one that died.
    pub takeovers: u64,
    /// Planned replacements.
    pub handovers: u64,
    /// The last time without service, from the death of a backend until its successor served.
    pub last_pause_ms: Option<f64>,
    /// The longest such time.
    pub longest_pause_ms: Option<f64>,
    /// How long the outage has lasted, while there is one.
    pub outage_ms: Option<f64>,
    /// Open files.
    pub open_files: u64,
    /// Open directories.
    pub open_dirs: u64,
    /// Locks held.
    pub locks: u64,
    /// Locks that could not be had back after a death.
    pub lost_locks: u64,
    /// Writes of others that met unflushed ones of ours.
    pub conflicts: u64,
    /// Acknowledged bytes that could not be written.
    pub dropped_bytes: u64,
    /// Inodes the kernel knows.
    pub inodes: u64,
    /// Requests that were read and are not answered.
    pub inflight: u64,
    /// Age of the oldest of them.
    pub oldest_request_ms: Option<f64>,
    /// Acknowledged bytes that are not durable in the store.
    pub unflushed_bytes: u64,
    /// Requests that were begun by a backend that died and were done by its successor.
    pub reissued: u64,
    /// Requests of a backend that died which its successor found done.
    pub verified_done: u64,
    /// Requests of which it cannot be known who did them.
    pub ambiguous: u64,
    /// Requests answered with EIO because they kill every backend.
    pub poisoned: u64,
    /// Requests answered in an outage because their caller was dying.
    pub early_answers: u64,
    /// Callers that wait for a lock.
    pub waiters: u64,
    /// Starts of a backend that came to nothing since the last one that served.
    pub restarts_failed: u64,
    /// Files and directories in use that were gone from the store when a backend took over (CephFS).
    /// What is done with them fails with ESTALE.
    pub lost_files: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_read_back_as_it_was_written() {
        let source: Source = "dir:/a b:c".parse().unwrap();
        assert_eq!(source, Source::Dir("/a b:c".into()));
        let json = serde_json::to_string(&source).unwrap();
        assert_eq!(json, r#""dir:/a b:c""#);
        assert_eq!(serde_json::from_str::<Source>(&json).unwrap(), source);
        for text in ["ceph:/", "ceph:fs-1/a/b:c"] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn secrets_do_not_show() {
        let secrets = Secrets {
            conf: Some("hidden".to_owned().into()),
            key: Some(Secret::Key("hidden".to_owned().into())),
        };
        assert!(!format!("{secrets:?} {:?}", secrets.key).contains("hidden"));
    }

    #[test]
    fn a_source_that_cannot_be_used_is_refused_with_a_reason() {
        let reason = |s: &str| s.parse::<Source>().unwrap_err().to_string();
        assert!(reason("/data").contains("dir:/path"));
        assert!(reason("/data:x").contains("has no kind"));
        assert!(reason("ceph:fs").contains("ceph:[FSNAME]/path"));
        assert!(reason("exec:sshfs").contains("not built in yet"));
        assert!(reason("nfs:/x").contains("no backend 'nfs'"));
        assert!(reason("dir:").contains("no directory"));
    }

    #[test]
    fn a_vault_key_survives_the_way_to_the_front_end() {
        let id = Identity::new(&[1, 0xab, 255]).unwrap();
        for key in [
            VaultKey::Root,
            VaultKey::Inode(id),
            VaultKey::Lock {
                nodeid: u64::MAX,
                owner: 1 << 63,
                flock: true,
            },
        ] {
            let message = BackendMessage::Deposit { id: 3, key };
            let json = serde_json::to_string(&message).unwrap();
            assert_eq!(
                serde_json::from_str::<BackendMessage>(&json).unwrap(),
                message
            );
        }
        let ready = BackendMessage::Ready {
            root: id,
            needs_paths: false,
            lost_locks: Vec::new(),
            ended: Vec::new(),
        };
        let json = serde_json::to_string(&ready).unwrap();
        assert!(json.contains(r#""root":"01abff""#), "{json}");
    }

    #[test]
    fn secrets_arrive_as_they_are_and_are_not_shown() {
        let text = |text: &str| Zeroizing::new(text.to_owned());
        for key in [
            None,
            Some(Secret::Keyring(text("[client.a]\n\tkey = \"x\"\n"))),
            Some(Secret::Key(text("x"))),
            Some(Secret::Key(text(""))),
        ] {
            for conf in [None, Some(text("")), Some(text("[global]\nä = \\\n"))] {
                let secrets = Secrets {
                    conf,
                    key: key.clone(),
                };
                let bytes = secrets.to_bytes();
                assert!(Secrets::from_bytes(&bytes).unwrap() == secrets);
                for cut in 0..bytes.len() {
                    assert!(Secrets::from_bytes(&bytes[..cut]).is_err());
                }
                assert!(!format!("{secrets:?} {:?}", secrets.key).contains('x'));
            }
        }
        assert!(Secrets::from_bytes(b"{\"conf\":18446744073709551615}\nx").is_err());
        assert!(Secrets::from_bytes(b"{\"conf\":1}\n\xff").is_err());
    }

    #[test]
    fn an_identity_that_is_no_hex_or_too_long_is_refused() {
        let long = format!("\"{}\"", "00".repeat(Identity::MAX + 1));
        for bad in ["\"0\"", "\"zz\"", "\"é\"", "7", "\"+1\"", long.as_str()] {
            assert!(serde_json::from_str::<Identity>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn versions_meet_at_the_newest_common_one() {
        assert_eq!(common_protocol((1, 3), (2, 5)), Some(3));
        assert_eq!(common_protocol((1, 1), (1, 1)), Some(1));
        assert_eq!(common_protocol((1, 2), (3, 4)), None);
    }

    #[test]
    fn status_has_the_promised_fields_in_their_promised_form() {
        let json = serde_json::to_value(Status::default()).unwrap();
        let promised = "mountpoint source state reason generation channel frontend_pid backend_pid \
            standby_pid version backend_version takeovers handovers last_pause_ms longest_pause_ms \
            outage_ms open_files open_dirs locks lost_locks conflicts dropped_bytes inodes inflight \
            oldest_request_ms unflushed_bytes reissued verified_done ambiguous poisoned";
        for field in promised.split_whitespace() {
            assert!(json.get(field).is_some(), "{field} is missing");
        }
        assert_eq!(json["state"], "outage");
        assert_eq!(json["channel"], "relay");
    }

    #[test]
    fn a_command_of_a_newer_client_is_unknown_and_no_error() {
        let command: Command = serde_json::from_str(r#"{"command":"dance","with":3}"#).unwrap();
        assert_eq!(command, Command::Unknown);
    }

    #[test]
    fn a_status_of_a_newer_front_end_is_read() {
        let answer = r#"{"answer":"status","state":"serving","locks":3,"new_field":[1]}"#;
        let CommandAnswer::Status(status) = serde_json::from_str(answer).unwrap() else {
            panic!("not a status");
        };
        assert_eq!((status.state, status.locks), (State::Serving, 3));
    }
}
