//! From node ids and handles to what a backend can find.

use crate::region::slot::{Annex, HandleRef, NodeRef, PATHS};
use crate::region::tables::Tables;
use crate::wire::{Errno, Op, Request};

/// Builds the annex of a request, and the paths that go with it if `paths` are wanted.
///
/// An unknown node or handle is ESTALE and EBADF: the kernel only uses what it was given, so this is
/// a request for something that was lost or never existed. A handle whose lock was lost is EIO. For an operation that opens, a handle is
/// reserved; whoever does not issue the request after all gives it back (`Tables::close_handle`).
pub fn resolve(
    tables: &mut Tables,
    request: &Request<'_>,
    arrived_ns: u64,
    paths: bool,
) -> Result<(Annex, Vec<u8>), Errno> {
    let mut annex = Annex {
        arrived_ns,
        ..Annex::default()
    };
    let mut path_bytes = Vec::new();
    let batch = matches!(request.op, Op::BatchForget { .. });
    let nodeid = request.header.nodeid;
    if !batch && nodeid != 0 {
        annex.node = match node_ref(tables, nodeid, paths, &mut path_bytes) {
            // The end of a handle that an outage delayed, until after the end of its node.
            Err(_) if matches!(request.op, Op::Release(_)) => NodeRef {
                nodeid,
                ..NodeRef::default()
            },
            node => node?,
        };
    }
    if let Some(second) = request.second_node() {
        annex.second = node_ref(tables, second, paths, &mut path_bytes)?;
    }
    if let Some(fh) = request.fh() {
        annex.handle = handle_ref(tables, fh);
        let ends = matches!(request.op, Op::Release(_) | Op::Flush(_));
        if !ends && tables.handle(fh).is_some_and(|h| h.lost) {
            return Err(Errno::EIO);
        }
    }
    if let Op::CopyFileRange(copy) = request.op {
        annex.second_handle = handle_ref(tables, copy.fh_out);
    }
    annex.handle.flags = lock_flags(tables, request);
    if request.opcode.opens_handle() {
        annex.new_fh = tables.reserve_handle().map_err(|_| Errno::ENFILE)?;
    }
    Ok((annex, path_bytes))
}

fn node_ref(
    tables: &Tables,
    nodeid: u64,
    paths: bool,
    path_bytes: &mut Vec<u8>,
) -> Result<NodeRef, Errno> {
    let node = tables.node(nodeid).ok_or(Errno::ESTALE)?;
    let mut path_len = 0;
    if paths {
        // A node without a path (removed, or too deep) is found in the vault or not at all.
        if let Some(path) = tables.path(nodeid, PATHS - path_bytes.len()) {
            path_len = path.len() as u32;
            path_bytes.extend_from_slice(&path);
        }
    }
    Ok(NodeRef {
        nodeid,
        flags: if node.vaulted { NodeRef::VAULTED } else { 0 },
        path_len,
        identity: node.identity,
    })
}

/// A handle the tables do not know stays without flags: the backend decides (EBADF, or the node).
fn handle_ref(tables: &Tables, fh: u64) -> HandleRef {
    HandleRef {
        fh,
        open_flags: tables.handle(fh).map_or(0, |h| h.open_flags),
        flags: 0,
    }
}

fn lock_flags(tables: &Tables, request: &Request<'_>) -> u32 {
    let nodeid = request.header.nodeid;
    match request.op {
        Op::Flush(flush) if tables.has_locks(nodeid, flush.lock_owner, false) => {
            HandleRef::OWNER_HAS_LOCKS
        }
        _ => 0,
    }
}
