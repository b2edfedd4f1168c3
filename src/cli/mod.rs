//! The command line: one file per command.
//!
//! Exit codes are a contract with scripts: 0 done, 1 failed, 2 usage.

pub mod backend;
pub mod demo;
pub mod doctor;
pub mod frontend;
pub mod mount;
pub mod status;
pub mod umount;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A mount that outlives the process that serves it.
#[derive(Parser)]
#[command(name = "evermount", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Mount(Box<mount::Args>),
    Status(status::Args),
    Umount(umount::Args),
    Doctor(doctor::Args),
    Demo(demo::Args),
    #[command(name = "__frontend", hide = true)]
    Frontend(frontend::Args),
    #[command(name = "__backend", hide = true)]
    Backend(backend::Args),
    #[command(name = "__demo-app", hide = true)]
    DemoApp(demo::app::Args),
}

/// Runs the program with these arguments, the first being its name.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version are printed by this, too; then the code is 0.
            let _ = e.print();
            return ExitCode::from(e.exit_code() as u8);
        }
    };
    let done = match cli.command {
        Command::Mount(args) => mount::run(*args),
        Command::Status(args) => status::run(args),
        Command::Umount(args) => umount::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Frontend(args) => frontend::run(args),
        Command::Backend(args) => backend::run(args),
        Command::DemoApp(args) => demo::app::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // `evermount status --watch | head` is done when head is.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            let _ = writeln!(io::stderr(), "evermount: {}", describe(&e));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, without a cause that the error before it has told already.
fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Nobody reads the standard output any more.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to the standard output: {0}")]
struct OutputError(#[from] io::Error);

/// Prints to the standard output. `println!` would panic when nobody reads it.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    (out.write_all(text.as_bytes()).and_then(|()| out.flush())).map_err(OutputError)?;
    Ok(())
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    (error.downcast_ref::<OutputError>()).is_some_and(|e| e.0.kind() == io::ErrorKind::BrokenPipe)
}

/// Sends the log to the standard error. `EVERMOUNT_LOG` chooses what is logged, e.g. `debug`.
fn start_log() {
    use tracing_subscriber::EnvFilter;
    let filter =
        EnvFilter::try_from_env("EVERMOUNT_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // Fails if there is a log already: then that one serves.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .try_init();
}

/// Names this process in `ps` and `top`, where it would show as `exe`. At most 15 bytes count.
fn name_process(name: &std::ffi::CStr) {
    // Only cosmetic, so a failure is nothing to report.
    let _ = rustix::thread::set_name(name);
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_cause_is_told_once() {
        let cause = std::io::Error::other("it is late");
        let error = anyhow::Error::from(cause).context("no: it is late");
        assert_eq!(describe(&error), "no: it is late");
        assert_eq!(describe(&error.context("why")), "why: no: it is late");
    }

    #[test]
    fn wrong_usage_is_told_apart_from_failure() {
        let code = |args: &[&str]| {
            let args = std::iter::once("evermount").chain(args.iter().copied());
            Cli::try_parse_from(args).err().map(|e| e.exit_code())
        };
        assert_eq!(code(&["mount", "dir:/a", "/m"]), None);
        assert_eq!(code(&["mount", "/a", "/m"]), Some(2));
        assert_eq!(code(&["mount", "dir:/a", "/m", "-o", "nonsense"]), Some(2));
        assert_eq!(
            code(&["mount", "dir:/a", "/m", "--outage", "panic"]),
            Some(2)
        );
        assert_eq!(code(&["mount", "dir:/a"]), Some(2));
        assert_eq!(code(&["dance"]), Some(2));
        assert_eq!(code(&["--version"]), Some(0));
    }
}
