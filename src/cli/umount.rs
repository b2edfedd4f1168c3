//! `evermount umount`: removes a mount and waits until its front-end has ended.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::control::runtime;
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
    let Some(pidfd) = frontend.filter(|_| !args.lazy) else {
        return Ok(());
    };
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
