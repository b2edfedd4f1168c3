//! Descriptors of nodes in recent use.
//!
//! Only a cache: whatever is not in it is found again from the node's identity. It is bounded
//! because each entry holds a descriptor of this process and pins an inode of the store.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

/// An `O_PATH` descriptor per node id. Node ids are never reused, so an entry is never wrong.
pub(super) struct NodeCache {
    clock: Mutex<Clock>,
    capacity: usize,
}

/// Second-chance replacement: a use costs one bit, where a true LRU list would have to be relinked.
#[derive(Default)]
struct Clock {
    places: HashMap<u64, usize>,
    ring: Vec<Option<Place>>,
    free: Vec<usize>,
    hand: usize,
}

struct Place {
    nodeid: u64,
    fd: Arc<OwnedFd>,
    used: bool,
}

impl NodeCache {
    /// Holds up to `capacity` (at least one) descriptors.
    pub(super) fn new(capacity: usize) -> NodeCache {
        NodeCache {
            clock: Mutex::default(),
            capacity: capacity.max(1),
        }
    }

    /// The node's descriptor, if it is here.
    pub(super) fn get(&self, nodeid: u64) -> Option<Arc<OwnedFd>> {
        let mut clock = self.clock.lock();
        let place = *clock.places.get(&nodeid)?;
        let place = clock.ring.get_mut(place)?.as_mut()?;
        place.used = true;
        Some(place.fd.clone())
    }

    /// Keeps a descriptor. When another thread was faster, its descriptor stays and is returned.
    pub(super) fn insert(&self, nodeid: u64, fd: OwnedFd) -> Arc<OwnedFd> {
        let mut clock = self.clock.lock();
        if let Some(&at) = clock.places.get(&nodeid)
            && let Some(Some(place)) = clock.ring.get(at)
        {
            return place.fd.clone();
        }
        let fd = Arc::new(fd);
        let at = clock.room(self.capacity);
        clock.ring[at] = Some(Place {
            nodeid,
            fd: fd.clone(),
            used: false,
        });
        clock.places.insert(nodeid, at);
        fd
    }

    /// Drops the node's descriptor: the kernel forgot it.
    pub(super) fn remove(&self, nodeid: u64) {
        let mut clock = self.clock.lock();
        if let Some(at) = clock.places.remove(&nodeid) {
            clock.ring[at] = None;
            clock.free.push(at);
        }
    }

    /// Drops every descriptor, to make room when the process has too many open.
    pub(super) fn clear(&self) {
        *self.clock.lock() = Clock::default();
    }
}

impl Clock {
    /// An empty place of the ring.
    fn room(&mut self, capacity: usize) -> usize {
        if let Some(at) = self.free.pop() {
            return at;
        }
        if self.ring.len() < capacity {
            self.ring.push(None);
            return self.ring.len() - 1;
        }
        loop {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.ring.len();
            match &mut self.ring[at] {
                Some(place) if place.used => place.used = false,
                Some(place) => {
                    self.places.remove(&place.nodeid);
                    self.ring[at] = None;
                    return at;
                }
                // Free places were popped above; one more is as good as any.
                None => return at,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> OwnedFd {
        std::fs::File::open("/").unwrap().into()
    }

    #[test]
    fn a_node_in_use_survives_those_that_are_used_once() {
        let cache = NodeCache::new(4);
        cache.insert(1, fd());
        for nodeid in 2..50 {
            assert!(cache.get(1).is_some());
            cache.insert(nodeid, fd());
        }
        assert!(cache.get(2).is_none());
        assert!(cache.get(49).is_some());
    }

    #[test]
    fn a_forgotten_node_makes_room() {
        let cache = NodeCache::new(2);
        cache.insert(1, fd());
        cache.insert(2, fd());
        cache.remove(1);
        cache.insert(3, fd());
        assert!(cache.get(1).is_none() && cache.get(2).is_some() && cache.get(3).is_some());
    }
}
