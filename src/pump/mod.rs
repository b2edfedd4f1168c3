//! The way of a request through the tables, the same for every channel.
//!
//! * [`resolve`](resolve::resolve): before a request is handed over, node ids and handles become
//!   identities in the slot's annex.
//! * [`settle`](settle::settle): after the reply is complete and before the kernel gets it, the
//!   tables learn what the kernel will know: lookup counts, names, handles, locks.
//!
//! Both work on a slot's bytes and the tables alone, so whoever takes over the tables can do exactly
//! the same again. Nothing here does I/O.
//!
//! Order for every request: reply complete → `ReplyReady` → table changes → `write(2)` → `Free`.

pub mod resolve;
pub mod settle;
