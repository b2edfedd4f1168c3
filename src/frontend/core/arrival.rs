//! From the kernel to the backend: arrival, waiting outside, handing over.

use super::*;

impl Core {
    /// A request of `len` bytes was read into the reader's slot.
    pub fn arrived(&mut self, io: &Io, len: usize) {
        self.counters.requests += 1;
        let slot = io.region.slot(self.reader_slot);
        slot.set_request_len(len);
        slot.set_chunks(&self.reader_chunks, &[]);
        let bytes = slot.copy_request();
        let request = match Request::decode(&bytes) {
            Ok(request) => request,
            Err(e) => {
                tracing::warn!("request from the kernel: {e}");
                let unique = slot.request_header().unique;
                // ENOSYS is for ever, so only for what a newer kernel may really ask.
                let errno = match e {
                    DecodeError::UnknownOpcode(_) => Errno::ENOSYS,
                    DecodeError::Short { .. } | DecodeError::Malformed { .. } => Errno::EIO,
                };
                io.send(&error_reply(unique, Some(errno)));
                return;
            }
        };
        match request.op {
            Op::Interrupt { unique } => return self.interrupt(io, unique),
            Op::Other => {
                // DESTROY wants an answer; nothing else of these is negotiated.
                let errno = (request.opcode != Opcode::Destroy).then_some(Errno::ENOSYS);
                io.send(&error_reply(request.header.unique, errno));
                return;
            }
            _ => {}
        }
        let held = self.hold(&request, Purpose::Kernel);
        if self.answer_without_backend(io, &held, &request) {
            return;
        }
        let first_chunks = request_chunks(len);
        let chunks = first_chunks + reply_chunks(&request);
        // Whoever waits for chunks outside is first, or small ones would starve a large one.
        let overtakes = chunks > 0 && self.outside_chunked > 0;
        if !overtakes && self.may_start(&request, chunks) {
            let index = self.reader_slot;
            self.reader_slot = self.free_slots.pop().expect("may_start saw a free slot");
            let mut request_chunks = std::mem::take(&mut self.reader_chunks);
            self.reader_chunks = request_chunks.split_off(first_chunks);
            let from = self.free_chunks.len() - first_chunks;
            self.reader_chunks.extend(self.free_chunks.drain(from..));
            self.start(io, index, held, request_chunks, &request);
        } else {
            let mut bytes = Vec::with_capacity(len);
            for span in slot.request_spans() {
                bytes.extend_from_slice(&span.to_vec());
            }
            self.push_outside(held, bytes);
        }
    }

    pub(super) fn hold(&mut self, request: &Request<'_>, purpose: Purpose) -> Held {
        self.sequence += 1;
        Held {
            unique: request.header.unique,
            opcode: request.opcode,
            nodeid: request.header.nodeid,
            pid: request.header.pid,
            arrived: sys::monotonic_ns(),
            arrived_ns: sys::realtime_ns(),
            sequence: self.sequence,
            purpose,
            interrupted: false,
            deaths_alone: 0,
            suspect: false,
            lock_tries: 0,
        }
    }

    pub(super) fn push_outside(&mut self, held: Held, bytes: Vec<u8>) {
        let replies = Request::decode(&bytes).map_or(0, |r| reply_chunks(&r));
        let chunks = request_chunks(bytes.len()) + replies;
        self.outside_chunked += usize::from(chunks > 0);
        self.outside_bytes += bytes.len();
        self.slack += bytes.len() + size_of::<Outside>();
        self.outside.push_back(Outside {
            held,
            bytes,
            chunks,
        });
    }

    /// Takes a request from outside.
    pub(super) fn take_outside(&mut self, at: usize) -> Option<Outside> {
        let outside = self.outside.remove(at)?;
        self.left_outside(&outside);
        Some(outside)
    }

    /// A request is not outside any more.
    pub(super) fn left_outside(&mut self, outside: &Outside) {
        self.outside_bytes -= outside.bytes.len();
        self.outside_chunked -= usize::from(outside.chunks > 0);
    }

    /// Issues a request of the front-end itself.
    pub fn issue_internal(&mut self, io: &Io, opcode: Opcode, nodeid: u64, args: &[u8]) {
        use zerocopy::IntoBytes;
        let header = InHeader {
            len: (size_of::<InHeader>() + args.len()) as u32,
            opcode: opcode as u32,
            nodeid,
            ..InHeader::default()
        };
        let bytes = [header.as_bytes(), args].concat();
        let Ok(request) = Request::decode(&bytes) else {
            return tracing::error!("internal {opcode} request is malformed");
        };
        let held = self.hold(&request, Purpose::Internal);
        self.push_outside(held, bytes.clone());
        self.start_outside(io);
    }

    /// A signal for the caller of a request. It only marks: the kernel sends it once, for any signal
    /// with a handler, and a live program must not see EINTR because of an outage. Only a lock waiter
    /// is meant to be interrupted.
    pub(super) fn interrupt(&mut self, io: &Io, unique: u64) {
        if self.waiting.remove(&unique).is_some() {
            self.tables.remove_waiter(unique);
            io.send(&error_reply(unique, Some(Errno::EINTR)));
            return;
        }
        let waits = |o: &Outside| o.held.unique == unique && o.held.opcode == Opcode::Setlkw;
        if let Some(at) = self.outside.iter().position(waits) {
            self.take_outside(at);
            io.send(&error_reply(unique, Some(Errno::EINTR)));
            return;
        }
        let slots = self.slots.iter_mut().flatten().map(|s| &mut s.held);
        let outside = self.outside.iter_mut().map(|o| &mut o.held);
        if let Some(held) = slots.chain(outside).find(|h| h.unique == unique) {
            held.interrupted = true;
        }
    }

    pub(super) fn may_start(&self, request: &Request<'_>, chunks: usize) -> bool {
        self.service == Service::Serving
            && self.quarantine.is_empty()
            && !self.free_slots.is_empty()
            && self.free_chunks.len() >= chunks
            && !self.is_held_back(request)
    }

    /// An unlock that was answered in an outage is still to be told to the store. Its owner may take
    /// the lock again meanwhile, and the two must not be executed in the wrong order.
    pub(super) fn is_held_back(&self, request: &Request<'_>) -> bool {
        let is_lock = |opcode| matches!(opcode, Opcode::Setlk | Opcode::Setlkw);
        is_lock(request.opcode)
            && self.slots.iter().flatten().any(|s| {
                s.held.purpose == Purpose::Internal
                    && is_lock(s.held.opcode)
                    && s.held.nodeid == request.header.nodeid
            })
    }

    /// Hands the request in `index` over for the first time.
    pub(super) fn start(
        &mut self,
        io: &Io,
        index: SlotIndex,
        held: Held,
        request_chunks: Vec<u16>,
        request: &Request<'_>,
    ) {
        let from = self.free_chunks.len() - reply_chunks(request);
        let reply_chunks: Vec<u16> = self.free_chunks.drain(from..).collect();
        let slot = io.region.slot(index);
        slot.set_chunks(&request_chunks, &reply_chunks);
        slot.set_sequence(held.sequence);
        slot.set_phase(Phase::Queued);
        self.slots[index.get() as usize] = Some(InSlot {
            held,
            at: Where::Here,
            answered: false,
            new_fh: 0,
            request_chunks,
            reply_chunks,
        });
        self.hand_over(io, index, request);
    }

    /// Gives a slot to the backend, for the first time or again.
    pub(super) fn hand_over(&mut self, io: &Io, index: SlotIndex, request: &Request<'_>) {
        let Some(in_slot) = &mut self.slots[index.get() as usize] else {
            return;
        };
        let slot = io.region.slot(index);
        let again = slot.phase() == Some(Phase::Running);
        in_slot.at = Where::Handed;
        let arrived_ns = in_slot.held.arrived_ns;
        let reserved = std::mem::take(&mut in_slot.new_fh);
        let resolved = resolve(&mut self.tables, request, arrived_ns, self.needs_paths);
        let (mut annex, paths) = match resolved {
            Ok(resolved) => resolved,
            Err(errno) => {
                self.tables.close_handle(reserved);
                let reply = error_reply(request.header.unique, Some(errno));
                return self.answer_slot(io, index, &reply);
            }
        };
        annex.again = again.into();
        if reserved != 0 {
            // The first attempt may have left its number with the store: it keeps it.
            self.tables.close_handle(annex.new_fh);
            annex.new_fh = reserved;
        }
        in_slot.new_fh = annex.new_fh;
        self.counters.reissued += u64::from(again);
        self.handed += 1;
        annex.handle.flags |= self.vault_flags(request);
        slot.set_annex(&annex, &paths);
        io.region.requests().push(index);
    }

    /// Locks the tables have forgotten (all ranges unlocked) may still have a description.
    pub(super) fn vault_flags(&self, request: &Request<'_>) -> u32 {
        use crate::region::slot::HandleRef;
        match request.op {
            Op::Flush(flush) => {
                let key = VaultKey::Lock {
                    nodeid: request.header.nodeid,
                    owner: flush.lock_owner,
                    flock: false,
                };
                if self.vault.has(&key) {
                    HandleRef::OWNER_HAS_LOCKS
                } else {
                    0
                }
            }
            _ => 0,
        }
    }

    /// Moves what waits outside into slots as far as there is room.
    pub(super) fn start_outside(&mut self, io: &Io) {
        let mut at = 0;
        let mut chunks_are_short = false;
        while at < self.outside.len() {
            if self.service != Service::Serving || self.free_slots.is_empty() {
                return;
            }
            let (bytes, chunks) = (&self.outside[at].bytes, self.outside[at].chunks);
            let Ok(request) = Request::decode(bytes) else {
                // It was decoded when it arrived.
                self.take_outside(at);
                continue;
            };
            let must_wait = chunks > 0 && chunks_are_short;
            if must_wait || !self.may_start(&request, chunks) {
                chunks_are_short |= chunks > self.free_chunks.len();
                at += 1;
                continue;
            }
            let (Some(index), Some(Outside { held, bytes, .. })) =
                (self.free_slots.pop(), self.take_outside(at))
            else {
                return;
            };
            let from = self.free_chunks.len() - request_chunks(bytes.len());
            let chunks: Vec<u16> = self.free_chunks.drain(from..).collect();
            let slot = io.region.slot(index);
            slot.put_request(&bytes, &chunks);
            slot.set_request_len(bytes.len());
            if let Ok(request) = Request::decode(&bytes) {
                self.start(io, index, held, chunks, &request);
            }
        }
    }
}

/// Payload chunks a request of this length takes.
fn request_chunks(len: usize) -> usize {
    len.saturating_sub(REQUEST_SMALL).div_ceil(CHUNK)
}

/// Payload chunks its reply may take.
fn reply_chunks(request: &Request<'_>) -> usize {
    let wanted = match request.op {
        Op::Read(read) if request.opcode == Opcode::Read => read.size,
        Op::Getxattr { arg, .. } | Op::Listxattr(arg) => arg.size,
        Op::Ioctl { arg, .. } => arg.out_size.saturating_add(size_of::<IoctlOut>() as u32),
        _ => 0,
    } as usize;
    if wanted <= REPLY_SMALL {
        0
    } else {
        wanted.min(MAX_WRITE).div_ceil(CHUNK)
    }
}
