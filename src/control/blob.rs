//! Bytes for another process in a memory file: what is too long for a message, or too secret for an
//! argument.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Longest contents that are read, bytes.
const MAX: u64 = 64 << 20;

/// A memory file with these contents, which nobody can change. `name` shows in `/proc`.
pub fn seal(name: &str, contents: &[u8]) -> io::Result<OwnedFd> {
    let name = CString::new(name).map_err(io::Error::other)?;
    let fd = memfd_create(&*name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(contents)?;
    file.seek(SeekFrom::Start(0))?;
    let seals = SealFlag::F_SEAL_SHRINK
        | SealFlag::F_SEAL_GROW
        | SealFlag::F_SEAL_WRITE
        | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file.into())
}

/// Contents of a memory file.
pub fn read(fd: OwnedFd) -> io::Result<Vec<u8>> {
    let mut file = File::from(fd);
    // The position is shared with every duplicate.
    file.seek(SeekFrom::Start(0))?;
    let mut contents = Vec::new();
    file.take(MAX + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > MAX {
        return Err(io::Error::other(format!("more than {MAX} bytes")));
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_arrive_and_cannot_be_changed() {
        let fd = seal("test", b"abc").unwrap();
        let mut other = File::from(fd.try_clone().unwrap());
        assert!(other.write_all(b"x").is_err());
        assert!(other.set_len(1).is_err());
        assert_eq!(read(fd.try_clone().unwrap()).unwrap(), b"abc");
        assert_eq!(read(fd).unwrap(), b"abc");
    }
}
