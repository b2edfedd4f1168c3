use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use proptest::prelude::*;

use super::check::{Seen, check};
use super::words::Killed;
use super::*;
use crate::region::Identity;
use crate::wire::abi::Attr;

fn id(n: u64) -> Identity {
    let mut bytes = *b"ext4:........";
    bytes[5..].copy_from_slice(&n.to_le_bytes());
    Identity::new(&bytes).unwrap()
}

fn attr(ino: u64) -> Attr {
    Attr {
        ino,
        mode: libc::S_IFREG | 0o644,
        size: 10 * ino,
        blksize: 4096,
        blocks: (10 * ino).div_ceil(512),
        ..Attr::default()
    }
}

fn tables() -> Tables {
    let mut tables = Tables::create().unwrap();
    tables.set_root(&id(0), &attr(1));
    tables
}

fn name(name: &str) -> &OsStr {
    OsStr::new(name)
}

fn successor(t: &Tables) -> Tables {
    Tables::open(t.as_fd().try_clone_to_owned().unwrap()).unwrap()
}

fn posix(nodeid: u64, owner: u64, exclusive: bool, start: u64, end: u64) -> Lock {
    Lock {
        nodeid,
        owner,
        flock: false,
        exclusive,
        start,
        end,
        pid: owner as u32,
        fh: 7,
    }
}

fn gone(n: u64) -> Forget {
    Forget::Gone {
        identity: id(n),
        vaulted: false,
    }
}

#[test]
fn an_inode_is_found_by_id_identity_and_name_until_it_is_forgotten() {
    let mut t = tables();
    let a = t
        .look_up(&id(5), Some((1, name("hello"))), &attr(5))
        .unwrap();
    assert_eq!(t.find(&id(5)), Some(a));
    assert_eq!(t.find_name(1, name("hello")), Some(a));
    assert_eq!(t.attr(a), Some(attr(5)));
    assert_eq!(t.node(1).unwrap().identity, id(0));
    assert_eq!(t.forget(a, 1), gone(5));
    assert_eq!(t.find(&id(5)), None);
    assert_eq!(t.find_name(1, name("hello")), None);
    assert_eq!(t.node(a), None);
    assert_eq!(t.forget(a, 1), Forget::Unknown);
    check(&t);
}

#[test]
fn a_node_id_is_never_used_again() {
    let mut t = tables();
    let mut seen = std::collections::HashSet::new();
    for round in 0..20 {
        let ids: Vec<u64> = (1..200)
            .map(|n| t.look_up(&id(n), None, &attr(n)).unwrap())
            .collect();
        assert!(ids.iter().all(|&id| seen.insert(id)), "round {round}");
        for id in ids {
            t.forget(id, 1);
        }
        // Names and handles use the pages in between.
        let fhs: Vec<u64> = (0..300).map(|_| t.reserve_handle().unwrap()).collect();
        for fh in fhs {
            t.close_handle(fh);
        }
    }
    check(&t);
}

#[test]
fn a_handle_is_never_used_again_and_never_zero() {
    let mut t = tables();
    let mut seen = std::collections::HashSet::from([0]);
    for _ in 0..20 {
        let fhs: Vec<u64> = (0..300).map(|_| t.reserve_handle().unwrap()).collect();
        assert!(fhs.iter().all(|&fh| seen.insert(fh)));
        for fh in fhs {
            assert_eq!(t.close_handle(fh), None);
            assert_eq!(t.close_handle(fh), None);
        }
    }
    check(&t);
}

#[test]
fn the_root_is_node_1_and_is_never_forgotten() {
    let mut t = tables();
    assert_eq!(t.find(&id(0)), Some(1));
    assert_eq!(t.forget(1, 1000), Forget::Remains);
    assert_eq!(t.node(1).unwrap().nlookup, 1);
    t.set_root(&id(9), &attr(9));
    assert_eq!((t.find(&id(0)), t.find(&id(9))), (None, Some(1)));
    assert_eq!(t.path(1, 0), Some(vec![]));
    check(&t);
}

#[test]
fn a_path_follows_names_and_ends_at_a_lost_one_a_loop_or_the_limit() {
    let mut t = tables();
    let a = t.look_up(&id(1), Some((1, name("a"))), &attr(1)).unwrap();
    let b = t.look_up(&id(2), Some((a, name("bb"))), &attr(2)).unwrap();
    assert_eq!(t.path(b, 4).unwrap(), b"a/bb");
    assert_eq!(t.path(b, 3), None);
    t.drop_name(1, name("a"));
    assert_eq!(t.path(b, 100), None);
    t.look_up(&id(1), Some((b, name("a"))), &attr(1)).unwrap();
    assert_eq!(t.path(b, usize::MAX), None);
}

#[test]
fn a_name_belongs_to_the_inode_it_was_last_seen_to_name() {
    let mut t = tables();
    let a = t.look_up(&id(1), Some((1, name("x"))), &attr(1)).unwrap();
    let b = t.look_up(&id(2), Some((1, name("x"))), &attr(2)).unwrap();
    assert_eq!((t.name_of(a), t.find_name(1, name("x"))), (None, Some(b)));
    assert_eq!(t.node(a).unwrap().parent, 0);
    t.rename(1, name("x"), 1, name("y"));
    assert_eq!(t.name_of(b), Some((1, OsString::from("y"))));
    t.look_up(&id(1), Some((1, name("z"))), &attr(1)).unwrap();
    t.exchange(1, name("y"), 1, name("z"));
    assert_eq!(t.find_name(1, name("y")), Some(a));
    assert_eq!(t.find_name(1, name("z")), Some(b));
    t.exchange(1, name("y"), 1, name("unknown"));
    assert_eq!(t.find_name(1, name("unknown")), Some(a));
    t.rename(1, name("unknown"), 1, name("z"));
    assert_eq!((t.name_of(b), t.find_name(1, name("z"))), (None, Some(a)));
    check(&t);
}

#[test]
fn names_of_every_length_are_kept_up_to_a_page() {
    let mut t = tables();
    for len in (1..300).chain([511, 512, 513, 1023, 1024, 2048, 4096]) {
        let long = "n".repeat(len);
        let n = t.look_up(&id(len as u64), Some((1, name(&long))), &attr(1));
        assert_eq!(t.find_name(1, name(&long)), Some(n.unwrap()), "{len}");
    }
    let long = "n".repeat(4097);
    let n = t.look_up(&id(1), Some((1, name(&long))), &attr(1)).unwrap();
    assert_eq!(t.name_of(n), None);
    check(&t);
}

#[test]
fn an_inode_without_identity_is_another_one_each_time() {
    let mut t = tables();
    let a = t.look_up(&Identity::NONE, None, &attr(1)).unwrap();
    let b = t.look_up(&Identity::NONE, None, &attr(1)).unwrap();
    assert_ne!(a, b);
    assert_eq!(t.find(&Identity::NONE), None);
    t.forget(a, 1);
    check(&t);
}

#[test]
fn a_lookup_taken_back_is_one_less() {
    let mut t = tables();
    let a = t.look_up(&id(1), None, &attr(1)).unwrap();
    t.look_up(&id(1), None, &attr(1)).unwrap();
    assert_eq!(t.unlook_up(a), Forget::Remains);
    t.set_vaulted(a, true);
    assert!(t.node(a).unwrap().vaulted);
    let gone = Forget::Gone {
        identity: id(1),
        vaulted: true,
    };
    assert_eq!(t.unlook_up(a), gone);
}

#[test]
fn a_lock_of_the_kernel_splits_and_merges_as_posix_says() {
    let mut t = tables();
    t.set_lock(&posix(1, 1, true, 0, 99)).unwrap();
    t.set_lock(&posix(1, 1, false, 10, 19)).unwrap();
    assert_eq!(t.locks(), 3);
    assert_eq!(t.conflict(&posix(1, 2, false, 10, 19)), None);
    assert_eq!(t.conflict(&posix(1, 2, false, 15, 20)).unwrap().start, 20);
    t.set_lock(&posix(1, 1, true, 10, 19)).unwrap();
    assert_eq!(t.locks(), 1);
    t.unlock(1, 1, false, 50, u64::MAX).unwrap();
    assert_eq!(t.locks_on(1)[0].end, 49);
    assert!(t.has_locks(1, 1, false) && !t.has_locks(1, 1, true));
    assert!(t.unlock_owner(1, 1, false) && !t.unlock_owner(1, 1, false));
    check(&t);
}

#[test]
fn a_flock_is_of_the_whole_file_and_no_matter_of_posix_locks() {
    let mut t = tables();
    let flock = Lock {
        flock: true,
        ..posix(1, 1, true, 5, 6)
    };
    t.set_lock(&flock).unwrap();
    assert_eq!(t.conflict(&posix(1, 2, true, 0, 9)), None);
    let other = Lock { owner: 2, ..flock };
    assert_eq!(t.conflict(&other).unwrap().end, u64::MAX);
    t.set_lock(&Lock {
        exclusive: false,
        ..flock
    })
    .unwrap();
    assert_eq!(t.locks(), 1);
    t.unlock(1, 1, true, 0, 0).unwrap();
    assert_eq!(t.locks(), 0);
    check(&t);
}

#[test]
fn the_owners_that_locked_through_a_handle_are_those_whose_latest_lock_was() {
    let mut t = tables();
    let handle = Handle {
        nodeid: 1,
        open_flags: 2,
        directory: false,
        uid: 1,
        gid: 2,
        pid: 3,
        lost: false,
    };
    let (a, b) = (t.reserve_handle().unwrap(), t.reserve_handle().unwrap());
    assert_eq!(t.handle(a), None);
    t.open_handle(a, handle);
    t.open_handle(b, handle);
    let lock = |fh, owner, start| Lock {
        fh,
        ..posix(1, owner, true, start, start)
    };
    t.set_lock(&lock(a, 1, 0)).unwrap();
    t.set_lock(&lock(a, 2, 10)).unwrap();
    t.set_lock(&lock(b, 1, 20)).unwrap();
    assert_eq!(t.locks_through(a), [(1, 2, false)]);
    assert_eq!(t.locks_through(b), [(1, 1, false)]);
    assert_eq!(t.open_files(), 2);
    assert_eq!(t.close_handle(a), Some(handle));
    assert_eq!((t.handle(a), t.locks_through(a)), (None, vec![]));
    check(&t);
}

#[test]
fn waiters_are_found_by_request_by_inode_and_all_in_order() {
    let mut t = tables();
    let waiter = |n: u64| Waiter {
        unique: 2 * n,
        fd_index: 3,
        sequence: 1000 - n,
        request: [n as u8; 88],
    };
    let a = t.look_up(&id(1), None, &attr(1)).unwrap();
    for n in 0..200 {
        t.add_waiter(if n % 2 == 0 { 1 } else { a }, &waiter(n))
            .unwrap();
    }
    check(&t);
    assert_eq!(t.waiters_on(1).len(), 100);
    assert!(t.waiters().is_sorted_by_key(|w| w.sequence));
    assert_eq!(t.remove_waiter(20), Some(waiter(10)));
    assert_eq!(t.remove_waiter(20), None);
    t.forget(a, 1);
    assert_eq!(t.waiters_len(), 99);
    assert_eq!(t.add_waiter(a, &waiter(1)), Err(Full));
    check(&t);
}

#[test]
fn ten_thousand_locks_on_a_file_are_all_given_back() {
    let mut t = tables();
    for n in 0..10_000 {
        t.set_lock(&posix(1, n % 2, true, 4 * n, 4 * n + 1))
            .unwrap();
    }
    assert_eq!(t.locks(), 10_000);
    assert!(t.unlock_owner(1, 0, false));
    assert!(t.unlock_owner(1, 1, false));
    check(&t);
    assert!(allocated(&t) < 512 * 1024);
}

#[test]
fn what_was_dropped_gives_its_memory_back() {
    let mut t = tables();
    let ids: Vec<u64> = (1..50_000)
        .map(|n| {
            let name = format!("a name of twenty-four {n:x}");
            t.look_up(&id(n), Some((1, OsStr::new(&name))), &attr(n))
                .unwrap()
        })
        .collect();
    let full = allocated(&t);
    for id in ids {
        t.forget(id, 1);
    }
    check(&t);
    assert!(full > 8_000_000, "{full}");
    assert!(allocated(&t) < 512 * 1024, "{}", allocated(&t));
    assert!(t.bytes_in_use() < 128 * 1024, "{}", t.bytes_in_use());
}

/// Bytes of memory the kernel has given the file.
fn allocated(t: &Tables) -> u64 {
    let file = std::fs::File::from(t.as_fd().try_clone_to_owned().unwrap());
    file.metadata().unwrap().blocks() * 512
}

#[test]
fn a_successor_refuses_what_are_no_tables() {
    let other = crate::region::memory::Memory::create("other", 1 << 20).unwrap();
    assert!(Tables::open(other.as_fd().try_clone_to_owned().unwrap()).is_err());
}

#[test]
fn changes_made_atomically_are_all_undone_when_the_writer_dies_before_the_last() {
    let mut t = tables();
    let before = Seen::of(&t);
    let died = catch_unwind(AssertUnwindSafe(|| {
        t.atomically(|t| {
            t.mark(0, 5);
            t.look_up(&id(1), Some((1, name("a"))), &attr(1)).unwrap();
            t.reserve_handle().unwrap();
            std::panic::resume_unwind(Box::new(Killed));
        });
    }));
    assert!(died.is_err());
    let t = successor(&t);
    check(&t);
    assert_eq!(Seen::of(&t), before);
}

#[test]
fn a_change_that_finds_the_table_full_changes_nothing_of_the_change_around_it() {
    let mut t = tables();
    t.atomically(|t| {
        t.set_lock(&posix(1, 1, true, 0, 9)).unwrap();
        assert_eq!(t.set_lock(&posix(77, 1, true, 0, 9)), Err(Full));
        t.mark(0, 1);
    });
    check(&t);
    assert_eq!((t.locks(), t.marked(0)), (1, 1));
}

/// A small random number generator, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn pick(&mut self, from: impl Iterator<Item = u64>) -> u64 {
        let all: Vec<u64> = from.collect();
        match all.len() {
            0 => 0,
            len => all[self.below(len as u64) as usize],
        }
    }
}

/// A change, with all it needs.
#[derive(Clone, Debug)]
enum Change {
    LookUp(u64, Option<(u64, String)>),
    Forget(u64, u64),
    DropName(u64, String),
    Rename(u64, String, u64, String),
    Exchange(u64, String, u64, String),
    Vaulted(u64, bool),
    NoteAttr(u64, u64),
    Reserve,
    Open(u64, Handle),
    Close(u64),
    Lock(Lock),
    Unlock(u64, u64, bool, u64, u64),
    UnlockOwner(u64, u64, bool),
    AddWaiter(u64, u64),
    RemoveWaiter(u64),
    SetRoot(u64),
    Several(u64, Vec<Change>),
}

impl Change {
    fn apply(&self, t: &mut Tables) {
        match self.clone() {
            Change::LookUp(n, to) => {
                let to = to
                    .as_ref()
                    .map(|(parent, name)| (*parent, OsStr::new(name)));
                t.look_up(&id(n), to, &attr(n)).unwrap();
            }
            Change::Forget(node, n) => drop(t.forget(node, n)),
            Change::DropName(p, n) => t.drop_name(p, name(&n)),
            Change::Rename(p, n, q, m) => t.rename(p, name(&n), q, name(&m)),
            Change::Exchange(p, n, q, m) => t.exchange(p, name(&n), q, name(&m)),
            Change::Vaulted(node, is) => t.set_vaulted(node, is),
            Change::NoteAttr(node, n) => t.note_attr(node, &attr(n)),
            Change::Reserve => drop(t.reserve_handle().unwrap()),
            Change::Open(fh, handle) => t.open_handle(fh, handle),
            Change::Close(fh) => drop(t.close_handle(fh)),
            Change::Lock(lock) => _ = t.set_lock(&lock),
            Change::Unlock(n, o, f, s, e) => t.unlock(n, o, f, s, e).unwrap(),
            Change::UnlockOwner(n, o, f) => drop(t.unlock_owner(n, o, f)),
            Change::AddWaiter(node, unique) => {
                let waiter = Waiter {
                    unique,
                    fd_index: 1,
                    sequence: unique,
                    request: [unique as u8; 88],
                };
                _ = t.add_waiter(node, &waiter);
            }
            Change::RemoveWaiter(unique) => drop(t.remove_waiter(unique)),
            Change::SetRoot(n) => t.set_root(&id(n), &attr(n)),
            Change::Several(mark, changes) => t.atomically(|t| {
                changes.iter().for_each(|change| change.apply(t));
                t.mark(0, mark);
            }),
        }
    }

    /// A change that makes sense for what is in the table.
    fn random(r: &mut Random, t: &Tables, step: u64, grows: bool) -> Change {
        let seen = Seen::of(t);
        let node = r.pick(seen.nodes.keys().copied());
        let parent = r.pick(seen.nodes.keys().copied());
        let fh = r.pick(seen.handles.keys().copied());
        let new_name =
            |r: &mut Random| "n".repeat(1 + r.below(40) as usize) + &r.below(9).to_string();
        let named = |r: &mut Random| {
            let at = r.pick(seen.nodes.keys().copied());
            match t.name_of(at) {
                Some((parent, name)) => (parent, name.into_string().unwrap()),
                None => (1, new_name(r)),
            }
        };
        let lock = |r: &mut Random| {
            let start = r.below(60);
            Lock {
                flock: r.below(5) == 0,
                fh,
                ..posix(
                    node,
                    r.below(3),
                    r.below(2) == 0,
                    start,
                    start + r.below(20),
                )
            }
        };
        match (r.below(30), grows) {
            (0..=9, true) => Change::LookUp(step, Some((parent, new_name(r)))),
            (0..=9, false) => Change::Forget(node, 100),
            (10, _) => Change::LookUp(r.below(step + 1) + 1, None),
            (11, _) => Change::LookUp(r.below(step + 1) + 1, Some(named(r))),
            (12, _) => Change::Forget(node, 1),
            (13, _) => {
                let (p, n) = named(r);
                Change::DropName(p, n)
            }
            (14, _) => {
                let ((p, n), m) = (named(r), new_name(r));
                Change::Rename(p, n, parent, m)
            }
            (15, _) => {
                let ((p, n), (q, m)) = (named(r), named(r));
                Change::Rename(p, n, q, m)
            }
            (16, _) => {
                let ((p, n), (q, m)) = (named(r), named(r));
                Change::Exchange(p, n, q, m)
            }
            (17, _) => Change::Vaulted(node, r.below(2) == 0),
            (18, _) => Change::NoteAttr(node, step),
            (19, true) => Change::Reserve,
            (20, true) => Change::Open(
                t.reserved_handles().last().copied().unwrap_or(0),
                Handle {
                    nodeid: node,
                    open_flags: 1,
                    directory: r.below(2) == 0,
                    uid: 1,
                    gid: 1,
                    pid: 1,
                    lost: false,
                },
            ),
            (19 | 20, false) => Change::Close(fh),
            (21, _) => Change::Close(t.reserved_handles().first().copied().unwrap_or(0)),
            (22 | 23, _) => Change::Lock(lock(r)),
            (24, _) => Change::Unlock(node, r.below(3), false, r.below(60), 60),
            (25, _) => {
                let held = t.all_locks();
                let n = r.below(held.len().max(1) as u64) as usize;
                held.get(n).map_or(Change::Reserve, |held| {
                    Change::UnlockOwner(held.nodeid, held.owner, held.flock)
                })
            }
            (26, _) => Change::AddWaiter(node, step),
            (27, _) => Change::RemoveWaiter(r.pick(seen.waiters.iter().map(|w| w.unique))),
            (28, _) => Change::SetRoot(1_000_000 + step),
            _ => Change::Several(
                step,
                (0..3)
                    .map(|n| Change::random(r, t, 10_000 + 10 * step + n, grows))
                    .collect(),
            ),
        }
    }
}

/// Kills the writer after every number of stores of every one of many changes. Each time the
/// successor must find the change done or not done, and everything in order; its recovery is killed
/// too, once per change.
#[test]
fn a_change_is_done_or_not_done_wherever_its_writer_is_killed() {
    let mut r = Random(0x1234_5678_9abc_def1);
    let mut t = tables();
    let mut twin = tables();
    let (mut kills, mut split, mut released) = (0, 0, 0);
    for n in 1..100 {
        let change = Change::LookUp(1000 + n, Some((1, format!("{n:09}"))));
        change.apply(&mut t);
        change.apply(&mut twin);
    }
    for step in 1..230 {
        let grows = step < 60;
        let last = twin.node_ids().last().copied().unwrap_or(1);
        let change = match step {
            0..130 => Change::random(&mut r, &twin, step, grows),
            _ => Change::Forget(last, 100),
        };
        let before = Seen::of(&twin);
        let pages = twin.words.load(words::PAGES_USED);
        change.apply(&mut twin);
        check(&twin);
        let after = Seen::of(&twin);
        for stores in 0.. {
            t.words.stop_after.set(stores);
            let end = catch_unwind(AssertUnwindSafe(|| change.apply(&mut t)));
            t.words.stop_after.set(u64::MAX);
            match end {
                Ok(()) => {
                    assert_eq!(Seen::of(&t), after, "step {step}: {change:?}");
                    break;
                }
                Err(cause) => assert!(cause.is::<Killed>(), "step {step}: {change:?}"),
            }
            kills += 1;
            if stores % 4 == 1 {
                let fd = t.as_fd().try_clone_to_owned().unwrap();
                let mut killed_too = Tables::attach(fd).unwrap();
                killed_too.words.stop_after.set(r.below(stores + 1));
                let _ = catch_unwind(AssertUnwindSafe(|| killed_too.recover()));
            }
            match kills % 16 {
                0 => t = successor(&t),
                _ => t.recover(),
            }
            check(&t);
            let seen = Seen::of(&t);
            if seen == after && seen != before {
                break;
            }
            assert_eq!(
                seen, before,
                "step {step}: {change:?} after {stores} stores"
            );
        }
        split = split.max(t.words.buckets(index::Index::Name));
        if t.words.load(words::PAGES_USED) < pages {
            released += 1;
        }
    }
    // It was worth something: indexes grew and shrank, pages came and went.
    let shrunk = t.words.buckets(index::Index::Name) < split;
    assert!(
        kills > 5_000 && split > 100 && shrunk && released > 1,
        "{kills} {split} {shrunk} {released}"
    );
}

const WRITER_FD: &str = "EVERMOUNT_TEST_TABLES_FD";

#[test]
fn a_writer_killed_by_sigkill_leaves_whole_changes_only() {
    let t = tables();
    let mut r = Random(0x5eed_5eed_5eed_5eed);
    let path = format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        std::os::fd::AsRawFd::as_raw_fd(&t.as_fd())
    );
    let mut last = 0;
    for _ in 0..25 {
        let mut writer = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact"])
            .arg("region::tables::tests::writes_until_it_is_killed")
            .env(WRITER_FD, &path)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while t.marked(0) == last {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        std::thread::sleep(std::time::Duration::from_micros(r.below(8000)));
        writer.kill().unwrap();
        writer.wait().unwrap();
        let t = successor(&t);
        check(&t);
        last = t.marked(0);
        let node = t.find(&id(last)).and_then(|nodeid| t.node(nodeid)).unwrap();
        assert_eq!(node.nlookup, 2);
        assert!(t.has_locks(node.nodeid, last, false));
        assert_eq!(t.find(&id(last + 1)), None);
    }
}

/// The other process of the test above.
#[test]
#[ignore = "run by another test"]
fn writes_until_it_is_killed() {
    let Some(path) = std::env::var_os(WRITER_FD) else {
        return;
    };
    let file = std::fs::File::options().read(true).write(true).open(path);
    let mut t = Tables::open(file.unwrap().into()).unwrap();
    for n in t.marked(0) + 1.. {
        t.atomically(|t| {
            let node = t.look_up(&id(n), Some((1, name("newest"))), &attr(n));
            let node = node.unwrap();
            let own = "n".repeat(1 + n as usize % 50) + &n.to_string();
            t.look_up(&id(n), Some((1, name(&own))), &attr(n)).unwrap();
            t.set_lock(&posix(node, n, true, 0, 99)).unwrap();
            t.unlock(node, n, false, 10, 19).unwrap();
            let oldest = n.saturating_sub(200 + 100 * (n / 500 % 3));
            for old in oldest.saturating_sub(2).max(1)..oldest {
                t.find(&id(old)).map(|old| t.forget(old, 2));
            }
            t.mark(0, n);
        });
    }
}

/// Other processes may write anything into the memory.
#[test]
fn corrupt_tables_give_wrong_answers_but_no_panic_and_no_endless_walk() {
    let mut r = Random(0xfeed_beef_1234_5678);
    for _ in 0..400 {
        let mut t = tables();
        for step in 1..120 {
            Change::random(&mut r, &t, step, true).apply(&mut t);
        }
        let seen = Seen::of(&t);
        for _ in 0..1 + r.below(12) {
            let at = words::anywhere(r.below(u64::MAX), r.below(u64::MAX));
            let value = match r.below(4) {
                0 => r.below(u64::MAX),
                1 => r.below(1 << 12),
                2 => t.words.load(at).wrapping_add(r.below(1 << 40)),
                _ => t
                    .words
                    .load(words::anywhere(r.below(u64::MAX), r.below(u64::MAX))),
            };
            t.words
                .memory()
                .u64(at)
                .store(value, std::sync::atomic::Ordering::Relaxed);
        }
        let mut t = successor(&t);
        let nodes: Vec<u64> = seen.nodes.keys().copied().collect();
        for step in 1..100 {
            let node = nodes[r.below(nodes.len() as u64) as usize];
            let other = nodes[r.below(nodes.len() as u64) as usize];
            t.path(node, 4096);
            t.node(node);
            t.attr(node);
            let to = t.name_of(node).unwrap_or((1, "x".into()));
            t.find_name(to.0, &to.1);
            let _ = t.look_up(&id(step), Some((to.0, &to.1)), &attr(step));
            t.rename(to.0, &to.1, other, name("renamed"));
            t.exchange(other, name("renamed"), to.0, &to.1);
            let lock = posix(node, 1, step % 2 == 0, step, step + 30);
            t.conflict(&lock);
            let _ = t.set_lock(&lock);
            let _ = t.unlock(node, 1, false, step + 5, step + 6);
            let fh = t.reserve_handle().unwrap_or(0);
            t.close_handle(fh);
            t.locks_through(r.pick(seen.handles.keys().copied()));
            Change::AddWaiter(node, step).apply(&mut t);
            t.remove_waiter(step / 2);
            t.waiters_on(node);
            t.unlock_owner(other, 1, false);
            t.forget(other, 1 + r.below(3));
        }
        t.waiters();
        t.all_locks();
        t.handles();
        t.bytes_in_use();
    }
}

#[derive(Clone, Debug)]
enum NameOp {
    LookUp(u64, Option<(u64, u8)>),
    Forget(u64, u64),
    Drop(u64, u8),
    Rename(u64, u8, u64, u8),
    Exchange(u64, u8, u64, u8),
}

fn name_op() -> impl Strategy<Value = NameOp> {
    let slot = || (0u64..4, 0u8..6);
    prop_oneof![
        (1u64..40, proptest::option::of(slot())).prop_map(|(n, to)| NameOp::LookUp(n, to)),
        (1u64..40, 1u64..4).prop_map(|(n, count)| NameOp::Forget(n, count)),
        slot().prop_map(|(p, n)| NameOp::Drop(p, n)),
        (slot(), slot()).prop_map(|((p, n), (q, m))| NameOp::Rename(p, n, q, m)),
        (slot(), slot()).prop_map(|((p, n), (q, m))| NameOp::Exchange(p, n, q, m)),
    ]
}

/// Inodes by number: lookups and name.
#[derive(Default)]
struct Model {
    lookups: HashMap<u64, u64>,
    names: HashMap<(u64, u8), u64>,
}

impl Model {
    fn unname(&mut self, n: u64) {
        self.names.retain(|_, named| *named != n);
    }

    fn apply(&mut self, op: &NameOp) {
        match *op {
            NameOp::LookUp(n, to) => {
                *self.lookups.entry(n).or_default() += 1;
                if let Some(to) = to {
                    self.unname(n);
                    self.names.insert(to, n);
                }
            }
            NameOp::Forget(n, count) => {
                let left = self.lookups.get(&n).map_or(0, |l| l.saturating_sub(count));
                self.lookups.insert(n, left);
                if left == 0 {
                    self.lookups.remove(&n);
                    self.unname(n);
                }
            }
            NameOp::Drop(p, n) => drop(self.names.remove(&(p, n))),
            NameOp::Rename(p, n, q, m) => {
                if (p, n) != (q, m) {
                    self.names.remove(&(q, m));
                    if let Some(moved) = self.names.remove(&(p, n)) {
                        self.names.insert((q, m), moved);
                    }
                }
            }
            NameOp::Exchange(p, n, q, m) => {
                let (a, b) = (self.names.remove(&(p, n)), self.names.remove(&(q, m)));
                a.and_then(|a| self.names.insert((q, m), a));
                b.and_then(|b| self.names.insert((p, n), b));
            }
        }
    }
}

fn nth_name(n: u8) -> OsString {
    OsString::from("name".repeat(usize::from(n) + 1))
}

fn apply_name_op(t: &mut Tables, ids: &mut HashMap<u64, u64>, op: &NameOp) {
    match *op {
        NameOp::LookUp(n, to) => {
            let name = to.map(|(parent, name)| (parent, nth_name(name)));
            let to = name.as_ref().map(|(p, n)| (*p, n.as_os_str()));
            let nodeid = t.look_up(&id(n), to, &attr(n)).unwrap();
            ids.insert(n, nodeid);
        }
        NameOp::Forget(n, count) => {
            if let Some(&nodeid) = ids.get(&n) {
                t.forget(nodeid, count);
            }
        }
        NameOp::Drop(p, n) => t.drop_name(p, &nth_name(n)),
        NameOp::Rename(p, n, q, m) => t.rename(p, &nth_name(n), q, &nth_name(m)),
        NameOp::Exchange(p, n, q, m) => t.exchange(p, &nth_name(n), q, &nth_name(m)),
    }
}

const BYTES: u64 = 24;

fn lock_op() -> impl Strategy<Value = (u64, Option<bool>, u64, u64)> {
    (
        0u64..3,
        proptest::option::of(any::<bool>()),
        0..BYTES,
        0..BYTES,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn inodes_and_names_are_as_in_a_simple_map(ops in proptest::collection::vec(name_op(), 1..300)) {
        let (mut t, mut model, mut ids) = (tables(), Model::default(), HashMap::new());
        for op in &ops {
            model.apply(op);
            apply_name_op(&mut t, &mut ids, op);
        }
        check(&t);
        prop_assert_eq!(t.inodes(), model.lookups.len() as u64 + 1);
        for n in 1..40 {
            let node = t.find(&id(n)).and_then(|nodeid| t.node(nodeid));
            prop_assert_eq!(node.map(|node| node.nlookup), model.lookups.get(&n).copied());
        }
        for parent in 0..4 {
            for n in 0..6 {
                let named = t.find_name(parent, &nth_name(n)).and_then(|nodeid| t.node(nodeid));
                let expected = model.names.get(&(parent, n)).map(|&n| id(n));
                prop_assert_eq!(named.map(|node| node.identity), expected);
            }
        }
    }

    #[test]
    fn posix_locks_are_as_a_map_of_every_byte(ops in proptest::collection::vec(lock_op(), 1..120)) {
        let mut t = tables();
        let mut model = vec![HashMap::<u64, bool>::new(); BYTES as usize];
        for (owner, exclusive, a, b) in ops {
            let (start, end) = (a.min(b), a.max(b));
            for byte in &mut model[start as usize..=end as usize] {
                match exclusive {
                    Some(exclusive) => byte.insert(owner, exclusive),
                    None => byte.remove(&owner),
                };
            }
            match exclusive {
                Some(exclusive) => t.set_lock(&posix(1, owner, exclusive, start, end)).unwrap(),
                None => t.unlock(1, owner, false, start, end).unwrap(),
            }
        }
        check(&t);
        for (byte, owners) in model.iter().enumerate() {
            let byte = byte as u64;
            let held: HashMap<u64, bool> = t.locks_on(1).into_iter()
                .filter(|lock| lock.start <= byte && byte <= lock.end)
                .map(|lock| (lock.owner, lock.exclusive))
                .collect();
            prop_assert_eq!(&held, owners);
            for exclusive in [false, true] {
                let conflict = t.conflict(&posix(1, 0, exclusive, byte, byte)).is_some();
                let expected = owners.iter().any(|(&o, &e)| o != 0 && (e || exclusive));
                prop_assert_eq!(conflict, expected);
            }
        }
    }
}

/// `cargo test --release --lib what_a_million_inodes_cost -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn what_a_million_inodes_cost() {
    const N: u64 = 1_000_000;
    let names: Vec<OsString> = (0..N)
        .map(|n| format!("file-{n:0w$}", w = 7 + (n % 25) as usize).into())
        .collect();
    let len: usize = names.iter().map(|n| n.len()).sum();
    println!("average name {} bytes", len as u64 / N);
    let mut t = tables();
    let per_op = |what: &str, run: &mut dyn FnMut(u64)| {
        let start = Instant::now();
        (0..N).for_each(run);
        println!("{what}: {} ns", start.elapsed().as_nanos() as u64 / N);
    };
    let mut ids = Vec::new();
    per_op("first look_up", &mut |n| {
        let to = Some((1, names[n as usize].as_os_str()));
        ids.push(t.look_up(&id(n + 1), to, &attr(n)).unwrap());
    });
    println!(
        "{} bytes per inode, {} in use",
        allocated(&t) / N,
        t.bytes_in_use() / N
    );
    let mut r = Random(88_172_645_463_325_252);
    per_op("look_up of a random known inode", &mut |_| {
        let n = r.below(N);
        let to = Some((1, names[n as usize].as_os_str()));
        t.look_up(&id(n + 1), to, &attr(n)).unwrap();
    });
    per_op("look_up of a recent known inode", &mut |n| {
        let n = n % 100;
        let to = Some((1, names[n as usize].as_os_str()));
        t.look_up(&id(n + 1), to, &attr(n)).unwrap();
    });
    per_op("node of a random inode", &mut |_| {
        t.node(ids[r.below(N) as usize]).unwrap();
    });
    per_op("forget one of a recent inode", &mut |n| {
        t.forget(ids[(n % 100) as usize], 1);
    });
    per_op("forget all", &mut |n| {
        t.forget(ids[n as usize], u64::MAX);
    });
    println!("{} KiB left, {} inodes", allocated(&t) / 1024, t.inodes());
    check(&t);
}
