//! `evermount __frontend`: the process that holds a mount. Started by `evermount mount`.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};

use crate::frontend::{self, FrontendConfig, mount::unmount};

/// Serve a mount in this process.
#[derive(clap::Args)]
pub struct Args {
    /// The configuration, as JSON.
    config: String,
}

/// The one line a front-end writes to its standard output: `{"ok":true}` or `{"error":"…"}`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The mount is served.
    Ok(bool),
    /// It is not, and nothing of it is left.
    Error(String),
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    // Before anything is opened: a caller's lock file or pipe must not live as long as the mount.
    crate::sys::close_inherited();
    // A session of its own: no terminal's hang-up or Ctrl-C reaches it. Fails only in a process that
    // leads a group already, which is one started by hand.
    let _ = nix::unistd::setsid();
    super::name_process(c"evermount-front");
    super::start_log();
    let report = Reporter::take_stdout().context("cannot set the standard output aside")?;
    let config: FrontendConfig =
        serde_json::from_str(&args.config).context("the configuration cannot be read")?;
    let secrets = take_secrets(&config).context("cannot set the standard input aside")?;
    let mountpoint = config.mount.mountpoint.clone();
    let ready = report.clone();
    let served = frontend::run(config, secrets, move |outcome| match outcome {
        Ok(()) => {
            if ready.send(&Report::Ok(true)).is_err() {
                // Who asked for the mount is gone and believes that there is none.
                tracing::error!("nobody waits for this mount any more; unmounting");
                let _ = unmount(&mountpoint, true);
            }
        }
        Err(reason) => {
            let _ = ready.send(&Report::Error(reason));
        }
    });
    served.map_err(|e| {
        // Does nothing if something was reported before.
        let _ = report.send(&Report::Error(format!("{e:#}")));
        anyhow!("{e:#}")
    })
}

/// Takes the memory file with conf and key from the standard input and leaves `/dev/null` there.
fn take_secrets(config: &FrontendConfig) -> io::Result<Option<OwnedFd>> {
    if !config.secrets {
        return Ok(None);
    }
    crate::sys::keep_memory_private()?;
    let secrets = io::stdin().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    Ok(Some(secrets))
}

/// Sends one report.
#[derive(Clone)]
struct Reporter(Arc<Mutex<Option<File>>>);

impl Reporter {
    /// Takes the standard output and leaves `/dev/null` in its place, so that no child inherits the
    /// pipe and keeps its reader waiting.
    fn take_stdout() -> io::Result<Reporter> {
        let pipe: OwnedFd = io::stdout().as_fd().try_clone_to_owned()?;
        let null = File::options().write(true).open("/dev/null")?;
        nix::unistd::dup2_stdout(null)?;
        Ok(Reporter(Arc::new(Mutex::new(Some(pipe.into())))))
    }

    /// Sends the report and closes the pipe; later ones go nowhere.
    fn send(&self, report: &Report) -> io::Result<()> {
        let pipe = (self.0.lock().unwrap_or_else(PoisonError::into_inner)).take();
        let Some(mut pipe) = pipe else { return Ok(()) };
        let mut line = serde_json::to_vec(report)?;
        line.push(b'\n');
        pipe.write_all(&line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_its_promised_form() {
        let json = |r: &Report| serde_json::to_string(r).unwrap();
        assert_eq!(json(&Report::Ok(true)), r#"{"ok":true}"#);
        assert_eq!(json(&Report::Error("no".into())), r#"{"error":"no"}"#);
    }
}
