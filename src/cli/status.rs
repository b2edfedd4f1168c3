//! `evermount status`: asks front-ends how their mounts are. Never touches a mount.

use std::fmt::Write;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};

use crate::control::message::{Command, CommandAnswer, State, Status};
use crate::control::{Conn, mountinfo, runtime};

/// A front-end answers from its own memory, so one that takes longer is stopped.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Show how mounts are.
#[derive(clap::Args)]
pub struct Args {
    /// Where it is mounted; without it, all mounts are shown
    mountpoint: Option<PathBuf>,
    /// Print an object per mount, as JSON
    #[arg(long)]
    json: bool,
    /// Repeat every second
    #[arg(long)]
    watch: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    loop {
        let text = match &args.mountpoint {
            Some(mountpoint) => {
                let status = of(mountpoint)?;
                if args.json {
                    to_json(&status, args.watch)?
                } else {
                    table(&status)
                }
            }
            None => {
                let all = all()?;
                if args.json {
                    to_json(&all, args.watch)?
                } else if all.is_empty() {
                    "no mounts\n".to_owned()
                } else {
                    all.iter().map(table).collect::<Vec<_>>().join("\n")
                }
            }
        };
        if args.watch && !args.json && std::io::stdout().is_terminal() {
            // Cursor home, clear to the end: no flicker as with a cleared screen.
            super::print("\x1b[H\x1b[J")?;
        }
        super::print(&text)?;
        if !args.watch {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// One line per round when repeated, so that each line is a document.
fn to_json(value: &impl serde::Serialize, compact: bool) -> anyhow::Result<String> {
    let text = if compact {
        serde_json::to_string(value)
    } else {
        serde_json::to_string_pretty(value)
    };
    Ok(text.context("the status cannot be written as JSON")? + "\n")
}

/// The status of one mount.
pub fn of(mountpoint: &Path) -> anyhow::Result<Status> {
    let conn = runtime::find(mountpoint)?;
    ask(&conn).with_context(|| format!("no status of {}", mountpoint.display()))
}

/// The status of all mounts of this user, also of those whose front-end is gone.
fn all() -> anyhow::Result<Vec<Status>> {
    let mounts = mountinfo::read().context("cannot read /proc/self/mountinfo")?;
    let mut served = Vec::new();
    let mut all = Vec::new();
    for (minor, conn) in runtime::list()? {
        served.push(minor);
        all.push(ask(&conn).unwrap_or_else(|e| {
            let entry = mounts.iter().find(|m| m.minor == minor && m.is_evermount());
            unanswered(
                entry,
                format!("the front-end does not answer: {}", super::describe(&e)),
            )
        }));
    }
    let me = nix::unistd::geteuid().as_raw();
    for entry in mounts.iter().filter(|m| m.is_evermount()) {
        // A bind mount is the same superblock again.
        if entry.owner() == Some(me) && !served.contains(&entry.minor) {
            served.push(entry.minor);
            let reason = "no front-end; unmount it with `evermount umount --lazy`";
            all.push(unanswered(Some(entry), reason.to_owned()));
        }
    }
    Ok(all)
}

/// What can be said of a mount that does not speak for itself.
fn unanswered(entry: Option<&mountinfo::MountEntry>, reason: String) -> Status {
    Status {
        mountpoint: entry.map(|m| m.mountpoint.clone()).unwrap_or_default(),
        source: entry.map_or_else(String::new, |m| m.source.to_string_lossy().into_owned()),
        state: State::Failed,
        reason: Some(reason),
        ..Status::default()
    }
}

/// Asks the front-end at the other end.
pub fn ask(conn: &Conn) -> anyhow::Result<Status> {
    conn.set_timeout(Some(ANSWER_LIMIT))?;
    conn.send(&Command::Status, &[])?;
    match conn.recv::<CommandAnswer>()? {
        Some((CommandAnswer::Status(status), _)) => Ok(*status),
        Some((CommandAnswer::Failed { reason }, _)) => bail!(reason),
        None => bail!("the front-end closed the conversation without an answer; it may be ending"),
    }
}

/// A status for people.
fn table(s: &Status) -> String {
    let mut out = String::new();
    let ms = |t: Option<f64>| t.map_or("-".to_owned(), |t| format!("{t:.1} ms"));
    let pid = |p: Option<u32>| p.map_or("-".to_owned(), |p| p.to_string());
    let mut line = |name: &str, text: String| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "  {name:<10} {text}");
    };
    let mut state = s.state.to_string();
    if let Some(outage) = s.outage_ms.filter(|_| s.state != State::Serving) {
        let _ = write!(state, " for {:.1} s", outage / 1000.0);
    }
    if let Some(reason) = &s.reason {
        // While it is served the reason is that of the last interruption.
        let before = if s.state == State::Serving {
            "before: "
        } else {
            ""
        };
        let _ = write!(state, " ({before}{reason})");
    }
    line("state", state);
    if s.frontend_pid != 0 {
        line(
            "processes",
            format!(
                "front-end {} (version {}), backend {} (version {}), standby {}",
                s.frontend_pid,
                s.version,
                pid(s.backend_pid),
                s.backend_version.as_deref().unwrap_or("-"),
                pid(s.standby_pid),
            ),
        );
        line(
            "service",
            format!(
                "generation {} by {}; {} takeovers, {} handovers; last pause {}, longest {}",
                s.generation,
                s.channel,
                s.takeovers,
                s.handovers,
                ms(s.last_pause_ms),
                ms(s.longest_pause_ms),
            ),
        );
        line(
            "open",
            format!(
                "{} files, {} directories, {} locks, {} waiting for a lock; {} inodes known",
                s.open_files, s.open_dirs, s.locks, s.waiters, s.inodes
            ),
        );
        line(
            "requests",
            format!(
                "{} in flight, the oldest for {}; {} bytes not durable yet",
                s.inflight,
                ms(s.oldest_request_ms),
                s.unflushed_bytes
            ),
        );
        line(
            "recovered",
            format!(
                "{} done again, {} found done, {} ambiguous; {} answered early",
                s.reissued, s.verified_done, s.ambiguous, s.early_answers
            ),
        );
        line(
            "lost",
            format!(
                "{} locks, {} files, {} bytes; {} conflicts, {} poisoned requests, {} failed restarts",
                s.lost_locks,
                s.lost_files,
                s.dropped_bytes,
                s.conflicts,
                s.poisoned,
                s.restarts_failed
            ),
        );
    }
    format!("{} on {}\n{out}", s.source, s.mountpoint.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_front_end_is_asked_and_its_answer_shown() {
        let (client, frontend) = Conn::pair().unwrap();
        let served = std::thread::spawn(move || {
            let (command, _) = frontend.recv::<Command>().unwrap().unwrap();
            assert_eq!(command, Command::Status);
            let status = Status {
                mountpoint: "/m".into(),
                source: "dir:/a".into(),
                state: State::Outage,
                reason: Some("backend 7 was killed".into()),
                outage_ms: Some(1500.0),
                frontend_pid: 5,
                last_pause_ms: Some(12.34),
                ..Status::default()
            };
            let answer = CommandAnswer::Status(Box::new(status));
            frontend.send(&answer, &[]).unwrap();
        });
        let status = ask(&client).unwrap();
        served.join().unwrap();
        let text = table(&status);
        assert!(text.starts_with("dir:/a on /m\n"), "{text}");
        assert!(text.contains("outage for 1.5 s (backend 7 was killed)"));
        assert!(text.contains("last pause 12.3 ms, longest -"), "{text}");
    }

    #[test]
    fn a_front_end_that_ends_without_an_answer_is_an_error() {
        let (client, frontend) = Conn::pair().unwrap();
        drop(frontend);
        assert!(ask(&client).is_err());
    }
}
