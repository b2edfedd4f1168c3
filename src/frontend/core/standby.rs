//! What a standby session keeps: objects without a name that the kernel knows.

use super::*;
use crate::control::message::Restore;

/// Most of what is deleted is forgotten by the kernel at once. A standby is told of the rest, this
/// time later, nanoseconds.
const PATIENCE: u64 = 10_000_000;

/// What the standby session does not know yet.
#[derive(Default)]
pub(super) struct News {
    pin: HashSet<Identity>,
    unpin: Vec<Identity>,
    /// When to tell it.
    due: Option<u64>,
    /// The supervisor does not know that there is something.
    fresh: bool,
}

impl News {
    fn note(&mut self) {
        if self.due.is_none() {
            self.due = Some(sys::monotonic_ns() + PATIENCE);
            self.fresh = true;
        }
    }

    /// An object lost its last name.
    pub(super) fn pin(&mut self, identity: Identity) {
        self.pin.insert(identity);
        self.note();
    }

    /// The kernel does not know it any more.
    pub(super) fn unpin(&mut self, identity: Identity) {
        if !self.pin.remove(&identity) {
            self.unpin.push(identity);
            self.note();
        }
    }
}

impl Core {
    /// A standby begins: all it is to keep. From now on changes are noted for it.
    pub fn standby_begins(&mut self) -> Restore {
        self.standby = Some(News::default());
        Restore {
            pinned: self.pinned.iter().copied().collect(),
            ..Restore::default()
        }
    }

    /// There is none any more.
    pub fn standby_ended(&mut self) {
        self.standby = None;
    }

    /// When the standby has to be told something, `sys::monotonic_ns`.
    pub fn standby_due(&self) -> Option<u64> {
        self.standby.as_ref()?.due
    }

    /// What it has to be told: first what to let go of, then what to keep.
    pub fn standby_news(&mut self) -> (Vec<Identity>, Vec<Identity>) {
        let news = self.standby.as_mut().map(std::mem::take);
        let news = news.unwrap_or_default();
        (news.unpin, news.pin.into_iter().collect())
    }

    /// The supervisor has to be woken for what has happened. True once for each time.
    pub fn has_news(&mut self) -> bool {
        let news = self.standby.as_mut();
        let fresh = news.is_some_and(|news| std::mem::take(&mut news.fresh));
        fresh || !self.unpin.is_empty()
    }

    /// Objects that were in use are gone from the store.
    pub fn lose_files(&mut self, gone: &[Identity]) {
        for identity in gone {
            // What is still in use is gone for the next generation, too.
            if self.tables.find(identity).is_some() && self.gone.insert(*identity) {
                self.counters.lost_files += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(number: u8) -> Identity {
        Identity::new(&[number]).unwrap()
    }

    #[test]
    fn a_standby_hears_nothing_of_what_is_forgotten_at_once() {
        let mut news = News::default();
        news.pin(identity(1));
        assert!(news.due.is_some() && news.fresh);
        news.unpin(identity(1));
        assert!(news.pin.is_empty() && news.unpin.is_empty());
    }

    #[test]
    fn a_standby_lets_go_before_it_is_told_to_keep() {
        // It was told to keep it; a link gave it a name, which was removed, and so on.
        let mut news = News::default();
        news.unpin(identity(1));
        news.pin(identity(1));
        assert_eq!(news.unpin, [identity(1)]);
        assert_eq!(news.pin, HashSet::from([identity(1)]));
        news.unpin(identity(1));
        assert_eq!((news.unpin.len(), news.pin.len()), (1, 0));
    }
}
