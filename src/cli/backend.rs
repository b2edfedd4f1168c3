//! `evermount __backend`: one generation of a backend. Started by a front-end, which gives it its end
//! of the conversation as the standard input.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use anyhow::{Context, anyhow};

use crate::backend::server;
use crate::control::Conn;

/// Answer the requests of the front-end at the standard input.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args) -> anyhow::Result<()> {
    super::name_process(c"evermount-back");
    super::start_log();
    let fd = io::stdin().as_fd().try_clone_to_owned();
    let conn = Conn::from_fd(fd.context("cannot take over the standard input")?);
    // Otherwise the conversation would stay open after this end was dropped.
    let null = File::open("/dev/null").context("cannot open /dev/null")?;
    nix::unistd::dup2_stdin(null).context("cannot replace the standard input")?;
    server::run(conn).map_err(|e| anyhow!("{e:#}"))?;
    // Workers may be in the store still; nothing waits for them.
    crate::sys::exit_now(0)
}
