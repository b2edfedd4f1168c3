//! What is answered without a backend, or before it answers.

use zerocopy::IntoBytes;

use super::super::callers::Fate;
use super::*;

impl Core {
    /// Answers what needs no backend: bookkeeping in an outage, and what policy refuses.
    pub(super) fn answer_without_backend(
        &mut self,
        io: &Io,
        held: &Held,
        request: &Request<'_>,
    ) -> bool {
        let Service::Outage { since } = self.service else {
            // The store has not answered for the root in time, so it is not asked again until it
            // does: each of these would take a slot and half a second of somebody who only looks.
            return self.root_is_stuck() && self.answer_from_memory(io, request);
        };
        if self.apply_in_outage(io, held, request) {
            return true;
        }
        if self.answer_from_memory(io, request) {
            return true;
        }
        let refuse = match self.policy {
            OutagePolicy::Queue => false,
            OutagePolicy::Error => true,
            OutagePolicy::QueueFor(limit) => {
                held.arrived.saturating_sub(since) > limit.as_nanos() as u64
            }
        };
        if refuse {
            io.send(&self.refusal(request, Errno::EIO));
        }
        refuse
    }

    /// Requests that only end something: the tables are all that has to know, since the store loses
    /// its part with the backend. FLUSH is one of them because a write is with the store when it is
    /// acknowledged; and it must not wait: `execve(2)` sends it with locks held for which everybody
    /// waits who reads `/proc/PID/stat`.
    fn apply_in_outage(&mut self, io: &Io, held: &Held, request: &Request<'_>) -> bool {
        let effects = match request.op {
            Op::Forget { .. } | Op::BatchForget { .. } => {
                settle::forget_all(&mut self.tables, request)
            }
            Op::Release(release) => {
                self.vault.drop_locks_of(release.fh);
                self.tell_later(held, request);
                self.note_close(release.fh);
                settle::release(&mut self.tables, release.fh)
            }
            Op::Setlk(lk) if lk.lk.typ == libc::F_UNLCK as u32 => {
                // Free for everybody here at once; the next generation tells the store.
                let flock = lk.lk_flags & LK_FLOCK != 0;
                let (start, end) = (lk.lk.start, lk.lk.end);
                let unlocked = self.tables.unlock(held.nodeid, lk.owner, flock, start, end);
                if unlocked.is_err() {
                    return false;
                }
                let mut later = held.clone();
                later.purpose = Purpose::Internal;
                self.push_outside(later, setlk_bytes(request));
                vec![Effect::Unlocked(held.nodeid)]
            }
            Op::Flush(flush) => {
                let (nodeid, owner) = (held.nodeid, flush.lock_owner);
                self.vault.discard(&VaultKey::Lock {
                    nodeid,
                    owner,
                    flock: false,
                });
                let mut effects = Vec::new();
                settle::drop_owner(&mut self.tables, nodeid, owner, &mut effects);
                if !effects.is_empty() {
                    self.tell_later(held, request);
                }
                effects
            }
            _ => return false,
        };
        self.apply(io, &effects);
        if !held.opcode.has_no_reply() && held.purpose == Purpose::Kernel {
            io.send(&error_reply(held.unique, None));
        }
        true
    }

    /// Answers from the last known values: the root's attributes, the file system's numbers. `df`
    /// opens its argument first, so opening the root's directory belongs to it: a handle in the tables
    /// is all it takes, which a backend restores when it is used.
    pub(super) fn answer_from_memory(&mut self, io: &Io, request: &Request<'_>) -> bool {
        if !is_remembered(request.opcode, request.header.nodeid) {
            return false;
        }
        if let Op::Getxattr { arg, name } = request.op {
            return name == ACCESS_ACL && self.answer_root_acl(io, request.header.unique, arg.size);
        }
        let (Some(root), Some(statfs)) = (&self.root_attr, &self.statfs) else {
            return false;
        };
        let mut opened = None;
        let unique = request.header.unique;
        let reply = match request.op {
            Op::Statfs => data_reply(unique, None, statfs.as_bytes()),
            Op::Getattr(_) => data_reply(unique, None, root.as_bytes()),
            // Asked instead of GETATTR by whoever wants the time of birth, too: `stat(1)`.
            Op::Statx(_) => data_reply(unique, None, statx_of(&root.attr).as_bytes()),
            Op::Access(_) => error_reply(unique, None),
            Op::Open(open) => {
                let Ok(fh) = self.tables.reserve_handle() else {
                    return false;
                };
                self.tables.open_handle(
                    fh,
                    Handle {
                        nodeid: ROOT_ID,
                        open_flags: open.flags,
                        directory: true,
                        uid: request.header.uid,
                        gid: request.header.gid,
                        pid: request.header.pid,
                        lost: false,
                    },
                );
                opened = Some(fh);
                let out = OpenOut {
                    fh,
                    ..OpenOut::default()
                };
                data_reply(unique, None, out.as_bytes())
            }
            _ => return false,
        };
        self.counters.early_answers += 1;
        if !io.send(&reply)
            && let Some(fh) = opened
        {
            self.tables.close_handle(fh);
        }
        true
    }

    /// The kernel asks for the list of the root before it lets anybody but the root's owner into it:
    /// for `df` as well.
    fn answer_root_acl(&mut self, io: &Io, unique: u64, room: u32) -> bool {
        let reply = match &self.root_acl {
            None => return false,
            Some(Err(errno)) => error_reply(unique, Some(*errno)),
            Some(Ok(list)) if room == 0 => {
                let size = GetxattrOut {
                    size: list.len() as u32,
                    padding: 0,
                };
                data_reply(unique, None, size.as_bytes())
            }
            Some(Ok(list)) if list.len() > room as usize => {
                error_reply(unique, Some(Errno::ERANGE))
            }
            Some(Ok(list)) => data_reply(unique, None, list),
        };
        self.counters.early_answers += 1;
        io.send(&reply);
        true
    }

    /// A backend serves, and a request that was answered from memory is still with it.
    pub(super) fn root_is_stuck(&self) -> bool {
        let mut answered = self.slots.iter().flatten().filter(|s| s.answered);
        answered.any(|s| is_remembered(s.held.opcode, s.held.nodeid))
    }

    /// The answer to a request that is refused. A name the kernel knows is found again whatever
    /// happens: with an error it would detach what is mounted below it.
    pub(super) fn refusal(&mut self, request: &Request<'_>, errno: Errno) -> Vec<u8> {
        let unique = request.header.unique;
        if let Op::Lookup { name } = request.op {
            let parent = request.header.nodeid;
            let known = if parent == ROOT_ID && (name == "." || name == "..") {
                Some(ROOT_ID)
            } else {
                self.tables.find_name(parent, name)
            };
            let found = known.and_then(|nodeid| {
                let attr = self.tables.attr(nodeid)?;
                let identity: Identity = self.tables.node(nodeid)?.identity;
                Some((nodeid, attr, identity))
            });
            if let Some((nodeid, attr, identity)) = found
                && self.tables.look_up(&identity, None, &attr).is_ok()
            {
                let entry = EntryOut {
                    nodeid,
                    attr,
                    ..EntryOut::default()
                };
                return data_reply(unique, None, entry.as_bytes());
            }
        }
        error_reply(unique, Some(errno))
    }

    /// Calling threads whose requests have waited for some time.
    pub fn callers(&self) -> Vec<u32> {
        let now = sys::monotonic_ns();
        let slots = self.slots.iter().flatten().filter(|s| !s.answered);
        let held = slots
            .map(|s| &s.held)
            .chain(self.outside.iter().map(|o| &o.held));
        held.filter(|h| h.pid != 0 && now.saturating_sub(h.arrived) >= CALLER_PATIENCE)
            .map(|h| h.pid)
            .collect()
    }

    /// Looks after what depends on time. `fate` says what becomes of a caller.
    pub fn tick(&mut self, io: &Io, fate: impl Fn(u32) -> Fate) {
        let now = sys::monotonic_ns();
        let age = |held: &Held| Duration::from_nanos(now.saturating_sub(held.arrived));
        // What has been refused before it ran is simply dropped.
        let mut outside = std::mem::take(&mut self.outside);
        outside.retain(|o| {
            let Ok(request) = Request::decode(&o.bytes) else {
                return false;
            };
            let keep = !self.answer_early(io, &o.held, &request, age(&o.held), now, &fate);
            if !keep {
                self.left_outside(o);
            }
            keep
        });
        // Answering may have put something outside.
        outside.append(&mut self.outside);
        self.outside = outside;

        for index in (0..SLOTS).filter_map(SlotIndex::new) {
            let Some(in_slot) = &self.slots[index.get() as usize] else {
                continue;
            };
            if in_slot.answered || in_slot.at == Where::Settling {
                continue;
            }
            let (held, at) = (in_slot.held.clone(), in_slot.at);
            let bytes = io.region.slot(index).copy_request();
            let Some(request) = self.genuine(index, &bytes) else {
                if at == Where::Here {
                    let reply = error_reply(held.unique, Some(Errno::EIO));
                    self.answer_slot(io, index, &reply);
                }
                continue;
            };
            if !self.answer_early(io, &held, &request, age(&held), now, &fate) {
                continue;
            }
            if self.stale.len() < STALE_MAX {
                self.stale.push(held.nodeid);
            }
            if at == Where::Here {
                // No backend has it: it is over.
                self.give_up(io, index);
            } else if let Some(in_slot) = &mut self.slots[index.get() as usize] {
                in_slot.answered = true;
            }
        }
        self.next_suspect(io);
        self.retry_waiters(io, now);
        self.start_outside(io);
    }

    /// Lets go of the room a burst of requests took outside, now that nothing is held. True if the
    /// allocator may keep some, too.
    pub fn shrink(&mut self) -> bool {
        if self.slack < SLACK_MAX || self.inflight() > 0 || !self.outside.is_empty() {
            return false;
        }
        self.slack = 0;
        self.outside = VecDeque::new();
        true
    }

    /// Answers a request before the backend does, if it must not wait longer.
    pub(super) fn answer_early(
        &mut self,
        io: &Io,
        held: &Held,
        request: &Request<'_>,
        age: Duration,
        now: u64,
        fate: &impl Fn(u32) -> Fate,
    ) -> bool {
        if held.purpose == Purpose::Internal || held.opcode.has_no_reply() {
            return false;
        }
        if age >= ROOT_PATIENCE && self.answer_from_memory(io, request) {
            return true;
        }
        let outage = self.service != Service::Serving;
        if outage && self.apply_in_outage(io, held, request) {
            return true;
        }
        let limit = match self.policy {
            OutagePolicy::Queue => None,
            OutagePolicy::QueueFor(limit) => Some(limit),
            OutagePolicy::Error => Some(ERROR_PATIENCE),
        };
        if let (Service::Outage { since }, Some(limit)) = (self.service, limit)
            && now.saturating_sub(since) > limit.as_nanos() as u64
        {
            self.counters.early_answers += 1;
            io.send(&self.refusal(request, Errno::EIO));
            return true;
        }
        let nobody_waits = || match fate(held.pid) {
            Fate::Lives => false,
            Fate::Dying => true,
            // Whoever needs the page asks for it again.
            Fate::Gone => is_page_read(request),
        };
        if age >= Duration::from_nanos(CALLER_PATIENCE) && nobody_waits() {
            self.counters.early_answers += 1;
            io.send(&self.refusal(request, Errno::EINTR));
            return true;
        }
        false
    }
}

/// A READ for the page cache, not for a buffer of the caller.
fn is_page_read(request: &Request<'_>) -> bool {
    let buffered = |read: ReadIn| read.flags as i32 & libc::O_DIRECT == 0;
    request.opcode == Opcode::Read && matches!(request.op, Op::Read(read) if buffered(read))
}

/// Requests of `df`, `stat` and kubelet, which are answered from memory if need be.
pub(super) fn is_remembered(opcode: Opcode, nodeid: u64) -> bool {
    use Opcode::*;
    let of_root = matches!(opcode, Getattr | Statx | Access | Opendir | Getxattr);
    opcode == Statfs || nodeid == ROOT_ID && of_root
}

/// The answer to a STATX, without the time of birth, which nobody remembers.
pub(super) fn statx_of(attr: &Attr) -> StatxOut {
    let time = |sec: u64, nsec| SxTime {
        sec: sec as i64,
        nsec,
        reserved: 0,
    };
    StatxOut {
        stat: Statx {
            mask: libc::STATX_BASIC_STATS,
            blksize: attr.blksize,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: attr.mode as u16,
            ino: attr.ino,
            size: attr.size,
            blocks: attr.blocks,
            atime: time(attr.atime, attr.atimensec),
            ctime: time(attr.ctime, attr.ctimensec),
            mtime: time(attr.mtime, attr.mtimensec),
            ..Statx::default()
        },
        ..StatxOut::default()
    }
}
