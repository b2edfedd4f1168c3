//! `evermount umount`: removes a mount and waits until its front-end has ended.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::backend::ceph::session;
use crate::control::sessions::{self, Record};
use crate::control::{Source, runtime};
use crate::frontend::mount::unmount;
use crate::sys;

/// How long the front-end may take to end after its mount is gone.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Remove the mount at MOUNTPOINT.
#[derive(clap::Args)]
pub struct Args {
    /// Where it is mounted
    mountpoint: PathBuf,
    /// Detach it now, even if it is in use; it ends when its last user does
    #[arg(long)]
    lazy: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let entry = runtime::locate(&args.mountpoint)?;
    // A mount whose front-end was killed can be removed as well; there is only nobody to wait for.
    let frontend = runtime::connect(&args.mountpoint, &entry)
        .ok()
        .and_then(|conn| sys::pidfd_open(conn.peer_pid().ok()?).ok());
    unmount(&args.mountpoint, args.lazy)?;
    let Some(pidfd) = frontend else {
        end_sessions(&entry.mountpoint);
        return Ok(());
    };
    if args.lazy {
        return Ok(());
    }
    // What the backend still had to write is written when the front-end has ended.
    let timeout = PollTimeout::try_from(END_LIMIT).unwrap_or(PollTimeout::MAX);
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    if poll(&mut fds, timeout) == Ok(0) {
        eprintln!(
            "evermount: {} is unmounted, but its front-end has not ended within {} s",
            args.mountpoint.display(),
            END_LIMIT.as_secs()
        );
    }
    Ok(())
}

/// Cleans up after a mount whose processes were killed: its socket, and its sessions, for which other
/// clients of the store would have to wait.
fn end_sessions(mountpoint: &Path) {
    // Removes sockets nobody listens on.
    let _ = runtime::list();
    let Ok(directory) = runtime::directory() else {
        return;
    };
    for abandoned in sessions::abandoned(&directory) {
        if abandoned.record().mountpoint != mountpoint {
            continue;
        }
        match end_sessions_of(abandoned.record()) {
            Ok(()) => abandoned.forget(),
            Err(e) => eprintln!(
                "evermount: {} is unmounted, but its session with the store cannot be ended: {e:#}; \
                 other clients may wait for it for some minutes, or until it is mounted here again",
                mountpoint.display()
            ),
        }
    }
}

fn end_sessions_of(record: &Record) -> anyhow::Result<()> {
    let store = &record.store;
    let Source::Ceph(source) = store.source.parse()? else {
        return Ok(());
    };
    // The mount is gone already: nobody is to wait long for this. What the user said comes later.
    let mut options = store.options.clone();
    let limit = ("client_mount_timeout".to_owned(), "5".to_owned());
    options.conf.insert(0, limit);
    let secrets = super::mount::secrets(&store.files, &options)?;
    session::end_abandoned(&source, &options, &secrets, record.names.clone())?;
    Ok(())
}
