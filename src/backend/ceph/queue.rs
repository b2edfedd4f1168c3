//! Waiting for the locks of a dead generation.
//!
//! Its session still has them. Once that is ended they are free, and whoever asks first has them: used
//! and given back before this generation asks, its holder would never know. So each is asked for while
//! the dead session has it still, by a call that waits. The metadata server serves those who wait in
//! their order before it listens to anybody else, so nobody who comes later can be in between.
//!
//! Whoever waited before gets the lock, and then it is lost. It is found out by asking who has it, over
//! and over until it is ours. That sees the other one even if the lock is given back before it is our
//! turn, unless between two questions: a fraction of a millisecond, less than a round trip of theirs.
//!
//! Waiting cannot be taken back (16.2.15 has no call for it), so a thread stays for each lock that is
//! lost, and gives it back when it comes. Until then the owner's locks of that file are another owner's
//! to the metadata server ([`Locks::alias`](super::locks::Locks::alias)).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client::{Client, File, Perms};
use super::locks::{Mark, open_for_locks, range_of};
use super::login::Mounting;
use super::node::vino;
use crate::control::message::HeldLock;
use crate::wire::Errno;

/// Each lock takes a thread. More than these are not waited for.
const LOCKS_MAX: usize = 64;
/// The dead session is ended at last when this has passed. What does not come through by then waits for
/// something the dead session has: the root, or the attributes of a file that nobody else has looked at.
const LIMIT: Duration = Duration::from_millis(50);
/// Answers of the server to other questions after which a call that waits has surely arrived.
const ROUNDS: u32 = 3;
/// Questions follow each other at once for this long; the end of a session takes less.
const EAGER: Duration = Duration::from_secs(2);

/// Locks that are asked for.
pub(super) struct Queue {
    shared: Arc<Shared>,
    queued: mpsc::Receiver<()>,
    watch: JoinHandle<()>,
}

struct Shared {
    locks: Vec<Asked>,
    /// The dead sessions are.
    ended: AtomicBool,
    calls: Arc<Calls>,
}

struct Asked {
    lock: HeldLock,
    range: libc::flock,
    /// What the locks of this file are known by in the dead session.
    pids: Vec<i32>,
    state: Mutex<State>,
    rounds: AtomicU32,
}

enum State {
    /// Not asked for yet.
    Opening,
    Asking(Arc<File>),
    Decided(Outcome),
}

/// What became of a lock.
#[derive(Clone)]
pub(super) enum Outcome {
    /// It is ours, through this file.
    Held(Arc<File>),
    /// Somebody else had it, or has it.
    Lost(Errno),
    /// It was not asked for.
    Unasked,
}

/// How many calls wait for a lock.
#[derive(Default)]
pub(super) struct Calls(AtomicUsize);

impl Calls {
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

impl Queue {
    /// Asks for locks as soon as the session has begun. In threads: nothing here waits. None if there
    /// are none, or no threads.
    pub(super) fn begin(
        client: &Arc<Client>,
        mounting: &Arc<Mounting>,
        held: &[HeldLock],
        mark: Mark,
    ) -> Option<Queue> {
        if held.is_empty() {
            return None;
        }
        let mut locks = Vec::new();
        for lock in held.iter().take(LOCKS_MAX) {
            let of_file = held.iter().filter(|other| other.nodeid == lock.nodeid);
            locks.push(Asked {
                lock: lock.clone(),
                range: range_of(lock, mark).ok()?,
                pids: of_file.map(|other| mark.on(other.pid)).collect(),
                state: Mutex::new(State::Opening),
                rounds: AtomicU32::default(),
            });
        }
        let shared = Arc::new(Shared {
            locks,
            ended: AtomicBool::default(),
            calls: Arc::default(),
        });
        let (sender, queued) = mpsc::channel();
        let work = {
            let (shared, client, mounting) = (shared.clone(), client.clone(), mounting.clone());
            move || {
                // What is looked up while a mount is under way the library takes for the root.
                if mounting.outcome().is_ok() {
                    shared.ask(&client);
                    shared.watch(sender);
                }
            }
        };
        let watch = Builder::new().name("locks".into()).spawn(work).ok()?;
        Some(Queue {
            shared,
            queued,
            watch,
        })
    }

    /// Returns when all calls have arrived, or when that is not to be expected any more.
    pub(super) fn wait(&self) {
        if self.queued.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::debug!("not all locks are waited for: the dead session is in the way");
        }
    }

    /// The dead sessions are ended: whoever has a lock from now on is somebody else. Returns what
    /// became of the first locks that [`begin`](Queue::begin) was given, in their order.
    pub(super) fn finish(self) -> (Vec<Outcome>, Arc<Calls>) {
        self.shared.ended.store(true, Ordering::SeqCst);
        if self.watch.join().is_err() {
            tracing::warn!("the thread that waited for locks failed");
        }
        let locks = self.shared.locks.iter();
        let outcomes = locks.map(|asked| match &*asked.state.lock() {
            State::Decided(outcome) => outcome.clone(),
            State::Opening | State::Asking(_) => Outcome::Unasked,
        });
        (outcomes.collect(), self.shared.calls.clone())
    }
}

impl Shared {
    /// Opens the files, each in a thread of its own: one may have to wait for the end of the dead
    /// session. Then asks for their locks, each in a thread again.
    fn ask(self: &Arc<Self>, client: &Arc<Client>) {
        let mut files: HashMap<u64, Vec<usize>> = HashMap::new();
        for (at, asked) in self.locks.iter().enumerate() {
            files.entry(asked.lock.nodeid).or_default().push(at);
        }
        for locks in files.into_values() {
            let (shared, client, mine) = (self.clone(), client.clone(), locks.clone());
            let work = move || {
                let file = shared.open(&client, mine[0]);
                for at in mine {
                    shared.ask_for(at, file.clone());
                }
            };
            if Builder::new().name("lock".into()).spawn(work).is_err() {
                for at in locks {
                    self.locks[at].decide(Outcome::Unasked);
                }
            }
        }
    }

    fn open(&self, client: &Arc<Client>, at: usize) -> Result<Arc<File>, Errno> {
        let vino = vino(&self.locks[at].lock.identity).ok_or(Errno::ESTALE)?;
        let superuser = Perms::new(client, 0, 0, &[])?;
        let file = open_for_locks(&client.find(vino)?, &superuser)?;
        Ok(Arc::new(file))
    }

    fn ask_for(self: &Arc<Self>, at: usize, file: Result<Arc<File>, Errno>) {
        let file = match file {
            Ok(file) => file,
            Err(errno) => return self.locks[at].decide(Outcome::Lost(errno)),
        };
        let shared = self.clone();
        self.calls.0.fetch_add(1, Ordering::SeqCst);
        *self.locks[at].state.lock() = State::Asking(file.clone());
        let work = move || {
            shared.locks[at].wait_in(&file);
            drop(file);
            shared.calls.0.fetch_sub(1, Ordering::SeqCst);
        };
        if Builder::new().name("lock".into()).spawn(work).is_err() {
            self.calls.0.fetch_sub(1, Ordering::SeqCst);
            self.locks[at].decide(Outcome::Unasked);
        }
    }

    /// Asks who has the locks until it is clear for each of them. Says when all are asked for.
    fn watch(&self, queued: mpsc::Sender<()>) {
        let mut queued = Some(queued);
        let began = Instant::now();
        loop {
            let ended = self.ended.load(Ordering::SeqCst);
            let (mut open, mut arrived, mut waited) = (false, true, false);
            for asked in &self.locks {
                let file = match &*asked.state.lock() {
                    State::Decided(_) => continue,
                    State::Opening => None,
                    State::Asking(file) => Some(file.clone()),
                };
                open = true;
                if let Some(file) = file {
                    waited |= asked.look(&file, ended);
                }
                arrived &= asked.rounds.load(Ordering::Relaxed) >= ROUNDS;
            }
            if arrived && let Some(queued) = queued.take() {
                let _ = queued.send(());
            }
            if !open {
                return;
            }
            if began.elapsed() > EAGER {
                std::thread::sleep(Duration::from_millis(10));
            } else if !waited {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

impl Asked {
    fn decide(&self, outcome: Outcome) {
        *self.state.lock() = State::Decided(outcome);
    }

    /// Returns when the lock was granted, however late.
    fn wait_in(&self, file: &Arc<File>) {
        let granted = file.wait_for_lock(self.range, self.lock.owner);
        let mut state = self.state.lock();
        if matches!(*state, State::Asking(_)) {
            *state = State::Decided(match granted {
                Ok(()) => Outcome::Held(file.clone()),
                Err(errno) => Outcome::Lost(errno),
            });
            return;
        }
        drop(state);
        if granted.is_ok() {
            self.give_back(file);
        }
    }

    /// Looks who has the lock. False if that cannot be known now.
    fn look(&self, file: &Arc<File>, ended: bool) -> bool {
        let Ok(found) = file.test_lock(self.range, self.lock.owner) else {
            return false;
        };
        self.rounds.fetch_add(1, Ordering::Relaxed);
        if i32::from(found.l_type) == libc::F_UNLCK {
            return true;
        }
        // Until its end it is mostly the dead session that has it.
        if ended || !self.pids.contains(&found.l_pid) {
            let mut state = self.state.lock();
            let lost = State::Decided(Outcome::Lost(Errno::EAGAIN));
            let before = std::mem::replace(&mut *state, lost);
            drop(state);
            if matches!(before, State::Decided(Outcome::Held(_))) {
                self.give_back(file);
            }
        }
        true
    }

    fn give_back(&self, file: &File) {
        let mut range = self.range;
        range.l_type = libc::F_UNLCK as libc::c_short;
        if let Err(e) = file.lock(range, self.lock.owner) {
            tracing::warn!("a lock on node {} stays with nobody: {e}", self.lock.nodeid);
        }
    }
}
