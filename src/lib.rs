//! A FUSE mount that outlives the process that serves it.
//!
//! ```text
//!  application ──▶ kernel FUSE superblock
//!                     │ /dev/fuse
//!           ┌─────────▼─────────┐   session region (memfd)   ┌──────────────────┐
//!           │ front-end (thin)  │◀═══ slots, rings, tables ═▶│ backend, gen. N  │──▶ store
//!           └───────────────────┘   control socket (fds)     └──────────────────┘
//! ```
//!
//! The front-end holds the kernel's FUSE connection for the life of the mount. It reads each request
//! into a slot of shared memory and hands the slot to the backend. When the backend dies, the
//! front-end starts the next generation, which finds every request in its slot, every open file in
//! the tables, and everything that cannot be found again (unlinked files, locks) in the vault.
//!
//! Read in this order:
//!
//! * [`wire`]: the FUSE protocol, and what each operation means when it is issued twice.
//! * [`region`]: what survives a death: slots, rings, tables. Nothing else is in shared memory.
//! * [`pump`]: the way of a request: *admit* resolves it, *settle* does the bookkeeping of its reply.
//! * [`backend`]: the trait, the server loop, and the stores ([`backend::dir`], [`backend::ceph`]).
//! * [`frontend`]: the kernel connection, supervision, outage, takeover.
//! * [`control`]: the sockets between the processes.
//! * [`cli`]: one file per command.
//! * [`sys`]: system calls no crate wraps.

pub mod backend;
pub mod cli;
pub mod control;
pub mod frontend;
pub mod pump;
pub mod region;
pub mod sys;
pub mod wire;
