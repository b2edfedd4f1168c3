//! The sockets between the processes.
//!
//! Two conversations run over the same kind of socket ([`socket`]), each message one JSON object in
//! one packet, with file descriptors beside it:
//!
//! * **backend ↔ front-end**, over a socket pair that the backend inherits: attach, become ready,
//!   put into and take out of the vault ([`message::BackendMessage`], [`message::FrontendMessage`]).
//!   A standby session's process speaks the same language, and only hears what to keep.
//! * **client ↔ front-end**, over a socket in the runtime directory ([`runtime`]): `status` and the
//!   like ([`message::Command`], [`message::CommandAnswer`]).
//!
//! No request travels here, only what is said *about* the mount. A process that dies is noticed by
//! its pidfd; the end of a conversation is only a hint.
//!
//! [`sessions`] is what a mount leaves behind if all its processes die: what to end at its store.
//!
//! [`mountinfo`] finds mounts by reading a file, because touching a mount whose backend is gone
//! would wait for it.

pub mod blob;
pub mod message;
pub mod mountinfo;
pub mod runtime;
pub mod sessions;
pub mod socket;

pub use message::{
    BackendMessage, Channel, Command, CommandAnswer, FrontendMessage, Source, State, Status,
};
pub use socket::{Conn, ControlError, Listener};
