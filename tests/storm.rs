//! Everything at once, while the backend is killed at random.
//!
//! EVERMOUNT_KILLS says how many kills (40 by default; the long form is 200 and more), EVERMOUNT_SEED
//! repeats a run's choices.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::tools::{Actor, Chance, act, entries, kills, open_rw, percentiles};
use common::{Mount, PATIENCE, ceph_is_wanted, errno, store_knows, until, within};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Advice, AtFlags, Mode, OFlags, StatxFlags, statx};

/// Not a test: the other process ([`Actor`]).
#[test]
#[ignore = "started by the tests of this file"]
fn actor() {
    act();
}

/// Those who use the mount while the storm lasts. Each accepts no error.
struct Crew {
    stop: Arc<AtomicBool>,
    members: Vec<Member>,
}

struct Member {
    name: String,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Crew {
    fn new() -> Crew {
        Crew {
            stop: Arc::default(),
            members: Vec::new(),
        }
    }

    /// `begin` makes what the member needs and returns what it does in each round; `end` sees that
    /// nothing was lost.
    fn add<S: Send + 'static>(
        &mut self,
        name: &str,
        mut state: S,
        mut round: impl FnMut(&mut S) + Send + 'static,
        end: impl FnOnce(S) + Send + 'static,
    ) {
        let (stop, rounds) = (self.stop.clone(), Arc::new(AtomicU64::new(0)));
        let count = rounds.clone();
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                round(&mut state);
                count.fetch_add(1, Ordering::Relaxed);
            }
            end(state);
        });
        self.members.push(Member {
            name: name.to_owned(),
            rounds,
            thread: thread.unwrap(),
        });
    }

    /// Everybody has done something, and nobody gave up.
    fn all_did_something(&self) -> bool {
        for member in &self.members {
            assert!(!member.thread.is_finished(), "{} gave up", member.name);
        }
        self.members
            .iter()
            .all(|m| m.rounds.load(Ordering::Relaxed) > 0)
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for member in self.members {
            let rounds = member.rounds.load(Ordering::Relaxed);
            let thread = member.thread;
            within(3 * PATIENCE, &member.name, move || thread.join())
                .unwrap_or_else(|e| std::panic::resume_unwind(e));
            eprintln!("{}: {rounds} rounds", member.name);
        }
    }
}

/// A file whose contents are known.
struct Known {
    file: File,
    contents: Vec<u8>,
}

impl Known {
    fn new(file: File, len: usize, chance: &mut Chance) -> Known {
        let contents: Vec<u8> = (0..len).map(|_| chance.next() as u8).collect();
        file.write_all_at(&contents, 0).unwrap();
        Known { file, contents }
    }

    fn check(&self) {
        // Past the kernel's pages, or it would be its memory that is tested.
        self.file.sync_data().unwrap();
        rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed).unwrap();
        let mut back = vec![0; self.contents.len()];
        self.file.read_exact_at(&mut back, 0).unwrap();
        assert!(back == self.contents, "contents differ");
    }

    /// Changes a part at most `max` long and looks at it.
    fn change(&mut self, max: usize, chance: &mut Chance) {
        let len = 1 + chance.below(max.min(self.contents.len()) as u64) as usize;
        let at = chance.below((self.contents.len() - len + 1) as u64) as usize;
        let part = &mut self.contents[at..at + len];
        let fill = chance.next().to_ne_bytes();
        part.iter_mut()
            .zip(fill.iter().cycle())
            .for_each(|(b, f)| *b = *f);
        self.file.write_all_at(part, at as u64).unwrap();
        let mut back = vec![0; len];
        self.file.read_exact_at(&mut back, at as u64).unwrap();
        assert!(back == part, "what was read is not what was written");
    }
}

fn writers(crew: &mut Crew, mount: &Mount, chance: &mut Chance) {
    for (n, max) in [(0, 4096), (1, 100_000), (2, 1 << 20)] {
        let (path, behind) = (
            mount.path(&format!("rw-{n}")),
            mount.behind(&format!("rw-{n}")),
        );
        let mut chance = chance.split();
        let known = Known::new(open_rw(&path), 2 << 20, &mut chance);
        crew.add(
            &format!("writer {n}"),
            known,
            move |known| {
                for _ in 0..10 {
                    known.change(max, &mut chance);
                }
                if chance.below(4) == 0 {
                    known.check();
                }
            },
            move |known| {
                known.check();
                assert!(fs::read(behind).unwrap() == known.contents);
            },
        );
    }
}

const RECORD: usize = 48;

fn appenders(crew: &mut Crew, mount: &Mount) -> Vec<Arc<AtomicU64>> {
    let counts: Vec<Arc<AtomicU64>> = vec![Arc::default(), Arc::default()];
    for (n, count) in counts.iter().enumerate() {
        let mut options = OpenOptions::new();
        let file = options
            .append(true)
            .create(true)
            .open(mount.path("log"))
            .unwrap();
        let count = count.clone();
        crew.add(
            &format!("appender {n}"),
            file,
            move |file| {
                let number = count.fetch_add(1, Ordering::Relaxed);
                let record = format!("{n} {number:0width$}\n", width = RECORD - 3);
                assert_eq!(file.write(record.as_bytes()).unwrap(), RECORD);
            },
            drop,
        );
    }
    counts
}

/// Every record is there once, in the order in which its appender wrote it.
fn check_log(path: &Path, counts: &[Arc<AtomicU64>]) {
    let text = fs::read_to_string(path).unwrap();
    let mut next = vec![0u64; counts.len()];
    for line in text.lines() {
        assert_eq!(line.len() + 1, RECORD, "{line}");
        let (who, number) = line.split_once(' ').unwrap();
        let who: usize = who.parse().unwrap();
        assert_eq!(number.parse::<u64>().unwrap(), next[who], "appender {who}");
        next[who] += 1;
    }
    for (next, count) in next.iter().zip(counts) {
        assert_eq!(*next, count.load(Ordering::Relaxed), "records were lost");
    }
}

fn mapper(crew: &mut Crew, mount: &Mount, chance: &mut Chance) {
    const LEN: usize = 1 << 20;
    let file = open_rw(&mount.path("mapped"));
    file.set_len(LEN as u64).unwrap();
    // SAFETY: nobody truncates this file while it is mapped.
    let map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    let behind = mount.behind("mapped");
    let mut chance = chance.split();
    crew.add(
        "mapper",
        (map, vec![0u8; LEN]),
        move |(map, model)| {
            for _ in 0..20 {
                let at = chance.below(LEN as u64 - 8) as usize;
                let value = chance.next().to_ne_bytes();
                map[at..at + 8].copy_from_slice(&value);
                model[at..at + 8].copy_from_slice(&value);
            }
            if chance.below(3) == 0 {
                map.flush().unwrap();
            } else {
                map.flush_async().unwrap();
            }
        },
        move |(map, model)| {
            map.flush().unwrap();
            assert!(map[..] == model[..]);
            assert!(fs::read(behind).unwrap() == model, "a mapped page was lost");
        },
    );
}

/// Operations on names, each of which has one right outcome.
fn namers(crew: &mut Crew, mount: &Mount, chance: &mut Chance) {
    for n in 0..2 {
        let dir = mount.path(&format!("names-{n}"));
        fs::create_dir(&dir).unwrap();
        let behind = mount.behind(&format!("names-{n}"));
        let mut chance = chance.split();
        let mut number = 0u64;
        crew.add(
            &format!("namer {n}"),
            dir,
            move |dir| {
                number += 1;
                let at = |kind: &str| dir.join(format!("{kind}-{number}"));
                let (file, other) = (at("file"), at("other"));
                let mut new = OpenOptions::new();
                new.write(true).create_new(true).mode(0o640);
                let mut opened = new.open(&file).unwrap();
                opened.write_all(b"0123456789").unwrap();
                assert_eq!(errno(new.open(&file)), Some(libc::EEXIST));
                // O_CREAT of what is there, O_TRUNC of what has contents.
                assert_eq!(open_rw(&file).metadata().unwrap().len(), 10);
                let truncated = File::create(&file).unwrap();
                assert_eq!(opened.metadata().unwrap().len(), 0);
                truncated.write_all_at(b"abc", 0).unwrap();
                assert_eq!(fs::read(&file).unwrap(), b"abc");
                fs::hard_link(&file, &other).unwrap();
                assert_eq!(errno(fs::hard_link(&file, &other)), Some(libc::EEXIST));
                assert_eq!(fs::metadata(&file).unwrap().nlink(), 2);
                fs::remove_file(&other).unwrap();
                assert_eq!(errno(fs::remove_file(&other)), Some(libc::ENOENT));
                fs::rename(&file, &other).unwrap();
                assert_eq!(errno(fs::rename(&file, &other)), Some(libc::ENOENT));
                symlink("other", &file).unwrap();
                assert_eq!(fs::read_link(&file).unwrap(), Path::new("other"));
                fs::create_dir(at("dir")).unwrap();
                assert_eq!(errno(fs::create_dir(at("dir"))), Some(libc::EEXIST));
                fs::rename(&other, at("dir").join("in")).unwrap();
                assert_eq!(errno(fs::remove_dir(at("dir"))), Some(libc::ENOTEMPTY));
                fs::remove_file(at("dir").join("in")).unwrap();
                fs::remove_dir(at("dir")).unwrap();
                fs::remove_file(&file).unwrap();
                assert_eq!(fs::read_dir(&*dir).unwrap().count(), 0);
                if chance.below(2) == 0 {
                    opened.write_all(b"unlinked").unwrap();
                    assert_eq!(opened.metadata().unwrap().len(), 18);
                }
            },
            move |_| assert_eq!(fs::read_dir(behind).unwrap().count(), 0),
        );
    }
}

/// Files without a name, each kept for a while.
fn keepers(crew: &mut Crew, mount: &Mount, chance: &mut Chance) {
    type Make = fn(&Path, u64) -> File;
    let kinds: [(&str, Make); 3] = [
        ("unlinked", |dir, n| {
            let path = dir.join(format!("{n}"));
            let file = open_rw(&path);
            fs::remove_file(path).unwrap();
            file
        }),
        ("renamed-over", |dir, n| {
            let path = dir.join(format!("{n}"));
            let file = open_rw(&path);
            fs::rename(&path, dir.join("target")).unwrap();
            file
        }),
        ("tmpfile", |dir, _| {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            rustix::fs::open(dir, flags, Mode::RWXU).unwrap().into()
        }),
    ];
    // CephFS has no files made without a name.
    let wanted = |kind| kind != "tmpfile" || !ceph_is_wanted();
    for (kind, make) in kinds.into_iter().filter(|(kind, _)| wanted(*kind)) {
        let dir = mount.path(kind);
        fs::create_dir(&dir).unwrap();
        let mut chance = chance.split();
        let mut number = 0;
        crew.add(
            kind,
            Vec::<Known>::new(),
            move |kept| {
                number += 1;
                let len = 1 + chance.below(20_000) as usize;
                kept.push(Known::new(make(&dir, number), len, &mut chance));
                if kept.len() > 12 {
                    let one = chance.below(kept.len() as u64) as usize;
                    kept.swap_remove(one);
                }
                for _ in 0..3 {
                    let one = chance.below(kept.len() as u64) as usize;
                    kept[one].change(5000, &mut chance);
                    kept[one].check();
                }
            },
            |kept| kept.iter().for_each(Known::check),
        );
    }
}

fn listers(crew: &mut Crew, mount: &Mount, count: usize, chance: &mut Chance) {
    let dir = mount.path("many");
    let behind = mount.behind("many");
    fs::create_dir(&behind).unwrap();
    let name = |n: usize| format!("entry-{n:06}");
    for n in 0..count {
        File::create(behind.join(name(n))).unwrap();
    }
    let wanted: HashSet<String> = (0..count).map(name).collect();
    for size in [1000, 6000] {
        let mut chance = chance.split();
        let (dir, wanted) = (dir.clone(), wanted.clone());
        crew.add(
            &format!("lister with {size} bytes"),
            (),
            move |()| {
                let stream = File::open(&dir).unwrap();
                let mut seen = HashSet::new();
                loop {
                    let size = size / 2 + chance.below(size / 2);
                    let next = entries(&stream, size as usize).unwrap();
                    if next.is_empty() {
                        break;
                    }
                    for (name, _) in next {
                        if name.starts_with("entry-") {
                            assert!(wanted.contains(&name), "{name} never was");
                            assert!(seen.insert(name.clone()), "{name} came twice");
                        }
                    }
                }
                let missing: Vec<_> = wanted.difference(&seen).take(3).collect();
                assert!(missing.is_empty(), "{missing:?} did not come");
            },
            drop,
        );
    }
    let mut chance = chance.split();
    crew.add(
        "changer of the listed directory",
        HashSet::<u64>::new(),
        move |others| {
            let n = chance.below(200);
            let path = dir.join(format!("other-{n}"));
            if others.remove(&n) {
                fs::remove_file(path).unwrap();
            } else {
                OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .open(path)
                    .unwrap();
                others.insert(n);
            }
        },
        drop,
    );
}

/// Processes that hold locks all the time; whoever tries them, before or behind the mount, fails.
fn lockers(crew: &mut Crew, mount: &Mount) {
    let kinds = [
        ("posix", "posix 0 w 0 0"),
        ("ofd", "ofd 0 w 0 0"),
        ("flock", "flock 0 w"),
    ];
    for (kind, lock) in kinds.into_iter().filter(|(kind, _)| store_knows(kind)) {
        let path = mount.path(&format!("lock-{kind}"));
        drop(open_rw(&path));
        let mut holder = Actor::on(&path);
        assert_eq!(holder.ask(lock), "ok");
        let front = Actor::on(&path);
        let behind = Actor::on(&mount.behind(&format!("lock-{kind}")));
        let asks = kind == "posix";
        crew.add(
            &format!("contender for {kind}"),
            (holder, front, behind),
            move |(holder, front, behind)| {
                assert_eq!(front.ask(lock), "EAGAIN", "in front");
                assert_eq!(behind.ask(lock), "EAGAIN", "behind");
                // The owner may go on to use it.
                assert_eq!(holder.ask(lock), "ok");
                if asks {
                    let held = format!("{} w 0 0", holder.pid());
                    assert_eq!(front.ask("posixget 0 r 0 0"), held);
                }
            },
            move |(mut holder, mut front, behind)| {
                drop(behind);
                assert_eq!(holder.ask(&lock.replace(" w", " u")), "ok");
                assert_eq!(front.ask(lock), "ok");
            },
        );
    }
    // Locks that come and go, with waiting.
    let path = mount.path("lock-shared");
    drop(open_rw(&path));
    let inside = Arc::new(AtomicBool::new(false));
    for n in 0..3 {
        let inside = inside.clone();
        crew.add(
            &format!("user of a lock {n}"),
            open_rw(&path),
            move |file| {
                rustix::fs::flock(&*file, rustix::fs::FlockOperation::LockExclusive).unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two owners");
                file.write_all_at(b"mine", 0).unwrap();
                assert!(inside.swap(false, Ordering::SeqCst), "two owners");
                rustix::fs::flock(&*file, rustix::fs::FlockOperation::Unlock).unwrap();
            },
            drop,
        );
    }
}

/// What must not change: device, inode and mount numbers.
fn identity(mount: &Mount) -> Vec<(u32, u32, u64, u64)> {
    let flags = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    ["", "rw-0", "many", "names-0"]
        .iter()
        .map(|name| {
            let path = mount.path(name);
            let st = statx(rustix::fs::CWD, path, AtFlags::empty(), flags).unwrap();
            (
                st.stx_dev_major,
                st.stx_dev_minor,
                st.stx_ino,
                st.stx_mnt_id,
            )
        })
        .collect()
}

fn mountinfo(mount: &Mount) -> String {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let point = mount.point.to_str().unwrap();
    let mut lines = text.lines().filter(|l| l.split(' ').nth(4) == Some(point));
    let line = lines.next().expect("mounted").to_owned();
    assert_eq!(lines.next(), None, "mounted twice");
    line
}

/// Names, types, sizes and inode numbers of a tree.
fn tree(root: &Path) -> BTreeMap<PathBuf, (u32, u64, u64)> {
    let mut all = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            if meta.is_dir() {
                todo.push(path.clone());
            }
            let size = if meta.is_dir() { 0 } else { meta.len() };
            let name = path.strip_prefix(root).unwrap().to_path_buf();
            all.insert(name, (meta.mode(), size, meta.ino()));
        }
    }
    all
}

#[test]
fn a_storm_of_kills_costs_nobody_anything() {
    let wanted = kills(40);
    let mut chance = Chance::new("storm");
    let mount = Mount::new();
    let mut crew = Crew::new();
    writers(&mut crew, &mount, &mut chance);
    let counts = appenders(&mut crew, &mount);
    mapper(&mut crew, &mount, &mut chance);
    namers(&mut crew, &mount, &mut chance);
    keepers(&mut crew, &mount, &mut chance);
    let many = if wanted >= 200 { 100_000 } else { 20_000 };
    listers(&mut crew, &mount, many, &mut chance);
    lockers(&mut crew, &mount);
    let watched = mount.path("watched");
    fs::create_dir(&watched).unwrap();
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, &watched, WatchFlags::CREATE).unwrap();
    let before = (identity(&mount), mountinfo(&mount));

    let mut pauses = Vec::new();
    let (mut done, mut takeovers) = (0, mount.status().takeovers);
    let deadline = Instant::now() + Duration::from_secs(1) * wanted as u32 + 5 * PATIENCE;
    // A session of CephFS takes its time to begin, and then something has to be done in it.
    let (least, most) = if ceph_is_wanted() {
        (50, 1000)
    } else {
        (5, 100)
    };
    // Everybody has to have been through it.
    while done < wanted || !crew.all_did_something() {
        assert!(
            Instant::now() < deadline,
            "somebody gets nowhere\n{:#?}",
            mount.status()
        );
        std::thread::sleep(chance.millis(least, most));
        let status = mount.status();
        if status.takeovers != takeovers {
            takeovers = status.takeovers;
            pauses.extend(status.last_pause_ms);
        }
        if let Some(pid) = status.backend_pid {
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
            done += 1;
        }
    }
    let status = mount.wait("serving", |s| s.outage_ms.is_none());
    crew.end();

    check_log(&mount.behind("log"), &counts);
    check_log(&mount.path("log"), &counts);
    assert_eq!(before, (identity(&mount), mountinfo(&mount)));
    File::create(watched.join("new")).unwrap();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    let name = events.next().map(|e| e.file_name().map(|n| n.to_owned()));
    assert_eq!(name.unwrap().as_deref(), Some(c"new"));
    assert_eq!(
        (status.poisoned, status.ambiguous, status.lost_locks),
        (0, 0, 0)
    );
    assert!(
        tree(&mount.point) == tree(&mount.behind("")),
        "the trees differ"
    );
    drop(watch);
    eprintln!(
        "{done} kills, {} takeovers, {} issued again of which {} were done; pauses: {}",
        status.takeovers,
        status.reissued,
        status.verified_done,
        percentiles(&mut pauses)
    );
    mount.wait("without locks, handles and waiters", |s| {
        (s.locks, s.waiters, s.open_files, s.open_dirs) == (0, 0, 0, 0)
    });
    mount.end();
}

/// Kills `wanted` backends, one every now and then, and prints how long the mount paused: as it says
/// itself, and as a program saw it that asks for attributes and reads all the time.
fn measure(what: &str, mount: &Mount, wanted: usize, chance: &mut Chance) {
    let path = mount.path("measured");
    let file = open_rw(&path);
    file.write_all_at(b"contents", 0).unwrap();
    let mut crew = Crew::new();
    let worst = Arc::new(AtomicU64::new(0));
    let seen = worst.clone();
    crew.add(
        "measuring",
        Instant::now(),
        move |last| {
            // Asks the backend, whatever the kernel remembers.
            let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::EMPTY_PATH;
            statx(&file, "", flags, StatxFlags::BASIC_STATS).unwrap();
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
            let mut contents = [0; 8];
            file.read_exact_at(&mut contents, 0).unwrap();
            assert_eq!(&contents, b"contents");
            let now = Instant::now();
            let gap = now.duration_since(*last).as_micros() as u64;
            *last = now;
            seen.fetch_max(gap, Ordering::Relaxed);
        },
        drop,
    );
    let rounds = crew.members[0].rounds.clone();
    let (mut own, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..wanted {
        std::thread::sleep(chance.millis(20, 60));
        worst.store(0, Ordering::Relaxed);
        mount.replace_backend();
        let now = rounds.load(Ordering::Relaxed);
        assert!(until(PATIENCE, || rounds.load(Ordering::Relaxed) > now + 2));
        own.extend(mount.status().last_pause_ms);
        theirs.push(worst.load(Ordering::Relaxed) as f64 / 1000.0);
    }
    crew.end();
    eprintln!("{what}: status: {}", percentiles(&mut own));
    eprintln!("{what}: application: {}", percentiles(&mut theirs));
}

#[test]
fn the_pause_is_measured_idle_and_under_load() {
    let wanted = kills(40);
    let mut chance = Chance::new("pause");
    let mount = Mount::new();
    measure("idle", &mount, wanted, &mut chance);
    let mut crew = Crew::new();
    writers(&mut crew, &mount, &mut chance);
    namers(&mut crew, &mount, &mut chance);
    keepers(&mut crew, &mount, &mut chance);
    measure("under load", &mount, wanted, &mut chance);
    crew.end();
    mount.end();
}
