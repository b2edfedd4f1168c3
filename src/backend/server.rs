//! The backend process: takes slots from the ring, has them served, hands them back.
//!
//! The process is disposable at every instruction. What it must not lose it has written before:
//! journal → `Running` → work → reply → `ReplyReady` → ring. A slot whose phase says `ReplyReady`
//! needs this process no more.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::convert::Timeouts;
use super::dir::{Dir, DirOptions};
use super::fault::{self, Place};
use super::{Attempt, Backend, Call, Frontend, Replayed, Vault, VaultKey, ceph, put_answer};
use crate::control::blob;
use crate::control::message::{
    Attachment, BackendMessage, BackendOptions, FrontendMessage, LostLock, PROTOCOL, Restore,
    Secrets, SessionNames, Source, StaleRange,
};
use crate::control::socket::Conn;
use crate::region::retained::Retained;
use crate::region::slot::{Phase, Slot, SlotIndex};
use crate::region::{Identity, Region, SLOTS};
use crate::sys;
use crate::wire::{Errno, Request};

/// Threads that serve at the start.
const WORKERS: u32 = 2;
/// Threads at most. More than slots would never have work.
const WORKERS_MAX: u32 = SLOTS;
/// Address space of a worker's stack: libraries of stores are not sparing with it.
const STACK: usize = 2 << 20;
/// A vault that does not answer for this long is a front-end that is gone.
const VAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Objects in one message.
const GONE_MAX: usize = 256;

/// Exit code of a backend that lost its store through no fault of a request (`EX_TEMPFAIL`).
pub const EXIT_LOST: i32 = 75;

/// Why a backend could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The front-end and this program do not understand each other.
    #[error(
        "front-end chose control protocol {theirs}, which this backend did not offer; \
         use the same release for both"
    )]
    Protocol {
        /// The version it chose.
        theirs: u32,
    },
    /// The front-end did not do what it should.
    #[error("front-end {0}")]
    Attach(&'static str),
    /// The socket failed.
    #[error(transparent)]
    Control(#[from] crate::control::ControlError),
    /// The session region could not be mapped.
    #[error("cannot map the session region: {0}")]
    Region(#[source] std::io::Error),
    /// The store could not be opened.
    #[error(transparent)]
    Dir(#[from] super::dir::DirError),
    /// The store could not be reached.
    #[error(transparent)]
    Ceph(#[from] super::ceph::login::CephError),
    /// What the front-end sent cannot be read.
    #[error("cannot read what the front-end sent beside the attach: {0}")]
    Attachment(#[source] std::io::Error),
    /// The limit cannot be set.
    #[error("cannot limit the backend's memory: {0}; is the limit of this process lower?")]
    Memory(#[source] std::io::Error),
    /// A test wanted it so ([`fault`]).
    #[error("{0}")]
    Ordered(String),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// Serves over `conn`, the socket to the front-end, until the front-end ends or says so.
pub fn run(conn: Conn) -> Result<(), ServeError> {
    let conn = Arc::new(conn);
    conn.send(
        &BackendMessage::Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
        },
        &[],
    )?;
    let Some((message, fds)) = conn.recv::<FrontendMessage>()? else {
        return Err(ServeError::Attach("closed the socket before attaching"));
    };
    let serves = matches!(message, FrontendMessage::Attach { .. });
    let (FrontendMessage::Attach {
        protocol,
        source,
        options,
        session,
        attachments,
        ..
    }
    | FrontendMessage::Keep {
        protocol,
        source,
        options,
        session,
        attachments,
    }) = message
    else {
        return Err(ServeError::Attach("sent something else than an attach"));
    };
    if !(PROTOCOL.0..=PROTOCOL.1).contains(&protocol) {
        return Err(ServeError::Protocol { theirs: protocol });
    }
    let mut fds = fds.into_iter();
    let region_fd = if serves { fds.next() } else { None };
    let given = Given {
        source,
        options: *options,
        session,
        ..Given::read(attachments, fds)?
    };
    let retire_limit = given.options.retire_limit();
    let link = Arc::new(FrontendLink {
        conn: conn.clone(),
        next: AtomicU64::new(1),
        pending: Mutex::default(),
    });
    if !serves {
        return keep(&conn, link, given);
    }
    let region_fd = region_fd.ok_or(ServeError::Attach("sent no session region"))?;
    let region = Region::open(region_fd).map_err(ServeError::Region)?;
    let serving: Arc<OnceLock<Arc<Server>>> = Arc::default();

    // Opening the store may need the vault, whose answers arrive on the socket.
    let starter = {
        let (conn, link, serving) = (conn.clone(), link.clone(), serving.clone());
        move || {
            if let Err(e) = start(&conn, region, link, given, &serving) {
                let reason = e.to_string();
                let _ = conn.send(&BackendMessage::Failed { reason }, &[]);
                // The library may have threads that no destructor waits for.
                sys::exit_now(1);
            }
        }
    };
    std::thread::Builder::new()
        .name("start".into())
        .spawn(starter)
        .map_err(ServeError::Thread)?;
    while let Some((message, fds)) = conn.recv::<FrontendMessage>()? {
        match message {
            FrontendMessage::Answer { id, errno, found } => {
                let answer = if errno != 0 {
                    Err(Errno::from_raw(errno))
                } else {
                    Ok(fds.into_iter().next().filter(|_| found))
                };
                if let Some(waiting) = link.pending.lock().remove(&id) {
                    let _ = waiting.send(answer);
                }
            }
            FrontendMessage::Unpin { identities } => {
                if let Some(server) = serving.get() {
                    server.backend.unpin(&identities);
                }
            }
            FrontendMessage::Retire => break,
            FrontendMessage::Pin { .. } => {
                return Err(ServeError::Attach("took a backend for a standby"));
            }
            FrontendMessage::Attach { .. } | FrontendMessage::Keep { .. } => {
                return Err(ServeError::Attach("attached twice"));
            }
        }
    }
    if let Some(server) = serving.get() {
        limit_retirement(retire_limit);
        server.backend.retire();
    }
    Ok(())
}

/// The front-end may be gone, and the store may not answer: ends this process if it has not ended by
/// itself.
fn limit_retirement(limit: Duration) {
    let thread = std::thread::Builder::new().name("limit".into());
    let _ = thread.spawn(move || {
        std::thread::sleep(limit);
        tracing::error!("the store does not end its session; leaving it");
        sys::exit_now(1)
    });
}

/// Holds a standby session, as [`run`] serves.
fn keep(conn: &Arc<Conn>, link: Arc<FrontendLink>, given: Given) -> Result<(), ServeError> {
    let Source::Ceph(source) = given.source else {
        return Err(ServeError::Attach("wants a standby of a store without one"));
    };
    // For `ps`.
    let _ = rustix::thread::set_name(c"evermount-stby");
    if let Some(bytes) = given.options.memory_limit {
        sys::limit_memory(bytes).map_err(ServeError::Memory)?;
    }
    let retire_limit = given.options.retire_limit();
    let (teller, news) = mpsc::channel();
    let keeper = {
        let conn = conn.clone();
        move || {
            let start = ceph::session::Start {
                source: &source,
                options: &given.options.ceph,
                timeouts: Timeouts::default(),
                names: &given.session,
                secrets: given.secrets,
                restore: given.restore,
                retained: None,
                frontend: link,
            };
            let keeping = || {
                // Nobody hears it if the front-end is gone, which ends the conversation anyway.
                let _ = conn.send(&BackendMessage::Keeping, &[]);
            };
            if let Err(e) = ceph::standby::keep(&start, &news, keeping) {
                let reason = e.to_string();
                let _ = conn.send(&BackendMessage::Failed { reason }, &[]);
                sys::exit_now(1);
            }
        }
    };
    let keeper = std::thread::Builder::new()
        .name("keep".into())
        .spawn(keeper)
        .map_err(ServeError::Thread)?;
    while let Some((message, _)) = conn.recv::<FrontendMessage>()? {
        let told = match message {
            FrontendMessage::Pin { identities } => ceph::standby::News::Pin(identities),
            FrontendMessage::Unpin { identities } => ceph::standby::News::Unpin(identities),
            FrontendMessage::Retire => break,
            FrontendMessage::Attach { .. }
            | FrontendMessage::Keep { .. }
            | FrontendMessage::Answer { .. } => {
                return Err(ServeError::Attach("took a standby for a backend"));
            }
        };
        // The thread lives until it is told no more, or the process ends.
        let _ = teller.send(told);
    }
    limit_retirement(retire_limit);
    drop(teller);
    if keeper.join().is_err() {
        sys::exit_now(1);
    }
    Ok(())
}

/// What an attach brings.
struct Given {
    source: Source,
    options: BackendOptions,
    session: SessionNames,
    restore: Restore,
    secrets: Secrets,
    retained: Option<Retained>,
}

impl Given {
    fn read(
        attachments: Vec<Attachment>,
        fds: impl Iterator<Item = OwnedFd>,
    ) -> Result<Given, ServeError> {
        let mut given = Given {
            source: Source::Dir(PathBuf::new()),
            options: BackendOptions::default(),
            session: SessionNames::default(),
            restore: Restore::default(),
            secrets: Secrets::default(),
            retained: None,
        };
        for (attachment, fd) in attachments.into_iter().zip(fds) {
            if attachment == Attachment::Retained {
                given.retained = Some(Retained::open(fd).map_err(ServeError::Attachment)?);
                continue;
            }
            if attachment == Attachment::Secrets {
                sys::keep_memory_private().map_err(ServeError::Attachment)?;
            }
            let text = blob::read(fd).map_err(ServeError::Attachment)?;
            match attachment {
                Attachment::Restore => {
                    let restore = serde_json::from_slice(&text);
                    given.restore = restore.map_err(|e| ServeError::Attachment(e.into()))?;
                }
                Attachment::Secrets => {
                    let secrets = Secrets::from_bytes(&text);
                    given.secrets =
                        secrets.map_err(|e| ServeError::Attachment(std::io::Error::other(e)))?;
                }
                Attachment::Retained => {}
            }
        }
        Ok(given)
    }
}

/// A store that is open.
struct Opened {
    backend: Box<dyn Backend>,
    /// Locks that somebody else has now.
    lost_locks: Vec<LostLock>,
    /// Objects in use that are not there any more.
    gone: Vec<Identity>,
    /// Sessions of dead mounts that it ended.
    ended: Vec<String>,
}

/// Opens the store.
fn open(given: Given, link: &Arc<FrontendLink>) -> Result<Opened, ServeError> {
    match given.source {
        Source::Dir(path) => {
            let mut options = DirOptions::default();
            let Timeouts { entry, attr } = options.timeouts;
            options.timeouts = Timeouts {
                entry: given.options.entry_timeout.unwrap_or(entry),
                attr: given.options.attr_timeout.unwrap_or(attr),
            };
            Ok(Opened {
                backend: Box::new(Dir::open(&path, options, &**link)?),
                lost_locks: Vec::new(),
                gone: Vec::new(),
                ended: Vec::new(),
            })
        }
        Source::Ceph(source) => {
            let opened = ceph::session::open(ceph::session::Start {
                source: &source,
                options: &given.options.ceph,
                timeouts: Timeouts {
                    entry: given.options.entry_timeout.unwrap_or_default(),
                    attr: given.options.attr_timeout.unwrap_or_default(),
                },
                names: &given.session,
                secrets: given.secrets,
                restore: given.restore,
                retained: given.retained,
                frontend: link.clone(),
            })?;
            Ok(Opened {
                backend: Box::new(opened.ceph),
                lost_locks: opened.lost_locks,
                gone: opened.gone,
                ended: opened.ended,
            })
        }
    }
}

fn start(
    conn: &Conn,
    region: Region,
    link: Arc<FrontendLink>,
    given: Given,
    serving: &OnceLock<Arc<Server>>,
) -> Result<(), ServeError> {
    if let Some(reason) = fault::start() {
        return Err(ServeError::Ordered(reason));
    }
    if let Some(bytes) = given.options.memory_limit {
        sys::limit_memory(bytes).map_err(ServeError::Memory)?;
    }
    let Opened {
        backend,
        lost_locks,
        gone,
        ended,
    } = open(given, &link)?;
    for part in gone.chunks(GONE_MAX) {
        let identities = part.to_vec();
        conn.send(&BackendMessage::Gone { identities }, &[])?;
    }
    let root = backend.root();
    let needs_paths = backend.needs_paths();
    let server = Arc::new(Server {
        region,
        backend,
        vault: link,
        requests: Mutex::new(()),
        replies: Mutex::new(()),
        idle: AtomicU32::new(0),
        workers: AtomicU32::new(0),
    });
    for _ in 0..WORKERS {
        server.spawn_worker().map_err(ServeError::Thread)?;
    }
    let _ = serving.set(server);
    let ready = BackendMessage::Ready {
        root,
        needs_paths,
        lost_locks,
        ended,
    };
    conn.send(&ready, &[])?;
    Ok(())
}

struct Server {
    region: Region,
    backend: Box<dyn Backend>,
    vault: Arc<FrontendLink>,
    /// Turn to take from the request ring.
    requests: Mutex<()>,
    /// Turn to put into the reply ring.
    replies: Mutex<()>,
    /// Workers that wait for a request.
    idle: AtomicU32,
    workers: AtomicU32,
}

impl Server {
    fn spawn_worker(self: &Arc<Self>) -> std::io::Result<()> {
        self.workers.fetch_add(1, Ordering::Relaxed);
        let server = self.clone();
        let name = "worker".to_owned();
        let spawned = std::thread::Builder::new()
            .name(name)
            .stack_size(STACK)
            .spawn(move || server.work());
        if spawned.is_err() {
            self.workers.fetch_sub(1, Ordering::Relaxed);
        }
        spawned.map(drop)
    }

    fn work(self: Arc<Self>) {
        self.backend.enter_thread();
        let requests = self.region.requests();
        loop {
            let taken = {
                let _turn = self.requests.lock();
                requests.pop()
            };
            let Some(index) = taken else {
                self.idle.fetch_add(1, Ordering::Relaxed);
                requests.wait(None);
                self.idle.fetch_sub(1, Ordering::Relaxed);
                continue;
            };
            // A request may block in the store: somebody must be left for the next one, also if that
            // comes later.
            if self.idle.load(Ordering::Relaxed) == 0
                && self.workers.load(Ordering::Relaxed) < WORKERS_MAX
                && let Err(e) = self.spawn_worker()
            {
                tracing::warn!("cannot start another worker: {e}");
            }
            self.serve(index);
        }
    }

    /// The story of one request.
    fn serve(&self, index: SlotIndex) {
        let slot = self.region.slot(index);
        let again = slot.annex().again != 0;
        if !again {
            slot.set_phase(Phase::Preparing);
        }
        let bytes = slot.copy_request();
        let done = match Request::decode(&bytes) {
            Ok(request) => {
                self.execute(&slot, request, again);
                Some(request)
            }
            Err(e) => {
                // The front-end decodes before it hands over, so this is a broken region.
                tracing::error!("slot {}: {e}", index.get());
                slot.set_reply(slot.request_header().unique, -Errno::EIO.raw(), 0);
                None
            }
        };
        slot.set_phase(Phase::ReplyReady);
        if let Some(request) = done {
            fault::point(Place::BeforeBookkeeping, &request);
        }
        let _turn = self.replies.lock();
        self.region.replies().push(index);
    }

    fn execute(&self, slot: &Slot<'_>, request: Request<'_>, again: bool) {
        let call = Call::new(request, *slot, &*self.vault);
        let journal = if again {
            slot.journal()
        } else {
            match self.backend.prepare(&call) {
                Ok(journal) => {
                    slot.set_journal(&journal);
                    journal
                }
                Err(errno) => {
                    slot.replayed().store(0, Ordering::Relaxed);
                    return put_answer(slot, &request, Err(errno));
                }
            }
        };
        slot.set_phase(Phase::Running);
        fault::point(Place::BeforeExecution, &request);
        let attempt = if again {
            Attempt::Again(&journal)
        } else {
            Attempt::First(&journal)
        };
        let answer = self.backend.execute(&call, attempt);
        fault::point(Place::BeforeReply, &request);
        let replayed: Replayed = call.replayed();
        slot.replayed().store(replayed as u32, Ordering::Relaxed);
        put_answer(slot, &request, answer);
    }
}

/// The front-end, over the control socket: its vault, and its ear.
struct FrontendLink {
    conn: Arc<Conn>,
    next: AtomicU64,
    pending: Mutex<HashMap<u64, mpsc::SyncSender<VaultAnswer>>>,
}

type VaultAnswer = Result<Option<OwnedFd>, Errno>;

impl FrontendLink {
    fn ask(
        &self,
        message: impl FnOnce(u64) -> BackendMessage,
        fds: &[BorrowedFd<'_>],
    ) -> VaultAnswer {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::sync_channel(1);
        self.pending.lock().insert(id, sender);
        let sent = self.conn.send(&message(id), fds);
        let answer = match sent {
            Ok(()) => receiver
                .recv_timeout(VAULT_TIMEOUT)
                .unwrap_or(Err(Errno::EIO)),
            Err(e) => {
                tracing::error!("vault: {e}");
                Err(Errno::EIO)
            }
        };
        self.pending.lock().remove(&id);
        answer
    }
}

impl Vault for FrontendLink {
    fn deposit(&self, key: VaultKey, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        self.ask(|id| BackendMessage::Deposit { id, key }, &[fd])
            .map(drop)
    }

    fn withdraw(&self, key: VaultKey) -> Result<Option<OwnedFd>, Errno> {
        self.ask(|id| BackendMessage::Withdraw { id, key }, &[])
    }

    fn discard(&self, key: VaultKey) {
        if let Err(e) = self.conn.send(&BackendMessage::Discard { key }, &[]) {
            tracing::error!("vault: {e}");
        }
    }
}

impl FrontendLink {
    fn tell(&self, message: &BackendMessage) {
        if let Err(e) = self.conn.send(message, &[]) {
            tracing::error!("front-end: {e}");
        }
    }
}

impl Frontend for FrontendLink {
    fn stale(&self, identity: &Identity, off: i64, len: i64) {
        let ranges = vec![StaleRange {
            identity: *identity,
            off,
            len,
        }];
        self.tell(&BackendMessage::Stale { ranges });
    }

    fn lost(&self, reason: &str) -> ! {
        let reason = reason.to_owned();
        self.tell(&BackendMessage::Failed { reason });
        // Nothing in order: other threads may be in the store, which is gone.
        sys::exit_now(EXIT_LOST)
    }
}
