//! Where the sockets of live mounts are, and how to find the one of a mount.
//!
//! The socket of a mount is named after the device number of its superblock, `mount-MINOR.sock`:
//! unique while the mount lives, and known from `/proc/self/mountinfo` wherever it is bind-mounted.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::mountinfo::{self, MountEntry};
use super::socket::{Conn, ControlError};

/// Why a mount, or the directory of their sockets, was not found.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// There is no place for it.
    #[error(
        "no runtime directory: XDG_RUNTIME_DIR is not set; set EVERMOUNT_RUNTIME_DIR to a \
         directory of your own"
    )]
    NoDirectory,
    /// It cannot be made or looked at.
    #[error(
        "runtime directory {}: {source}; set EVERMOUNT_RUNTIME_DIR to a directory of your own",
        path.display()
    )]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Others could put sockets into it.
    #[error(
        "runtime directory {} belongs to uid {uid} and has mode {mode:03o}; it must be yours, mode \
         700, or others could pretend to be your mounts; chmod it or set EVERMOUNT_RUNTIME_DIR",
        path.display()
    )]
    NotPrivate {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        uid: u32,
        /// Its mode.
        mode: u32,
    },
    /// The path does not exist or cannot be walked.
    #[error("{}: {source}", path.display())]
    Path {
        /// The path asked for.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The list of mounts cannot be read.
    #[error("cannot read /proc/self/mountinfo: {0}; is /proc mounted?")]
    Mountinfo(io::Error),
    /// Nothing is mounted exactly there.
    #[error(
        "{} is not a mountpoint; `evermount status` lists the mounts there are",
        path.display()
    )]
    NotMounted {
        /// The path asked for.
        path: PathBuf,
    },
    /// Something else is mounted there.
    #[error(
        "{} is a mount of type {fstype}, not one of evermount; `evermount status` lists those",
        path.display()
    )]
    NotOurs {
        /// The path asked for.
        path: PathBuf,
        /// What is mounted there.
        fstype: String,
    },
    /// The mount is there and nobody answers for it here.
    #[error("{}: no front-end answers for this mount: {source}{hint}", path.display())]
    FrontendGone {
        /// The path asked for.
        path: PathBuf,
        /// Why it was not reached.
        source: Box<ControlError>,
        /// What to do.
        hint: String,
    },
}

/// The directory of the sockets, created if need be: `$EVERMOUNT_RUNTIME_DIR`, else
/// `/run/evermount` for root, else `$XDG_RUNTIME_DIR/evermount`. Only its owner may use it.
pub fn directory() -> Result<PathBuf, RuntimeError> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty());
    let path = match var("EVERMOUNT_RUNTIME_DIR") {
        Some(path) => PathBuf::from(path),
        None if nix::unistd::geteuid().is_root() => "/run/evermount".into(),
        None => {
            Path::new(&var("XDG_RUNTIME_DIR").ok_or(RuntimeError::NoDirectory)?).join("evermount")
        }
    };
    private_directory(&path)?;
    Ok(path)
}

fn private_directory(path: &Path) -> Result<(), RuntimeError> {
    let failed = |source| RuntimeError::Directory {
        path: path.to_owned(),
        source,
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(failed)?;
    let meta = std::fs::metadata(path).map_err(failed)?;
    let mode = meta.permissions().mode() & 0o777;
    // Root's directory cannot be meant for a user, nor a user's for root: both would trust sockets
    // the other one made.
    if meta.uid() != nix::unistd::geteuid().as_raw() || mode & 0o077 != 0 {
        return Err(RuntimeError::NotPrivate {
            path: path.to_owned(),
            uid: meta.uid(),
            mode,
        });
    }
    Ok(())
}

/// Where the front-end of the superblock with this minor device number listens.
pub fn socket_path(minor: u32) -> Result<PathBuf, RuntimeError> {
    Ok(directory()?.join(socket_name(minor)))
}

/// Name of that socket in the runtime directory.
pub fn socket_name(minor: u32) -> String {
    format!("mount-{minor}.sock")
}

/// Conversations with the front-ends of all live mounts, each with the minor device number. Sockets that nobody listens on any more are
/// removed: whoever made them was killed.
pub fn list() -> Result<Vec<(u32, Conn)>, RuntimeError> {
    let path = directory()?;
    list_in(&path).map_err(|source| RuntimeError::Directory { path, source })
}

fn list_in(directory: &Path) -> io::Result<Vec<(u32, Conn)>> {
    let mut sockets: Vec<(u32, PathBuf)> = std::fs::read_dir(directory)?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok()?;
            let minor = name.strip_prefix("mount-")?.strip_suffix(".sock")?;
            Some((minor.parse().ok()?, entry.path()))
        })
        .collect();
    sockets.sort();
    let mut live = Vec::new();
    for (minor, socket) in sockets {
        match Conn::connect(&socket) {
            Ok(conn) => live.push((minor, conn)),
            Err(ControlError::Path { source, .. })
                if source.kind() == io::ErrorKind::ConnectionRefused =>
            {
                let _ = std::fs::remove_file(&socket);
            }
            // Gone meanwhile, or too busy to be asked: neither is a reason to fail the others.
            Err(_) => {}
        }
    }
    Ok(live)
}

/// The evermount mount at `mountpoint`, which need not be served.
pub fn locate(mountpoint: &Path) -> Result<MountEntry, RuntimeError> {
    let resolved = mountinfo::resolve(mountpoint).map_err(|source| RuntimeError::Path {
        path: mountpoint.to_owned(),
        source,
    })?;
    let mounts = mountinfo::read().map_err(RuntimeError::Mountinfo)?;
    let entry = mountinfo::topmost(&mounts, &resolved).ok_or_else(|| RuntimeError::NotMounted {
        path: mountpoint.to_owned(),
    })?;
    if !entry.is_evermount() {
        return Err(RuntimeError::NotOurs {
            path: mountpoint.to_owned(),
            fstype: entry.fstype.clone(),
        });
    }
    Ok(entry.clone())
}

/// A conversation with the front-end of the mount at `mountpoint`. Never touches the mount itself,
/// which may not answer.
pub fn find(mountpoint: &Path) -> Result<Conn, RuntimeError> {
    connect(mountpoint, &locate(mountpoint)?)
}

/// A conversation with the front-end of a mount that was [`locate`]d.
pub fn connect(mountpoint: &Path, entry: &MountEntry) -> Result<Conn, RuntimeError> {
    let socket = socket_path(entry.minor)?;
    Conn::connect(&socket).map_err(|source| {
        let me = nix::unistd::geteuid().as_raw();
        let hint = match entry.owner() {
            Some(uid) if uid != me => format!("; the mount belongs to uid {uid}: ask as that user"),
            _ => "; if its front-end was killed, unmount it with `evermount umount --lazy` and mount \
                  again; if it was mounted with another EVERMOUNT_RUNTIME_DIR, set that"
                .to_owned(),
        };
        RuntimeError::FrontendGone {
            path: mountpoint.to_owned(),
            source: Box::new(source),
            hint,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::socket::Listener;

    #[test]
    fn live_sockets_are_listed_and_dead_ones_removed() {
        let dir = tempfile::tempdir().unwrap();
        let live = Listener::bind(&dir.path().join(socket_name(7))).unwrap();
        let dead = dir.path().join(socket_name(8));
        drop(std::os::unix::net::UnixListener::bind(&dead)); // wrong type and nobody there
        let stale = dir.path().join(socket_name(9));
        // A killed process leaves the file: shut the socket without running Drop.
        let killed = Listener::bind(&stale).unwrap();
        let socket = std::os::fd::AsFd::as_fd(&killed);
        rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap();
        std::mem::forget(killed);
        std::fs::write(dir.path().join("mount-x.sock"), "").unwrap();
        let found = list_in(dir.path()).unwrap();
        assert_eq!(
            found.iter().map(|(minor, _)| *minor).collect::<Vec<_>>(),
            [7]
        );
        assert!(live.path().exists());
        assert!(!stale.exists());
    }

    #[test]
    fn a_directory_that_others_can_use_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        private_directory(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = private_directory(&path).unwrap_err();
        assert!(error.to_string().contains("mode 755"), "{error}");
    }

    #[test]
    fn what_is_no_mount_of_ours_is_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            locate(dir.path()),
            Err(RuntimeError::NotMounted { .. })
        ));
        assert!(matches!(
            locate(Path::new("/proc")),
            Err(RuntimeError::NotOurs { fstype, .. }) if fstype == "proc"
        ));
        assert!(matches!(
            locate(&dir.path().join("none")),
            Err(RuntimeError::Path { .. })
        ));
    }
}
