//! The `evermount` program.
use evermount::*;
fn main() {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let args: Vec<String> = std::env::args().collect();
    match args[1].as_str() {
        "__backend" => {
            use std::os::fd::AsFd;
            let fd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
            if let Err(e) = backend::server::run(control::Conn::from_fd(fd)) {
                eprintln!("backend: {e}");
                std::process::exit(1)
            }
        }
        "mount" => {
            let config = frontend::FrontendConfig {
                source: args[2].parse().unwrap(),
                mount: frontend::mount::MountOptions {
                    mountpoint: (&args[3]).into(),
                    fsname: "x".into(),
                    options: Default::default(),
                },
                outage: frontend::OutagePolicy::Queue,
                channel: Default::default(),
            };
            if let Err(e) = frontend::run(config, |r| println!("ready {r:?}")) {
                eprintln!("{e}");
                std::process::exit(1)
            }
        }
        "status" => {
            let c = control::runtime::find((&args[2]).as_ref()).unwrap();
            c.send(&control::Command::Status, &[]).unwrap();
            println!(
                "{:#?}",
                c.recv::<control::CommandAnswer>().unwrap().unwrap().0
            );
        }
        _ => panic!(),
    }
}
