//! A process that does something on a mount when it is told to: the test binary itself, started again
//! as its ignored test [`ENTRY`].

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::{PATIENCE, until, within};

/// Name of the ignored test that calls [`play`].
pub const ENTRY: &str = "an_actor_of_another_test";
const ROLE: &str = "EVERMOUNT_TEST_ROLE";
const AT: &str = "EVERMOUNT_TEST_AT";

/// Such a process.
pub struct Actor {
    child: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Actor {
    /// Starts one and waits until it has prepared its role.
    pub fn start(role: &str, at: &Path) -> Actor {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", ENTRY, "--ignored", "--nocapture", "-q"])
            .env(ROLE, role)
            .env(AT, at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = child.stdout.take().map(BufReader::new);
        let mut actor = Actor {
            child,
            input,
            output,
        };
        assert_eq!(actor.line(), "ready", "{role}");
        actor
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to act.
    pub fn go(&mut self) {
        self.input.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    /// The next line it says. libtest says something, too; what an actor says begins with a dot.
    pub fn line(&mut self) -> String {
        let mut output = self.output.take().unwrap();
        let (line, output) = within(PATIENCE, "an actor", move || {
            loop {
                let mut line = String::new();
                assert_ne!(output.read_line(&mut line).unwrap(), 0, "the actor ended");
                if let Some(at) = line.find(".: ") {
                    return (line[at + 3..].trim_end().to_owned(), output);
                }
            }
        });
        self.output = Some(output);
        line
    }

    /// SIGKILLs it and returns how long it took to end.
    pub fn kill(&mut self) -> Duration {
        let began = Instant::now();
        self.child.kill().unwrap();
        let ended = until(Duration::from_secs(20), || {
            self.child.try_wait().unwrap().is_some()
        });
        assert!(ended, "a killed process did not end");
        began.elapsed()
    }

    /// Waits for its end.
    pub fn end(&mut self) -> ExitStatus {
        drop(self.input.take());
        let ended = until(PATIENCE, || self.child.try_wait().unwrap().is_some());
        assert!(ended, "an actor did not end");
        self.child.wait().unwrap()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        if !std::thread::panicking() {
            let _ = self.child.wait();
        }
    }
}

/// Says something to the test.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!(".: {line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Says that all is prepared, and waits for the word.
pub fn wait_for_go() {
    say("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

/// In the actor: plays the role it was given, if this is one.
pub fn play(roles: impl FnOnce(&str, &Path)) {
    let Some(role) = std::env::var_os(ROLE) else {
        return;
    };
    let at = std::env::var_os(AT).unwrap();
    roles(role.to_str().unwrap(), Path::new(&at));
}
