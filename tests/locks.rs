//! Locks of several processes, over the deaths of backends: never lost, never held by two, never
//! left behind.

mod common;

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::tools::{Actor, act, open_rw, range};
use common::{Mount, PATIENCE, ceph_is_wanted, store_knows, within};
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, flock};

/// Not a test: the other process ([`Actor`]).
#[test]
#[ignore = "started by the tests of this file"]
fn actor() {
    act();
}

/// The kinds of locks: how an [`Actor`] tries, waits, and unlocks.
fn kinds() -> Vec<&'static str> {
    let kinds = ["posix", "ofd", "flock"].into_iter();
    kinds.filter(|kind| store_knows(kind)).collect()
}

fn command(kind: &str, wait: bool, lock: &str) -> String {
    let wait = if wait { "w" } else { "" };
    match kind {
        "flock" => format!("flock{wait} 0 {lock}"),
        kind => format!("{kind}{wait} 0 {lock} 0 0"),
    }
}

fn try_lock(kind: &str) -> String {
    command(kind, false, "w")
}

fn wait_lock(kind: &str) -> String {
    command(kind, true, "w")
}

fn unlock(kind: &str) -> String {
    command(kind, false, "u")
}

/// A new file on the mount, and in the source.
fn file(mount: &Mount, name: &str) -> std::path::PathBuf {
    let path = mount.path(name);
    drop(open_rw(&path));
    path
}

#[test]
fn a_lock_waits_through_fifty_deaths_and_is_then_granted() {
    let mount = Mount::new();
    let kinds = kinds();
    let mut parties: Vec<(Actor, Actor, Actor)> = kinds
        .iter()
        .map(|kind| {
            let path = file(&mount, kind);
            let mut holder = Actor::on(&path);
            assert_eq!(holder.ask(&try_lock(kind)), "ok");
            let mut waiter = Actor::on(&path);
            waiter.tell(&wait_lock(kind));
            (holder, waiter, Actor::on(&path))
        })
        .collect();
    mount.wait("all waiting", |s| s.waiters == kinds.len() as u64);
    for death in 0..50 {
        mount.replace_backend();
        for (kind, (_, waiter, third)) in kinds.iter().zip(&mut parties) {
            assert_eq!(third.ask(&try_lock(kind)), "EAGAIN", "{kind}, {death}");
            assert_eq!(waiter.answer_within(Duration::ZERO), None, "{kind}");
        }
    }
    for (kind, (holder, waiter, third)) in kinds.iter().zip(&mut parties) {
        assert_eq!(holder.ask(&unlock(kind)), "ok");
        assert_eq!(waiter.answer(), "ok", "{kind}");
        mount.replace_backend();
        assert_eq!(third.ask(&try_lock(kind)), "EAGAIN", "{kind}");
        assert_eq!(waiter.ask(&unlock(kind)), "ok");
        assert_eq!(third.ask(&try_lock(kind)), "ok", "{kind}");
    }
    drop(parties);
    mount.wait("without locks", |s| s.locks == 0 && s.waiters == 0);
    mount.end();
}

#[test]
fn more_lock_waiters_than_slots_are_granted_one_after_the_other() {
    const WAITERS: usize = 150;
    let mount = Mount::new();
    for kind in ["flock", "ofd"].into_iter().filter(|k| store_knows(k)) {
        let path = file(&mount, kind);
        let lock = move |file: &fs::File, wait: &str| match (kind, wait) {
            ("flock", "u") => flock(file, FlockOperation::Unlock).unwrap(),
            ("flock", _) => flock(file, FlockOperation::LockExclusive).unwrap(),
            (_, kind) => {
                let lock = range(kind, 0, 0);
                fcntl(file.as_fd(), FcntlArg::F_OFD_SETLKW(&lock)).unwrap();
            }
        };
        let holder = open_rw(&path);
        lock(&holder, "w");
        let inside = Arc::new(AtomicBool::new(false));
        let granted = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..WAITERS)
            .map(|_| {
                let (path, inside, granted) = (path.clone(), inside.clone(), granted.clone());
                std::thread::spawn(move || {
                    let file = open_rw(&path);
                    lock(&file, "w");
                    assert!(!inside.swap(true, Ordering::SeqCst), "two owners");
                    granted.fetch_add(1, Ordering::SeqCst);
                    assert!(inside.swap(false, Ordering::SeqCst), "two owners");
                    lock(&file, "u");
                })
            })
            .collect();
        mount.wait("all waiting", |s| s.waiters == WAITERS as u64);
        mount.replace_backend();
        // There is room for others.
        let other = mount.path("other");
        within(PATIENCE, "mkdir", move || {
            fs::create_dir(&other).and_then(|()| fs::remove_dir(&other))
        })
        .unwrap();
        assert_eq!(granted.load(Ordering::SeqCst), 0);
        lock(&holder, "u");
        let third = |n| {
            common::until(PATIENCE, || {
                granted.load(Ordering::SeqCst) > n * WAITERS / 3
            })
        };
        for n in 0..2 {
            assert!(
                third(n),
                "{kind}: {granted:?} granted\n{:#?}",
                mount.status()
            );
            mount.replace_backend();
        }
        for thread in threads {
            within(PATIENCE, kind, move || thread.join()).unwrap();
        }
        assert_eq!(granted.load(Ordering::SeqCst), WAITERS);
        drop(holder);
        mount.wait("without locks", |s| s.locks == 0 && s.waiters == 0);
    }
    mount.end();
}

#[test]
fn a_signal_ends_the_wait_for_a_lock_and_the_lock_is_not_taken() {
    let mount = Mount::new();
    for outage in [false, true] {
        for kind in kinds() {
            let path = file(&mount, kind);
            let mut holder = Actor::on(&path);
            assert_eq!(holder.ask(&try_lock(kind)), "ok");
            let mut waiter = Actor::on(&path);
            let thread = waiter.catch();
            waiter.tell(&wait_lock(kind));
            mount.wait("waiting", |s| s.waiters == 1);
            if outage {
                mount.begin_outage();
            } else {
                mount.replace_backend();
            }
            waiter.interrupt(thread);
            assert_eq!(waiter.answer(), "EINTR", "{kind}, outage: {outage}");
            if outage {
                mount.end_outage();
            }
            assert_eq!(holder.ask(&unlock(kind)), "ok");
            let mut third = Actor::on(&path);
            assert_eq!(third.ask(&try_lock(kind)), "ok", "{kind}");
        }
    }
    mount.end();
}

#[test]
fn the_locks_of_a_killed_process_are_free() {
    let mount = Mount::new();
    for outage in [false, true] {
        for kind in kinds() {
            let what = format!("{kind}, outage: {outage}");
            let path = file(&mount, kind);
            let mut holder = Actor::on(&path);
            assert_eq!(holder.ask(&try_lock(kind)), "ok");
            let mut waiter = Actor::on(&path);
            waiter.tell(&wait_lock(kind));
            mount.wait("waiting", |s| s.waiters == 1);
            if outage {
                mount.begin_outage();
                holder.kill();
                mount.end_outage();
            } else {
                mount.replace_backend();
                holder.kill();
            }
            assert_eq!(waiter.answer(), "ok", "{what}");
            assert_eq!(waiter.ask(&unlock(kind)), "ok");
            let mut behind = Actor::on(&mount.behind(kind));
            assert_eq!(behind.ask(&try_lock(kind)), "ok", "{what}");
        }
    }
    mount.wait("without locks", |s| s.locks == 0);
    mount.end();
}

#[test]
fn a_killed_waiter_does_not_get_the_lock() {
    let mount = Mount::new();
    for kind in kinds() {
        let path = file(&mount, kind);
        let mut holder = Actor::on(&path);
        assert_eq!(holder.ask(&try_lock(kind)), "ok");
        let mut waiter = Actor::on(&path);
        waiter.tell(&wait_lock(kind));
        mount.wait("waiting", |s| s.waiters == 1);
        mount.begin_outage();
        waiter.kill();
        mount.end_outage();
        assert_eq!(holder.ask(&unlock(kind)), "ok");
        assert_eq!(Actor::on(&path).ask(&try_lock(kind)), "ok", "{kind}");
    }
    mount.end();
}

/// Does the same on the mount, with a death after every step, and directly on the file system
/// below: the answers must be the same.
///
/// A step is "WHO COMMAND"; each actor has the file open as its file 0.
fn as_without_a_mount(mount: &Mount, name: &str, actors: usize, steps: &[&str]) {
    file(mount, name);
    // CephFS' own client keeps what a close or a failed conversion gives up (16.2): no model.
    let local = tempfile::TempDir::new().unwrap();
    let direct = if ceph_is_wanted() {
        local.path().join("direct")
    } else {
        mount.behind("direct")
    };
    drop(open_rw(&direct));
    let run = |path: &Path, death: bool| -> Vec<String> {
        let mut who: Vec<Actor> = (0..actors).map(|_| Actor::on(path)).collect();
        let pids: Vec<String> = who.iter().map(|a| a.pid().to_string()).collect();
        let mut answers = Vec::new();
        for step in steps {
            let (number, command) = step.split_once(' ').unwrap();
            let number: usize = number.parse().unwrap();
            let command = command.replace("FILE", path.to_str().unwrap());
            let mut answer = who[number].ask(&command);
            for (number, pid) in pids.iter().enumerate() {
                if let Some(rest) = answer.strip_prefix(&format!("{pid} ")) {
                    answer = format!("actor {number}: {rest}");
                    break;
                }
            }
            answers.push(format!("{step} => {answer}"));
            if death {
                mount.replace_backend();
            }
        }
        answers
    };
    let wanted = run(&direct, false);
    for death in [false, true] {
        let got = run(&mount.path(name), death);
        assert_eq!(got, wanted, "{name}, deaths: {death}");
    }
    mount.wait("without locks", |s| s.locks == 0);
}

#[test]
fn a_posix_lock_goes_when_its_owner_closes_any_descriptor() {
    let mount = Mount::new();
    let steps = [
        "0 open FILE",
        "0 posix 0 w 0 10",
        "1 posix 0 w 5 1",
        "0 posix 0 r 100 10",
        "0 close 1",
        "1 posix 0 w 5 1",
        "1 posix 0 w 0 0",
        "0 posix 0 r 0 1",
        "1 posix 0 u 0 0",
        "0 posix 0 r 0 1",
    ];
    as_without_a_mount(&mount, "any-close", 2, &steps);
    mount.end();
}

#[test]
fn an_ofd_lock_goes_at_the_last_close_of_its_description() {
    let mount = Mount::new();
    let steps = [
        "0 dup 0",
        "0 ofd 0 w 0 10",
        "0 ofd 0 w 20 10",
        "1 ofd 0 w 5 1",
        "0 open FILE",
        "0 close 2",
        "1 ofd 0 r 5 1",
        "0 close 0",
        "1 ofd 0 r 5 1",
        "0 ofd 1 u 20 10",
        "1 ofd 0 w 25 1",
        "1 ofd 0 w 5 1",
        "0 close 1",
        // It waits: the kernel sends RELEASE some time after the close.
        "1 ofdw 0 w 5 1",
        "1 ofd 0 w 0 0",
        "0 open FILE",
        "0 ofd 3 r 0 0",
    ];
    as_without_a_mount(&mount, "last-close", 2, &steps);
    mount.end();
}

#[test]
fn an_ofd_lock_goes_with_its_description_although_another_generation_took_it() {
    let mount = Mount::new();
    // Whatever the new generation learns of the lock, and how.
    let looks: [&[&str]; 4] = [
        &[],
        &["0 ofdget 0 w 0 0"],
        &["0 ofd 0 u 20 10"],
        &["0 ofd 0 w 40 10", "0 ofd 0 u 20 10"],
    ];
    for (number, look) in looks.iter().enumerate() {
        let mut steps = vec!["0 ofd 0 w 0 10", "0 ofd 0 w 20 10"];
        steps.extend(*look);
        // It waits: the kernel sends RELEASE some time after the close.
        steps.extend(["0 close 0", "1 ofdw 0 w 0 0"]);
        let path = file(&mount, &format!("{number}"));
        let (mut owner, mut other) = (Actor::on(&path), Actor::on(&path));
        for (at, step) in steps.iter().enumerate() {
            let (who, command) = step.split_once(' ').unwrap();
            let who = if who == "0" { &mut owner } else { &mut other };
            let answer = who.ask(command);
            assert!(
                answer == "ok" || answer == "free",
                "{steps:?}: {step}: {answer}"
            );
            if at == 1 {
                mount.replace_backend();
            }
        }
    }
    mount.end();
}

#[test]
fn ranges_are_split_and_merged_and_named_with_the_pid_of_their_owner() {
    let mount = Mount::new();
    let steps = [
        "0 posix 0 w 0 100",
        "1 posixget 0 r 0 0",
        "1 posixget 0 w 50 1",
        "0 posix 0 u 40 20",
        "1 posixget 0 w 0 0",
        "1 posixget 0 w 40 0",
        "1 posixget 0 w 40 20",
        "1 posix 0 w 40 20",
        "0 posixget 0 w 0 0",
        "0 posix 0 w 40 20",
        "1 posix 0 u 0 0",
        "0 posix 0 w 40 20",
        "1 posixget 0 w 60 0",
        "0 posix 0 r 10 10",
        "1 posix 0 r 12 1",
        "1 posixget 0 r 0 0",
        "1 posixget 0 r 10 10",
        "2 posixget 0 w 12 1",
        "0 posix 0 u 0 0",
        "1 posixget 0 w 0 0",
        "0 posixget 0 w 0 0",
    ];
    as_without_a_mount(&mount, "split", 3, &steps);
    mount.end();
}

#[test]
fn a_flock_is_upgraded_and_downgraded_as_without_a_mount() {
    let mount = Mount::new();
    let steps = [
        "0 flock 0 r",
        "1 flock 0 r",
        "2 flock 0 w",
        // A conversion gives the old lock up first, also if it fails.
        "0 flock 0 w",
        "1 flock 0 u",
        "2 flock 0 w",
        "0 flock 0 r",
        "2 flock 0 r",
        "0 flock 0 r",
        "1 flock 0 r",
        "1 flock 0 w",
        "0 flock 0 u",
        "2 flock 0 u",
        "1 flock 0 w",
        "0 flock 0 r",
        "1 flock 0 r",
        "0 flock 0 r",
        "1 close 0",
        // It waits: the kernel sends RELEASE some time after the close.
        "0 flockw 0 w",
    ];
    as_without_a_mount(&mount, "upgrade", 3, &steps);
    mount.end();
}

#[test]
fn a_waiter_gets_what_a_failed_upgrade_gave_up() {
    if !store_knows("flock") {
        return;
    }
    let mount = Mount::new();
    let path = file(&mount, "file");
    let (mut a, mut b, mut c) = (Actor::on(&path), Actor::on(&path), Actor::on(&path));
    assert_eq!(a.ask("flock 0 r"), "ok");
    assert_eq!(b.ask("flock 0 r"), "ok");
    c.tell("flockw 0 w");
    mount.wait("waiting", |s| s.waiters == 1);
    mount.replace_backend();
    assert_eq!(a.ask("flock 0 w"), "EAGAIN");
    assert_eq!(b.ask("flock 0 u"), "ok");
    assert_eq!(c.answer(), "ok");
    drop((a, b, c));
    mount.end();
}

#[test]
fn locks_taken_behind_the_mount_conflict_and_are_had_soon_after_their_release() {
    let mount = Mount::new();
    for kind in kinds() {
        let path = file(&mount, kind);
        let mut behind = Actor::on(&mount.behind(kind));
        let mut front = Actor::on(&path);
        let mut waiter = Actor::on(&path);
        assert_eq!(behind.ask(&try_lock(kind)), "ok");
        assert_eq!(front.ask(&try_lock(kind)), "EAGAIN", "{kind}");
        if kind == "posix" {
            let held = format!("{} w 0 0", behind.pid());
            assert_eq!(front.ask("posixget 0 r 0 0"), held);
        }
        waiter.tell(&wait_lock(kind));
        mount.wait("waiting", |s| s.waiters == 1);
        mount.replace_backend();
        assert_eq!(waiter.answer_within(Duration::ZERO), None);
        assert_eq!(behind.ask(&unlock(kind)), "ok");
        let bound = Duration::from_secs(10); // a second or so, on a busy machine
        let granted = waiter.answer_within(bound);
        assert_eq!(granted.as_deref(), Some("ok"), "{kind}");
        // And the other way round.
        assert_eq!(behind.ask(&try_lock(kind)), "EAGAIN", "{kind}");
        mount.replace_backend();
        assert_eq!(behind.ask(&try_lock(kind)), "EAGAIN", "{kind}");
        behind.tell(&wait_lock(kind));
        assert_eq!(waiter.ask(&unlock(kind)), "ok");
        assert_eq!(behind.answer(), "ok", "{kind}");
    }
    mount.end();
}

#[test]
fn a_lock_taken_again_after_an_unlock_in_an_outage_is_kept() {
    let mount = Mount::new();
    for kind in kinds() {
        let path = file(&mount, kind);
        let mut owner = Actor::on(&path);
        let mut behind = Actor::on(&mount.behind(kind));
        assert_eq!(owner.ask(&try_lock(kind)), "ok");
        for round in 0..15 {
            mount.begin_outage();
            assert_eq!(owner.ask(&unlock(kind)), "ok");
            owner.tell(&wait_lock(kind));
            mount.wait("asked", |s| s.inflight == 2);
            mount.end_outage();
            assert_eq!(owner.answer(), "ok", "{kind}, {round}");
            // Whatever is still on its way is through.
            mount.wait("quiet", |s| s.inflight == 0);
            assert_eq!(behind.ask(&try_lock(kind)), "EAGAIN", "{kind}, {round}");
            assert_eq!(mount.status().locks, 1, "{kind}, {round}");
        }
    }
    mount.end();
}

/// A death at every moment of every request that has to do with a lock.
#[test]
fn locks_are_taken_and_given_up_exactly_once_whenever_the_backend_dies() {
    let moments = [
        ("before-execution", "kill"),
        ("before-reply", "kill"),
        ("before-bookkeeping", "kill"),
        ("before-execution", "kill 2"),
        ("before-reply", "kill 2"),
    ];
    let mount = Mount::new();
    let mut number = 0;
    for kind in kinds() {
        for (place, action) in moments {
            // What meets the death, what the owner does, and whether it holds the lock afterwards.
            let cases = [
                ("SETLK", try_lock(kind), true),
                // flock(2) unlocks with a request that may wait.
                (
                    if kind == "flock" { "SETLKW" } else { "SETLK" },
                    unlock(kind),
                    false,
                ),
                ("SETLKW", wait_lock(kind), true),
                ("FLUSH", "close 0".to_owned(), false),
                ("RELEASE", "close 0".to_owned(), false),
            ];
            for (opcode, command, holds) in cases {
                let what = format!("{kind}, {command}, {action} {place}@{opcode}");
                number += 1;
                let path = file(&mount, &format!("{number}"));
                let mut owner = Actor::on(&path);
                let mut other = Actor::on(&path);
                let mut behind = Actor::on(&mount.behind(&format!("{number}")));
                if !holds {
                    assert_eq!(owner.ask(&try_lock(kind)), "ok", "{what}");
                }
                let order = format!("{place}@{opcode}");
                let takeovers = mount.status().takeovers;
                mount.order(&order, action);
                assert_eq!(owner.ask(&command), "ok", "{what}");
                // RELEASE is sent after close(2) returns. What only ends something is answered in an
                // outage, and then there is nobody for a second death.
                let done = || {
                    let ends = opcode == "FLUSH" || opcode == "RELEASE";
                    mount.carried_out(&order) || ends && mount.status().takeovers > takeovers
                };
                assert!(common::until(PATIENCE, done), "{what}: nobody died");
                mount.wait("quiet", |s| s.outage_ms.is_none() && s.inflight == 0);
                mount.cancel(&order);
                let expected = if holds { "EAGAIN" } else { "ok" };
                let as_expected = || behind.ask(&try_lock(kind)) == expected;
                assert!(
                    common::until(PATIENCE, as_expected),
                    "{what}: not {expected}"
                );
                assert_eq!(behind.ask(&unlock(kind)), "ok", "{what}");
                assert_eq!(other.ask(&try_lock(kind)), expected, "{what}");
                assert_eq!(other.ask(&unlock(kind)), "ok", "{what}");
                mount.replace_backend();
                assert_eq!(behind.ask(&try_lock(kind)), expected, "{what}");
                assert_eq!(behind.ask(&unlock(kind)), "ok", "{what}");
                drop(owner);
                assert_eq!(other.ask(&wait_lock(kind)), "ok", "{what}");
                drop(other);
                mount.wait("without locks", |s| s.locks == 0);
                assert_eq!(behind.ask(&try_lock(kind)), "ok", "{what}");
            }
        }
    }
    mount.end();
}

#[test]
fn a_lock_attempt_that_fails_keeps_its_errno_and_leaves_nothing_whenever_the_backend_dies() {
    let mount = Mount::new();
    for kind in kinds() {
        for place in ["before-execution", "before-reply", "before-bookkeeping"] {
            let path = file(&mount, &format!("{kind}-{place}"));
            let (mut owner, mut other) = (Actor::on(&path), Actor::on(&path));
            assert_eq!(owner.ask(&try_lock(kind)), "ok");
            for (opcode, command) in [("SETLK", try_lock(kind)), ("SETLKW", wait_lock(kind))] {
                let order = format!("{place}@{opcode}");
                mount.order(&order, "kill");
                other.tell(&command);
                assert!(common::until(PATIENCE, || mount.carried_out(&order)));
                if opcode == "SETLK" {
                    assert_eq!(other.answer(), "EAGAIN", "{kind}, {place}");
                }
            }
            mount.wait("waiting", |s| s.waiters == 1);
            mount.replace_backend();
            // The owner dies; its lock goes to the waiter.
            owner.kill();
            assert_eq!(other.answer(), "ok", "{kind}, {place}");
            let mut third = Actor::on(&path);
            assert_eq!(third.ask(&try_lock(kind)), "EAGAIN", "{kind}, {place}");
        }
    }
    mount.wait("without locks", |s| s.locks == 0 && s.waiters == 0);
    mount.end();
}
