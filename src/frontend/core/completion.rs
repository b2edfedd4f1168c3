//! From the backend to the kernel: a reply goes through the tables and out.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use zerocopy::{FromBytes, IntoBytes};

use super::*;

impl Core {
    /// Takes the next reply of the backend through the tables.
    pub fn next_delivery(&mut self, io: &Io) -> Option<Delivery> {
        // Bounded: a backend that hands back nonsense for ever must not keep the lock for ever.
        for _ in 0..SLOTS {
            let index = io.region.replies().pop()?;
            if let Some(delivery) = self.settle(io, index) {
                return Some(delivery);
            }
        }
        None
    }

    pub(super) fn settle(&mut self, io: &Io, index: SlotIndex) -> Option<Delivery> {
        let slot = io.region.slot(index);
        let ready = slot.phase() == Some(Phase::ReplyReady);
        let Some(in_slot) = self.slots[index.get() as usize]
            .as_mut()
            .filter(|s| s.at == Where::Handed && ready)
        else {
            self.counters.protocol_errors += 1;
            tracing::error!(
                "backend handed back slot {}, which it does not have",
                index.get()
            );
            return None;
        };
        in_slot.at = Where::Settling;
        let (answered, purpose, new_fh) = (in_slot.answered, in_slot.held.purpose, in_slot.new_fh);
        let unique = in_slot.held.unique;
        self.settled += 1;
        self.end_pause();
        match slot.replayed().load(Ordering::Relaxed) {
            n if n == Replayed::Verified as u32 => self.counters.verified_done += 1,
            n if n == Replayed::Ambiguous as u32 => self.counters.ambiguous += 1,
            _ => {}
        }
        let bytes = slot.copy_request();
        let Some(request) = self.genuine(index, &bytes) else {
            self.tables.close_handle(new_fh);
            return Some(Delivery {
                index,
                reply: Reply::Bytes(error_reply(unique, Some(Errno::EIO))),
                given: Given::default(),
                request: Vec::new(),
                drops_pages: None,
            });
        };
        if let Op::Release(release) = request.op {
            self.note_close(release.fh);
        }
        let Settled {
            mut reply,
            mut given,
            effects,
        } = settle::settle(&mut self.tables, &slot, &request, new_fh);
        if let Op::Release(release) = request.op {
            self.vault.drop_locks_of(release.fh);
        }
        self.note_last_name(&slot, &request, slot.reply_header().error == 0);
        self.apply(io, &effects);
        self.remember_root(io, &request, &slot, &reply);
        if reply == Reply::Waits
            && !answered
            && let Err(errno) = self.wait_for_lock(&request, index)
        {
            reply = Reply::Bytes(error_reply(unique, Some(errno)));
        }
        if answered || purpose == Purpose::Internal {
            if answered && slot.reply_header().error == 0 {
                self.unlock_what_nobody_wanted(&request);
            }
            let orphan = given.handle;
            let effects = std::mem::take(&mut given).take_back(&mut self.tables);
            self.apply(io, &effects);
            if let Some(fh) = orphan {
                let directory = request.opcode == Opcode::Opendir;
                self.release_orphan(io, request.header.nodeid, fh, directory);
            }
            reply = Reply::None;
        }
        let drops = slot.reply_drops_pages().load(Ordering::Relaxed) != 0;
        Some(Delivery {
            index,
            reply,
            given,
            drops_pages: drops.then_some(request.header.nodeid),
            request: bytes,
        })
    }

    /// The request in a slot, if it still is the one that was put there.
    pub(super) fn genuine<'b>(&mut self, index: SlotIndex, bytes: &'b [u8]) -> Option<Request<'b>> {
        let held = &self.slots[index.get() as usize].as_ref()?.held;
        let asked = (held.unique, held.opcode, held.nodeid);
        let request = Request::decode(bytes)
            .ok()
            .filter(|r| (r.header.unique, r.opcode, r.header.nodeid) == asked);
        if request.is_none() {
            self.counters.protocol_errors += 1;
            tracing::error!(
                "the backend has changed the request in slot {}",
                index.get()
            );
        }
        request
    }

    /// A lock was granted whose caller was told EINTR, since it was dying, and may be gone.
    fn unlock_what_nobody_wanted(&mut self, request: &Request<'_>) {
        let Op::Setlk(mut lk) = request.op else {
            return;
        };
        if lk.lk.typ == libc::F_UNLCK as u32 {
            return;
        }
        lk.lk.typ = libc::F_UNLCK as u32;
        let header = InHeader {
            opcode: Opcode::Setlk as u32,
            ..request.header
        };
        let bytes = [header.as_bytes(), lk.as_bytes()].concat();
        let held = self.hold(request, Purpose::Internal);
        let opcode = Opcode::Setlk;
        self.push_outside(Held { opcode, ..held }, bytes);
    }

    /// A new generation serves: the pause that began with the death of the last one is over.
    pub(super) fn end_pause(&mut self) {
        if let Some(began) = self.pause_began.take() {
            let pause = sys::monotonic_ns().saturating_sub(began);
            self.last_pause = Some(pause);
            self.longest_pause = self.longest_pause.max(pause);
        }
    }

    /// The delivery happened, or nobody waited for it.
    pub fn delivered(&mut self, io: &Io, delivery: Delivery, taken: bool) {
        if !taken && let Ok(request) = Request::decode(&delivery.request) {
            let effects = delivery.given.take_back(&mut self.tables);
            self.apply(io, &effects);
            if let Some(fh) = delivery.given.handle {
                let directory = request.opcode == Opcode::Opendir;
                self.release_orphan(io, request.header.nodeid, fh, directory);
            }
        }
        self.free(io, delivery.index);
        self.next_suspect(io);
        self.start_outside(io);
    }

    /// Ends a handle that the backend opened and nobody will ever use.
    fn release_orphan(&mut self, io: &Io, nodeid: u64, fh: u64, directory: bool) {
        let opcode = if directory {
            Opcode::Releasedir
        } else {
            Opcode::Release
        };
        let arg = ReleaseIn {
            fh,
            ..ReleaseIn::default()
        };
        self.issue_internal(io, opcode, nodeid, arg.as_bytes());
    }

    pub(super) fn free(&mut self, io: &Io, index: SlotIndex) {
        if let Some(in_slot) = self.slots[index.get() as usize].take() {
            io.region.slot(index).set_phase(Phase::Free);
            self.free_chunks.extend(in_slot.request_chunks);
            self.free_chunks.extend(in_slot.reply_chunks);
            self.free_slots.push(index);
        }
    }

    /// Answers a request that is in a slot and not with a living backend, and frees the slot.
    pub(super) fn answer_slot(&mut self, io: &Io, index: SlotIndex, reply: &[u8]) {
        if let Some(in_slot) = &self.slots[index.get() as usize] {
            if in_slot.held.purpose == Purpose::Kernel
                && !in_slot.answered
                && !in_slot.held.opcode.has_no_reply()
            {
                io.send(reply);
            }
            self.free(io, index);
        }
    }

    pub(super) fn apply(&mut self, io: &Io, effects: &[Effect]) {
        for &effect in effects {
            match effect {
                Effect::Forgotten(identity) => {
                    self.vault.discard(&VaultKey::Inode(identity));
                    self.forget_pinned(identity);
                }
                Effect::Known(identity, nodeid) => {
                    if self.vault.claim(&identity) {
                        self.tables.set_vaulted(nodeid, true);
                    }
                }
                Effect::LockedThrough {
                    nodeid,
                    owner,
                    flock,
                    fh,
                } => {
                    let key = VaultKey::Lock {
                        nodeid,
                        owner,
                        flock,
                    };
                    self.vault.locked_through(&key, fh);
                }
                Effect::Unlocked(nodeid) => self.serve_waiters(io, nodeid),
                Effect::OrphanHandle { nodeid, fh } => self.release_orphan(io, nodeid, fh, false),
            }
        }
    }

    /// Keeps the last attributes of the root and of the file system, to answer with in an outage:
    /// those that were found fit for the kernel.
    fn remember_root(
        &mut self,
        io: &Io,
        request: &Request<'_>,
        slot: &crate::region::slot::Slot<'_>,
        reply: &Reply,
    ) {
        let is_root = request.header.nodeid == ROOT_ID;
        if let (Op::Getxattr { arg, name }, true) = (request.op, is_root)
            && name == ACCESS_ACL
            && arg.size != 0
        {
            let spans = slot.reply_data(slot.reply_data_len());
            self.root_acl = Some(match slot.reply_header().error {
                0 => Ok(spans.iter().flat_map(|s| s.to_vec()).collect()),
                error => Err(Errno::from_raw(error.saturating_neg())),
            });
            return;
        }
        let private = match reply {
            Reply::Bytes(bytes) => OutHeader::read_from_prefix(bytes).ok(),
            _ => None,
        };
        let data = private.filter(|(h, _)| h.error == 0).map(|(_, data)| data);
        match (request.op, data) {
            (Op::Getattr(_) | Op::Setattr(_), Some(data)) if is_root => {
                if let Ok(mut attr) = AttrOut::read_from_bytes(data)
                    && attr.attr.mode & libc::S_IFMT == libc::S_IFDIR
                {
                    (attr.attr_valid, attr.attr_valid_nsec) = (0, 0);
                    self.root_attr = Some(attr);
                }
                if matches!(request.op, Op::Setattr(_)) {
                    // A change of the mode changes the list.
                    self.ask_root_acl(io);
                }
            }
            (Op::Setxattr { .. } | Op::Removexattr { .. }, _) if is_root => self.ask_root_acl(io),
            (Op::Statfs, Some(data)) => self.statfs = Kstatfs::read_from_bytes(data).ok(),
            _ => {}
        }
    }

    /// Learns the root's access control list. Until the answer is there nothing is known of it.
    pub fn ask_root_acl(&mut self, io: &Io) {
        self.root_acl = None;
        let arg = GetxattrIn {
            size: REPLY_SMALL as u32,
            padding: 0,
        };
        let args = [arg.as_bytes(), ACCESS_ACL.as_bytes(), &[0]].concat();
        self.issue_internal(io, Opcode::Getxattr, ROOT_ID, &args);
    }

    /// The attributes of root and file system are known.
    pub fn knows_root(&self) -> bool {
        self.root_attr.is_some() && self.statfs.is_some()
    }
}

/// Writes a reply to the kernel. False if nobody waits for it.
pub fn deliver(io: &Io, delivery: &Delivery) -> bool {
    match &delivery.reply {
        Reply::None | Reply::Waits => true,
        Reply::Bytes(bytes) => io.send(bytes),
        Reply::FromSlot(header) => {
            let Some(fuse) = io.fuse.get() else {
                return false;
            };
            let len = header.len as usize - size_of::<OutHeader>();
            let data = io.region.slot(delivery.index).reply_data(len);
            match sys::write_message(fuse.as_fd(), header.as_bytes(), &data) {
                Ok(_) => true,
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => false,
                Err(e) => {
                    tracing::error!("reply refused by the kernel: {e}");
                    true
                }
            }
        }
    }
}
