//! The server loop.

use crate::control::Conn;

/// Serves the front-end at the other end of this conversation until it ends.
pub fn run(_conn: Conn) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Err("not implemented".into())
}
