//! What a backend calls an object so that a later generation finds the same one.

use std::fmt;

use serde::de::Error as _;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A backend's durable name of an object: opaque bytes, at most [`Identity::MAX`], with the object's
/// generation in them, so that a reused inode number is another identity.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Identity {
    len: u8,
    bytes: [u8; Identity::MAX],
}

impl Identity {
    /// Longest identity in bytes.
    pub const MAX: usize = 127;
    /// No identity: "absent" in a journal, "unknown" in an annex.
    pub const NONE: Identity = Identity {
        len: 0,
        bytes: [0; Identity::MAX],
    };

    /// The identity with these bytes; `None` if there are too many.
    pub fn new(bytes: &[u8]) -> Option<Identity> {
        let mut id = Identity::NONE;
        id.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        id.len = bytes.len() as u8;
        Some(id)
    }

    /// Its bytes. A length that cannot be (shared memory may hold anything) is cut.
    pub fn as_bytes_ref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len).min(Identity::MAX)]
    }

    /// There is none.
    pub fn is_none(&self) -> bool {
        self.len == 0
    }
}

impl Default for Identity {
    fn default() -> Identity {
        Identity::NONE
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Identity) -> bool {
        self.as_bytes_ref() == other.as_bytes_ref()
    }
}

impl Eq for Identity {}

impl std::hash::Hash for Identity {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.as_bytes_ref().hash(state);
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("id:")?;
        self.as_bytes_ref()
            .iter()
            .try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl serde::Serialize for Identity {
    /// Hexadecimal digits, as messages between processes carry it.
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let hex: String = (self.as_bytes_ref().iter())
            .map(|b| format!("{b:02x}"))
            .collect();
        to.serialize_str(&hex)
    }
}

impl<'de> serde::Deserialize<'de> for Identity {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Identity, D::Error> {
        let hex = <std::borrow::Cow<'de, str>>::deserialize(from)?;
        let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
        let bytes: Option<Vec<u8>> = (hex.as_bytes().chunks(2))
            .map(|pair| match pair {
                [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
                _ => None,
            })
            .collect();
        bytes
            .and_then(|bytes| Identity::new(&bytes))
            .ok_or_else(|| D::Error::custom(format!("'{hex}' is not an identity")))
    }
}
