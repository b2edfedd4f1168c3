//! A request that kills whoever serves it is answered EIO soon, and costs nobody else anything.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use common::tools::open_rw;
use common::{Mount, PATIENCE, errno, within};

/// Others who use the mount all the time, and accept no error.
struct Others {
    stop: Arc<AtomicBool>,
    done: Vec<Arc<AtomicU64>>,
    threads: Vec<JoinHandle<()>>,
}

impl Others {
    fn new(mount: &Mount) -> Others {
        let mut others = Others {
            stop: Arc::default(),
            done: Vec::new(),
            threads: Vec::new(),
        };
        for number in 0..3 {
            let file = open_rw(&mount.path(&format!("written-{number}")));
            others.add(move |n| {
                let (at, text) = (n % 100 * 8, n.to_ne_bytes());
                file.write_all_at(&text, at).unwrap();
                let mut back = [0; 8];
                file.read_exact_at(&mut back, at).unwrap();
                assert_eq!(back, text);
            });
        }
        for number in 0..2 {
            let dir = mount.path(&format!("dir-{number}"));
            fs::create_dir(&dir).unwrap();
            others.add(move |n| {
                let name = dir.join(format!("{n}"));
                fs::create_dir(&name).unwrap();
                assert_eq!(errno(fs::create_dir(&name)), Some(libc::EEXIST));
                fs::remove_dir(&name).unwrap();
            });
        }
        others.all_get_on();
        others
    }

    fn add(&mut self, step: impl Fn(u64) + Send + 'static) {
        let (stop, done) = (self.stop.clone(), Arc::new(AtomicU64::new(0)));
        self.done.push(done.clone());
        self.threads.push(std::thread::spawn(move || {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                step(n);
                n += 1;
                done.store(n, Ordering::Relaxed);
            }
        }));
    }

    /// Each of them does something more.
    fn all_get_on(&self) {
        let before: Vec<u64> = self
            .done
            .iter()
            .map(|d| d.load(Ordering::Relaxed))
            .collect();
        for (thread, (done, before)) in self.threads.iter().zip(self.done.iter().zip(before)) {
            let moved = || done.load(Ordering::Relaxed) > before + 1 || thread.is_finished();
            assert!(common::until(PATIENCE, moved), "somebody else hangs");
        }
    }

    fn end(self) {
        self.all_get_on();
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            within(PATIENCE, "somebody else", move || thread.join()).expect("no error for others");
        }
    }
}

/// Carries out `act` while the order makes every backend die of its own doing that meets it.
fn poisoned<T: Send + 'static>(
    mount: &Mount,
    order: &str,
    act: impl FnOnce(PathBuf) -> T + Send + 'static,
) -> T {
    poisoned_by("abort", mount, order, act)
}

fn poisoned_by<T: Send + 'static>(
    action: &str,
    mount: &Mount,
    order: &str,
    act: impl FnOnce(PathBuf) -> T + Send + 'static,
) -> T {
    let before = mount.wait("serving", |s| s.outage_ms.is_none());
    mount.order(order, &format!("{action} always"));
    let at = mount.point.clone();
    let result = within(PATIENCE, order, move || act(at));
    mount.cancel(order);
    let after = mount.wait("serving", |s| s.outage_ms.is_none());
    let deaths = after.takeovers - before.takeovers;
    assert!(
        (1..=3).contains(&deaths),
        "{order}: {deaths} deaths\n{}",
        mount.log_text()
    );
    assert_eq!(after.poisoned - before.poisoned, 1, "{order}");
    result
}

#[test]
fn a_request_that_kills_its_backend_is_answered_eio_and_others_succeed() {
    let mount = Mount::new();
    let others = Others::new(&mount);
    for place in ["before-execution", "before-reply"] {
        let order = format!("{place}@MKDIR@poison");
        let got = poisoned(&mount, &order, |at| fs::create_dir(at.join("poison")));
        assert_eq!(errno(got), Some(libc::EIO), "{place}");
        others.all_get_on();
        // Done or not, the name can be used again.
        let _ = fs::remove_dir(mount.path("poison"));
        fs::create_dir(mount.path("poison")).unwrap();
        fs::remove_dir(mount.path("poison")).unwrap();
    }
    others.end();
    mount.end();
}

#[test]
fn a_request_that_takes_all_memory_takes_that_of_its_backend_only() {
    let mount = Mount::with_args(&["--memory-limit", "1G"]);
    let others = Others::new(&mount);
    let order = "before-execution@MKDIR@huge";
    let got = poisoned_by("eat", &mount, order, |at| fs::create_dir(at.join("huge")));
    assert_eq!(errno(got), Some(libc::EIO));
    others.end();
    mount.end();
}

#[test]
fn a_poisoned_write_is_the_only_write_that_gets_eio() {
    let mount = Mount::new();
    let file = File::create(mount.path("appended")).unwrap();
    let order = "before-execution@WRITE";
    // Without others: every write would be the poison.
    let got = poisoned(&mount, order, move |_| file.write_all_at(b"text", 0));
    assert_eq!(errno(got), Some(libc::EIO));
    let others = Others::new(&mount);
    others.end();
    mount.end();
}

#[test]
fn a_known_name_is_found_although_looking_it_up_kills_the_backend() {
    let mount = Mount::new();
    fs::create_dir(mount.path("known")).unwrap();
    let ino = inode(&mount.path("known"));
    let others = Others::new(&mount);
    for place in ["before-execution", "before-reply"] {
        let order = format!("{place}@LOOKUP@known");
        // The kernel trusts a name for a second and tells nobody when that is over.
        std::thread::sleep(Duration::from_millis(1100));
        let found = poisoned(&mount, &order, |at| inode(&at.join("known")));
        assert_eq!(found, ino, "{place}");
    }
    others.end();
    mount.end();
}

fn inode(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::symlink_metadata(path).unwrap().ino()
}

#[test]
fn a_backend_killed_by_an_operator_poisons_nothing_however_often() {
    let mount = Mount::new();
    let others = Others::new(&mount);
    let order = "before-execution@MKDIR@innocent";
    mount.order(order, "kill 10");
    let path = mount.path("innocent");
    within(PATIENCE, "mkdir", move || fs::create_dir(path)).unwrap();
    assert!(mount.carried_out(order));
    others.end();
    let status = mount.status();
    assert!(status.takeovers >= 10, "{status:#?}");
    assert_eq!(status.poisoned, 0);
    mount.end();
}

#[test]
fn two_requests_that_kill_are_both_found_out() {
    let mount = Mount::new();
    let others = Others::new(&mount);
    for name in ["first", "second"] {
        fs::create_dir(mount.path(&format!("in-{name}"))).unwrap();
        mount.order(&format!("before-execution@MKDIR@{name}"), "abort always");
    }
    let threads = ["first", "second"].map(|name| {
        let path = mount.path(&format!("in-{name}/{name}"));
        std::thread::spawn(move || errno(fs::create_dir(path)))
    });
    for thread in threads {
        let got = within(PATIENCE, "mkdir", move || thread.join().unwrap());
        assert_eq!(got, Some(libc::EIO));
    }
    for name in ["first", "second"] {
        mount.cancel(&format!("before-execution@MKDIR@{name}"));
    }
    others.end();
    assert_eq!(mount.status().poisoned, 2);
    mount.end();
}
