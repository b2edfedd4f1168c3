//! The thin stable side: the kernel connection, supervision, outage, takeover.

pub mod callers;
pub mod config;
pub mod mount;

pub use config::{FrontendConfig, OutagePolicy};

/// Serves a mount until it is unmounted. `ready` is called once: when the mount is served, or when
/// it cannot be.
pub fn run(
    _config: FrontendConfig,
    ready: impl FnOnce(Result<(), String>),
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    ready(Err("not implemented".into()));
    Err("not implemented".into())
}
