//! The sessions that a store may have of this mount, and those that dead mounts left behind.

use crate::control::message::SessionNames;
use crate::control::runtime;
use crate::control::sessions::{self, Abandoned, Record, Register, Store};

use super::{FrontendConfig, FrontendError};

/// Standbys that came to nothing in a row, of which the sessions are ended. No store has those of more
/// for so long.
const STANDBYS_MAX: usize = 64;

/// See the module.
pub struct Sessions {
    /// Beginning of the names of all of them.
    name: String,
    /// May be with the store, the newest last.
    names: Vec<String>,
    /// Those of standbys, the newest last. No backend ends them.
    standbys: Vec<String>,
    /// Standbys there have been.
    standby: u32,
    register: Register,
    /// Of mounts that died, until a backend has seen to them.
    abandoned: Vec<Abandoned>,
}

impl Sessions {
    /// Those of a new mount, if its store has sessions.
    pub fn new(config: &FrontendConfig) -> Result<Option<Sessions>, FrontendError> {
        if !config.source.has_sessions() {
            return Ok(None);
        }
        let directory = runtime::directory()?;
        let record = Record {
            mountpoint: config.mount.mountpoint.clone(),
            store: Store {
                source: config.source.to_string(),
                options: config.backend.ceph.clone(),
                files: config.secret_files.clone(),
            },
            names: Vec::new(),
            tried: None,
        };
        let name = sessions::random_name().map_err(super::io("read a random number"))?;
        let mut abandoned = sessions::abandoned(&directory);
        abandoned.retain(|a| record.store.is_same_client(&a.record().store));
        let register = Register::create(&directory, &name, record)
            .map_err(super::io("write to the runtime directory"))?;
        Ok(Some(Sessions {
            name,
            names: Vec::new(),
            standbys: Vec::new(),
            standby: 0,
            register,
            abandoned,
        }))
    }

    /// Names for the next backend. They stand in the file before it knows them.
    pub fn next(&mut self, generation: u32) -> SessionNames {
        let own = format!("{}-{generation}", self.name);
        let old = self.names.clone();
        self.names.push(own.clone());
        self.write();
        let abandoned = self.abandoned.iter().flat_map(|a| a.record().names.clone());
        SessionNames {
            own,
            old,
            abandoned: abandoned.collect(),
        }
    }

    /// The newest serves and has ended all the others; of those of dead mounts, these.
    pub fn ready(&mut self, ended: &[String]) {
        self.names = self.names.pop().into_iter().collect();
        self.write();
        for abandoned in self.abandoned.drain(..) {
            let record = abandoned.record();
            let found = record.names.iter().any(|name| ended.contains(name));
            if found {
                tracing::info!(
                    "ended the sessions that a dead mount on {} left behind",
                    record.mountpoint.display()
                );
            }
            if found || record.store.is_same(self.register.store()) {
                abandoned.forget();
            } else {
                abandoned.keep_for_a_while();
            }
        }
    }

    /// The newest came to nothing and is not with the store.
    pub fn gave_up(&mut self) {
        self.names.pop();
        self.write();
    }

    /// Names for the next standby.
    pub fn next_standby(&mut self) -> SessionNames {
        self.standby += 1;
        let own = format!("{}-standby-{}", self.name, self.standby);
        let old = self.standbys.clone();
        self.standbys.push(own.clone());
        if self.standbys.len() > STANDBYS_MAX {
            self.standbys.remove(0);
        }
        self.write();
        SessionNames {
            own,
            old,
            abandoned: Vec::new(),
        }
    }

    /// The newest standby has ended those of all others.
    pub fn standby_keeps(&mut self) {
        self.standbys = self.standbys.pop().into_iter().collect();
        self.write();
    }

    /// The newest standby has ended in order, and so its session.
    pub fn standby_ended(&mut self) {
        self.standbys.pop();
        self.write();
    }

    /// Some of standbys may be with the store.
    pub fn standbys_are_left(&self) -> bool {
        !self.standbys.is_empty()
    }

    /// Some may be with the store.
    pub fn are_left(&self) -> bool {
        !self.names.is_empty()
    }

    /// The mount is over. `ended`: its last session was ended in order.
    pub fn finish(self, ended: bool) {
        if (ended || self.names.is_empty()) && self.standbys.is_empty() {
            self.register.remove();
        }
    }

    fn write(&mut self) {
        let names = [&self.names[..], &self.standbys].concat();
        if let Err(e) = self.register.set(&names) {
            tracing::warn!(
                "cannot note the sessions of this mount in the runtime directory: {e}; should all its \
                 processes die, other clients may wait for a minute"
            );
        }
    }
}
