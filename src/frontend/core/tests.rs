//! A backend that hands back nonsense.

use super::*;
use crate::region::Region;
use std::io::Read;
use std::os::unix::net::UnixStream;
use zerocopy::{FromBytes, IntoBytes};

/// A core that serves, and the other end of its kernel connection.
fn serving() -> (Core, Io, UnixStream) {
    let (ours, kernel) = UnixStream::pair().unwrap();
    kernel
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let io = Io {
        region: Region::create().unwrap(),
        fuse: OwnedFd::from(ours).into(),
    };
    let mut core = Core::new(Tables::create().unwrap(), OutagePolicy::Queue, false, 1024);
    let root = Identity::new(b"root").unwrap();
    core.tables.set_root(&root, &Attr::default());
    core.backend_ready(&io, 1, false);
    (core, io, kernel)
}

/// The kernel sends an OPENDIR of the root.
fn ask(core: &mut Core, io: &Io, unique: u64) -> SlotIndex {
    let args = OpenIn::default();
    let header = InHeader {
        len: (size_of::<InHeader>() + size_of::<OpenIn>()) as u32,
        opcode: Opcode::Opendir as u32,
        unique,
        nodeid: ROOT_ID,
        ..InHeader::default()
    };
    let bytes = [header.as_bytes(), args.as_bytes()].concat();
    let (index, chunks) = core.reading();
    io.region.slot(index).put_request(&bytes, &chunks);
    core.arrived(io, bytes.len());
    assert_eq!(io.region.requests().pop(), Some(index));
    index
}

fn answer(kernel: &mut UnixStream) -> (u64, i32) {
    let mut bytes = [0; size_of::<OutHeader>()];
    kernel.read_exact(&mut bytes).unwrap();
    let header = OutHeader::read_from_bytes(&bytes).unwrap();
    (header.unique, header.error)
}

fn nothing_is_left(core: &Core) {
    assert_eq!(core.inflight(), 0);
    assert_eq!(core.free_slots.len(), SLOTS as usize - 1);
    assert_eq!(core.free_chunks.len(), CHUNKS as usize - MAX_CHUNKS);
    assert_eq!(core.tables.open_dirs(), 0);
}

#[test]
fn slots_a_backend_does_not_have_are_not_taken_from_it() {
    let (mut core, io, mut kernel) = serving();
    let index = ask(&mut core, &io, 2);
    for n in (0..SLOTS).rev() {
        let slot = SlotIndex::new(n).unwrap();
        // All but its own, and that is not ready yet.
        if slot != index {
            io.region.slot(slot).set_phase(Phase::ReplyReady);
        }
        io.region.replies().push(slot);
    }
    while !io.region.replies().is_empty() {
        assert!(core.next_delivery(&io).is_none());
    }
    assert_eq!(core.counters.protocol_errors, u64::from(SLOTS));
    assert_eq!(core.inflight(), 1);
    // It answers after all, with an error that does not exist, and twice.
    let slot = io.region.slot(index);
    slot.set_reply(2, -4000, 0);
    slot.set_phase(Phase::ReplyReady);
    io.region.replies().push(index);
    io.region.replies().push(index);
    let delivery = core.next_delivery(&io).unwrap();
    assert!(core.next_delivery(&io).is_none());
    let taken = deliver(&io, &delivery);
    core.delivered(&io, delivery, taken);
    assert_eq!(answer(&mut kernel), (2, -libc::EIO));
    nothing_is_left(&core);
}

#[test]
fn a_request_that_was_overwritten_by_the_backend_is_answered_when_that_is_dead() {
    let (mut core, io, mut kernel) = serving();
    for unique in [2, 4] {
        let index = ask(&mut core, &io, unique);
        io.region.slot(index).put_request(&[255; 200], &[]);
        io.region.slot(index).set_phase(Phase::Running);
    }
    core.backend_died(&io, false);
    assert_eq!(core.inflight(), 2);
    core.backend_ready(&io, 2, false);
    let mut answers = [answer(&mut kernel), answer(&mut kernel)];
    answers.sort_unstable();
    assert_eq!(answers, [(2, -libc::EIO), (4, -libc::EIO)]);
    nothing_is_left(&core);
}

/// The kernel sends a READ of `size` bytes of the root. True if it was handed over.
fn read(core: &mut Core, io: &Io, unique: u64, size: u32) -> bool {
    let args = ReadIn {
        size,
        ..ReadIn::default()
    };
    let header = InHeader {
        len: (size_of::<InHeader>() + size_of::<ReadIn>()) as u32,
        opcode: Opcode::Read as u32,
        unique,
        nodeid: ROOT_ID,
        ..InHeader::default()
    };
    let bytes = [header.as_bytes(), args.as_bytes()].concat();
    let (index, chunks) = core.reading();
    io.region.slot(index).put_request(&bytes, &chunks);
    core.arrived(io, bytes.len());
    io.region.requests().pop().is_some()
}

#[test]
fn a_large_request_that_waits_for_room_is_not_overtaken_by_smaller_ones() {
    let (mut core, io, _kernel) = serving();
    let (large, small) = (MAX_WRITE as u32, 128 * 1024);
    assert!(read(&mut core, &io, 2, large));
    assert!(read(&mut core, &io, 4, large));
    assert!(read(&mut core, &io, 6, small));
    assert!(!read(&mut core, &io, 8, large), "there is no room for it");
    assert!(
        !read(&mut core, &io, 10, small),
        "it overtook the large one"
    );
    assert!(read(&mut core, &io, 12, 4096), "it needs no room");
}

#[test]
fn a_backend_that_dies_over_its_first_request_is_told_from_one_that_served() {
    let (mut core, io, _kernel) = serving();
    assert!(core.backend_died(&io, false), "it was asked nothing");
    core.backend_ready(&io, 2, false);
    ask(&mut core, &io, 2);
    assert!(!core.backend_died(&io, true), "it answered nothing");
}

#[test]
fn a_reply_that_waits_for_a_notice_waits_for_it_when_its_backend_dies_as_well() {
    let (mut core, io, mut kernel) = serving();
    let index = ask(&mut core, &io, 2);
    let slot = io.region.slot(index);
    slot.set_reply(2, -libc::EACCES, 0);
    let drops = slot.reply_drops_pages();
    drops.store(1, std::sync::atomic::Ordering::Relaxed);
    slot.set_phase(Phase::ReplyReady);
    core.backend_died(&io, false);
    kernel.set_nonblocking(true).unwrap();
    assert!(kernel.read(&mut [0]).is_err(), "it was answered already");
    kernel.set_nonblocking(false).unwrap();
    let delivery = core.after_notice.pop().unwrap();
    assert_eq!(delivery.drops_pages(), Some(ROOT_ID));
    let taken = deliver(&io, &delivery);
    core.delivered(&io, delivery, taken);
    assert_eq!(answer(&mut kernel), (2, -libc::EACCES));
    nothing_is_left(&core);
}
