//! The death of a backend and the beginning of the next one.

use super::*;

impl Core {
    /// The backend is gone (its pidfd said so). Everything it completed is delivered; the rest waits
    /// for the next generation. `own_doing`: it died of a fault, not of somebody's SIGKILL. False if
    /// it was given requests and answered none.
    pub fn backend_died(&mut self, io: &Io, own_doing: bool) -> bool {
        if self.service == Service::Serving {
            let since = sys::monotonic_ns();
            self.service = Service::Outage { since };
        }
        self.quarantine.clear();
        io.region.replies().producer_is_gone();
        io.region.requests().consumer_is_gone();
        for index in (0..SLOTS).filter_map(SlotIndex::new) {
            let handed = |s: &InSlot| s.at == Where::Handed;
            let phase = io.region.slot(index).phase();
            if self.slots[index.get() as usize]
                .as_ref()
                .is_some_and(handed)
                && phase == Some(Phase::ReplyReady)
                && let Some(delivery) = self.settle(io, index)
            {
                if delivery.drops_pages().is_some() {
                    self.after_notice.push(delivery);
                    continue;
                }
                let taken = deliver(io, &delivery);
                self.delivered(io, delivery, taken);
            }
        }
        self.vault.drop_unclaimed();
        if let (Service::Outage { since }, None) = (self.service, self.pause_began)
            && self.generation > 0
        {
            self.pause_began = Some(since);
        }

        let fruitful = self.settled > 0 || self.handed == 0;
        let mut started = Vec::new();
        let mut running = 0;
        for index in (0..SLOTS).filter_map(SlotIndex::new) {
            let slot = io.region.slot(index);
            let Some(in_slot) = self.slots[index.get() as usize]
                .as_mut()
                .filter(|s| s.at == Where::Handed)
            else {
                continue;
            };
            in_slot.at = Where::Here;
            in_slot.held.suspect = false;
            let phase = slot.phase();
            running += u32::from(matches!(phase, Some(Phase::Running | Phase::Preparing)));
            if in_slot.answered {
                // Its caller has an answer: never issued again.
                self.give_up(io, index);
                continue;
            }
            match phase {
                Some(Phase::Running) => {
                    started.push(index);
                    let bytes = slot.copy_request();
                    if let Some(request) = self.genuine(index, &bytes) {
                        self.note_last_name(&slot, &request, true);
                    }
                }
                Some(Phase::Preparing) => {
                    started.push(index);
                    slot.set_phase(Phase::Queued);
                }
                _ => slot.set_phase(Phase::Queued),
            }
        }
        if own_doing {
            self.suspect(&started, running == 1);
        }
        self.drop_locks_of_nobody();
        fruitful
    }

    /// Ends a request that no backend has and no caller waits for.
    pub(super) fn give_up(&mut self, io: &Io, index: SlotIndex) {
        if let Some(in_slot) = &self.slots[index.get() as usize] {
            self.tables.close_handle(in_slot.new_fh);
        }
        self.free(io, index);
    }

    /// Descriptions that carry no lock the tables know of, and none that is just being taken: what
    /// a request left that was never answered.
    fn drop_locks_of_nobody(&mut self) {
        let locking = |nodeid: u64| {
            let slots = self.slots.iter().flatten().map(|s| &s.held);
            let held = slots.chain(self.outside.iter().map(|o| &o.held));
            held.filter(|h| matches!(h.opcode, Opcode::Setlk | Opcode::Setlkw | Opcode::Flush))
                .any(|h| h.nodeid == nodeid)
        };
        let tables = &self.tables;
        self.vault.keep_locks(|key| match *key {
            VaultKey::Lock {
                nodeid,
                owner,
                flock,
            } => tables.has_locks(nodeid, owner, flock) || locking(nodeid),
            VaultKey::Root | VaultKey::Inode(_) => true,
        });
    }

    /// Notes who may have done it.
    fn suspect(&mut self, started: &[SlotIndex], alone: bool) {
        for &index in started {
            if let Some(in_slot) = &mut self.slots[index.get() as usize] {
                in_slot.held.suspect = true;
                if alone {
                    in_slot.held.deaths_alone += 1;
                }
            }
        }
    }

    /// A new generation is ready: it gets what the last one left, then what arrived meanwhile.
    pub fn backend_ready(&mut self, io: &Io, generation: u32, needs_paths: bool) {
        self.generation = generation;
        (self.handed, self.settled) = (0, 0);
        self.needs_paths = needs_paths;
        self.service = Service::Serving;
        if self.inflight() == 0 {
            self.end_pause();
        }
        let mut left: Vec<(u64, SlotIndex, bool)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(n, s)| Some((SlotIndex::new(n as u32)?, s.as_ref()?)))
            .filter(|(_, s)| s.at == Where::Here)
            .map(|(index, s)| (s.held.sequence, index, s.held.suspect))
            .collect();
        left.sort_unstable();
        for &(_, index, suspect) in &left {
            let slot = &self.slots[index.get() as usize];
            let renames = |s: &InSlot| matches!(s.held.opcode, Opcode::Rename | Opcode::Rename2);
            // A rename that may have happened decides what paths mean, so it is settled before
            // anything is looked for by path.
            let first = needs_paths && slot.as_ref().is_some_and(renames);
            if suspect || first {
                self.quarantine.push_back(index);
            }
        }
        if self.quarantine.is_empty() {
            self.issue_left(io);
        } else {
            self.issue_suspect(io);
        }
    }

    /// What may have run goes first, so that nothing new overtakes it.
    pub(super) fn issue_left(&mut self, io: &Io) {
        let mut left: Vec<(bool, u64, SlotIndex)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(n, s)| Some((SlotIndex::new(n as u32)?, s.as_ref()?)))
            .filter(|(_, s)| s.at == Where::Here)
            .map(|(index, s)| {
                let ran = io.region.slot(index).phase() == Some(Phase::Running);
                (!ran, s.held.sequence, index)
            })
            .collect();
        left.sort_unstable();
        for (_, _, index) in left {
            let bytes = io.region.slot(index).copy_request();
            match self.genuine(index, &bytes) {
                Some(request) => self.hand_over(io, index, &request),
                None => self.refuse_slot(io, index),
            }
        }
        self.start_outside(io);
    }

    /// What the last backend made of the request cannot be answered otherwise.
    fn refuse_slot(&mut self, io: &Io, index: SlotIndex) {
        if let Some(in_slot) = &self.slots[index.get() as usize] {
            let reply = error_reply(in_slot.held.unique, Some(Errno::EIO));
            self.tables.close_handle(in_slot.new_fh);
            self.answer_slot(io, index, &reply);
        }
    }

    /// Issues the next suspect alone, or answers it if it is poison.
    fn issue_suspect(&mut self, io: &Io) {
        while let Some(&index) = self.quarantine.front() {
            let bytes = io.region.slot(index).copy_request();
            let held = self.slots[index.get() as usize].as_ref();
            let Some(held) = held.map(|s| s.held.clone()) else {
                self.quarantine.pop_front();
                continue;
            };
            let Some(request) = self.genuine(index, &bytes) else {
                self.quarantine.pop_front();
                self.refuse_slot(io, index);
                continue;
            };
            if held.deaths_alone < POISON_DEATHS {
                self.hand_over(io, index, &request);
                if self.slots[index.get() as usize].is_some() {
                    return;
                }
                // Its node is gone, and so it was answered.
                self.quarantine.pop_front();
                continue;
            }
            tracing::error!(
                "{} of process {} killed {} backends: answered EIO",
                held.opcode,
                held.pid,
                held.deaths_alone
            );
            self.counters.poisoned += 1;
            self.quarantine.pop_front();
            if held.opcode.has_no_reply() {
                let effects = settle::forget_all(&mut self.tables, &request);
                self.apply(io, &effects);
                self.give_up(io, index);
                continue;
            }
            let reply = self.refusal(&request, Errno::EIO);
            if let Some(in_slot) = &self.slots[index.get() as usize] {
                self.tables.close_handle(in_slot.new_fh);
            }
            self.answer_slot(io, index, &reply);
        }
        self.issue_left(io);
    }

    /// A suspect came back: the next one, or everything else.
    pub(super) fn next_suspect(&mut self, io: &Io) {
        let Some(&index) = self.quarantine.front() else {
            return;
        };
        if self.service == Service::Serving && self.slots[index.get() as usize].is_none() {
            self.quarantine.pop_front();
            self.issue_suspect(io);
        }
    }
}
