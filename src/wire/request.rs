//! Taking a request apart.
//!
//! Bytes come from the kernel, but a request may also be re-read from a slot that another process
//! could write to, so every length is checked and a malformed request is an error, never a panic.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::abi::*;
use super::opcode::Opcode;

/// Why bytes are not a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Fewer bytes than the header or its length field need.
    #[error("request of {got} bytes is shorter than {need}")]
    Short {
        /// Bytes there are.
        got: usize,
        /// Bytes there should be.
        need: usize,
    },
    /// The header's opcode is not known.
    #[error("opcode {0} is unknown")]
    UnknownOpcode(u32),
    /// The arguments of this operation do not fit its opcode.
    #[error("malformed {opcode} request: {what}")]
    Malformed {
        /// The operation.
        opcode: Opcode,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// A request: the header and what it asks for.
///
/// WRITE data is not part of it: it stays where the kernel put it.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The header as the kernel sent it.
    pub header: InHeader,
    /// The header's opcode.
    pub opcode: Opcode,
    /// The arguments.
    pub op: Op<'a>,
}

/// The arguments of a request. Names are single path components without `/` and NUL.
#[allow(missing_docs)] // fields are the kernel's
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    Lookup {
        name: &'a OsStr,
    },
    Forget {
        nlookup: u64,
    },
    BatchForget {
        forgets: Forgets<'a>,
    },
    Getattr(GetattrIn),
    Setattr(SetattrIn),
    Readlink,
    Symlink {
        name: &'a OsStr,
        target: &'a OsStr,
    },
    Mknod {
        arg: MknodIn,
        name: &'a OsStr,
    },
    Mkdir {
        arg: MkdirIn,
        name: &'a OsStr,
    },
    Unlink {
        name: &'a OsStr,
    },
    Rmdir {
        name: &'a OsStr,
    },
    /// RENAME (flags 0) and RENAME2.
    Rename {
        newdir: u64,
        flags: u32,
        name: &'a OsStr,
        newname: &'a OsStr,
    },
    Link {
        oldnodeid: u64,
        newname: &'a OsStr,
    },
    /// OPEN and OPENDIR.
    Open(OpenIn),
    /// READ, READDIR and READDIRPLUS.
    Read(ReadIn),
    Write(WriteIn),
    Statfs,
    /// RELEASE and RELEASEDIR.
    Release(ReleaseIn),
    /// FSYNC and FSYNCDIR.
    Fsync(FsyncIn),
    Setxattr {
        arg: SetxattrIn,
        name: &'a OsStr,
        value: &'a [u8],
    },
    Getxattr {
        arg: GetxattrIn,
        name: &'a OsStr,
    },
    Listxattr(GetxattrIn),
    Removexattr {
        name: &'a OsStr,
    },
    Flush(FlushIn),
    Getlk(LkIn),
    /// SETLK and SETLKW.
    Setlk(LkIn),
    Access(AccessIn),
    /// CREATE; TMPFILE has no name (the kernel sends "/").
    Create {
        arg: CreateIn,
        name: &'a OsStr,
    },
    Interrupt {
        unique: u64,
    },
    Bmap(BmapIn),
    Ioctl {
        arg: IoctlIn,
        input: &'a [u8],
    },
    Poll(PollIn),
    Fallocate(FallocateIn),
    Lseek(LseekIn),
    /// COPY_FILE_RANGE and COPY_FILE_RANGE_64.
    CopyFileRange(CopyFileRangeIn),
    Syncfs,
    Statx(StatxIn),
    /// Known, carries nothing this program uses (INIT, DESTROY, DAX mappings, ...).
    Other,
}

/// The list of a BATCH_FORGET.
#[derive(Debug, Clone, Copy)]
pub struct Forgets<'a>(&'a [u8]);

impl<'a> Forgets<'a> {
    /// Each node and the lookups the kernel gives back.
    pub fn iter(self) -> impl Iterator<Item = ForgetOne> + 'a {
        self.0
            .chunks_exact(size_of::<ForgetOne>())
            .filter_map(|one| ForgetOne::read_from_bytes(one).ok())
    }
}

/// A cursor over the bytes after the header.
struct Args<'a> {
    opcode: Opcode,
    rest: &'a [u8],
}

impl<'a> Args<'a> {
    fn malformed(&self, what: &'static str) -> DecodeError {
        DecodeError::Malformed {
            opcode: self.opcode,
            what,
        }
    }

    fn take<T: FromBytes + KnownLayout + Immutable>(&mut self) -> Result<T, DecodeError> {
        let (value, rest) =
            T::read_from_prefix(self.rest).map_err(|_| self.malformed("argument is cut off"))?;
        self.rest = rest;
        Ok(value)
    }

    fn cstr(&mut self) -> Result<&'a OsStr, DecodeError> {
        let end = self
            .rest
            .iter()
            .position(|&b| b == 0)
            .ok_or_else(|| self.malformed("string is not terminated"))?;
        let s = OsStr::from_bytes(&self.rest[..end]);
        self.rest = &self.rest[end + 1..];
        Ok(s)
    }

    /// One component of a path.
    fn name(&mut self) -> Result<&'a OsStr, DecodeError> {
        let name = self.cstr()?;
        if name.is_empty() || name.as_bytes().contains(&b'/') {
            return Err(self.malformed("name is empty or contains a slash"));
        }
        Ok(name)
    }

    /// A component that an operation creates, removes or renames: never `.` or `..`.
    fn entry_name(&mut self) -> Result<&'a OsStr, DecodeError> {
        let name = self.name()?;
        if name == "." || name == ".." {
            return Err(self.malformed("name is . or .."));
        }
        Ok(name)
    }

    fn bytes(&mut self, len: u32) -> Result<&'a [u8], DecodeError> {
        if self.rest.len() < len as usize {
            return Err(self.malformed("data is cut off"));
        }
        let (data, rest) = self.rest.split_at(len as usize);
        self.rest = rest;
        Ok(data)
    }
}

impl<'a> Request<'a> {
    /// Decodes the bytes of one request. For WRITE, `bytes` may end after `WriteIn`.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, DecodeError> {
        let (header, rest) = InHeader::read_from_prefix(bytes).map_err(|_| DecodeError::Short {
            got: bytes.len(),
            need: size_of::<InHeader>(),
        })?;
        let opcode =
            Opcode::from_raw(header.opcode).ok_or(DecodeError::UnknownOpcode(header.opcode))?;
        if opcode != Opcode::Write && (header.len as usize) != bytes.len() {
            return Err(DecodeError::Short {
                got: bytes.len(),
                need: header.len as usize,
            });
        }
        let mut args = Args { opcode, rest };
        let op = decode_op(&mut args)?;
        if let Op::Write(w) = op {
            let need = size_of::<InHeader>() + size_of::<WriteIn>() + w.size as usize;
            if header.len as usize != need {
                return Err(args.malformed("size does not match the length of the request"));
            }
        }
        Ok(Request { header, opcode, op })
    }

    /// The file handle the request works through, if it names one.
    pub fn fh(&self) -> Option<u64> {
        match self.op {
            Op::Getattr(a) if a.getattr_flags & GETATTR_FH != 0 => Some(a.fh),
            Op::Statx(a) if a.getattr_flags & GETATTR_FH != 0 => Some(a.fh),
            Op::Setattr(a) if a.valid & SetattrValid::FH.bits() != 0 => Some(a.fh),
            Op::Read(a) => Some(a.fh),
            Op::Write(a) => Some(a.fh),
            Op::Release(a) => Some(a.fh),
            Op::Fsync(a) => Some(a.fh),
            Op::Flush(a) => Some(a.fh),
            Op::Getlk(a) | Op::Setlk(a) => Some(a.fh),
            Op::Ioctl { arg, .. } => Some(arg.fh),
            Op::Poll(a) => Some(a.fh),
            Op::Fallocate(a) => Some(a.fh),
            Op::Lseek(a) => Some(a.fh),
            Op::CopyFileRange(a) => Some(a.fh_in),
            _ => None,
        }
    }

    /// The second node the request works on: the new directory of a rename, the inode a link is
    /// made to, the destination of a copy.
    pub fn second_node(&self) -> Option<u64> {
        match self.op {
            Op::Rename { newdir, .. } => Some(newdir),
            Op::Link { oldnodeid, .. } => Some(oldnodeid),
            Op::CopyFileRange(a) => Some(a.nodeid_out),
            _ => None,
        }
    }

    /// The name in the request's node, for operations that have one.
    pub fn name(&self) -> Option<&'a OsStr> {
        match self.op {
            Op::Create { name, .. } if self.opcode == Opcode::Create => Some(name),
            Op::Lookup { name }
            | Op::Symlink { name, .. }
            | Op::Mknod { name, .. }
            | Op::Mkdir { name, .. }
            | Op::Unlink { name }
            | Op::Rmdir { name }
            | Op::Rename { name, .. }
            | Op::Link { newname: name, .. } => Some(name),
            _ => None,
        }
    }
}

fn decode_op<'a>(a: &mut Args<'a>) -> Result<Op<'a>, DecodeError> {
    Ok(match a.opcode {
        Opcode::Lookup => Op::Lookup { name: a.name()? },
        Opcode::Forget => Op::Forget {
            nlookup: a.take::<ForgetIn>()?.nlookup,
        },
        Opcode::BatchForget => {
            let arg: BatchForgetIn = a.take()?;
            let len = arg.count.checked_mul(size_of::<ForgetOne>() as u32);
            let len = len.ok_or_else(|| a.malformed("count is too large"))?;
            Op::BatchForget {
                forgets: Forgets(a.bytes(len)?),
            }
        }
        Opcode::Getattr => Op::Getattr(a.take()?),
        Opcode::Setattr => Op::Setattr(a.take()?),
        Opcode::Readlink => Op::Readlink,
        Opcode::Symlink => Op::Symlink {
            name: a.entry_name()?,
            target: a.cstr()?,
        },
        Opcode::Mknod => Op::Mknod {
            arg: a.take()?,
            name: a.entry_name()?,
        },
        Opcode::Mkdir => Op::Mkdir {
            arg: a.take()?,
            name: a.entry_name()?,
        },
        Opcode::Unlink => Op::Unlink {
            name: a.entry_name()?,
        },
        Opcode::Rmdir => Op::Rmdir {
            name: a.entry_name()?,
        },
        Opcode::Rename => Op::Rename {
            newdir: a.take::<RenameIn>()?.newdir,
            flags: 0,
            name: a.entry_name()?,
            newname: a.entry_name()?,
        },
        Opcode::Rename2 => {
            let arg: Rename2In = a.take()?;
            Op::Rename {
                newdir: arg.newdir,
                flags: arg.flags,
                name: a.entry_name()?,
                newname: a.entry_name()?,
            }
        }
        Opcode::Link => Op::Link {
            oldnodeid: a.take::<LinkIn>()?.oldnodeid,
            newname: a.entry_name()?,
        },
        Opcode::Open | Opcode::Opendir => Op::Open(a.take()?),
        Opcode::Read | Opcode::Readdir | Opcode::Readdirplus => Op::Read(a.take()?),
        Opcode::Write => Op::Write(a.take()?),
        Opcode::Statfs => Op::Statfs,
        Opcode::Release | Opcode::Releasedir => Op::Release(a.take()?),
        Opcode::Fsync | Opcode::Fsyncdir => Op::Fsync(a.take()?),
        Opcode::Setxattr => {
            let arg: SetxattrIn = a.take()?;
            Op::Setxattr {
                arg,
                name: a.cstr()?,
                value: a.bytes(arg.size)?,
            }
        }
        Opcode::Getxattr => Op::Getxattr {
            arg: a.take()?,
            name: a.cstr()?,
        },
        Opcode::Listxattr => Op::Listxattr(a.take()?),
        Opcode::Removexattr => Op::Removexattr { name: a.cstr()? },
        Opcode::Flush => Op::Flush(a.take()?),
        Opcode::Getlk => Op::Getlk(a.take()?),
        Opcode::Setlk | Opcode::Setlkw => Op::Setlk(a.take()?),
        Opcode::Access => Op::Access(a.take()?),
        Opcode::Create => Op::Create {
            arg: a.take()?,
            name: a.entry_name()?,
        },
        Opcode::Tmpfile => Op::Create {
            arg: a.take()?,
            name: a.cstr()?,
        },
        Opcode::Interrupt => Op::Interrupt {
            unique: a.take::<InterruptIn>()?.unique,
        },
        Opcode::Bmap => Op::Bmap(a.take()?),
        Opcode::Ioctl => {
            let arg: IoctlIn = a.take()?;
            Op::Ioctl {
                arg,
                input: a.bytes(arg.in_size)?,
            }
        }
        Opcode::Poll => Op::Poll(a.take()?),
        Opcode::Fallocate => Op::Fallocate(a.take()?),
        Opcode::Lseek => Op::Lseek(a.take()?),
        Opcode::CopyFileRange | Opcode::CopyFileRange64 => Op::CopyFileRange(a.take()?),
        Opcode::Syncfs => Op::Syncfs,
        Opcode::Statx => Op::Statx(a.take()?),
        Opcode::Init
        | Opcode::Destroy
        | Opcode::NotifyReply
        | Opcode::Setupmapping
        | Opcode::Removemapping => Op::Other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    /// A request of `opcode` with these argument bytes.
    fn message(opcode: Opcode, args: &[u8]) -> Vec<u8> {
        let header = InHeader {
            len: (size_of::<InHeader>() + args.len()) as u32,
            opcode: opcode as u32,
            unique: 2,
            nodeid: ROOT_ID,
            ..Default::default()
        };
        [header.as_bytes(), args].concat()
    }

    #[test]
    fn a_rename_is_taken_apart() {
        let arg = Rename2In {
            newdir: 7,
            flags: 1,
            padding: 0,
        };
        let bytes = message(Opcode::Rename2, &[arg.as_bytes(), b"from\0to\0"].concat());
        let request = Request::decode(&bytes).unwrap();
        assert_eq!(request.second_node(), Some(7));
        assert!(
            matches!(request.op, Op::Rename { flags: 1, name, newname, .. } if name == "from" && newname == "to")
        );
    }

    #[test]
    fn names_that_leave_the_directory_are_refused() {
        for name in [&b"a/b\0"[..], b"..\0", b".\0", b"\0", b"unterminated"] {
            assert!(Request::decode(&message(Opcode::Unlink, name)).is_err());
        }
        assert!(Request::decode(&message(Opcode::Lookup, b"..\0")).is_ok());
    }

    #[test]
    fn a_write_whose_size_lies_is_refused() {
        let arg = WriteIn {
            size: 100,
            ..Default::default()
        };
        let mut bytes = message(Opcode::Write, arg.as_bytes());
        assert!(Request::decode(&bytes).is_err());
        let len = (size_of::<InHeader>() + size_of::<WriteIn>() + 100) as u32;
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        assert!(Request::decode(&bytes).is_ok());
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in proptest::collection::vec(0u8.., 0..200), opcode in 0u32..60) {
            if bytes.len() >= 8 {
                let len = (bytes.len() as u32).to_ne_bytes();
                bytes[..4].copy_from_slice(&len);
                bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
            }
            let _ = Request::decode(&bytes);
        }
    }
}
