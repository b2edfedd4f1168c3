//! The thin stable side: the kernel connection, supervision, outage, takeover.
//!
//! Threads that are all asleep when nothing happens: the reader and the writer on the kernel connection
//! ([`kernel`]), those that tell the kernel what is old ([`notify`]), and the supervisor
//! ([`supervisor`]), around one state ([`core`]). The supervisor also looks after the process of the
//! [`standby`] session, if one is wanted.
//!
//! When this process dies, the mount dies with it.

pub mod callers;
pub mod config;
pub mod core;
pub mod kernel;
pub mod mount;
pub mod notify;
pub mod sessions;
pub mod standby;
pub mod supervisor;
pub mod vault;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use zerocopy::IntoBytes;

pub use config::{FrontendConfig, OutagePolicy};

use crate::control::{ControlError, Listener, runtime};
use crate::region::Region;
use crate::region::tables::Tables;
use crate::wire::Opcode;
use crate::wire::abi::{GetattrIn, ROOT_ID};
use kernel::Shared;
use supervisor::Supervisor;

/// The root of the store must answer within this time for a mount to be made.
const ROOT_LIMIT: Duration = Duration::from_secs(30);

/// Why a mount could not be made.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// Something of this process.
    #[error("cannot {what}: {source}")]
    Io {
        /// What.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The backend.
    #[error("{0}")]
    Backend(String),
    /// The kernel.
    #[error(transparent)]
    Mount(#[from] mount::MountError),
    /// The control socket.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The runtime directory.
    #[error(transparent)]
    Runtime(#[from] runtime::RuntimeError),
}

fn io(what: &'static str) -> impl Fn(std::io::Error) -> FrontendError {
    move |source| FrontendError::Io { what, source }
}

/// Serves a mount until it is unmounted. `secrets` is a sealed memory file for the backend. `ready` is called once: when the mount is served, or when
/// it cannot be; then nothing is left mounted and nothing left running.
pub fn run(
    config: FrontendConfig,
    secrets: Option<OwnedFd>,
    ready: impl FnOnce(Result<(), String>),
) -> Result<(), FrontendError> {
    match begin(config, secrets) {
        Ok(mut supervisor) => {
            ready(Ok(()));
            supervisor.run();
            Ok(())
        }
        Err(e) => {
            ready(Err(e.to_string()));
            Err(e)
        }
    }
}

/// Backend first, mount last: what fails before leaves no trace in the file system.
fn begin(config: FrontendConfig, secrets: Option<OwnedFd>) -> Result<Supervisor, FrontendError> {
    crate::sys::use_one_heap();
    crate::sys::children_can_be_waited_for();
    supervisor::block_signals().map_err(io("block signals"))?;
    let nofile = raise_nofile();
    let region = Region::create().map_err(io("create the session region"))?;
    let tables = Tables::create().map_err(io("create the tables"))?;
    let core = core::Core::new(tables, config.outage, config.source.has_sessions(), nofile);
    let io_state = core::Io {
        region,
        fuse: std::sync::OnceLock::new(),
    };
    let shared = Arc::new(Shared::new(io_state, core).map_err(io("create an eventfd"))?);
    thread("writer", &shared, Shared::write_replies)?;
    for _ in 0..notify::THREADS {
        thread("notifier", &shared, Shared::notify)?;
    }
    let mount_options = config.mount.clone();
    let sessions = sessions::Sessions::new(&config)?;
    let mut supervisor = Supervisor::new(shared.clone(), config, secrets, sessions)
        .map_err(io("create a signalfd"))?;
    if let Err(e) = become_ready(&mut supervisor, &shared) {
        supervisor.stop();
        return Err(e);
    }
    let mounted = mount::mount(&mount_options).inspect_err(|_| supervisor.stop())?;
    for warning in mount::sysctl_warnings() {
        tracing::warn!("{warning}");
    }
    let listener = runtime::socket_path(mounted.minor)
        .map_err(FrontendError::from)
        .and_then(|path| Ok(Listener::bind(&path)?));
    shared.io.region.set_init_flags(mounted.init_flags);
    let _ = shared.io.fuse.set(mounted.fuse);
    let started = thread("reader", &shared, Shared::read_requests);
    match (listener, started) {
        (Ok(listener), Ok(())) => {
            supervisor.listen(listener, mounted.mountpoint);
            Ok(supervisor)
        }
        (listener, started) => {
            let _ = mount::unmount(&mounted.mountpoint, true);
            supervisor.stop();
            listener?;
            started?;
            unreachable!("one of them failed")
        }
    }
}

/// Starts the first backend and learns what the root looks like.
fn become_ready(supervisor: &mut Supervisor, shared: &Shared) -> Result<(), FrontendError> {
    while !supervisor.is_ready() {
        supervisor.step(Some(Duration::from_secs(1)));
        if let Some(reason) = supervisor.failure() {
            return Err(FrontendError::Backend(reason.to_owned()));
        }
        if shared.ended.load(std::sync::atomic::Ordering::Acquire) {
            return Err(FrontendError::Backend(
                "asked to end before the mount was made".into(),
            ));
        }
    }
    {
        let mut core = shared.core.lock();
        let arg = GetattrIn::default();
        core.issue_internal(&shared.io, Opcode::Getattr, ROOT_ID, arg.as_bytes());
        core.issue_internal(&shared.io, Opcode::Statfs, ROOT_ID, &[]);
        core.ask_root_acl(&shared.io);
    }
    let deadline = Instant::now() + ROOT_LIMIT;
    let mut core = shared.core.lock();
    while !core.knows_root() {
        if shared.progress.wait_until(&mut core, deadline).timed_out() {
            return Err(FrontendError::Backend(format!(
                "the store did not answer within {} s",
                ROOT_LIMIT.as_secs()
            )));
        }
    }
    Ok(())
}

fn thread(name: &str, shared: &Arc<Shared>, work: fn(&Shared)) -> Result<(), FrontendError> {
    let shared = shared.clone();
    std::thread::Builder::new()
        .name(name.into())
        .stack_size(256 * 1024)
        .spawn(move || work(&shared))
        .map(drop)
        .map_err(io("start a thread"))
}

/// Allows this process as many descriptors as it may have: the vault keeps one per unlinked file.
fn raise_nofile() -> usize {
    let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return 1024;
    };
    let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft as usize)
}
