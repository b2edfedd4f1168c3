//! Mounts as `/proc/self/mountinfo` lists them.
//!
//! Reading this file asks the kernel only. `stat` of a mount would ask its backend, which may be the
//! very thing that is missing, so every search for a mount goes through here.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// What the type of every mount of this program begins with.
pub const FSTYPE: &str = "fuse.evermount";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Number of the mount in this mount namespace.
    pub mount_id: u64,
    /// Device number of the file system, as `st_dev` shows it.
    pub major: u32,
    /// Low part of it. For FUSE it names the superblock (the major number is 0).
    pub minor: u32,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Type, with the subtype after a dot.
    pub fstype: String,
    /// Source: for a FUSE mount, the `fsname`.
    pub source: OsString,
    /// Options of the superblock.
    pub options: String,
}

impl MountEntry {
    /// A mount of this program.
    pub fn is_evermount(&self) -> bool {
        self.fstype == FSTYPE || self.fstype.starts_with("fuse.evermount.")
    }

    /// Any FUSE mount: its answers depend on a process.
    pub fn is_fuse(&self) -> bool {
        matches!(self.fstype.as_str(), "fuse" | "fuseblk")
            || self.fstype.starts_with("fuse.")
            || self.fstype.starts_with("fuseblk.")
    }

    /// The uid the mount belongs to, of a FUSE mount.
    pub fn owner(&self) -> Option<u32> {
        self.options
            .split(',')
            .find_map(|o| o.strip_prefix("user_id="))
            .and_then(|uid| uid.parse().ok())
    }
}

/// All mounts of this process's mount namespace that it can reach, those mounted later after those
/// they lie on.
pub fn read() -> io::Result<Vec<MountEntry>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// Takes the file apart. Lines that are not understood are left out: a new kernel may add some.
pub fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|b| *b == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let mut fields = line.split(|b| *b == b' ');
    let mount_id = text(fields.next()?).parse().ok()?;
    let _parent = fields.next()?;
    let device = text(fields.next()?);
    let (major, minor) = device.split_once(':')?;
    let _root = fields.next()?;
    let mountpoint = PathBuf::from(unescape(fields.next()?));
    let _mount_options = fields.next()?;
    // Any number of optional fields, ended by a dash.
    fields.by_ref().find(|f| *f == b"-")?;
    Some(MountEntry {
        mount_id,
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        mountpoint,
        fstype: text(fields.next()?),
        source: unescape(fields.next()?),
        options: text(fields.next()?),
    })
}

/// Undoes the kernel's `\040` for space, tab, newline, backslash and `#`.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|d| {
            first == b'\\' && d.iter().all(|b| (b'0'..=b'7').contains(b)) && d[0] <= b'3'
        });
        match octal {
            Some(digits) => {
                out.push(digits.iter().fold(0, |n, b| n << 3 | (b - b'0')));
                rest = &tail[3..];
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out)
}

/// The topmost mount at exactly this (resolved) path.
pub fn topmost<'m>(mounts: &'m [MountEntry], mountpoint: &Path) -> Option<&'m MountEntry> {
    mounts.iter().rev().find(|m| m.mountpoint == mountpoint)
}

/// Makes a path absolute and resolves its symbolic links, **without touching a mount at its end**.
///
/// Everything but the last component is resolved by the kernel; the last one is only asked whether
/// it is a symbolic link, which the kernel knows without asking the file system mounted there.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    // As many as the kernel follows (MAXSYMLINKS).
    const MOST_LINKS: usize = 40;
    let mut path = std::path::absolute(path)?;
    for _ in 0..MOST_LINKS {
        // A path that is listed is resolved already; nothing at all needs to be touched.
        if read().is_ok_and(|mounts| topmost(&mounts, &path).is_some()) {
            return Ok(path);
        }
        let (parent, name) = match (path.parent(), path.components().next_back()) {
            (Some(parent), Some(Component::Normal(name))) => (parent.canonicalize()?, name),
            _ => return path.canonicalize(), // "/", or a path that ends in ".."
        };
        let resolved = parent.join(name);
        match std::fs::read_link(&resolved) {
            Ok(target) => path = parent.join(target),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => return Ok(resolved),
            Err(e) => return Err(e),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// The number of the mount an open descriptor is on, and its entry.
pub fn of_fd(fd: std::os::fd::BorrowedFd<'_>) -> io::Result<MountEntry> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    let text = std::fs::read_to_string(&path)?;
    let id = text
        .lines()
        .find_map(|l| l.strip_prefix("mnt_id:"))
        .and_then(|id| id.trim().parse::<u64>().ok())
        .ok_or_else(|| io::Error::other(format!("{path} has no mnt_id")))?;
    read()?
        .into_iter()
        .find(|m| m.mount_id == id)
        .ok_or_else(|| io::Error::other(format!("mount {id} is not in /proc/self/mountinfo")))
}

/// An option value or source, with what `-o` and the kernel's lists use as separators escaped.
pub fn escape_option(value: &OsStr) -> OsString {
    let mut out = Vec::new();
    for &b in value.as_bytes() {
        if matches!(b, b',' | b'\\') {
            out.push(b'\\');
        }
        out.push(b);
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_and_without_optional_fields_is_read() {
        let mounts = parse(
            b"36 35 0:52 / /mnt/a\\040b\\134c rw,noatime master:1 shared:2 - fuse.evermount dir:/x rw,user_id=1000,group_id=0\n\
              37 35 8:1 / /mnt rw - ext4 /dev/sda1 rw\n\
              nonsense\n",
        );
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].mountpoint, Path::new("/mnt/a b\\c"));
        assert_eq!((mounts[0].mount_id, mounts[0].minor), (36, 52));
        assert_eq!(mounts[0].owner(), Some(1000));
        assert!(mounts[0].is_evermount() && mounts[0].is_fuse());
        assert!(!mounts[1].is_evermount() && !mounts[1].is_fuse());
    }

    #[test]
    fn the_topmost_of_stacked_mounts_is_the_last_one_listed() {
        let mounts = parse(
            b"36 35 0:52 / /mnt rw - tmpfs a rw\n\
              37 36 0:53 / /mnt rw - fuse.evermount b rw\n",
        );
        assert_eq!(topmost(&mounts, Path::new("/mnt")).unwrap().minor, 53);
        assert!(topmost(&mounts, Path::new("/mn")).is_none());
    }

    #[test]
    fn a_backslash_that_escapes_nothing_stays() {
        assert_eq!(unescape(b"a\\"), "a\\");
        assert_eq!(unescape(b"a\\04"), "a\\04");
        assert_eq!(unescape(b"a\\777"), "a\\777");
        assert_eq!(unescape(b"\\011x"), "\tx");
    }

    #[test]
    fn symbolic_links_on_the_way_and_at_the_end_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(dir.join("real/end")).unwrap();
        std::os::unix::fs::symlink("real", dir.join("way")).unwrap();
        std::os::unix::fs::symlink("way/end", dir.join("last")).unwrap();
        assert_eq!(resolve(&dir.join("last")).unwrap(), dir.join("real/end"));
        assert_eq!(
            resolve(&dir.join("way/end/")).unwrap(),
            dir.join("real/end")
        );
        assert_eq!(resolve(&dir.join("real/end/..")).unwrap(), dir.join("real"));
        assert!(resolve(&dir.join("none")).is_err());
        std::os::unix::fs::symlink("loop", dir.join("loop")).unwrap();
        assert!(resolve(&dir.join("loop")).is_err());
    }

    #[test]
    fn the_mount_of_an_open_file_is_found() {
        let proc = std::fs::File::open("/proc/self/status").unwrap();
        let mount = of_fd(std::os::fd::AsFd::as_fd(&proc)).unwrap();
        assert_eq!(mount.fstype, "proc");
    }
}
