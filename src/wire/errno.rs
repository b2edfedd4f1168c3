//! The error number of a reply.

use std::fmt;

/// A positive Linux error number, as `errno(3)` gives it. On the wire it is negated.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident),* $(,)?) => {
        #[allow(missing_docs)] // each is the constant of errno(3) of that name
        impl Errno {
            $(pub const $name: Errno = Errno(libc::$name);)*
        }

        impl fmt::Display for Errno {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    $(libc::$name => f.write_str(stringify!($name)),)*
                    other => write!(f, "errno {other}"),
                }
            }
        }
    };
}

errnos!(
    E2BIG,
    EACCES,
    EAGAIN,
    EBADF,
    EBUSY,
    EDEADLK,
    EEXIST,
    EFAULT,
    EFBIG,
    EINTR,
    EINVAL,
    EIO,
    EISDIR,
    ELOOP,
    EMFILE,
    EMLINK,
    ENAMETOOLONG,
    ENFILE,
    ENODATA,
    ENODEV,
    ENOENT,
    ENOLCK,
    ENOMEM,
    ENOSPC,
    ENOSYS,
    ENOTCONN,
    ENOTDIR,
    ENOTEMPTY,
    ENOTTY,
    ENXIO,
    EOPNOTSUPP,
    EOVERFLOW,
    EPERM,
    EPROTO,
    ERANGE,
    EROFS,
    ESHUTDOWN,
    ESTALE,
    ETIMEDOUT,
    ETXTBSY,
    EXDEV,
);

impl Errno {
    /// The errno with this number; anything outside 1..=511 becomes EIO, since the kernel refuses
    /// a reply with an error outside (-512, 0] (`fuse_dev_do_write`).
    pub fn from_raw(raw: i32) -> Errno {
        if (1..512).contains(&raw) {
            Errno(raw)
        } else {
            Errno::EIO
        }
    }

    /// The positive number.
    pub fn raw(self) -> i32 {
        self.0
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Errno {}

impl From<rustix::io::Errno> for Errno {
    fn from(e: rustix::io::Errno) -> Errno {
        Errno::from_raw(e.raw_os_error())
    }
}

impl From<nix::errno::Errno> for Errno {
    fn from(e: nix::errno::Errno) -> Errno {
        Errno::from_raw(e as i32)
    }
}

impl From<std::io::Error> for Errno {
    fn from(e: std::io::Error) -> Errno {
        e.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
    }
}
