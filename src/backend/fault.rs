//! Places where a test can make this process die.
//!
//! Compiled in only with the feature `fault-points`; otherwise [`point`] is empty. The directory
//! named by `EVERMOUNT_FAULTS` holds orders, files named `PLACE@OPCODE` or `PLACE@OPCODE@NAME` (NAME
//! is the request's name, so that an order meets one request only). The first word of the file says
//! what happens: `kill` (SIGKILL), `abort` (SIGABRT, dying of its own doing), `hang` (until killed).
//! An order is carried out once, since whoever carries it out removes the file first; with the second
//! word `always` the file stays.

use crate::wire::Request;

/// Where in the life of a request.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// The journal is written and the slot is `Running`; nothing was executed.
    BeforeExecution,
    /// Executed; the reply does not exist yet.
    BeforeReply,
    /// The reply is complete (`ReplyReady`); nobody was told.
    BeforeBookkeeping,
}

impl Place {
    #[cfg(feature = "fault-points")]
    fn name(self) -> &'static str {
        match self {
            Place::BeforeExecution => "before-execution",
            Place::BeforeReply => "before-reply",
            Place::BeforeBookkeeping => "before-bookkeeping",
        }
    }
}

/// Carries out an order for this place and request, if there is one.
#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn point(_place: Place, _request: &Request<'_>) {}

/// Carries out an order for this place and request, if there is one.
#[cfg(feature = "fault-points")]
pub fn point(place: Place, request: &Request<'_>) {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    static ORDERS: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(orders) =
        ORDERS.get_or_init(|| std::env::var_os("EVERMOUNT_FAULTS").map(PathBuf::from))
    else {
        return;
    };
    let general = format!("{}@{}", place.name(), request.opcode);
    let mut names = vec![general.clone()];
    if let Some(name) = request.name() {
        names.push(format!("{general}@{}", name.to_string_lossy()));
    }
    for name in names {
        let order = orders.join(name);
        let Ok(text) = std::fs::read_to_string(&order) else {
            continue;
        };
        let mut words = text.split_whitespace();
        let action = words.next().unwrap_or("kill");
        if words.next() != Some("always") && std::fs::remove_file(&order).is_err() {
            continue; // another thread was faster
        }
        match action {
            "abort" => std::process::abort(),
            "hang" => loop {
                std::thread::park();
            },
            _ => {
                let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
            }
        }
    }
}
