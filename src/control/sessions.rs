//! Names of the sessions that a store may still have when every process of a mount is gone.
//!
//! A store with sessions keeps that of a client that died, and has all others wait for what it held.
//! A backend's is ended by the next generation. When the front-end dies as well there is none; so the
//! names stand in a file of the runtime directory, `session-ID.json`, which only its owner can read:
//!
//! * it is written before a session begins, and removed when the last one was ended in order;
//! * the front-end holds a lock on it (`flock(2)`), which ends with the process, whatever ends it: a
//!   file without a lock is of a mount that died;
//! * whoever next mounts as the same client of the store, or unmounts the dead mount, ends these
//!   sessions, and removes the file.
//!
//! Nothing secret is in it. It is replaced, never changed, so a death leaves the old one or the new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::message::{CephOptions, CephSource, SecretFiles};

/// Longest file that is read, bytes.
const MAX: u64 = 4 << 20;
/// After this time no store knows a session of a dead client any more (Ceph: five minutes, unless it
/// is told otherwise).
const KEPT: Duration = Duration::from_secs(3600);
/// A draft that is older than this belongs to a process that died while it wrote it.
const DRAFT_LIMIT: Duration = Duration::from_secs(60);

/// What stands in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Where it was mounted.
    pub mountpoint: PathBuf,
    /// What.
    pub store: Store,
    /// The sessions.
    pub names: Vec<String>,
    /// When it was first tried in vain to end them, seconds since 1970.
    #[serde(default)]
    pub tried: Option<u64>,
}

/// Which store, and how to connect to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Store {
    /// The source, as on the command line: `ceph:[FSNAME]/path`.
    pub source: String,
    /// Options on the command line.
    #[serde(default)]
    pub options: CephOptions,
    /// Files on the command line.
    #[serde(default)]
    pub files: SecretFiles,
}

impl Store {
    /// The sessions of the other can be ended by this client: a store ends those of the same client
    /// only. If it is of another cluster it has no such session.
    pub fn is_same_client(&self, other: &Store) -> bool {
        let id = |store: &Store| store.options.id.clone().unwrap_or_else(|| "admin".into());
        id(self) == id(other)
    }

    /// The same file system, by the same words: what it does not have is gone.
    pub fn is_same(&self, other: &Store) -> bool {
        let file_system = |store: &Store| match store.source.parse() {
            Ok(super::Source::Ceph(CephSource { fs, .. })) => Some(fs),
            _ => None,
        };
        file_system(self) == file_system(other)
            && self.is_same_client(other)
            && self.options.mon == other.options.mon
            && self.files.conf == other.files.conf
    }
}

/// The file of a living mount.
pub struct Register {
    path: PathBuf,
    record: Record,
    /// The lock.
    _held: Flock<File>,
}

impl Register {
    /// Writes a file for a mount with this name, and holds it.
    pub fn create(directory: &Path, name: &str, record: Record) -> io::Result<Register> {
        let path = directory.join(format!("session-{name}.json"));
        Ok(Register {
            _held: write(&path, &record)?,
            path,
            record,
        })
    }

    /// What the mount is of.
    pub fn store(&self) -> &Store {
        &self.record.store
    }

    /// Replaces the names. After an error the old ones stand there.
    pub fn set(&mut self, names: &[String]) -> io::Result<()> {
        let record = Record {
            names: names.to_vec(),
            ..self.record.clone()
        };
        self._held = write(&self.path, &record)?;
        self.record = record;
        Ok(())
    }

    /// No session is left.
    pub fn remove(self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Puts a record in its place. Locked before anybody can see it there.
fn write(path: &Path, record: &Record) -> io::Result<Flock<File>> {
    let draft = path.with_extension("draft");
    let _ = fs::remove_file(&draft);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)?;
    let mut file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e)?;
    let written = serde_json::to_vec(record)
        .map_err(io::Error::from)
        .and_then(|text| file.write_all(&text))
        .and_then(|()| fs::rename(&draft, path));
    if written.is_err() {
        let _ = fs::remove_file(&draft);
    }
    written.map(|()| file)
}

/// The file of a mount that died. Nobody else has it while this value lives.
pub struct Abandoned {
    path: PathBuf,
    _held: Flock<File>,
    record: Record,
}

impl Abandoned {
    /// What stands in it.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Its sessions are gone.
    pub fn forget(self) {
        let _ = fs::remove_file(&self.path);
    }

    /// The store that was asked knows none of its sessions. It may be another one; but after some time
    /// none knows them.
    pub fn keep_for_a_while(mut self) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |t| t.as_secs());
        match self.record.tried {
            Some(then) if now.saturating_sub(then) < KEPT.as_secs() => {}
            Some(_) => self.forget(),
            None => {
                self.record.tried = Some(now);
                let _ = write(&self.path, &self.record);
            }
        }
    }
}

/// The files of mounts that died. Those that cannot be read are removed with a warning.
pub fn abandoned(directory: &Path) -> Vec<Abandoned> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|e| e.file_name().to_string_lossy().starts_with("session-"))
        .map(|e| e.path())
        .collect();
    paths.sort();
    paths.into_iter().filter_map(take).collect()
}

/// Takes one, if it is abandoned.
fn take(path: PathBuf) -> Option<Abandoned> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&path)
        .ok()?;
    let meta = file.metadata().ok()?;
    if !meta.is_file() {
        return None;
    }
    let mut held = Flock::lock(file, FlockArg::LockExclusiveNonblock).ok()?;
    // It may have been replaced or removed between the two calls, by its living owner.
    let now = fs::symlink_metadata(&path).ok()?;
    if (now.dev(), now.ino()) != (meta.dev(), meta.ino()) {
        return None;
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("json") => {}
        Some("draft") => {
            if meta.modified().ok()?.elapsed().ok()? > DRAFT_LIMIT {
                let _ = fs::remove_file(&path);
            }
            return None;
        }
        _ => return None,
    }
    let mut text = Vec::new();
    let read = (&mut *held).take(MAX).read_to_end(&mut text);
    let record = match read.and_then(|_| Ok(serde_json::from_slice::<Record>(&text)?)) {
        Ok(record) => record,
        Err(e) => {
            tracing::warn!(
                "{} is damaged ({e}) and was removed; if a mount died, other clients of its store may \
                 wait for a minute",
                path.display()
            );
            let _ = fs::remove_file(&path);
            return None;
        }
    };
    let taken = Abandoned {
        path,
        _held: held,
        record,
    };
    if taken.record.names.is_empty() {
        taken.forget();
        return None;
    }
    Some(taken)
}

/// 128 random bits: every mount of a cluster has sessions under names of its own.
pub fn random_name() -> io::Result<String> {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(format!("evermount-{}", uuid.trim()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn record(names: &[&str]) -> Record {
        Record {
            mountpoint: "/m".into(),
            store: Store {
                source: "ceph:fs/a".into(),
                options: CephOptions::default(),
                files: SecretFiles::default(),
            },
            names: names.iter().map(|n| (*n).to_owned()).collect(),
            tried: None,
        }
    }

    fn names(directory: &Path) -> Vec<Vec<String>> {
        let found = abandoned(directory);
        found.into_iter().map(|a| a.record.names.clone()).collect()
    }

    fn is_empty(directory: &Path) -> bool {
        fs::read_dir(directory).unwrap().next().is_none()
    }

    #[test]
    fn the_names_of_a_living_mount_are_left_alone_and_those_of_a_dead_one_found() {
        let dir = tempfile::tempdir().unwrap();
        let mut living = Register::create(dir.path(), "x", record(&[])).unwrap();
        living.set(&["x-1".into()]).unwrap();
        let path = dir.path().join("session-x.json");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(abandoned(dir.path()).is_empty());
        living.set(&["x-1".into(), "x-2".into()]).unwrap();
        assert!(abandoned(dir.path()).is_empty());
        // Without `remove`, as when the process is killed.
        drop(living);
        assert_eq!(names(dir.path()), [["x-1", "x-2"]]);
        let found = abandoned(dir.path());
        assert!(abandoned(dir.path()).is_empty(), "two took it");
        found.into_iter().for_each(Abandoned::forget);
        assert!(is_empty(dir.path()));
    }

    #[test]
    fn nothing_is_left_of_a_mount_whose_sessions_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut living = Register::create(dir.path(), "x", record(&["x-1"])).unwrap();
        living.set(&["x-2".into()]).unwrap();
        living.remove();
        assert!(is_empty(dir.path()));
        drop(Register::create(dir.path(), "x", record(&[])).unwrap());
        assert!(abandoned(dir.path()).is_empty());
        assert!(is_empty(dir.path()));
    }

    #[test]
    fn a_damaged_file_is_removed_and_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let whole = serde_json::to_vec(&record(&["x-1"])).unwrap();
        for cut in 0..whole.len() {
            fs::write(dir.path().join("session-cut.json"), &whole[..cut]).unwrap();
            assert!(abandoned(dir.path()).is_empty(), "{cut}");
            assert!(is_empty(dir.path()), "{cut}");
        }
        fs::write(dir.path().join("session-a.json"), [0xff, 0, 7]).unwrap();
        fs::write(dir.path().join("session-b.json"), b"{\"names\":[\"x\"]}").unwrap();
        fs::create_dir(dir.path().join("session-c.json")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("session-d.json")).unwrap();
        fs::write(dir.path().join("session-e.json"), &whole).unwrap();
        assert_eq!(names(dir.path()), [["x-1"]]);
        assert!(!dir.path().join("session-a.json").exists());
        assert!(!dir.path().join("session-b.json").exists());
    }

    #[test]
    fn names_that_no_store_knows_are_given_up_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        drop(Register::create(dir.path(), "x", record(&["x-1"])).unwrap());
        let take = || abandoned(dir.path()).pop().unwrap();
        take().keep_for_a_while();
        take().keep_for_a_while();
        let mut old = take();
        let tried = old.record.tried.unwrap();
        old.record.tried = Some(tried - KEPT.as_secs());
        old.keep_for_a_while();
        assert!(is_empty(dir.path()));
    }

    #[test]
    fn sessions_of_another_client_are_not_touched() {
        let store = record(&[]).store;
        let mut other = store.clone();
        other.options.id = Some("admin".into());
        other.source = "ceph:fs/elsewhere".into();
        assert!(store.is_same_client(&other) && store.is_same(&other));
        other.source = "ceph:fs2/a".into();
        assert!(store.is_same_client(&other) && !store.is_same(&other));
        other.options.id = Some("app".into());
        assert!(!store.is_same_client(&other) && !store.is_same(&other));
    }
}
