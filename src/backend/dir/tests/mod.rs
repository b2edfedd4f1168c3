//! The directory backend without FUSE: requests are put into a slot by hand, as the pump would.

mod passthrough;
mod replay;
mod restore;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Dir, DirOptions};
use crate::backend::vault::LocalVault;
use crate::backend::{Answer, Attempt, Backend, Call, Replayed};
use crate::region::memory::total;
use crate::region::slot::{Annex, HandleRef, NodeRef, Slot, SlotIndex};
use crate::region::{Identity, Region};
use crate::sys;
use crate::wire::abi::*;
use crate::wire::{Errno, Opcode, Request};

/// A store, and what the front-end would keep for it: region, vault and tables.
pub(super) struct World {
    region: Region,
    pub(super) vault: LocalVault,
    source: RefCell<PathBuf>,
    options: DirOptions,
    nodes: RefCell<HashMap<u64, Node>>,
    handles: RefCell<HashMap<u64, (u64, u32)>>,
    next: Cell<u64>,
    _temp: TempDir,
}

#[derive(Clone)]
struct Node {
    id: Identity,
    path: String,
    flags: u32,
}

/// A request and what belongs to it.
#[derive(Clone)]
pub(super) struct Ask {
    opcode: Opcode,
    node: u64,
    second: u64,
    args: Vec<u8>,
    fh: u64,
    second_fh: u64,
    handle_flags: u32,
    uid: u32,
    gid: u32,
}

/// A request of `node` with this argument struct, followed by these bytes.
pub(super) fn ask(
    opcode: Opcode,
    node: u64,
    arg: impl IntoBytes + Immutable,
    tail: impl AsRef<[u8]>,
) -> Ask {
    Ask {
        opcode,
        node,
        second: 0,
        args: [arg.as_bytes(), tail.as_ref()].concat(),
        fh: 0,
        second_fh: 0,
        handle_flags: 0,
        uid: 0,
        gid: 0,
    }
}

impl Ask {
    pub(super) fn second(self, second: u64) -> Ask {
        Ask { second, ..self }
    }

    pub(super) fn fh(self, fh: u64) -> Ask {
        Ask { fh, ..self }
    }

    pub(super) fn second_fh(self, second_fh: u64) -> Ask {
        Ask { second_fh, ..self }
    }

    pub(super) fn flags(self, handle_flags: u32) -> Ask {
        Ask {
            handle_flags,
            ..self
        }
    }

    pub(super) fn caller(self, uid: u32, gid: u32) -> Ask {
        Ask { uid, gid, ..self }
    }
}

/// What came back.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) answer: Result<Answer, Errno>,
    pub(super) replayed: Replayed,
    filled: Vec<u8>,
    new_fh: u64,
}

impl Outcome {
    pub(super) fn errno(&self) -> Errno {
        *self.answer.as_ref().expect_err("succeeded")
    }

    pub(super) fn ok(self) -> Outcome {
        assert!(self.answer.is_ok(), "{:?}", self.answer);
        self
    }

    pub(super) fn verified(self) -> Outcome {
        assert_eq!(self.replayed, Replayed::Verified);
        self.ok()
    }

    pub(super) fn reissued(self) -> Outcome {
        assert_eq!(self.replayed, Replayed::Reissued);
        self.ok()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self.answer.as_ref().unwrap() {
            Answer::Data(bytes) | Answer::Entries(bytes, _) => bytes,
            Answer::Filled(len) => &self.filled[..*len],
            other => panic!("{other:?} has no bytes"),
        }
    }

    pub(super) fn data<T: FromBytes + KnownLayout + Immutable>(&self) -> T {
        T::read_from_prefix(self.bytes()).unwrap().0
    }

    pub(super) fn attr(&self) -> Attr {
        match self.answer.as_ref().unwrap() {
            Answer::Entry(entry, _) | Answer::Created(entry, _, _) => entry.attr,
            _ => self.data::<AttrOut>().attr,
        }
    }

    pub(super) fn id(&self) -> Identity {
        match self.answer.as_ref().unwrap() {
            Answer::Entry(_, id) | Answer::Created(_, id, _) => *id,
            other => panic!("{other:?} has no identity"),
        }
    }
}

/// Runs a test on ext4 (or whatever /tmp is) and tmpfs by handle, and by walking.
pub(super) fn on_every_store(test: impl Fn(&World)) {
    for (parent, always_walk) in [("/tmp", false), ("/dev/shm", false), ("/tmp", true)] {
        test(&World::new(Path::new(parent), always_walk));
    }
}

impl World {
    pub(super) fn new(parent: &Path, always_walk: bool) -> World {
        let temp = tempfile::tempdir_in(parent).unwrap();
        let source = temp.path().join("source");
        std::fs::create_dir(&source).unwrap();
        World::at(temp, source, always_walk)
    }

    pub(super) fn at(temp: TempDir, source: PathBuf, always_walk: bool) -> World {
        World {
            region: Region::create().unwrap(),
            vault: LocalVault::default(),
            source: RefCell::new(source),
            options: DirOptions {
                always_walk,
                ..Default::default()
            },
            nodes: RefCell::default(),
            handles: RefCell::default(),
            next: Cell::new(100),
            _temp: temp,
        }
    }

    /// A new generation.
    pub(super) fn generation(&self) -> Dir {
        let dir = Dir::open(&self.source.borrow(), self.options, &self.vault).unwrap();
        let path = String::new();
        let (id, flags) = (dir.root(), 0);
        self.nodes.borrow_mut().insert(1, Node { id, path, flags });
        dir
    }

    /// Where something in the store is, seen from outside of the mount.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.source.borrow().join(name)
    }

    pub(super) fn walks(&self) -> bool {
        self.options.always_walk
    }

    pub(super) fn number(&self) -> u64 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }

    fn slot(&self) -> Slot<'_> {
        self.region.slot(SlotIndex::new(0).unwrap())
    }

    fn node_ref(&self, nodeid: u64, paths: &mut Vec<u8>) -> NodeRef {
        let nodes = self.nodes.borrow();
        let Some(node) = nodes.get(&nodeid) else {
            return NodeRef::default();
        };
        let path_len = if self.walks() {
            paths.extend_from_slice(node.path.as_bytes());
            node.path.len() as u32
        } else {
            0
        };
        NodeRef {
            nodeid,
            flags: node.flags,
            path_len,
            identity: node.id,
        }
    }

    fn handle_ref(&self, fh: u64, flags: u32) -> HandleRef {
        HandleRef {
            fh,
            open_flags: self.handles.borrow().get(&fh).map_or(0, |h| h.1),
            flags,
        }
    }

    /// Puts a request into the slot.
    fn put(&self, ask: &Ask) {
        let header = InHeader {
            len: (size_of::<InHeader>() + ask.args.len()) as u32,
            opcode: ask.opcode as u32,
            unique: 2,
            nodeid: ask.node,
            uid: ask.uid,
            gid: ask.gid,
            ..Default::default()
        };
        let bytes = [header.as_bytes(), &ask.args].concat();
        let slot = self.slot();
        slot.set_chunks(&[], &[]);
        slot.put_request(&bytes, &[]);
        slot.set_request_len(bytes.len());
        let mut paths = Vec::new();
        let annex = Annex {
            node: self.node_ref(ask.node, &mut paths),
            second: self.node_ref(ask.second, &mut paths),
            handle: self.handle_ref(ask.fh, ask.handle_flags),
            second_handle: self.handle_ref(ask.second_fh, 0),
            new_fh: self.number(),
            arrived_ns: sys::realtime_ns(),
            ..Default::default()
        };
        slot.set_annex(&annex, &paths);
    }

    /// Executes what is in the slot.
    fn execute(&self, dir: &Dir, again: bool) -> Outcome {
        let slot = self.slot();
        let bytes = slot.copy_request();
        let request = Request::decode(&bytes).unwrap();
        let call = Call::new(request, slot, &self.vault);
        let journal = slot.journal();
        let answer = dir.execute(
            &call,
            if again {
                Attempt::Again(&journal)
            } else {
                Attempt::First(&journal)
            },
        );
        let mut filled = Vec::new();
        if let Ok(Answer::Filled(len)) = answer {
            let spans = call.read_buffer(len);
            assert!(len <= total(&spans));
            filled = spans.iter().flat_map(|s| s.to_vec()).collect();
        }
        let outcome = Outcome {
            answer,
            replayed: call.replayed(),
            filled,
            new_fh: call.annex.new_fh,
        };
        self.learn(&call, &outcome);
        outcome
    }

    /// What the pump notes in its tables.
    fn learn(&self, call: &Call<'_>, outcome: &Outcome) {
        use crate::wire::Op;
        let flags = match call.request.op {
            Op::Create { arg, .. } => arg.flags,
            Op::Open(arg) => arg.flags,
            _ => 0,
        };
        if let Ok(Answer::Opened(_) | Answer::Created(..)) = outcome.answer {
            let handle = (call.request.header.nodeid, flags);
            self.handles.borrow_mut().insert(outcome.new_fh, handle);
        }
    }

    /// A first attempt, with its answer.
    pub(super) fn first(&self, dir: &Dir, ask: &Ask) -> Outcome {
        match self.prepare(dir, ask) {
            Ok(()) => self.execute(dir, false),
            Err(errno) => Outcome {
                answer: Err(errno),
                replayed: Replayed::No,
                filled: Vec::new(),
                new_fh: 0,
            },
        }
    }

    /// A generation that dies before it executes.
    pub(super) fn prepare(&self, dir: &Dir, ask: &Ask) -> Result<(), Errno> {
        self.put(ask);
        let slot = self.slot();
        let bytes = slot.copy_request();
        let call = Call::new(Request::decode(&bytes).unwrap(), slot, &self.vault);
        slot.set_journal(&dir.prepare(&call)?);
        Ok(())
    }

    /// The next generation finds the request in the slot.
    pub(super) fn again(&self, dir: &Dir) -> Outcome {
        self.execute(dir, true)
    }

    /// Dies before it executes; the answer of the next generation.
    pub(super) fn died_before(&self, ask: &Ask) -> Outcome {
        self.prepare(&self.generation(), ask).unwrap();
        self.again(&self.generation())
    }

    /// Dies after it executed; the answer of the next generation.
    pub(super) fn died_after(&self, ask: &Ask) -> Outcome {
        self.first(&self.generation(), ask).ok();
        self.again(&self.generation())
    }

    /// Makes an object known, as the reply to a LOOKUP does.
    pub(super) fn lookup(&self, dir: &Dir, parent: u64, name: &str) -> u64 {
        let outcome = self.first(dir, &ask(Opcode::Lookup, parent, (), z(name)));
        self.know(parent, name, outcome.id())
    }

    /// Gives an identity a node id.
    pub(super) fn know(&self, parent: u64, name: &str, id: Identity) -> u64 {
        let mut path = self.nodes.borrow()[&parent].path.clone();
        if !path.is_empty() {
            path.push('/');
        }
        path.push_str(name);
        let nodeid = self.number();
        let flags = 0;
        self.nodes
            .borrow_mut()
            .insert(nodeid, Node { id, path, flags });
        nodeid
    }

    /// Notes that the vault has a node's last descriptor.
    pub(super) fn vaulted(&self, nodeid: u64) {
        let mut nodes = self.nodes.borrow_mut();
        nodes.get_mut(&nodeid).unwrap().flags = NodeRef::VAULTED;
    }

    /// Opens a node; its handle.
    pub(super) fn open(&self, dir: &Dir, node: u64, flags: i32) -> u64 {
        let arg = OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        let opcode = if flags & libc::O_DIRECTORY != 0 {
            Opcode::Opendir
        } else {
            Opcode::Open
        };
        self.first(dir, &ask(opcode, node, arg, [])).ok().new_fh
    }

    /// Reads through a handle.
    pub(super) fn read(&self, dir: &Dir, node: u64, fh: u64) -> Result<Vec<u8>, Errno> {
        let arg = ReadIn {
            fh,
            size: 4096,
            ..Default::default()
        };
        let outcome = self.first(dir, &ask(Opcode::Read, node, arg, []).fh(fh));
        outcome.answer.as_ref().map_err(|e| *e)?;
        Ok(outcome.bytes().to_vec())
    }

    /// Attributes of a node.
    pub(super) fn getattr(&self, dir: &Dir, node: u64) -> Outcome {
        self.first(dir, &ask(Opcode::Getattr, node, GetattrIn::default(), []))
    }
}

/// A string as it stands in a request.
pub(super) fn z(name: &str) -> Vec<u8> {
    [name.as_bytes(), b"\0"].concat()
}

/// Two strings.
pub(super) fn zz(a: &str, b: &str) -> Vec<u8> {
    [z(a), z(b)].concat()
}

pub(super) fn mkdir(name: &str) -> Ask {
    let arg = MkdirIn {
        mode: 0o755,
        umask: 0,
    };
    ask(Opcode::Mkdir, 1, arg, z(name))
}

pub(super) fn unlink(name: &str) -> Ask {
    ask(Opcode::Unlink, 1, (), z(name))
}

pub(super) fn create(name: &str, flags: i32) -> Ask {
    let arg = CreateIn {
        flags: flags as u32,
        mode: 0o644,
        ..Default::default()
    };
    ask(Opcode::Create, 1, arg, z(name))
}

pub(super) fn rename(from: &str, to: &str, flags: u32) -> Ask {
    let arg = Rename2In {
        newdir: 1,
        flags,
        padding: 0,
    };
    ask(Opcode::Rename2, 1, arg, zz(from, to)).second(1)
}

pub(super) fn write(node: u64, fh: u64, flags: i32, offset: u64, data: &[u8]) -> Ask {
    let arg = WriteIn {
        fh,
        offset,
        size: data.len() as u32,
        flags: flags as u32,
        ..Default::default()
    };
    ask(Opcode::Write, node, arg, data).fh(fh)
}

/// Names in the store.
pub(super) fn names(path: &Path) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(path).unwrap();
    let mut names: Vec<_> = entries
        .map(|e| e.unwrap().file_name().as_bytes().to_vec())
        .collect();
    names.sort();
    names
}
