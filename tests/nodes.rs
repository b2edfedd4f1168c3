//! Several clients of one CephFS, and a cluster that fails: what the deaths of one client's backends
//! mean to the others, and what becomes of what it held.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use common::ceph::{CephFuse, Cluster, ClusterOptions};
use common::tools::{Actor, act, open_rw, percentiles, range};
use common::{Mount, PATIENCE, errno, long, until, within};
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};

/// What another client may have to wait for because a backend died: a takeover, and not the minute
/// after which the metadata server gives a client up.
const BOUND: Duration = Duration::from_secs(3);

/// Not a test: the other process ([`Actor`]).
#[test]
#[ignore = "started by the tests of this file"]
fn actor() {
    act();
}

/// Two nodes that mount the same directory.
fn two_nodes(cluster: &Cluster, directory: &str) -> (Mount, Mount) {
    let mount = || Mount::of_ceph(cluster, directory, &[]);
    (mount(), mount())
}

/// The same directory mounted by an unmodified client.
fn third_node(cluster: &Cluster, directory: &str) -> CephFuse {
    cluster.make_dir(directory);
    cluster.ceph_fuse(&[&format!("--client_mountpoint={directory}")])
}

/// Sessions of clients, the names they gave them, and the processes they are of.
fn sessions(cluster: &Cluster, mds: &str) -> Vec<(u64, String, u32)> {
    let text = |s: &serde_json::Value, key| {
        let text = s["client_metadata"][key].as_str();
        text.unwrap_or_default().to_owned()
    };
    let all = cluster.sessions(mds);
    let named = all.iter().map(|s| {
        let pid = text(s, "pid").parse().unwrap_or(0);
        (s["id"].as_u64().unwrap(), text(s, "uuid"), pid)
    });
    named.collect()
}

/// Ends the sessions of a mount's backend.
fn evict(cluster: &Cluster, backend: u32) {
    cluster.evict_process("mds.a", backend);
}

fn lock(file: &File, kind: &str, range_kind: &str) -> nix::Result<i32> {
    let range = range(range_kind, 0, 0);
    match kind {
        "posix" => fcntl(file.as_fd(), FcntlArg::F_SETLK(&range)),
        "ofd" => fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&range)),
        _ => fcntl(file.as_fd(), FcntlArg::F_OFD_SETLKW(&range)),
    }
}

/// Writes through a handle, syncs it and reads it back.
fn works(file: &File) -> io::Result<()> {
    file.write_all_at(b"works", 0)?;
    file.sync_all()?;
    let mut back = [0; 5];
    file.read_exact_at(&mut back, 0)?;
    assert_eq!(&back, b"works");
    Ok(())
}

// ---- load ------------------------------------------------------------------------------------

/// Operations and how long they took.
#[derive(Default)]
struct Times(Vec<(&'static str, Duration)>);

impl Times {
    /// Does something that must succeed.
    fn take<T>(&mut self, what: &'static str, work: impl FnOnce() -> io::Result<T>) -> T {
        let began = Instant::now();
        let done = work();
        let took = began.elapsed();
        self.0.push((what, took));
        done.unwrap_or_else(|e| panic!("{what}, after {took:?}: {e}"))
    }

    fn longest(&self) -> (&'static str, Duration) {
        let longest = self.0.iter().max_by_key(|(_, took)| *took);
        *longest.expect("nothing was done")
    }

    fn tell(&self, who: &str) {
        let mut ms: Vec<f64> = self.0.iter().map(|(_, t)| t.as_secs_f64() * 1e3).collect();
        let (what, _) = self.longest();
        eprintln!("{who}: {}, the longest: {what}", percentiles(&mut ms));
    }
}

/// A round of what applications do in a directory. Each operation must succeed.
fn round(at: &Path, name: &str, times: &mut Times) {
    let (path, renamed) = (at.join(name), at.join(format!("{name}-renamed")));
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    let file = times.take("create", || options.open(&path));
    times.take("write", || file.write_all_at(name.as_bytes(), 0));
    times.take("lock", || Ok(lock(&file, "ofd", "w")?));
    times.take("fsync", || file.sync_all());
    times.take("unlock", || Ok(lock(&file, "ofd", "u")?));
    let size = times.take("stat", || fs::metadata(&path)).len();
    assert_eq!(size, name.len() as u64, "{name}");
    let listed = times.take("list", || {
        let names = fs::read_dir(at)?.map(|e| Ok(e?.file_name()));
        names.collect::<io::Result<Vec<_>>>()
    });
    assert!(listed.iter().any(|n| n == name), "{name} in {listed:?}");
    times.take("rename", || fs::rename(&path, &renamed));
    let read = times.take("read", || fs::read(&renamed));
    assert_eq!(read, name.as_bytes());
    times.take("unlink", || fs::remove_file(&renamed));
}

/// Applications at work in some directories, each in a thread of its own.
struct Load {
    stop: Arc<AtomicBool>,
    rounds: Vec<Arc<AtomicU64>>,
    threads: Vec<JoinHandle<Times>>,
}

impl Load {
    fn start(directories: &[PathBuf]) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds: Vec<Arc<AtomicU64>> = directories.iter().map(|_| Arc::default()).collect();
        let threads = directories.iter().zip(&rounds).enumerate();
        let threads = threads.map(|(who, (at, rounds))| {
            let (at, rounds, stop) = (at.clone(), Arc::clone(rounds), stop.clone());
            spawn(move || {
                let mut times = Times::default();
                while !stop.load(Ordering::Relaxed) {
                    let number = rounds.fetch_add(1, Ordering::Relaxed);
                    round(&at, &format!("load-{who}-{number}"), &mut times);
                }
                times
            })
        });
        let threads = threads.collect();
        Load {
            stop,
            rounds,
            threads,
        }
    }

    /// Waits until each of them has done a whole round from now on.
    fn goes_on(&self, when: &str) {
        let began = Instant::now();
        for (rounds, thread) in self.rounds.iter().zip(&self.threads) {
            let before = rounds.load(Ordering::Relaxed);
            let more = || rounds.load(Ordering::Relaxed) > before + 1 || thread.is_finished();
            assert!(until(PATIENCE, more), "the load hangs {when}");
        }
        eprintln!("{when}: the load goes on after {:?}", began.elapsed());
    }

    /// Ends it. Nothing has failed.
    fn end(mut self) -> Vec<Times> {
        self.stop.store(true, Ordering::Relaxed);
        let join = |thread: JoinHandle<Times>| within(PATIENCE, "the load", || thread.join());
        let ended = std::mem::take(&mut self.threads).into_iter().map(join);
        ended
            .map(|times| times.unwrap_or_else(|e| std::panic::resume_unwind(e)))
            .collect()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

// ---- locks -----------------------------------------------------------------------------------

#[test]
fn a_lock_that_nobody_waits_for_survives_every_death() {
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/kept");
    let held = open_rw(&a.path("file"));
    lock(&held, "ofd", "w").unwrap();
    let mut other = Actor::on(&b.path("file"));
    for _ in 0..5 {
        a.replace_backend();
        assert_eq!(other.ask("posix 0 w 0 0"), "EAGAIN");
        works(&held).unwrap();
        b.replace_backend();
    }
    other.tell("posixw 0 w 0 0");
    b.wait("waiting", |s| s.waiters == 1);
    assert_eq!(a.status().lost_locks, 0);
    lock(&held, "ofd", "u").unwrap();
    assert_eq!(other.answer(), "ok");
    assert_eq!(lock(&held, "ofd", "r"), Err(nix::errno::Errno::EAGAIN));
    drop((held, other));
    a.end();
    b.end();
}

/// What becomes of a handle whose lock somebody else has.
fn a_lock_is_lost(a: &Mount, kind: &str, winner: &mut Actor, lose: impl FnOnce(&mut Actor)) {
    let (path, other) = (a.path(kind), a.path(&format!("{kind}-other")));
    let (held, other) = (open_rw(&path), open_rw(&other));
    lock(&held, kind, "w").unwrap();
    lock(&other, kind, "w").unwrap();
    works(&held).unwrap();
    let before = a.status().lost_locks;
    lose(winner);
    assert_eq!(winner.answer(), "ok", "{kind}");
    let serving = |s: &evermount::control::Status| s.outage_ms.is_none();
    let after = a.wait("serving", |s| serving(s) && s.lost_locks > before);
    assert_eq!(after.lost_locks, before + 1);
    for _ in 0..2 {
        let eio = Some(libc::EIO);
        assert_eq!(errno(held.write_at(b"lost", 0)), eio, "{kind}");
        assert_eq!(errno(held.sync_all()), eio, "{kind}");
        // Once the kernel has dropped its pages.
        let mut bytes = [0; 4];
        let refused = until(BOUND, || errno(held.read_at(&mut bytes, 0)) == eio);
        assert!(refused, "{kind}: a handle that lost its lock reads");
        works(&other).unwrap();
        a.replace_backend();
    }
    let again = open_rw(&path);
    works(&again).unwrap();
    assert_eq!(lock(&again, "ofd", "w"), Err(nix::errno::Errno::EAGAIN));
    assert_eq!(winner.ask("posix 0 u 0 0"), "ok");
    drop(held);
    lock(&again, "ofd", "w").unwrap();
    works(&again).unwrap();
    assert_eq!(a.status().lost_locks, before + 1);
}

#[test]
fn a_lock_another_client_waited_for_is_lost_with_the_session_and_its_handle_says_so() {
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/lost");
    let c = third_node(cluster, "/lost");
    for kind in ["posix", "ofd"] {
        // The unmodified client waits at the metadata server, which serves it at once.
        drop(open_rw(&c.path(kind)));
        let mut winner = Actor::on(&c.path(kind));
        a_lock_is_lost(&a, kind, &mut winner, |winner| {
            winner.tell("posixw 0 w 0 0");
            // It does wait: a moment, since nobody tells that it has arrived.
            assert_eq!(winner.answer_within(Duration::from_millis(500)), None);
            a.replace_backend();
        });
        drop(winner);
        fs::remove_file(c.path(kind)).unwrap();
        // The other node gets it when the dead session is ended before the takeover.
        drop(open_rw(&b.path(kind)));
        let mut winner = Actor::on(&b.path(kind));
        a_lock_is_lost(&a, kind, &mut winner, |winner| {
            winner.tell("posixw 0 w 0 0");
            b.wait("waiting", |s| s.waiters == 1);
            let backend = a.status().backend_pid.unwrap();
            a.begin_outage();
            evict(cluster, backend);
            b.wait("granted", |s| s.locks == 1);
            a.end_outage();
        });
    }
    a.end();
    b.end();
}

#[test]
fn a_lock_that_is_lost_is_waited_for_by_nobody_who_matters() {
    let cluster = Cluster::shared();
    let a = Mount::of_ceph(cluster, "/given-back", &[]);
    let c = third_node(cluster, "/given-back");
    let held = open_rw(&a.path("file"));
    let first = |file: &File, kind| fcntl(file.as_fd(), FcntlArg::F_SETLK(&range(kind, 0, 10)));
    let second = |file: &File, kind| fcntl(file.as_fd(), FcntlArg::F_SETLK(&range(kind, 20, 10)));
    let mut winner = Actor::on(&c.path("file"));
    let lose = |held: &File, winner: &mut Actor| {
        first(held, "w").unwrap();
        winner.tell("posixw 0 w 0 10");
        assert_eq!(winner.answer_within(Duration::from_millis(500)), None);
        let lost = a.status().lost_locks;
        a.replace_backend();
        assert_eq!(winner.answer(), "ok");
        a.wait("lost", |s| s.lost_locks > lost);
    };
    lose(&held, &mut winner);
    // The same owner takes another one, which stays when the one that is lost comes late.
    let again = open_rw(&a.path("file"));
    second(&again, "w").unwrap();
    assert_eq!(first(&again, "w"), Err(nix::errno::Errno::EAGAIN));
    assert_eq!(winner.ask("posix 0 u 0 10"), "ok");
    assert!(until(BOUND, || winner.ask("posix 0 w 0 10") == "ok"));
    assert_eq!(winner.ask("posix 0 u 0 10"), "ok");
    assert_eq!(winner.ask("posix 0 w 20 10"), "EAGAIN");
    a.replace_backend();
    assert_eq!(winner.ask("posix 0 w 20 10"), "EAGAIN");
    second(&again, "u").unwrap();
    // The end of the mount does not wait for the winner either.
    lose(&again, &mut winner);
    let third = open_rw(&a.path("file"));
    second(&third, "w").unwrap();
    drop((held, again, third));
    let began = Instant::now();
    a.end();
    eprintln!("the mount ends in {:?}", began.elapsed());
    // A backend that cannot end its session leaves it after 30 s.
    assert!(began.elapsed() < Duration::from_secs(15));
    assert_eq!(winner.ask("posix 0 w 20 10"), "ok");
}

/// Somebody who increments a number in a file under a lock.
#[derive(Default)]
struct Counter {
    path: PathBuf,
    direct: bool,
    /// Tries again and again instead of waiting its turn.
    tries: bool,
    /// Between reading and writing.
    holds: Duration,
    /// Others have their turn: those of evermount try from time to time, in no queue.
    pause: Duration,
    holding: Arc<AtomicBool>,
}

impl Counter {
    /// Increments until told to stop. Returns how often it surely did, and how often perhaps: a lock
    /// that is lost fails the write, which may have been done before.
    fn count(&self, stop: &AtomicBool) -> (u64, u64) {
        let open = || {
            let mut options = OpenOptions::new();
            let flags = if self.direct { libc::O_DIRECT } else { 0 };
            let file = options.read(true).write(true).custom_flags(flags);
            file.open(&self.path).unwrap()
        };
        let mut file = open();
        let (mut surely, mut perhaps) = (0, 0);
        let mut increment = |file: &File| -> io::Result<()> {
            lock(file, if self.tries { "ofd" } else { "ofdw" }, "w")?;
            let mut number = [0; 8];
            file.read_exact_at(&mut number, 0)?;
            self.holding.store(true, Ordering::Relaxed);
            sleep(self.holds);
            let next = (u64::from_ne_bytes(number) + 1).to_ne_bytes();
            perhaps += 1;
            file.write_all_at(&next, 0)?;
            (surely, perhaps) = (surely + 1, perhaps - 1);
            lock(file, "ofdw", "u")?;
            Ok(())
        };
        while !stop.load(Ordering::Relaxed) {
            let done = increment(&file);
            self.holding.store(false, Ordering::Relaxed);
            match done.map_err(|e| (e.raw_os_error(), e)) {
                Ok(()) => {}
                Err((Some(libc::EIO), _)) => file = open(),
                Err((Some(libc::EAGAIN), _)) if self.tries => {
                    sleep(Duration::from_micros(500));
                    continue;
                }
                Err((_, e)) => panic!("{}: {e}", self.path.display()),
            }
            sleep(self.pause);
        }
        (surely, perhaps)
    }
}

/// Has all of them count while the backend of `a` dies again and again; with `holding`, always in
/// such a moment. Returns the number of deaths, and of locks that were lost.
fn counted(a: &Mount, counters: Vec<Counter>, holding: Option<&AtomicBool>) -> (u64, u64) {
    let (path, before) = (a.path("number"), a.status().lost_locks);
    let stop = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (counters.into_iter())
        .map(|counter| {
            let stop = stop.clone();
            spawn(move || counter.count(&stop))
        })
        .collect();
    let length = Duration::from_secs(if long() { 60 } else { 5 });
    let (began, mut deaths) = (Instant::now(), 0);
    while began.elapsed() < length {
        match holding {
            Some(holding) => drop(until(BOUND, || holding.load(Ordering::Relaxed))),
            None => sleep(Duration::from_millis(150)),
        }
        a.replace_backend();
        deaths += 1;
    }
    stop.store(true, Ordering::Relaxed);
    let join = |thread: JoinHandle<_>| within(PATIENCE, "a counter", || thread.join()).unwrap();
    let counted: Vec<(u64, u64)> = threads.into_iter().map(join).collect();
    let number = u64::from_ne_bytes(past_pages(&path).try_into().unwrap());
    let lost = a.status().lost_locks - before;
    eprintln!("{number} of {counted:?}, {deaths} deaths, {lost} lost locks");
    let surely: u64 = counted.iter().map(|(surely, _)| surely).sum();
    let perhaps: u64 = counted.iter().map(|(_, perhaps)| perhaps).sum();
    assert!(surely > 0 && deaths > 2);
    assert!(number >= surely, "{} increments are lost", surely - number);
    assert!(number <= surely + perhaps);
    (deaths, lost)
}

#[test]
fn a_lock_never_has_two_owners_while_a_backend_dies_again_and_again() {
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/counted");
    let c = third_node(cluster, "/counted");
    let counter = |path, tries| Counter {
        path,
        direct: true,
        tries,
        // Long enough to be seen by who looks again and again, also on a machine that is busy.
        holds: Duration::from_millis(20),
        pause: Duration::from_millis(40),
        holding: Arc::default(),
    };
    // Others have the lock for a moment: those who come in between, and then also one that is in the
    // queue of the metadata server before.
    for waits in [false, true] {
        let mine = Counter {
            pause: Duration::from_millis(5),
            ..counter(a.path("number"), true)
        };
        let holding = mine.holding.clone();
        let mut counters = vec![
            mine,
            counter(b.path("number"), false),
            counter(c.path("number"), true),
            counter(c.path("number"), true),
        ];
        counters.extend(waits.then(|| counter(c.path("number"), false)));
        fs::write(a.path("number"), 0u64.to_ne_bytes()).unwrap();
        let (deaths, lost) = counted(&a, counters, Some(&holding));
        // Nobody is in the queue before the next backend is. Who asks in the very moment the session
        // ends can still have it; without a place in the queue it is lost nearly every time.
        assert!(waits || 2 * lost < deaths, "{lost} of {deaths}");
    }
    a.end();
    b.end();
}

#[test]
fn what_was_written_under_a_lock_is_seen_by_its_next_owner() {
    let (a, b) = two_nodes(Cluster::shared(), "/counted-pages");
    fs::write(a.path("number"), 0u64.to_ne_bytes()).unwrap();
    let counters = [&a, &b].map(|mount| Counter {
        path: mount.path("number"),
        pause: Duration::from_millis(5),
        ..Counter::default()
    });
    counted(&a, counters.into(), None);
    a.end();
    b.end();
}

#[test]
fn a_write_whose_lock_was_lost_meanwhile_is_not_done_again() {
    let cluster = Cluster::shared();
    let a = Mount::of_ceph(cluster, "/late", &[]);
    let c = third_node(cluster, "/late");
    for place in ["before-execution", "before-reply"] {
        let held = open_rw(&a.path(place));
        lock(&held, "ofd", "w").unwrap();
        let mut winner = Actor::on(&c.path(place));
        winner.tell("posixw 0 w 0 0");
        assert_eq!(winner.answer_within(Duration::from_millis(500)), None);
        a.order("start", "");
        a.order(&format!("{place}@WRITE"), "kill");
        let writing = spawn(move || (errno(held.write_at(b"late", 0)), held));
        a.wait("in outage", |s| s.outage_ms.is_some());
        a.end_outage();
        assert_eq!(winner.answer(), "ok");
        fs::write(c.path(place), "mine").unwrap();
        let (told, held) = within(PATIENCE, "a write", || writing.join()).unwrap();
        assert_eq!(told, Some(libc::EIO), "{place}");
        a.replace_backend();
        drop(held);
        assert_eq!(fs::read(c.path(place)).unwrap(), b"mine", "{place}");
        assert_eq!(fs::read(a.path(place)).unwrap(), b"mine", "{place}");
    }
    a.end();
}

#[test]
fn an_unlock_that_was_done_is_no_lost_lock() {
    let cluster = Cluster::shared();
    let a = Mount::of_ceph(cluster, "/unlocked", &[]);
    let c = third_node(cluster, "/unlocked");
    let held = open_rw(&a.path("file"));
    lock(&held, "ofd", "w").unwrap();
    let mut winner = Actor::on(&c.path("file"));
    winner.tell("posixw 0 w 0 0");
    assert_eq!(winner.answer_within(Duration::from_millis(500)), None);
    // The metadata server has it, and the next owner has the lock; the caller does not know yet.
    a.order("start", "");
    a.order("before-reply@SETLK", "kill");
    let unlocking = spawn(move || (lock(&held, "ofd", "u"), held));
    assert_eq!(winner.answer(), "ok");
    a.wait("in outage", |s| s.outage_ms.is_some());
    a.end_outage();
    let (told, held) = within(PATIENCE, "an unlock", || unlocking.join()).unwrap();
    told.unwrap();
    works(&held).unwrap();
    assert_eq!(a.status().lost_locks, 0);
    drop(held);
    a.end();
}

// ---- coherence -------------------------------------------------------------------------------

/// A file that is mapped.
struct Map(memmap2::Mmap);

impl Map {
    fn of(file: &File) -> Map {
        // SAFETY: read as volatile bytes only; nobody truncates it below this length.
        Map(unsafe { memmap2::Mmap::map(file) }.unwrap())
    }

    fn byte(&self, at: usize) -> u8 {
        // SAFETY: within the map; another client may change it at any time.
        unsafe { std::ptr::read_volatile(&raw const self.0[at]) }
    }
}

/// Contents of a file, past the kernel's page cache.
fn past_pages(path: &Path) -> Vec<u8> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_DIRECT).open(path);
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut file.unwrap(), &mut bytes).unwrap();
    bytes
}

#[test]
fn what_one_node_writes_the_others_see() {
    const LEN: usize = 64 << 10;
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/seen");
    let c = third_node(cluster, "/seen");
    let roots = [a.path(""), b.path(""), c.path("")];
    for (writer, reader) in [(0, 1), (1, 0), (0, 2), (2, 0)] {
        let name = format!("{writer}-{reader}");
        let (at, from) = (roots[writer].join(&name), roots[reader].join(&name));
        fs::write(&at, [1; LEN]).unwrap();
        // All of it is cached, and mapped.
        let open = File::open(&from).unwrap();
        assert_eq!(fs::read(&from).unwrap(), [1; LEN]);
        let map = Map::of(&open);
        assert_eq!(map.byte(LEN - 1), 1);
        let rounds = if long() { 200 } else { 30 };
        for round in 2..rounds + 2 {
            let file = open_rw(&at);
            file.write_all_at(&[round; LEN], 0).unwrap();
            if round % 2 == 0 {
                file.sync_all().unwrap();
            }
            drop(file);
            if reader == 2 {
                // Pages of an unmodified client can stay old: they are not what is tested here.
                let seen = until(BOUND, || past_pages(&from) == [round; LEN]);
                assert!(seen, "{name}, {round}");
                continue;
            }
            let read = fs::read(&from).unwrap();
            assert!(read == [round; LEN], "{name}, {round}: {}", read[0]);
            let mut bytes = [0; LEN];
            let seen = until(BOUND, || {
                open.read_exact_at(&mut bytes, 0).unwrap();
                bytes == [round; LEN] && map.byte(0) == round && map.byte(LEN - 1) == round
            });
            assert!(seen, "{name}, {round}: {} {}", bytes[0], map.byte(0));
        }
        // Sizes.
        let mut appending = OpenOptions::new().append(true).open(&at).unwrap();
        io::Write::write_all(&mut appending, b"more").unwrap();
        assert_eq!(fs::metadata(&from).unwrap().len(), LEN as u64 + 4);
        assert_eq!(open.metadata().unwrap().len(), LEN as u64 + 4);
        let mut tail = [0; 4];
        open.read_exact_at(&mut tail, LEN as u64).unwrap();
        assert_eq!(&tail, b"more");
        drop((map, appending));
        open_rw(&at).set_len(10).unwrap();
        assert_eq!(fs::metadata(&from).unwrap().len(), 10);
        assert_eq!(fs::read(&from).unwrap().len(), 10);
        // Attributes and names.
        fs::set_permissions(&at, fs::Permissions::from_mode(0o641)).unwrap();
        assert_eq!(fs::metadata(&from).unwrap().mode() & 0o777, 0o641);
        let (moved, moved_from) = (at.with_extension("moved"), from.with_extension("moved"));
        assert!(!moved_from.exists());
        fs::rename(&at, &moved).unwrap();
        assert!(!from.exists() && moved_from.exists());
        fs::remove_file(&moved).unwrap();
        assert!(!moved_from.exists());
        assert_eq!(open.metadata().unwrap().nlink(), 0);
        assert_eq!(errno(File::open(&moved_from)), Some(libc::ENOENT));
    }
    a.end();
    b.end();
}

#[test]
fn after_a_takeover_the_kernel_has_no_old_pages() {
    const LEN: usize = 64 << 10;
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/pages");
    // The dead session is ended by the next backend, or before by an administrator.
    for evicted in [false, true] {
        let name = format!("{evicted}");
        let (path, at) = (a.path(&name), b.path(&name));
        fs::write(&path, [1; LEN]).unwrap();
        let (open, closed) = (
            File::open(&path).unwrap(),
            a.path(&format!("{name}-closed")),
        );
        fs::write(&closed, [1; LEN]).unwrap();
        assert_eq!(fs::read(&closed).unwrap(), [1; LEN]);
        let map = Map::of(&open);
        let mut bytes = vec![0; LEN];
        open.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes[0], map.byte(LEN - 1)), (1, 1));

        let backend = a.status().backend_pid.unwrap();
        a.begin_outage();
        let closed_at = b.path(&format!("{name}-closed"));
        let writing = spawn(move || {
            fs::write(&at, [2; LEN]).unwrap();
            fs::write(&closed_at, [2; LEN]).unwrap();
        });
        if evicted {
            evict(cluster, backend);
            within(PATIENCE, "a write", || writing.join()).unwrap();
            // Pages the kernel has are read without anybody being asked.
            open.read_exact_at(&mut bytes, 0).unwrap();
            a.end_outage();
        } else {
            assert!(!until(Duration::from_millis(300), || writing.is_finished()));
            a.end_outage();
            let began = Instant::now();
            within(PATIENCE, "a write", || writing.join()).unwrap();
            eprintln!("the write goes on after {:?}", began.elapsed());
            assert!(began.elapsed() < BOUND);
        }
        assert!(fs::read(&closed).unwrap() == [2; LEN], "{name}");
        assert!(fs::read(&path).unwrap() == [2; LEN], "{name}");
        let seen = until(BOUND, || {
            open.read_exact_at(&mut bytes, 0).unwrap();
            bytes == [2; LEN] && map.byte(0) == 2 && map.byte(LEN - 1) == 2
        });
        assert!(seen, "{name}: {} {}", bytes[0], map.byte(0));
    }
    a.end();
    b.end();
}

// ---- others do not wait ----------------------------------------------------------------------

#[test]
fn nobody_waits_for_the_session_of_a_backend_that_died() {
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/shared");
    let c = third_node(cluster, "/shared");
    let load = Load::start(&[a.path(""), b.path(""), c.path("")]);
    // And a file that all of them write.
    let length = Duration::from_secs(if long() { 120 } else { 8 });
    let shared = b.path("of-all");
    let mine = open_rw(&a.path("of-all"));
    let began = Instant::now();
    let writing = spawn(move || {
        let mut times = Times::default();
        let file = open_rw(&shared);
        while began.elapsed() < length {
            times.take("write a shared file", || file.write_all_at(b"b", 1));
            times.take("stat a shared file", || fs::metadata(&shared));
            mine.write_all_at(b"a", 0).unwrap();
        }
        times
    });
    // Only those that serve: one that is killed at its start makes the next one wait.
    while began.elapsed() < length {
        a.replace_backend();
        sleep(Duration::from_millis(250));
    }
    let deaths = a.status().takeovers;
    let times = within(PATIENCE, "a shared file", || writing.join()).unwrap();
    let all = load.end();
    for (who, times) in ["a", "b", "c"].iter().zip(&all) {
        times.tell(who);
    }
    times.tell("b, a shared file");
    eprintln!("{deaths} deaths");
    for times in [&all[1], &all[2], &times] {
        let (what, took) = times.longest();
        assert!(took < BOUND, "{what} took {took:?}");
    }
    assert!(deaths > 2);
    a.end();
    b.end();
}

// ---- eviction --------------------------------------------------------------------------------

#[test]
fn a_backend_whose_session_was_ended_is_replaced_and_applications_see_a_pause_only() {
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/evicted");
    let held = open_rw(&a.path("held"));
    lock(&held, "ofd", "w").unwrap();
    let load = Load::start(&[a.path(""), b.path("")]);
    for _ in 0..if long() { 20 } else { 4 } {
        load.goes_on("before an eviction");
        let before = a.wait("serving", |s| s.outage_ms.is_none());
        evict(cluster, before.backend_pid.unwrap());
        a.wait("replaced", |s| {
            s.generation > before.generation && s.outage_ms.is_none()
        });
        load.goes_on("after it");
    }
    let times = load.end();
    times[0].tell("evicted");
    times[1].tell("other");
    works(&held).unwrap();
    assert_eq!(a.status().lost_locks, 0);
    assert_eq!(a.status().poisoned, 0);
    drop(held);
    a.end();
    b.end();
}

#[test]
fn fsync_after_an_eviction_is_never_a_false_success() {
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/synced");
    for round in 0..if long() { 50 } else { 6 } {
        let name = format!("{round}");
        let data = format!("round {round}");
        let file = open_rw(&a.path(&name));
        file.write_all_at(b"before...", 0).unwrap();
        if round % 2 == 0 {
            file.sync_all().unwrap();
        }
        file.write_all_at(data.as_bytes(), 0).unwrap();
        let backend = a.status().backend_pid.unwrap();
        evict(cluster, backend);
        let synced = within(PATIENCE, "fsync", move || {
            let synced = match round % 3 {
                0 => file.sync_all(),
                // The kernel does not tell a FUSE file system of `syncfs`, so it can promise nothing.
                1 => file.sync_data(),
                _ if common::wanted_writes().is_some_and(|when| when == "retained") => {
                    file.sync_data()
                }
                _ => rustix::fs::syncfs(&file).map_err(io::Error::from),
            };
            synced.map(|()| file)
        });
        let seen = fs::read(b.path(&name)).unwrap();
        match synced {
            Ok(file) => {
                assert!(seen.starts_with(data.as_bytes()), "{round}: {seen:?}");
                works(&file).unwrap();
            }
            Err(e) => eprintln!("round {round}: {e}"),
        }
    }
    a.end();
    b.end();
}

#[test]
fn an_idle_mount_whose_session_was_ended_shows_nothing_old() {
    const LEN: usize = 64 << 10;
    let cluster = Cluster::shared();
    let (a, b) = two_nodes(cluster, "/idle");
    fs::write(a.path("file"), [1; LEN]).unwrap();
    let open = File::open(a.path("file")).unwrap();
    let mut bytes = vec![0; LEN];
    open.read_exact_at(&mut bytes, 0).unwrap();
    evict(cluster, a.status().backend_pid.unwrap());
    fs::write(b.path("file"), [2; LEN]).unwrap();
    let seen = until(BOUND, || {
        open.read_exact_at(&mut bytes, 0).unwrap();
        bytes == [2; LEN]
    });
    assert!(seen, "{}", a.log_text());
    assert!(fs::read(a.path("file")).unwrap() == [2; LEN]);
    drop(open);
    a.end();
    b.end();
}

#[test]
fn a_file_without_a_name_survives_an_eviction_or_fails_alone() {
    let cluster = Cluster::shared();
    let a = Mount::of_ceph(cluster, "/nameless", &[]);
    let other = open_rw(&a.path("other"));
    for dead in [false, true] {
        let path = a.path("file");
        let nameless = open_rw(&path);
        nameless.write_all_at(b"still", 0).unwrap();
        fs::remove_file(&path).unwrap();
        let backend = a.status().backend_pid.unwrap();
        if dead {
            a.begin_outage();
            evict(cluster, backend);
            a.end_outage();
        } else {
            evict(cluster, backend);
        }
        works(&other).unwrap();
        let mut bytes = [0; 5];
        let read = nameless.read_exact_at(&mut bytes, 0);
        eprintln!("dead: {dead}: {read:?}");
        match read {
            Ok(()) => assert_eq!(&bytes, b"still"),
            Err(e) => {
                let errno = e.raw_os_error();
                assert!(
                    [Some(libc::ESTALE), Some(libc::EIO)].contains(&errno),
                    "{e}"
                );
            }
        }
        works(&other).unwrap();
    }
    drop(other);
    a.end();
}

// ---- a cluster that fails --------------------------------------------------------------------

#[test]
fn a_metadata_server_that_dies_is_waited_for() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        mds: 2,
        ..ClusterOptions::default()
    });
    let (a, b) = two_nodes(&cluster, "/mds");
    let held = open_rw(&a.path("held"));
    let nameless = open_rw(&a.path("nameless"));
    nameless.write_all_at(b"still", 0).unwrap();
    fs::remove_file(a.path("nameless")).unwrap();
    lock(&held, "ofd", "w").unwrap();
    let load = Load::start(&[a.path(""), b.path("")]);
    load.goes_on("at first");

    let first = cluster.active_mds("cephfs").unwrap();
    cluster.kill(&first);
    load.goes_on("with the standby");

    // No standby is left.
    let second = cluster.active_mds("cephfs").unwrap();
    assert_ne!(first, second);
    cluster.kill(&second);
    a.kill_backend();
    cluster.start_daemon(&second);
    load.goes_on("with a restarted one, and a backend that died meanwhile");
    let mut bytes = [0; 5];
    let kept = nameless.read_exact_at(&mut bytes, 0);
    eprintln!("a file without a name: {kept:?}");

    a.begin_outage();
    cluster.kill(&second);
    cluster.start_daemon(&second);
    a.end_outage();
    load.goes_on("with one restarted in an outage");
    for (who, times) in ["a", "b"].iter().zip(load.end()) {
        times.tell(who);
    }
    works(&held).unwrap();
    assert_eq!(
        lock(&open_rw(&b.path("held")), "ofd", "w"),
        Err(nix::errno::Errno::EAGAIN)
    );
    assert_eq!(a.status().lost_locks, 0);
    drop((held, nameless));
    a.end();
    b.end();
}

#[test]
fn object_stores_and_monitors_that_fail_are_waited_for() {
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        on_disk: true,
        ..ClusterOptions::default()
    });
    let (a, b) = two_nodes(&cluster, "/osd");
    let load = Load::start(&[a.path(""), b.path("")]);
    load.goes_on("at first");

    cluster.pause("osd.0");
    sleep(Duration::from_secs(1));
    a.kill_backend();
    sleep(Duration::from_secs(1));
    cluster.resume("osd.0");
    load.goes_on("after an OSD stood still");

    cluster.kill("osd.0");
    a.kill_backend();
    if long() {
        sleep(Duration::from_secs(20));
    }
    cluster.start_daemon("osd.0");
    load.goes_on("after an OSD died");

    cluster.kill("mon.a");
    a.begin_outage();
    a.cancel("start");
    sleep(Duration::from_secs(1));
    cluster.start_daemon("mon.a");
    a.wait("serving", |s| s.outage_ms.is_none());
    load.goes_on("after a monitor died");
    for (who, times) in ["a", "b"].iter().zip(load.end()) {
        times.tell(who);
    }
    a.end();
    b.end();
}

// ---- capabilities ----------------------------------------------------------------------------

/// The metadata server wants its memory back, and gets it: what the kernel knows is not held here.
#[test]
fn the_metadata_server_gets_back_what_it_asks_for() {
    const DIRECTORIES: usize = 8;
    const OPEN: usize = 500;
    const LIMIT: u64 = 1_000;
    let files = if long() { 20_000 } else { 4_000 };
    let cluster = Cluster::start(&ClusterOptions {
        mgr: false,
        conf: &[
            "mds max caps per client = 1000",
            "mds min caps per client = 100",
            // It asks again before anything can have come back, which the library sends once a second.
            // So it complains late.
            "mds recall max caps = 1500",
            "mds recall max decay threshold = 6000",
            "mds min caps working set = 500",
            "mds recall warning threshold = 50000",
        ],
        ..ClusterOptions::default()
    });
    let complaint = || {
        let health = cluster.health();
        health.contains("failing to respond to").then_some(health)
    };
    let mount = Mount::of_ceph(&cluster, "/recalled", &[]);
    let name = &|number: usize| mount.path(&format!("{}/{number}", number % DIRECTORIES));
    let backend = mount.status().backend_pid.unwrap().to_string();
    let caps = || {
        let sessions = cluster.sessions("mds.a");
        let of_backend = |s: &&serde_json::Value| s["client_metadata"]["pid"] == backend.as_str();
        let ours = sessions.iter().find(of_backend);
        ours.unwrap()["num_caps"].as_u64().unwrap()
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        for directory in 0..DIRECTORIES {
            scope.spawn(move || {
                fs::create_dir(name(directory).parent().unwrap()).unwrap();
                for number in (directory..files).step_by(DIRECTORIES) {
                    File::create(name(number)).unwrap();
                }
            });
        }
    });
    let mut open: Vec<File> = (0..OPEN)
        .map(|number| File::open(name(number)).unwrap())
        .collect();
    let mut most = 0;
    for directory in 0..DIRECTORIES {
        for entry in fs::read_dir(mount.path(&format!("{directory}"))).unwrap() {
            entry.unwrap().metadata().unwrap();
        }
        most = most.max(caps());
        assert_eq!(complaint(), None);
    }
    let known = mount.status().inodes;
    eprintln!("{known} known, {most} caps at most: {:?}", began.elapsed());
    assert!(known > files as u64);
    let fallen = until(PATIENCE, || {
        assert_eq!(complaint(), None);
        // The library takes open files for given back when it counts (16.2.15).
        caps() <= LIMIT + OPEN as u64 + LIMIT / 10
    });
    eprintln!("{} caps: {:?}", caps(), began.elapsed());
    assert!(fallen, "{} capabilities are kept", caps());
    assert_eq!(complaint(), None);

    // What is open cannot be given back: then it does complain.
    if long() {
        open.extend((OPEN..5 * OPEN).map(|number| File::open(name(number)).unwrap()));
        let complains = until(PATIENCE, || complaint().is_some());
        eprintln!("{} caps, complains: {:?}", caps(), began.elapsed());
        assert!(complains, "{} capabilities", caps());
    }
    drop(open);
    mount.end();
}

// ---- the end ---------------------------------------------------------------------------------

#[test]
fn after_an_unmount_the_cluster_knows_nothing_of_the_mount() {
    type Before = fn(&Mount);
    let cluster = Cluster::shared();
    let ways: [(&str, Before); 3] = [
        ("/end", |_| {}),
        ("/end-after-a-takeover", Mount::replace_backend),
        ("/end-without-a-backend", Mount::kill_backend),
    ];
    for (directory, before) in ways {
        let mount = Mount::of_ceph(cluster, directory, &[]);
        let file = open_rw(&mount.path("file"));
        lock(&file, "ofd", "w").unwrap();
        works(&file).unwrap();
        drop(file);
        let backend = mount.status().backend_pid.unwrap();
        let mut of_first = sessions(cluster, "mds.a").into_iter();
        let (_, name, _) = of_first.find(|(_, _, pid)| *pid == backend).unwrap();
        // Name of the mount, and number of the generation.
        let (of_mount, _) = name.rsplit_once('-').unwrap();
        before(&mount);
        mount.end();
        let mut left = sessions(cluster, "mds.a");
        left.retain(|(_, name, _)| name.starts_with(of_mount));
        assert_eq!(left, [], "{directory}");
    }
}

// ---- a key for one directory -----------------------------------------------------------------

/// Runs `work` as another user with supplementary groups, in a thread of its own.
fn as_user<T: Send + 'static>(groups: &[u32], work: impl FnOnce() -> T + Send + 'static) -> T {
    let groups = groups.to_vec();
    within(PATIENCE, "another user", move || {
        // SAFETY: setgroups(2), of this thread only, reads as many numbers as it is told.
        let set = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
        assert_eq!(set, 0);
        setfsgid(Gid::from_raw(1000));
        setfsuid(Uid::from_raw(1000));
        work()
    })
}

#[test]
fn a_key_for_one_directory_is_enough() {
    const GROUP: u32 = 4242;
    let cluster = Cluster::shared();
    cluster.make_dir("/app");
    let keyring = cluster.authorize("client.app", "cephfs", "/app");
    let keyring = format!("--keyring={}", keyring.display());
    let mount = || Mount::of_ceph(cluster, "/app", &["--id=app", &keyring]);
    let (a, b) = (mount(), mount());

    let nameless = open_rw(&a.path("nameless"));
    nameless.write_all_at(b"still", 0).unwrap();
    fs::remove_file(a.path("nameless")).unwrap();
    let held = open_rw(&a.path("held"));
    lock(&held, "ofd", "w").unwrap();
    let behind = open_rw(&b.path("held"));

    let (shared, secret) = (a.path("shared"), a.path("secret"));
    fs::create_dir(&shared).unwrap();
    fs::write(&secret, "secret").unwrap();
    for (path, mode) in [(&shared, 0o770), (&secret, 0o640)] {
        chown(path, Some(0), Some(GROUP)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    for death in 0..4 {
        let began = Instant::now();
        let mut bytes = [0; 5];
        nameless.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"still");
        nameless.write_all_at(b"still", 0).unwrap();
        works(&held).unwrap();
        assert_eq!(lock(&behind, "ofd", "w"), Err(nix::errno::Errno::EAGAIN));

        let (at, file) = (shared.join(format!("{death}")), secret.clone());
        as_user(&[7, GROUP], move || {
            drop(open_rw(&at));
            assert_eq!(fs::metadata(&at).unwrap().uid(), 1000);
            assert_eq!(fs::read(&file).unwrap(), b"secret");
            let write = OpenOptions::new().write(true).open(&file);
            assert_eq!(errno(write), Some(libc::EACCES));
        });
        let (at, file) = (shared.join("denied"), secret.clone());
        as_user(&[7], move || {
            assert_eq!(errno(fs::write(&at, "")), Some(libc::EACCES));
            assert_eq!(errno(fs::read(&file)), Some(libc::EACCES));
        });
        eprintln!("death {death}: {:?}", began.elapsed());
        a.replace_backend();
    }
    assert_eq!(a.status().lost_locks, 0);
    lock(&held, "ofd", "u").unwrap();
    lock(&behind, "ofd", "w").unwrap();
    drop((nameless, held, behind));
    a.end();
    b.end();
}
