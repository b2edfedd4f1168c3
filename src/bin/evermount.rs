//! The `evermount` program.

fn main() -> std::process::ExitCode {
    evermount::cli::main(std::env::args_os())
}
