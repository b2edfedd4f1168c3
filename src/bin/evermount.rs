//! The `evermount` program.

fn main() {}
