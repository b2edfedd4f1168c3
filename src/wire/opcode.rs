//! The operations and their meaning for recovery.

use std::fmt;

macro_rules! opcodes {
    ($($name:ident = $num:literal),* $(,)?) => {
        /// `enum fuse_opcode`.
        #[allow(missing_docs)] // the kernel's names
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Opcode { $($name = $num),* }

        impl Opcode {
            /// Every opcode this program knows.
            pub const ALL: &[Opcode] = &[$(Opcode::$name),*];

            /// The opcode with this number.
            pub fn from_raw(raw: u32) -> Option<Opcode> {
                match raw {
                    $($num => Some(Opcode::$name),)*
                    _ => None,
                }
            }

            /// The kernel's name without `FUSE_` and underscores (`"MKDIR"`, `"COPYFILERANGE"`).
            pub fn name(self) -> String {
                match self { $(Opcode::$name => stringify!($name)),* }.to_ascii_uppercase()
            }
        }
    };
}

opcodes!(
    Lookup = 1,
    Forget = 2,
    Getattr = 3,
    Setattr = 4,
    Readlink = 5,
    Symlink = 6,
    Mknod = 8,
    Mkdir = 9,
    Unlink = 10,
    Rmdir = 11,
    Rename = 12,
    Link = 13,
    Open = 14,
    Read = 15,
    Write = 16,
    Statfs = 17,
    Release = 18,
    Fsync = 20,
    Setxattr = 21,
    Getxattr = 22,
    Listxattr = 23,
    Removexattr = 24,
    Flush = 25,
    Init = 26,
    Opendir = 27,
    Readdir = 28,
    Releasedir = 29,
    Fsyncdir = 30,
    Getlk = 31,
    Setlk = 32,
    Setlkw = 33,
    Access = 34,
    Create = 35,
    Interrupt = 36,
    Bmap = 37,
    Destroy = 38,
    Ioctl = 39,
    Poll = 40,
    NotifyReply = 41,
    BatchForget = 42,
    Fallocate = 43,
    Readdirplus = 44,
    Rename2 = 45,
    Lseek = 46,
    CopyFileRange = 47,
    Setupmapping = 48,
    Removemapping = 49,
    Syncfs = 50,
    Tmpfile = 51,
    Statx = 52,
    CopyFileRange64 = 53,
);

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl Opcode {
    /// The kernel expects no reply (`FR_ISREPLY` is clear).
    pub fn has_no_reply(self) -> bool {
        matches!(self, Opcode::Forget | Opcode::BatchForget)
    }

    /// A successful reply begins with `EntryOut`, which gives the kernel one lookup count.
    pub fn replies_entry(self) -> bool {
        use Opcode::*;
        matches!(
            self,
            Lookup | Symlink | Mknod | Mkdir | Link | Create | Tmpfile
        )
    }

    /// A successful reply opens a file handle.
    pub fn opens_handle(self) -> bool {
        matches!(
            self,
            Opcode::Open | Opcode::Opendir | Opcode::Create | Opcode::Tmpfile
        )
    }

    /// Running it twice gives a wrong result or a wrong errno, so that a second run first has to
    /// find out whether the first one happened.
    pub fn needs_verify(self) -> bool {
        use Opcode::*;
        matches!(
            self,
            Symlink
                | Mknod
                | Mkdir
                | Unlink
                | Rmdir
                | Rename
                | Rename2
                | Link
                | Create
                | Tmpfile
                | Write
                | Setattr
                | Setxattr
                | Removexattr
                | Ioctl
        )
    }
}
