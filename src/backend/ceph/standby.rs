//! A second session that keeps objects without a name while there is no backend.
//!
//! A file that was unlinked, and is in use, lives as long as some session refers to it. That of a dead
//! backend ends by itself when the metadata server has lost patience, and at once when that is
//! restarted. This one lives on: in a process of its own that serves nothing, and so has no reason to
//! die with a backend.
//!
//! It refers to an object by looking it up by number, and nothing else is ever asked of it: opening it,
//! or asking for attributes, would take the serving session's capabilities from it.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use super::client::{Inode, Perms};
use super::ffi::Vino;
use super::login::{CephError, Login};
use super::node::vino;
use super::session::{Held, Start, WATCH, end_sessions, find_early};
use crate::region::Identity;
use crate::wire::Errno;

/// What a standby is told.
pub enum News {
    /// Keep these.
    Pin(Vec<Identity>),
    /// Let go of these.
    Unpin(Vec<Identity>),
}

/// Keeps what it is told to, first that of `start.restore`, until nobody can tell it any more; then the
/// session ends in order. `keeping` is called once, when it has begun.
pub fn keep(
    start: &Start<'_>,
    news: &Receiver<News>,
    keeping: impl FnOnce(),
) -> Result<(), CephError> {
    let login = Login::new(start.source, start.options, &start.secrets);
    let own = &start.names.own;
    let connected = login.connect(own)?;
    let client = connected.client.clone();
    let mounting = connected.mount(&start.source.path, Some(&format!("{own}-nobody")))?;
    let held = Held::find(&start.restore, |vino| find_early(&client, vino, &mounting));
    let mut kept: HashMap<Vino, Inode> = held.pinned.into_iter().collect();
    // An earlier standby may be the only one that keeps them, so it ends now.
    end_sessions(&client, start.names, &mounting)?;
    if mounting.is_over() {
        mounting
            .outcome()
            .map_err(|errno| login.mount_error(errno))?;
    }
    keeping();

    let mut superuser = None;
    let mut looked = Instant::now();
    loop {
        match news.recv_timeout(WATCH) {
            Ok(News::Pin(identities)) => {
                let found = identities.iter().filter_map(vino).filter_map(|vino| {
                    let inode = match client.find(vino) {
                        // Nobody needs it any more, since a moment ago.
                        Err(Errno::ESTALE) => None,
                        Err(_) => find_early(&client, vino, &mounting),
                        Ok(inode) => Some(inode),
                    };
                    Some((vino, inode?))
                });
                kept.extend(found);
            }
            Ok(News::Unpin(identities)) => {
                for vino in identities.iter().filter_map(vino) {
                    kept.remove(&vino);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        // The mount waits for the root, of which a dead backend may have capabilities. Nothing else
        // does.
        if looked.elapsed() < WATCH || !mounting.is_over() {
            continue;
        }
        looked = Instant::now();
        let perms = match &superuser {
            Some(perms) => perms,
            None => {
                let begun = mounting
                    .outcome()
                    .and_then(|()| Ok((client.root()?, Perms::new(&client, 0, 0, &[])?)));
                superuser.insert(begun.map_err(|errno| login.mount_error(errno))?)
            }
        };
        let (root, superuser) = perms;
        // The root first: it is there also when nothing is kept.
        let lost = |held| matches!(held, Err(Errno::ESHUTDOWN | Errno::ENOTCONN));
        if lost(root.hold(superuser)) || kept.values().any(|inode| lost(inode.hold(superuser))) {
            start
                .frontend
                .lost("its session was ended (evicted or blocklisted)");
        }
    }
    // All of them: one that is given back after the end of the session is one of freed memory.
    drop((kept, superuser));
    mounting
        .outcome()
        .and_then(|()| client.unmount())
        .map_err(|errno| login.mount_error(errno))
}
