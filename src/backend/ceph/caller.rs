//! Who asks: uid and gid of the request, and the groups of its process.
//!
//! The protocol carries no supplementary groups, so they are read from `/proc`, and remembered for a
//! moment: a process that changes its groups without changing its uid or gid is seen with the old
//! ones for that long.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Ceph;
use super::client::{self, Perms};
use crate::wire::Errno;
use crate::wire::abi::InHeader;

/// How long groups are remembered.
const MEMORY: Duration = Duration::from_secs(1);
/// How many callers are remembered.
const CALLERS: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    uid: u32,
    gid: u32,
    pid: u32,
}

/// The callers of the last moment.
#[derive(Default)]
pub(super) struct Callers(Mutex<HashMap<Key, (Arc<Perms>, Instant)>>);

impl Ceph {
    /// The caller's rights.
    pub(super) fn caller(&self, header: &InHeader) -> Result<Arc<Perms>, Errno> {
        if header.uid == 0 && header.gid == 0 {
            return Ok(self.superuser.clone());
        }
        let key = Key {
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
        };
        let now = Instant::now();
        if let Some((perms, since)) = self.callers.0.lock().get(&key)
            && now.duration_since(*since) < MEMORY
        {
            return Ok(perms.clone());
        }
        // Outside of the lock: `/proc` may make us wait.
        let groups = groups_of(header.pid);
        let perms = Perms::new(&self.client, header.uid, header.gid, &groups)?;
        let perms = Arc::new(perms);
        let mut callers = self.callers.0.lock();
        if callers.len() >= CALLERS {
            callers.retain(|_, (_, since)| now.duration_since(*since) < MEMORY);
        }
        if callers.len() < CALLERS {
            callers.insert(key, (perms.clone(), now));
        }
        Ok(perms)
    }

    /// The caller is in this group, besides its own one.
    pub(super) fn in_group(&self, header: &InHeader, gid: u32) -> bool {
        let caller = self.caller(header);
        caller.is_ok_and(|perms| perms.groups().contains(&gid))
    }

    /// The mode of something that is made. With ACLs the library applies the umask itself, unless
    /// the directory has a default ACL.
    pub(super) fn mode(&self, mode: u32, umask: u32) -> u32 {
        client::set_umask(umask);
        let mode = mode & 0o7777;
        if self.acls { mode } else { mode & !umask }
    }
}

/// Supplementary groups of a process. None if it cannot be seen from here.
fn groups_of(pid: u32) -> Vec<u32> {
    if pid == 0 {
        return Vec::new();
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("Groups:"));
    let numbers = line.unwrap_or_default().split_whitespace();
    numbers.filter_map(|n| n.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_this_process_are_found() {
        let mut expected: Vec<u32> = nix::unistd::getgroups()
            .unwrap()
            .into_iter()
            .map(|g| g.as_raw())
            .collect();
        let mut found = groups_of(std::process::id());
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        assert!(groups_of(0).is_empty());
    }
}
