//! Bytes for another process in a memory file: what is too long for a message, or too secret for an
//! argument.

use std::ffi::CString;
use std::fs::{File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use zeroize::Zeroizing;

/// Longest contents that are read, bytes.
const MAX: u64 = 64 << 20;

/// First size of the buffer for contents whose length is not known, bytes.
const ROOM: usize = 64 << 10;

/// A memory file with these contents, which nobody can change. `name` shows in `/proc`.
pub fn seal(name: &str, contents: &[u8]) -> io::Result<OwnedFd> {
    let name = CString::new(name).map_err(io::Error::other)?;
    let fd = memfd_create(&*name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let mut file = File::from(fd);
    // Others reach it through nothing but `/proc/PID/fd`. It is theirs to read no more than that is.
    file.set_permissions(Permissions::from_mode(0o600))?;
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
pub fn read(fd: OwnedFd) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut file = File::from(fd);
    // The position is shared with every duplicate.
    file.seek(SeekFrom::Start(0))?;
    read_secret(file)
}

/// The rest of a file, of which no copy stays in memory when the value is dropped.
pub fn read_secret(mut file: File) -> io::Result<Zeroizing<Vec<u8>>> {
    let length = file.metadata()?.len().min(MAX);
    let mut contents = Zeroizing::new(vec![0; ROOM.max(length as usize + 1)]);
    let mut read = 0;
    loop {
        match file.read(&mut contents[read..]) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        if read as u64 > MAX {
            return Err(io::Error::other(format!("more than {MAX} bytes")));
        }
        if read == contents.len() {
            // Not by growing, which would leave what was there in freed memory.
            let mut larger = Zeroizing::new(vec![0; 2 * read]);
            larger[..read].copy_from_slice(&contents);
            contents = larger;
        }
    }
    contents.truncate(read);
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
        assert_eq!(**read(fd.try_clone().unwrap()).unwrap(), *b"abc");
        assert_eq!(**read(fd).unwrap(), *b"abc");
    }

    #[test]
    fn contents_of_any_length_arrive_also_from_a_pipe() {
        for length in [0, ROOM - 1, ROOM, ROOM + 1, 5 * ROOM] {
            let contents: Vec<u8> = (0..length).map(|n| n as u8).collect();
            let (reader, mut writer) = std::io::pipe().unwrap();
            let written = contents.clone();
            let thread = std::thread::spawn(move || writer.write_all(&written));
            let read = read_secret(File::from(OwnedFd::from(reader))).unwrap();
            thread.join().unwrap().unwrap();
            assert_eq!(*read, contents);
            assert_eq!(
                *super::read(seal("test", &contents).unwrap()).unwrap(),
                contents
            );
        }
    }
}
