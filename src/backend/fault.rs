//! Places where a test can make this process die.
//!
//! Compiled in only with the feature `fault-points`; otherwise [`point`] is empty. The directory
//! named by `EVERMOUNT_FAULTS` holds orders, files named `PLACE@OPCODE` or `PLACE@OPCODE@NAME` (NAME
//! is the request's name, so that an order meets one request only). The first word of the file says
//! what happens: `kill` (SIGKILL), `abort` (SIGABRT, dying of its own doing), `hang` (until killed),
//! `eat` (memory, until the allocator refuses).
//! An order is carried out once, since whoever carries it out removes the file first; a second word
//! says how often (`kill 2`), or `always`.

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

/// The directory with the orders.
#[cfg(feature = "fault-points")]
fn orders() -> Option<&'static std::path::Path> {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    static ORDERS: OnceLock<Option<PathBuf>> = OnceLock::new();
    ORDERS
        .get_or_init(|| std::env::var_os("EVERMOUNT_FAULTS").map(PathBuf::from))
        .as_deref()
}

/// Before a backend opens its store: an order `start` keeps it from starting as long as it is there,
/// an order `start-fails` is the reason of a failure.
#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn start() -> Option<String> {
    None
}

/// Before a backend opens its store: an order `start` keeps it from starting as long as it is there,
/// an order `start-fails` is the reason of a failure.
#[cfg(feature = "fault-points")]
pub fn start() -> Option<String> {
    let orders = orders()?;
    while orders.join("start").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    std::fs::read_to_string(orders.join("start-fails")).ok()
}

/// At a place that has a name and no request: an order of that name ends the process. `retaining`: a
/// change is retained and about to be made; `retained`: what an earlier generation retained is about to
/// be done again.
#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn at(_place: &str) {}

/// At a place that has a name and no request: an order of that name ends the process. `retaining`: a
/// change is retained and about to be made; `retained`: what an earlier generation retained is about to
/// be done again.
#[cfg(feature = "fault-points")]
pub fn at(place: &str) {
    if let Some(orders) = orders() {
        obey(&orders.join(place));
    }
}

/// Carries out an order for this place and request, if there is one.
#[cfg(feature = "fault-points")]
pub fn point(place: Place, request: &Request<'_>) {
    let Some(orders) = orders() else {
        return;
    };
    let general = format!("{}@{}", place.name(), request.opcode);
    let mut names = vec![general.clone()];
    if let Some(name) = request.name() {
        names.push(format!("{general}@{}", name.to_string_lossy()));
    }
    for name in names {
        obey(&orders.join(name));
    }
}

/// Carries out an order, if it is there.
#[cfg(feature = "fault-points")]
fn obey(order: &std::path::Path) {
    let Ok(text) = std::fs::read_to_string(order) else {
        return;
    };
    let mut words = text.split_whitespace();
    let action = words.next().unwrap_or("kill");
    match words.next().map(|count| (count, count.parse::<u32>())) {
        Some(("always", _)) => {}
        Some((_, Ok(count))) if count > 1 => {
            let _ = std::fs::write(order, format!("{action} {}", count - 1));
        }
        _ if std::fs::remove_file(order).is_err() => return, // another thread was faster
        _ => {}
    }
    match action {
        "abort" => std::process::abort(),
        "eat" => eat(),
        "hang" => loop {
            std::thread::park();
        },
        _ => {
            let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
        }
    }
}

/// Takes memory as a library does that computes with a number from a request. The allocator's refusal
/// ends the process; without a limit this ends before the machine does.
#[cfg(feature = "fault-points")]
fn eat() {
    const PART: usize = 16 << 20;
    const ENOUGH: usize = 8 << 30;
    let mut eaten = Vec::new();
    while eaten.len() * PART < ENOUGH {
        eaten.push(vec![1u8; PART]);
    }
}
