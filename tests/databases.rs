//! Databases on a mount whose backend is killed every second: what they acknowledge is there
//! afterwards, and they never see an error.

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Mount, PATIENCE, long, open_to_all, until, within};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Gid, Pid, Uid, User};

const EVERY: Duration = Duration::from_secs(1);

fn duration() -> Duration {
    Duration::from_secs(if long() { 30 } else { 6 })
}

/// Processes of a test. None outlives it.
#[derive(Clone, Default)]
struct Processes(Arc<Mutex<Vec<Child>>>);

impl Processes {
    fn start(&self, command: &mut Command) -> (ChildStdin, BufReader<std::io::PipeReader>) {
        let (output, ours) = std::io::pipe().unwrap();
        command.stdin(Stdio::piped());
        command.stdout(ours.try_clone().unwrap()).stderr(ours);
        let mut child = command.spawn().unwrap();
        // Otherwise the command would keep the pipe open.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let input = child.stdin.take().unwrap();
        self.0.lock().unwrap().push(child);
        (input, BufReader::new(output))
    }
}

/// Ends them when the test ends, whatever their threads do.
struct Ended(Processes);

impl Drop for Ended {
    fn drop(&mut self) {
        for child in self.0.0.lock().unwrap().iter_mut() {
            let _ = child.kill();
            until(Duration::from_secs(10), || {
                !matches!(child.try_wait(), Ok(None))
            });
        }
    }
}

// ---- SQLite --------------------------------------------------------------------------------------

const WRITERS: u32 = 4;

fn sqlite(db: &Path, sql: &str) -> String {
    let output = Command::new("sqlite3")
        .arg(db)
        .args(["-cmd", ".timeout 60000"])
        .arg(sql)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    text.trim().to_owned()
}

/// Inserts row after row in a process of its own. Returns how many were acknowledged.
fn insert_rows(processes: &Processes, db: &Path, writer: u32, end: Instant) -> u64 {
    let (mut input, mut output) = processes.start(Command::new("sqlite3").arg(db));
    writeln!(input, ".timeout 60000").unwrap();
    let mut rows = 0;
    while Instant::now() < end {
        writeln!(
            input,
            "INSERT INTO rows VALUES ({writer}, {rows}, randomblob(300)); SELECT 'row {rows}';"
        )
        .unwrap();
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), format!("row {rows}"), "writer {writer}");
        rows += 1;
    }
    drop(input);
    let mut rest = String::new();
    output.read_line(&mut rest).unwrap();
    assert_eq!(rest, "", "writer {writer}");
    rows
}

fn sqlite_loses_nothing(journal: &str) {
    let mount = Mount::new();
    let db = mount.path("test.db");
    let mode = sqlite(
        &db,
        &format!(
            "PRAGMA journal_mode={journal}; \
             CREATE TABLE rows (writer INT, n INT, data BLOB, UNIQUE (writer, n));"
        ),
    );
    assert_eq!(mode, journal);
    let processes = Processes::default();
    let ended = Ended(processes.clone());
    let (acknowledged, deaths) = mount.under_fire(EVERY, || {
        let end = Instant::now() + duration();
        let db = db.clone();
        within(duration() + PATIENCE, "SQLite", move || {
            let writers: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    let (processes, db) = (processes.clone(), db.clone());
                    std::thread::spawn(move || insert_rows(&processes, &db, writer, end))
                })
                .collect();
            let rows = writers.into_iter().map(|w| w.join().unwrap());
            rows.collect::<Vec<u64>>()
        })
    });
    drop(ended);
    eprintln!("{journal}: {acknowledged:?} rows, {deaths} deaths");
    assert!(deaths >= 3, "{deaths} deaths");
    let expected: Vec<String> = (0..WRITERS)
        .zip(&acknowledged)
        .map(|(writer, rows)| format!("{writer}|{rows}|{}", rows.saturating_sub(1)))
        .collect();
    for db in [db, mount.behind("test.db")] {
        assert_eq!(sqlite(&db, "PRAGMA integrity_check;"), "ok");
        let found = sqlite(
            &db,
            "SELECT writer, count(*), max(n) FROM rows GROUP BY writer ORDER BY writer;",
        );
        assert_eq!(found.lines().collect::<Vec<_>>(), expected);
    }
    assert!(
        acknowledged.iter().all(|&rows| rows > 0),
        "a writer starved"
    );
    mount.end();
}

#[test]
fn sqlite_with_a_write_ahead_log_loses_nothing() {
    sqlite_loses_nothing("wal");
}

#[test]
fn sqlite_with_a_rollback_journal_loses_nothing() {
    sqlite_loses_nothing("delete");
}

// ---- PostgreSQL ----------------------------------------------------------------------------------

/// A PostgreSQL cluster, its data in one place, its socket and log in another.
struct Cluster {
    data: PathBuf,
    /// Socket and log.
    dir: tempfile::TempDir,
    server: Option<Child>,
}

impl Cluster {
    /// `initdb` in `data`, which must not exist, and a running server.
    fn new(data: PathBuf) -> Cluster {
        let dir = tempfile::Builder::new()
            .prefix("evermount-pg-")
            .tempdir()
            .unwrap();
        open_to_all(dir.path());
        let cluster = Cluster {
            data,
            dir,
            server: None,
        };
        let data = cluster.data.to_str().unwrap();
        cluster.run("initdb", &["-k", "-D", data, "--locale=C", "-A", "trust"]);
        cluster
    }

    /// A program of PostgreSQL as user postgres.
    fn program(&self, name: &str) -> Command {
        let user = User::from_name("postgres")
            .unwrap()
            .expect("no user postgres");
        let (uid, gid): (Uid, Gid) = (user.uid, user.gid);
        let mut command = Command::new(format!("/usr/lib/postgresql/15/bin/{name}"));
        command
            .uid(uid.as_raw())
            .gid(gid.as_raw())
            .current_dir(self.dir.path())
            .env("PGHOST", self.dir.path())
            .env("PGDATABASE", "postgres")
            .stdin(Stdio::null());
        command
    }

    /// Runs a program. It must succeed.
    fn run(&self, name: &str, args: &[&str]) -> String {
        let mut command = self.program(name);
        command.args(args);
        let name = name.to_owned();
        let output = within(4 * PATIENCE, &name, move || command.output().unwrap());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{name} {args:?}: {text}\n{errors}\n{}",
            self.log()
        );
        text
    }

    fn sql(&self, sql: &str) -> String {
        self.run("psql", &["-XAtc", sql]).trim().to_owned()
    }

    fn start(&mut self) {
        let log = File::options()
            .append(true)
            .create(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        let server = self
            .program("postgres")
            .arg("-D")
            .arg(&self.data)
            .args(["-c", "listen_addresses=", "-c"])
            .arg(format!(
                "unix_socket_directories={}",
                self.dir.path().display()
            ))
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.server = Some(server);
        let mut ready = self.program("pg_isready");
        ready.stdout(Stdio::null());
        let started = until(PATIENCE, || ready.status().unwrap().success());
        assert!(started, "the server does not start\n{}", self.log());
    }

    /// `SIGINT` is a fast shutdown, `SIGQUIT` an immediate one, which leaves a recovery to do.
    fn stop(&mut self, signal: Signal) {
        let mut server = self.server.take().unwrap();
        kill(Pid::from_raw(server.id() as i32), signal).unwrap();
        let gone = until(PATIENCE, || server.try_wait().unwrap().is_some());
        if !gone {
            self.server = Some(server);
            panic!("the server does not stop\n{}", self.log());
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn assert_no_errors(&self) {
        let log = self.log();
        for line in log.lines() {
            let severe = ["ERROR:", "FATAL:", "PANIC:"];
            // What a server says to those who ask whether it is ready yet.
            let expected = line.contains("the database system is starting up")
                || line.contains("the database system is not yet accepting connections");
            assert!(
                expected || !severe.iter().any(|s| line.contains(s)),
                "{line}\n{log}"
            );
        }
    }

    /// Balances and history tell the same story.
    fn assert_consistent(&self, transactions: &str) {
        let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = sum(delta), \
                    (SELECT sum(bbalance) FROM pgbench_branches) = sum(delta), \
                    (SELECT sum(tbalance) FROM pgbench_tellers) = sum(delta), \
                    count(*) FROM pgbench_history";
        assert_eq!(self.sql(sums), format!("t|t|t|{transactions}"));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let Some(mut server) = self.server.take() else {
            return;
        };
        // Its children go with it.
        let _ = kill(Pid::from_raw(server.id() as i32), Signal::SIGQUIT);
        if !until(Duration::from_secs(20), || {
            !matches!(server.try_wait(), Ok(None))
        }) {
            let _ = server.kill();
        }
    }
}

/// A line of pgbench's report.
fn field<'a>(report: &'a str, name: &str) -> &'a str {
    let line = report.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {report}"))
        .trim()
        .split([' ', '/'])
        .next()
        .unwrap()
}

fn pgbench(cluster: &Cluster) -> String {
    let seconds = (duration().as_secs() + 2).to_string();
    cluster.run("pgbench", &["-c", "4", "-j", "2", "-T", &seconds])
}

#[test]
fn postgresql_notices_nothing() {
    let mount = Mount::new();
    let mut cluster = Cluster::new(mount.path("data"));
    cluster.start();
    cluster.run("pgbench", &["-i", "-q", "-s", "2"]);
    let (report, deaths) = mount.under_fire(EVERY, || pgbench(&cluster));
    eprintln!("{deaths} deaths, {report}");
    assert!(deaths >= 4, "{deaths} deaths\n{report}");
    assert_eq!(
        field(&report, "number of failed transactions:"),
        "0",
        "{report}"
    );
    let transactions = field(&report, "number of transactions actually processed:");
    cluster.assert_consistent(transactions);
    let (_, _) = mount.under_fire(EVERY, || {
        cluster.run("pg_amcheck", &["--all", "--install-missing"])
    });
    cluster.assert_no_errors();

    let (_, _) = mount.under_fire(EVERY, || {
        cluster.stop(Signal::SIGQUIT);
        cluster.start();
    });
    cluster.assert_consistent(transactions);
    cluster.stop(Signal::SIGINT);
    cluster.assert_no_errors();
    let data = cluster.data.to_str().unwrap().to_owned();
    let (_, _) = mount.under_fire(EVERY, || cluster.run("pg_checksums", &["-c", "-D", &data]));
    if long() {
        // For comparison.
        let mut direct = Cluster::new(mount.behind("direct"));
        direct.start();
        direct.run("pgbench", &["-i", "-q", "-s", "2"]);
        eprintln!("in the source: {}", pgbench(&direct));
        let mut front = Cluster::new(mount.path("undisturbed"));
        front.start();
        front.run("pgbench", &["-i", "-q", "-s", "2"]);
        eprintln!("without deaths: {}", pgbench(&front));
    }
    drop(cluster);
    mount.end();
}
