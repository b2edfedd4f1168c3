//! Files whose pages the kernel may keep from one open to the next.
//!
//! The library tells when data it had the right to cache may be old, as long as it knows the file.
//! So a file is kept referred to after its last close, and an open of it does not cost the kernel
//! its pages. One that this generation has not opened before, or did not know all the time, may have
//! changed unseen: its first open drops them.
//!
//! What the library tells arrives a moment later than the change itself. So an open also drops the
//! pages of a file whose version is not the one of the last open or close: what others did before it
//! is seen, whatever is still on its way.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::client::Inode;
use super::ffi::Vino;

/// Closed files that are kept.
const CLOSED_MAX: usize = 4096;

struct File {
    _inode: Inode,
    opens: u32,
    /// The kernel's pages are from an open of this generation.
    trusted: bool,
    /// Its last name is gone: nothing may refer to it after its last close, or it lives on.
    doomed: bool,
    /// Of the last open or close.
    version: u64,
    closed_at: u64,
}

#[derive(Default)]
struct State {
    files: HashMap<Vino, File>,
    closed: usize,
    clock: u64,
}

/// See the module.
#[derive(Default)]
pub(super) struct Warm(Mutex<State>);

impl Warm {
    /// A file was opened. True if the kernel may keep its pages.
    pub(super) fn opened(&self, vino: Vino, inode: Inode, version: u64) -> bool {
        let mut state = self.0.lock();
        let state = &mut *state;
        match state.files.get_mut(&vino) {
            Some(file) => {
                state.closed -= usize::from(file.opens == 0);
                file.opens += 1;
                let same = std::mem::replace(&mut file.version, version) == version;
                std::mem::replace(&mut file.trusted, true) && same
            }
            None => {
                state.files.insert(
                    vino,
                    File {
                        _inode: inode,
                        opens: 1,
                        trusted: true,
                        doomed: false,
                        version,
                        closed_at: 0,
                    },
                );
                false
            }
        }
    }

    /// A handle of an earlier generation was opened again.
    pub(super) fn restored(&self, vino: Vino, inode: Inode) {
        let mut state = self.0.lock();
        let state = &mut *state;
        let fresh = File {
            _inode: inode,
            opens: 0,
            trusted: false,
            doomed: false,
            version: 0,
            closed_at: 0,
        };
        let file = state.files.entry(vino).or_insert(fresh);
        file.opens += 1;
    }

    /// A handle was closed, if it is known at which version.
    pub(super) fn closed(&self, vino: Vino, version: Option<u64>) {
        let mut unused = None;
        {
            let mut state = self.0.lock();
            let state = &mut *state;
            state.clock += 1;
            let Some(file) = state.files.get_mut(&vino) else {
                return;
            };
            file.opens = file.opens.saturating_sub(1);
            file.version = version.unwrap_or(file.version);
            if file.opens > 0 {
                return;
            }
            file.closed_at = state.clock;
            state.closed += 1;
            if file.doomed || !file.trusted {
                state.closed -= 1;
                unused = state.files.remove(&vino);
            } else if state.closed > CLOSED_MAX {
                let closed = state.files.iter().filter(|(_, f)| f.opens == 0);
                let first = closed.min_by_key(|(_, f)| f.closed_at).map(|(v, _)| *v);
                unused = first.and_then(|vino| state.files.remove(&vino));
                state.closed -= usize::from(unused.is_some());
            }
        }
        // Giving a reference back takes the library's lock.
        drop(unused);
    }

    /// The last name of a file is gone.
    pub(super) fn doom(&self, vino: Vino) {
        if let Some(file) = self.0.lock().files.get_mut(&vino) {
            file.doomed = true;
        }
        self.release(vino);
    }

    /// Lets go of a file that is not open.
    pub(super) fn release(&self, vino: Vino) {
        let gone = {
            let mut state = self.0.lock();
            match state.files.get(&vino) {
                Some(file) if file.opens == 0 => {
                    state.closed -= 1;
                    state.files.remove(&vino)
                }
                _ => None,
            }
        };
        drop(gone);
    }
}
