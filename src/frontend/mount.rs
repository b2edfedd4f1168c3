//! Making and removing the mount, and the one INIT of its life.
//!
//! As root the superblock is made detached (`fsopen`, `fsmount`), the INIT handshake is done, and
//! only then the mount is attached to the tree: whatever fails before that leaves nothing behind.
//! Other users need `fusermount3`, which attaches first; there a failure unmounts again.
//!
//! INIT is answered here, once, by the handshake of `fuser`. Its outcome is fixed for the life of the
//! mount and stored in the session region, because a later backend can neither repeat nor change it.
//!
//! | feature | chosen | why |
//! |---|---|---|
//! | `ASYNC_READ`, `ASYNC_DIO`, `PARALLEL_DIROPS` | yes | requests are independent in their slots |
//! | `POSIX_LOCKS` | yes | locks are the store's, and restored after a death |
//! | `FLOCK_LOCKS` | local stores | CephFS has no call for them: there the kernel keeps them |
//! | `EXPORT_SUPPORT` | yes | file handles outlive a backend: LOOKUP of `.` by node id works |
//! | `BIG_WRITES`, `MAX_PAGES` | required | WRITE and READ of up to 1 MiB |
//! | `DONT_MASK` | yes | the store applies the umask, as default ACLs want it |
//! | `HAS_IOCTL_DIR` | yes | the flags of directories (`lsattr`) |
//! | `AUTO_INVAL_DATA` | local stores | pages go when another client has changed the file; CephFS tells, and each cached read would ask it for attributes |
//! | `DO_READDIRPLUS`, `READDIRPLUS_AUTO` | yes | `ls -l` in one pass, `ls` without lookups |
//! | `POSIX_ACL` | local stores | the kernel checks ACLs; implies `default_permissions`. CephFS checks permissions itself, with the caller's groups |
//! | `CACHE_SYMLINKS` | yes | a link's target never changes |
//! | `HANDLE_KILLPRIV_V2` | required | the store drops set-id bits; without it each write asks for `security.capability` |
//! | `SETXATTR_EXT` | required | decides the layout of SETXATTR, which is read in one form only |
//! | `HAS_EXPIRE_ONLY` | yes | recovery may let a name expire; plain invalidation detaches mounts below it |
//! | `HAS_RESEND` | yes | requests that died with a holder can be had again |
//! | `DIRECT_IO_ALLOW_MMAP` | yes | a file opened for direct I/O can still be mapped |
//! | `ABORT_ERROR` | no | only tells an abort from an unmount; both end the mount |
//! | `ATOMIC_O_TRUNC` | never | a WRITE may be acknowledged while OPEN with O_TRUNC is unanswered: issued again, it would wipe acknowledged bytes |
//! | `WRITEBACK_CACHE` | never | acknowledged bytes would sit in the kernel with no order among them |
//! | `NO_OPEN_SUPPORT`, `NO_OPENDIR_SUPPORT` | never | ENOSYS is for ever; handles are what is restored |
//! | `SPLICE_*` | never | pages would bypass the slots |
//! | `PASSTHROUGH` | never | binds open files to descriptors of one backend |
//! | `OVER_IO_URING` | never | requests taken by a ring die with its process |
//! | `REQUEST_TIMEOUT` | never | the kernel would abort the mount in a long outage |
//! | `EXPLICIT_INVAL_DATA`, `NO_EXPORT_SUPPORT`, `HANDLE_KILLPRIV` | no | the opposite or the forerunner of a chosen one |
//! | `SUBMOUNTS`, `MAP_ALIGNMENT`, `HAS_INODE_DAX` | no | for virtiofs |
//! | `SECURITY_CTX`, `CREATE_SUPP_GROUP`, `ALLOW_IDMAP` | no | change what requests look like, for nothing this program offers |

use std::ffi::OsString;
use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use bitflags::bitflags;
use fuser::{Filesystem, InitFlags, KernelConfig, Session, SessionACL};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
};
use serde::{Deserialize, Serialize};

use crate::control::mountinfo::{self, MountEntry};
use crate::region::MAX_WRITE;

/// Oldest FUSE protocol (Linux 5.11): the first with `HANDLE_KILLPRIV_V2` and `SETXATTR_EXT`.
pub const OLDEST_PROTOCOL: (u32, u32) = (7, 33);

/// Background requests (read-ahead, asynchronous direct I/O) the kernel may have in flight. Fewer
/// than slots, so that they never take all of them.
pub const MAX_BACKGROUND: u16 = 64;

/// Without these no request can be served.
pub const REQUIRED: InitFlags = InitFlags::FUSE_BIG_WRITES
    .union(InitFlags::FUSE_MAX_PAGES)
    .union(InitFlags::FUSE_HANDLE_KILLPRIV_V2)
    .union(InitFlags::FUSE_SETXATTR_EXT);

/// The features of the table above, used where the kernel has them.
pub const WANTED: InitFlags = REQUIRED
    .union(InitFlags::FUSE_ASYNC_READ)
    .union(InitFlags::FUSE_POSIX_LOCKS)
    .union(InitFlags::FUSE_FLOCK_LOCKS)
    .union(InitFlags::FUSE_EXPORT_SUPPORT)
    .union(InitFlags::FUSE_DONT_MASK)
    .union(InitFlags::FUSE_HAS_IOCTL_DIR)
    .union(InitFlags::FUSE_AUTO_INVAL_DATA)
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_ASYNC_DIO)
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_POSIX_ACL)
    .union(InitFlags::FUSE_CACHE_SYMLINKS)
    .union(InitFlags::FUSE_HAS_EXPIRE_ONLY)
    .union(InitFlags::FUSE_HAS_RESEND)
    .union(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);

/// What the store does itself, and so the kernel does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Features {
    /// The kernel checks permissions and notices by itself when a file was changed.
    #[default]
    Local,
    /// The store checks permissions, tells of changes, and has no `flock(2)` locks.
    Cluster,
}

impl Features {
    fn wanted(self) -> InitFlags {
        match self {
            Features::Local => WANTED,
            Features::Cluster => WANTED.difference(KERNELS_PART),
        }
    }

    /// The kernel checks permissions.
    fn default_permissions(self) -> bool {
        self == Features::Local
    }
}

/// What is not chosen with [`Features::Cluster`].
const KERNELS_PART: InitFlags = InitFlags::FUSE_POSIX_ACL
    .union(InitFlags::FUSE_FLOCK_LOCKS)
    .union(InitFlags::FUSE_AUTO_INVAL_DATA);

/// Why a mount was not made. Nothing stays mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The mountpoint does not exist or cannot be reached.
    #[error("mountpoint {}: {source}; create the directory first", path.display())]
    Mountpoint {
        /// The mountpoint as given.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Only a directory can be mounted on.
    #[error("mountpoint {} is not a directory", path.display())]
    NotADirectory {
        /// The mountpoint.
        path: PathBuf,
    },
    /// A FUSE mount is there already, whose root may not answer.
    #[error(
        "mountpoint {} is in use: a mount of type {fstype} ({by}) is there; unmount it first \
         (`evermount umount`), or choose another directory",
        path.display()
    )]
    Busy {
        /// The mountpoint.
        path: PathBuf,
        /// Type of the mount there.
        fstype: String,
        /// Its source.
        by: String,
    },
    /// The kernel's FUSE device cannot be had.
    #[error("cannot open /dev/fuse: {source}; {advice}")]
    Device {
        /// What the kernel said.
        source: io::Error,
        /// What to do.
        advice: &'static str,
    },
    /// The kernel refused to mount.
    #[error("cannot mount on {}: {step}: {source}{advice}", path.display())]
    Refused {
        /// The mountpoint.
        path: PathBuf,
        /// Which step.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
        /// What to do.
        advice: &'static str,
    },
    /// `fusermount3` is missing or cannot be run.
    #[error(
        "cannot run fusermount3, which mounts for users other than root: {0}; install the package \
         fuse3, or mount as root"
    )]
    NoFusermount(io::Error),
    /// `fusermount3` refused.
    #[error("fusermount3 did not mount on {}: {message}", path.display())]
    Fusermount {
        /// The mountpoint.
        path: PathBuf,
        /// What it said.
        message: String,
    },
    /// The option needs the administrator's permission.
    #[error(
        "option allow_other is not permitted to users other than root: add a line \
         'user_allow_other' to /etc/fuse.conf"
    )]
    AllowOther,
    /// The kernel's protocol is too old.
    #[error(
        "the kernel speaks FUSE {}.{}, this program needs {}.{} (Linux 5.11): use a newer kernel",
        have.0, have.1, OLDEST_PROTOCOL.0, OLDEST_PROTOCOL.1
    )]
    KernelTooOld {
        /// What it speaks.
        have: (u32, u32),
    },
    /// The kernel lacks a feature.
    #[error("the kernel's FUSE lacks {missing}, without which no request can be served")]
    MissingFeature {
        /// Which.
        missing: String,
    },
    /// The first message could not be exchanged.
    #[error("the INIT handshake with the kernel failed on {}: {source}", path.display())]
    Handshake {
        /// The mountpoint.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// `/proc` does not tell about the new mount.
    #[error(
        "cannot find the new mount on {} in /proc: {source}; is /proc mounted?",
        path.display()
    )]
    Proc {
        /// The mountpoint.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
}

/// Why a mount was not removed.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// The path is not there.
    #[error("cannot unmount {}: {source}", path.display())]
    Path {
        /// The mountpoint.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Somebody uses it.
    #[error(
        "{0} is in use: a program has a file open or its working directory there (`fuser -vm {0}` \
         names it); stop it, or detach the mount with --lazy: it goes when its last user does",
        path.display()
    )]
    Busy {
        /// The mountpoint.
        path: PathBuf,
    },
    /// Nothing is mounted there.
    #[error("{} is not mounted", path.display())]
    NotMounted {
        /// The mountpoint.
        path: PathBuf,
    },
    /// Only root or the owner may.
    #[error("cannot unmount {}: not permitted; do it as root or as the mount's owner", path.display())]
    NotPermitted {
        /// The mountpoint.
        path: PathBuf,
    },
    /// `fusermount3` is missing or refused.
    #[error("fusermount3 did not unmount {}: {message}", path.display())]
    Fusermount {
        /// The mountpoint.
        path: PathBuf,
        /// What it said, or why it could not be run.
        message: String,
    },
}

bitflags! {
    /// What `-o` can ask for.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct MountFlags: u32 {
        /// `ro`: nothing can be changed through the mount.
        const READ_ONLY = 1 << 0;
        /// `suid`: honour set-id bits. Off by default, as for every FUSE mount; root only.
        const SUID = 1 << 1;
        /// `dev`: device files work. Off by default, as for every FUSE mount; root only.
        const DEV = 1 << 2;
        /// `noexec`: nothing can be executed.
        const NOEXEC = 1 << 3;
        /// `noatime`: reading does not change access times.
        const NOATIME = 1 << 4;
        /// `allow_other`: other users than the one who mounted may use it. Always on for root.
        const ALLOW_OTHER = 1 << 5;
    }
}

/// The options of `-o`, parsed. Read and written as the list itself: `ro,noatime`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OptionList(pub MountFlags);

/// An option nobody knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "mount option '{0}' is not known; there are ro, rw, suid, nosuid, dev, nodev, exec, noexec, \
     atime, noatime, allow_other"
)]
pub struct UnknownOption(String);

impl FromStr for OptionList {
    type Err = UnknownOption;

    fn from_str(list: &str) -> Result<OptionList, UnknownOption> {
        let mut flags = MountFlags::empty();
        for option in list.split(',').map(str::trim).filter(|o| !o.is_empty()) {
            let (flag, on) = match option {
                "ro" => (MountFlags::READ_ONLY, true),
                "rw" => (MountFlags::READ_ONLY, false),
                "suid" => (MountFlags::SUID, true),
                "nosuid" => (MountFlags::SUID, false),
                "dev" => (MountFlags::DEV, true),
                "nodev" => (MountFlags::DEV, false),
                "noexec" => (MountFlags::NOEXEC, true),
                "exec" => (MountFlags::NOEXEC, false),
                "noatime" => (MountFlags::NOATIME, true),
                "atime" | "relatime" => (MountFlags::NOATIME, false),
                "allow_other" => (MountFlags::ALLOW_OTHER, true),
                // True of every mount.
                "defaults" | "default_permissions" => continue,
                // For mount(8) and fstab, not for a file system.
                "auto" | "noauto" | "nofail" | "_netdev" | "user" | "nouser" | "users" => continue,
                _ if option.starts_with("x-") => continue,
                _ => return Err(UnknownOption(option.to_owned())),
            };
            flags.set(flag, on);
        }
        Ok(OptionList(flags))
    }
}

impl fmt::Display for OptionList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&names(self.0).join(","))
    }
}

impl TryFrom<String> for OptionList {
    type Error = UnknownOption;

    fn try_from(list: String) -> Result<OptionList, UnknownOption> {
        list.parse()
    }
}

impl From<OptionList> for String {
    fn from(list: OptionList) -> String {
        list.to_string()
    }
}

fn names(flags: MountFlags) -> Vec<&'static str> {
    [
        (MountFlags::READ_ONLY, "ro"),
        (MountFlags::SUID, "suid"),
        (MountFlags::DEV, "dev"),
        (MountFlags::NOEXEC, "noexec"),
        (MountFlags::NOATIME, "noatime"),
        (MountFlags::ALLOW_OTHER, "allow_other"),
    ]
    .into_iter()
    .filter_map(|(flag, name)| flags.contains(flag).then_some(name))
    .collect()
}

/// What to mount where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountOptions {
    /// The directory to mount on.
    pub mountpoint: PathBuf,
    /// What `mount` and `df` show as the source.
    pub fsname: String,
    /// The options of `-o`.
    #[serde(default)]
    pub options: OptionList,
    /// What the store does itself.
    #[serde(default)]
    pub features: Features,
}

/// A mount that was made. Dropping it does not unmount: close every duplicate of `fuse` for that, or
/// call [`unmount`].
#[derive(Debug)]
pub struct Mounted {
    /// The kernel's FUSE connection, after INIT.
    pub fuse: OwnedFd,
    /// INIT flags in force (`FUSE_*` bits).
    pub init_flags: u64,
    /// Minor device number of the superblock; the major number is 0.
    pub minor: u32,
    /// The mountpoint, absolute and without symbolic links.
    pub mountpoint: PathBuf,
    /// Number of the mount.
    pub mount_id: u64,
}

/// Mounts and answers INIT. From here on requests may come.
pub fn mount(options: &MountOptions) -> Result<Mounted, MountError> {
    let mountpoint = check_mountpoint(&options.mountpoint)?;
    if nix::unistd::geteuid().is_root() {
        mount_as_root(options, mountpoint)
    } else {
        mount_as_user(options, mountpoint)
    }
}

/// Resolves the mountpoint without touching a FUSE mount that may be there.
fn check_mountpoint(path: &Path) -> Result<PathBuf, MountError> {
    let failed = |source| MountError::Mountpoint {
        path: path.to_owned(),
        source,
    };
    let resolved = mountinfo::resolve(path).map_err(failed)?;
    let mounts = mountinfo::read().map_err(|source| MountError::Proc {
        path: path.to_owned(),
        source,
    })?;
    if let Some(there) = mountinfo::topmost(&mounts, &resolved).filter(|m| m.is_fuse()) {
        return Err(MountError::Busy {
            path: resolved.clone(),
            fstype: there.fstype.clone(),
            by: there.source.to_string_lossy().into_owned(),
        });
    }
    if !std::fs::metadata(&resolved).map_err(failed)?.is_dir() {
        return Err(MountError::NotADirectory { path: resolved });
    }
    Ok(resolved)
}

fn mount_as_root(options: &MountOptions, mountpoint: PathBuf) -> Result<Mounted, MountError> {
    let detached = Detached::create(options, &mountpoint)?;
    move_mount(
        &detached.mount,
        "",
        rustix::fs::CWD,
        &mountpoint,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .map_err(refused("attach the mount", &mountpoint))?;
    finish(
        detached.fuse,
        detached.greeting.flags,
        mountpoint,
        detached.mount.as_fd(),
    )
}

/// A mount that is in no tree. It ends when it is dropped.
struct Detached {
    fuse: OwnedFd,
    mount: OwnedFd,
    greeting: Greeting,
}

impl Detached {
    fn create(options: &MountOptions, on: &Path) -> Result<Detached, MountError> {
        let flags = options.options.0;
        let fuse = open_device()?;
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).map_err(refused("fsopen", on))?;
        for (key, value) in [
            ("source", &*options.fsname),
            ("subtype", "evermount"),
            ("fd", &fuse.as_raw_fd().to_string()),
            ("rootmode", "40000"),
            ("user_id", &nix::unistd::geteuid().to_string()),
            ("group_id", &nix::unistd::getegid().to_string()),
        ] {
            fsconfig_set_string(&context, key, value).map_err(refused("fsconfig", on))?;
        }
        let mut super_flags = vec!["allow_other"];
        if options.features.default_permissions() {
            super_flags.push("default_permissions");
        }
        if flags.contains(MountFlags::READ_ONLY) {
            super_flags.push("ro");
        }
        for flag in super_flags {
            fsconfig_set_flag(&context, flag).map_err(refused("fsconfig", on))?;
        }
        fsconfig_create(&context).map_err(refused("create the superblock", on))?;
        let mut attributes = MountAttrFlags::empty();
        for (flag, when, attribute) in [
            (
                MountFlags::READ_ONLY,
                true,
                MountAttrFlags::MOUNT_ATTR_RDONLY,
            ),
            (MountFlags::SUID, false, MountAttrFlags::MOUNT_ATTR_NOSUID),
            (MountFlags::DEV, false, MountAttrFlags::MOUNT_ATTR_NODEV),
            (MountFlags::NOEXEC, true, MountAttrFlags::MOUNT_ATTR_NOEXEC),
            (
                MountFlags::NOATIME,
                true,
                MountAttrFlags::MOUNT_ATTR_NOATIME,
            ),
        ] {
            if flags.contains(flag) == when {
                attributes |= attribute;
            }
        }
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map_err(refused("fsmount", on))?;
        let greeting = handshake(fuse.as_fd(), on, options.features)?;
        Ok(Detached {
            fuse,
            mount,
            greeting,
        })
    }
}

fn refused(step: &'static str, path: &Path) -> impl FnOnce(rustix::io::Errno) -> MountError {
    let path = path.to_owned();
    move |errno| MountError::Refused {
        path,
        step,
        source: errno.into(),
        advice: match errno {
            rustix::io::Errno::PERM => {
                "; mounting needs CAP_SYS_ADMIN: in a container run it privileged"
            }
            rustix::io::Errno::NODEV => "; the kernel has no FUSE: load it with `modprobe fuse`",
            rustix::io::Errno::NOSYS => "; this kernel is older than Linux 5.2",
            _ => "",
        },
    }
}

/// What the kernel's FUSE can do.
#[derive(Clone, Debug)]
pub struct Greeting {
    /// INIT flags in force (`FUSE_*` bits).
    pub flags: u64,
    /// Protocol version of the kernel.
    pub protocol: (u32, u32),
    /// Wanted features the kernel does not have. The mount works without them.
    pub lacking: Vec<&'static str>,
}

/// Finds out what the kernel's FUSE can do, with a mount that nobody ever sees. Needs root.
pub fn probe() -> Result<Greeting, MountError> {
    let options = MountOptions {
        mountpoint: "nothing".into(),
        fsname: "probe".to_owned(),
        options: OptionList::default(),
        features: Features::Local,
    };
    Ok(Detached::create(&options, Path::new("nothing"))?.greeting)
}

fn mount_as_user(options: &MountOptions, mountpoint: PathBuf) -> Result<Mounted, MountError> {
    let flags = options.options.0;
    if flags.contains(MountFlags::ALLOW_OTHER) && !user_allow_other() {
        return Err(MountError::AllowOther);
    }
    // suid and dev are refused by fusermount3 itself, with a message of its own.
    let mut list = OsString::from("subtype=evermount,");
    if options.features.default_permissions() {
        list.push("default_permissions,");
    }
    list.push("fsname=");
    list.push(mountinfo::escape_option(options.fsname.as_ref()));
    for name in names(flags) {
        list.push(",");
        list.push(name);
    }
    let (ours, theirs) =
        std::os::unix::net::UnixStream::pair().map_err(MountError::NoFusermount)?;
    // fusermount3 sends the descriptor over the socket whose number is in _FUSE_COMMFD. As its
    // standard input the socket has a number that is known here.
    let child = Command::new("fusermount3")
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .arg("-o")
        .arg(list)
        .arg("--")
        .arg(&mountpoint)
        .spawn()
        .map_err(MountError::NoFusermount)?;
    let output = child.wait_with_output().map_err(MountError::NoFusermount)?;
    let fuse = if output.status.success() {
        receive_fd(ours.as_fd())
    } else {
        None
    };
    let Some(fuse) = fuse else {
        let text = String::from_utf8_lossy(&output.stderr);
        let message = match text.trim().trim_start_matches("fusermount3: ") {
            "" => format!("it ended with {} and no file descriptor", output.status),
            // fusermount3 opens it with its caller's rights.
            message if message.contains("/dev/fuse: Permission denied") => format!(
                "{message}; users need read and write access to it (`chmod 666 /dev/fuse`, as udev \
                 does it)"
            ),
            message => message.to_owned(),
        };
        return Err(MountError::Fusermount {
            path: mountpoint,
            message,
        });
    };
    let undo = |error| {
        // The mount is in the tree already. It is ours and new, so lazily is at once.
        let _ = unmount(&mountpoint, true);
        error
    };
    let greeting = handshake(fuse.as_fd(), &mountpoint, options.features).map_err(undo)?;
    // O_PATH opens the root without asking the file system.
    let root = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
        .open(&mountpoint)
        .map_err(|source| {
            undo(MountError::Proc {
                path: mountpoint.clone(),
                source,
            })
        })?;
    finish(fuse, greeting.flags, mountpoint.clone(), root.as_fd())
}

/// Looks the new mount up, and unmounts it if that fails.
fn finish(
    fuse: OwnedFd,
    init_flags: u64,
    mountpoint: PathBuf,
    root: std::os::fd::BorrowedFd<'_>,
) -> Result<Mounted, MountError> {
    match mountinfo::of_fd(root) {
        Ok(MountEntry {
            minor, mount_id, ..
        }) => Ok(Mounted {
            fuse,
            init_flags,
            minor,
            mountpoint,
            mount_id,
        }),
        Err(source) => {
            let _ = unmount(&mountpoint, true);
            Err(MountError::Proc {
                path: mountpoint,
                source,
            })
        }
    }
}

fn open_device() -> Result<OwnedFd, MountError> {
    // std opens close-on-exec: only who is given the descriptor on purpose keeps the mount alive.
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    device.map(OwnedFd::from).map_err(|source| {
        let advice = match source.raw_os_error() {
            Some(libc::ENOENT) => {
                "load the kernel module with `modprobe fuse`; in a container, pass the device in"
            }
            Some(libc::EPERM | libc::EACCES) => {
                "in a container, allow the device (--device /dev/fuse)"
            }
            Some(libc::ENODEV | libc::ENXIO) => "the kernel has no FUSE: `modprobe fuse`",
            _ => "`evermount doctor` checks what is missing",
        };
        MountError::Device { source, advice }
    })
}

/// The descriptor fusermount3 has sent, if it has.
fn receive_fd(socket: std::os::fd::BorrowedFd<'_>) -> Option<OwnedFd> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut iov = [io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut iov, &mut beside, RecvFlags::CMSG_CLOEXEC).ok()?;
    beside.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    })
}

type Outcome = Result<Greeting, MountError>;

/// Answers INIT and nothing else.
struct Greeter(Arc<OnceLock<Outcome>>, Features);

impl Filesystem for Greeter {
    fn init(&mut self, _req: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        let outcome = choose(config, self.1);
        let refused = outcome.is_err();
        let _ = self.0.set(outcome);
        if refused {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        Ok(())
    }
}

fn choose(config: &mut KernelConfig, features: Features) -> Outcome {
    let abi = config.kernel_abi();
    if (abi.0, abi.1) < OLDEST_PROTOCOL {
        return Err(MountError::KernelTooOld {
            have: (abi.0, abi.1),
        });
    }
    let offered = config.capabilities();
    let missing = REQUIRED.difference(offered);
    if !missing.is_empty() {
        let names: Vec<&str> = missing.iter_names().map(|(name, _)| name).collect();
        return Err(MountError::MissingFeature {
            missing: names.join(", "),
        });
    }
    let chosen = features.wanted().intersection(offered);
    // All of them were offered, and the numbers are within fuser's limits, so none of these fails.
    let _ = config.add_capabilities(chosen);
    let _ = config.set_max_write(MAX_WRITE as u32);
    let _ = config.set_max_background(MAX_BACKGROUND);
    Ok(Greeting {
        flags: chosen.bits(),
        protocol: (abi.0, abi.1),
        lacking: (features.wanted().difference(offered).iter_names())
            .map(|(name, _)| name)
            .collect(),
    })
}

/// The INIT handshake.
fn handshake(fuse: std::os::fd::BorrowedFd<'_>, mountpoint: &Path, features: Features) -> Outcome {
    let failed = |source| MountError::Handshake {
        path: mountpoint.to_owned(),
        source,
    };
    let outcome = Arc::new(OnceLock::new());
    let fd = fuse.try_clone_to_owned().map_err(failed)?;
    // A session made from a descriptor does not own the mount: dropping it closes the duplicate and
    // does no more. Its request loop is never run.
    let session = Session::from_fd(
        Greeter(outcome.clone(), features),
        fd,
        SessionACL::All,
        fuser::Config::default(),
    );
    let greeted = session.map(drop);
    match (
        greeted,
        Arc::into_inner(outcome).and_then(OnceLock::into_inner),
    ) {
        (_, Some(Err(refusal))) => Err(refusal),
        (Err(source), _) => Err(failed(source)),
        (Ok(()), Some(Ok(greeting))) => Ok(greeting),
        (Ok(()), None) => Err(failed(io::Error::other("the kernel never sent INIT"))),
    }
}

/// Removes the topmost mount at `mountpoint`. `lazy` detaches it at once; it ends when its last user
/// goes. Never asks the file system.
pub fn unmount(mountpoint: &Path, lazy: bool) -> Result<(), UnmountError> {
    let path = mountinfo::resolve(mountpoint).map_err(|source| UnmountError::Path {
        path: mountpoint.to_owned(),
        source,
    })?;
    // fusermount3 has no message of its own for this.
    if mountinfo::read().is_ok_and(|mounts| mountinfo::topmost(&mounts, &path).is_none()) {
        return Err(UnmountError::NotMounted { path });
    }
    if !nix::unistd::geteuid().is_root() {
        return unmount_as_user(&path, lazy);
    }
    let mut flags = UnmountFlags::NOFOLLOW;
    if lazy {
        flags |= UnmountFlags::DETACH;
    }
    rustix::mount::unmount(&path, flags).map_err(|errno| match errno {
        rustix::io::Errno::BUSY => UnmountError::Busy { path },
        rustix::io::Errno::INVAL => UnmountError::NotMounted { path },
        rustix::io::Errno::PERM => UnmountError::NotPermitted { path },
        errno => UnmountError::Path {
            path,
            source: errno.into(),
        },
    })
}

fn unmount_as_user(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    let failed = |message: String| UnmountError::Fusermount {
        path: path.to_owned(),
        message,
    };
    let output = Command::new("fusermount3")
        .arg(if lazy { "-uz" } else { "-u" })
        .arg("--")
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| failed(format!("cannot run it: {e}; install the package fuse3")))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("busy") {
        return Err(UnmountError::Busy {
            path: path.to_owned(),
        });
    }
    Err(failed(text.trim().to_owned()))
}

/// The administrator lets users pass `allow_other`.
pub fn user_allow_other() -> bool {
    std::fs::read_to_string("/etc/fuse.conf")
        .is_ok_and(|conf| conf.lines().any(|l| l.trim() == "user_allow_other"))
}

/// What is wrong with the kernel's settings for a mount that must outlast an outage.
pub fn sysctl_warnings() -> Vec<String> {
    ["default_request_timeout", "max_request_timeout"]
        .into_iter()
        .filter_map(|name| {
            let value = std::fs::read_to_string(format!("/proc/sys/fs/fuse/{name}")).ok()?;
            sysctl_warning(name, value.trim())
        })
        .collect()
}

fn sysctl_warning(name: &str, value: &str) -> Option<String> {
    // Unreadable numbers are not ours to judge.
    let seconds: u64 = value.parse().ok().filter(|s| *s != 0)?;
    Some(format!(
        "fs.fuse.{name} is {seconds}: the kernel aborts the whole mount when a request takes longer \
         than that many seconds, and an outage may; set it to 0 (sysctl -w fs.fuse.{name}=0)"
    ))
}

/// Whether `/dev/fuse` can be opened; for `doctor`.
pub fn check_device() -> Result<(), MountError> {
    open_device().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(mountpoint: &Path, list: &str) -> MountOptions {
        MountOptions {
            features: Features::Local,
            mountpoint: mountpoint.to_owned(),
            fsname: "dir:/a b,c".into(),
            options: list.parse().unwrap(),
        }
    }

    fn mounted_at(path: &Path) -> Option<MountEntry> {
        mountinfo::topmost(&mountinfo::read().unwrap(), path).cloned()
    }

    #[test]
    fn an_option_list_is_read_back_as_it_was_written() {
        let list: OptionList = "rw,ro,noatime,_netdev,x-systemd.automount".parse().unwrap();
        assert_eq!(list.0, MountFlags::READ_ONLY | MountFlags::NOATIME);
        assert_eq!(list.to_string(), "ro,noatime");
        let json = serde_json::to_string(&list).unwrap();
        assert_eq!(serde_json::from_str::<OptionList>(&json).unwrap(), list);
        assert_eq!("".parse::<OptionList>().unwrap(), OptionList::default());
    }

    #[test]
    fn an_unknown_option_is_refused_by_name() {
        let error = "ro,nonsense=3".parse::<OptionList>().unwrap_err();
        assert!(error.to_string().contains("'nonsense=3'"), "{error}");
    }

    #[test]
    fn a_request_timeout_of_the_kernel_is_warned_about() {
        assert_eq!(sysctl_warning("max_request_timeout", "0"), None);
        let warning = sysctl_warning("max_request_timeout", "30").unwrap();
        assert!(warning.contains("fs.fuse.max_request_timeout=0"));
    }

    #[test]
    fn no_forbidden_feature_is_wanted() {
        let never = InitFlags::FUSE_ATOMIC_O_TRUNC
            | InitFlags::FUSE_WRITEBACK_CACHE
            | InitFlags::FUSE_SPLICE_READ
            | InitFlags::FUSE_SPLICE_WRITE
            | InitFlags::FUSE_SPLICE_MOVE
            | InitFlags::FUSE_NO_OPEN_SUPPORT
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT
            | InitFlags::FUSE_PASSTHROUGH
            | InitFlags::FUSE_OVER_IO_URING
            | InitFlags::FUSE_REQUEST_TIMEOUT;
        assert!(!WANTED.intersects(never));
    }

    // The tests below need /dev/fuse, and fail without: a mount is what this is about.

    #[test]
    fn a_probe_tells_the_protocol_and_leaves_no_mount() {
        if !nix::unistd::geteuid().is_root() {
            return; // only root can mount without attaching
        }
        let greeting = probe().unwrap();
        assert!(greeting.protocol >= OLDEST_PROTOCOL);
        assert_eq!(greeting.flags & !WANTED.bits(), 0);
        let mounts = mountinfo::read().unwrap();
        assert!(!mounts.iter().any(|m| m.source == "probe"));
    }

    #[test]
    fn a_mount_is_made_found_without_being_touched_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let point = dir.path().canonicalize().unwrap().join("m n");
        std::fs::create_dir(&point).unwrap();
        let mounted = mount(&options(&point, "noatime")).unwrap();
        assert_eq!(mounted.mountpoint, point);
        assert_eq!(mounted.init_flags & REQUIRED.bits(), REQUIRED.bits());
        let entry = mounted_at(&point).unwrap();
        assert_eq!(entry.fstype, "fuse.evermount");
        assert_eq!(entry.source, "dir:/a b,c");
        assert_eq!(
            (entry.minor, entry.mount_id),
            (mounted.minor, mounted.mount_id)
        );
        // Nobody serves it, so anything that asked the file system would hang here.
        let found = crate::control::runtime::locate(&point).unwrap();
        assert_eq!(found, entry);
        let busy = mount(&options(&point, "")).unwrap_err();
        assert!(matches!(busy, MountError::Busy { .. }), "{busy}");
        unmount(&point, false).unwrap();
        assert_eq!(mounted_at(&point), None);
        assert!(matches!(
            unmount(&point, false),
            Err(UnmountError::NotMounted { .. })
        ));
        // The connection has ended; the descriptor says so at once.
        let mut buf = vec![0; 1 << 21];
        let read = rustix::io::read(&mounted.fuse, &mut buf);
        assert_eq!(read.unwrap_err(), rustix::io::Errno::NODEV);
    }

    #[test]
    fn a_mount_in_use_is_not_removed_unless_lazily() {
        let dir = tempfile::tempdir().unwrap();
        let point = dir.path().canonicalize().unwrap();
        let _mounted = mount(&options(&point, "")).unwrap();
        let user = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(&point)
            .unwrap();
        let busy = unmount(&point, false).unwrap_err();
        assert!(busy.to_string().contains("--lazy"), "{busy}");
        unmount(&point, true).unwrap();
        drop(user);
        assert_eq!(mounted_at(&point), None);
    }

    #[test]
    fn a_mountpoint_that_cannot_be_used_is_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let missing = mount(&options(&dir.path().join("none"), "")).unwrap_err();
        assert!(
            matches!(missing, MountError::Mountpoint { .. }),
            "{missing}"
        );
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = mount(&options(&file, "")).unwrap_err();
        assert!(matches!(error, MountError::NotADirectory { .. }), "{error}");
    }

    /// What INIT of a kernel with this protocol and these features leads to.
    fn greeted_by(minor: u32, features: InitFlags) -> Outcome {
        use std::io::Write;
        let (ours, kernel) = crate::control::Conn::pair().unwrap();
        let kernel = OwnedFd::from(kernel);
        let bits = (features | InitFlags::FUSE_INIT_EXT).bits();
        let mut words = [0u32; 26];
        words[0] = size_of_val(&words) as u32;
        words[1] = crate::wire::Opcode::Init as u32;
        words[2] = 2; // unique
        words[10..15].copy_from_slice(&[7, minor, 131_072, bits as u32, (bits >> 32) as u32]);
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let mut kernel = std::fs::File::from(kernel);
        kernel.write_all(&bytes).unwrap();
        handshake(ours.as_fd(), Path::new("/mnt"), Features::Local)
    }

    #[test]
    fn a_kernel_that_is_too_old_is_refused_with_a_reason() {
        let old = greeted_by(31, WANTED).unwrap_err().to_string();
        assert!(old.contains("7.31") && old.contains("7.33"), "{old}");
        let poor = greeted_by(45, WANTED.difference(InitFlags::FUSE_HANDLE_KILLPRIV_V2));
        let poor = poor.unwrap_err().to_string();
        assert!(poor.contains("HANDLE_KILLPRIV_V2"), "{poor}");
    }
}
