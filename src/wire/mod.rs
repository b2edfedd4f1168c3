//! The FUSE protocol as Linux speaks it on `/dev/fuse`.
//!
//! A request is `fuse_in_header`, an argument struct and names or data; a reply is
//! `fuse_out_header` and data. This module knows the shapes ([`abi`]), the operations and what each
//! of them means when it has to be issued a second time ([`opcode`]), and how to take a request
//! apart ([`request`]). It knows nothing of slots, processes or file systems.
//!
//! Source of every layout and number: `include/uapi/linux/fuse.h` (protocol 7.45, Linux 6.18).
//! All integers are in host byte order.

pub mod abi;
pub mod errno;
pub mod opcode;
pub mod request;

pub use errno::Errno;
pub use opcode::Opcode;
pub use request::{DecodeError, Op, Request};
