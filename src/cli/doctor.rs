//! `evermount doctor`: checks what a mount needs on this machine, and says what to do.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::bail;
use nix::sys::resource::{Resource, getrlimit};

use crate::backend::ceph;
use crate::control::runtime;
use crate::frontend::mount;
use crate::sys::FileHandle;

/// Check what a mount needs on this machine.
#[derive(clap::Args)]
pub struct Args {}

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Ok,
    /// Nothing is wrong; something is not available.
    Info,
    /// A mount works, with a limit.
    Warn,
    /// A mount does not work.
    Fail,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Ok => "ok",
            Level::Info => "info",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        })
    }
}

struct Finding {
    level: Level,
    what: String,
    advice: Option<String>,
}

fn ok(what: impl Into<String>) -> Finding {
    Finding {
        level: Level::Ok,
        what: what.into(),
        advice: None,
    }
}

fn not_ok(level: Level, what: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding {
        level,
        what: what.into(),
        advice: Some(advice.into()),
    }
}

/// Runs the command.
pub fn run(_args: Args) -> anyhow::Result<()> {
    let mut findings = vec![kernel(), device(), protocol(), privilege()];
    findings.extend([
        limit_of_files(),
        limit_of_locked_memory(),
        pid_namespace(),
        file_handles(),
        runtime_directory(),
        ceph_library(),
    ]);
    findings.extend(request_timeouts());
    let mut failed = 0;
    for f in &findings {
        super::print(&format!("{:<5} {}\n", f.level, f.what))?;
        if let Some(advice) = &f.advice {
            super::print(&format!("      → {advice}\n"))?;
        }
        failed += usize::from(f.level == Level::Fail);
    }
    match failed {
        0 => Ok(()),
        1 => bail!("1 check failed; a mount will not work before it is put right"),
        n => bail!("{n} checks failed; a mount will not work before they are put right"),
    }
}

fn kernel() -> Finding {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    match version_of(&release) {
        Some(version) if version < (5, 11) => not_ok(
            Level::Fail,
            format!("kernel: Linux {release}"),
            "use Linux 5.11 or newer",
        ),
        Some(version) if version < (6, 9) => not_ok(
            Level::Info,
            format!("kernel: Linux {release}"),
            "Linux 6.9 and newer can deliver requests again that died with a process which held \
             the mount",
        ),
        _ => ok(format!("kernel: Linux {release}")),
    }
}

fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn device() -> Finding {
    match mount::check_device() {
        Ok(()) => ok("/dev/fuse can be opened"),
        Err(e) => not_ok(
            Level::Fail,
            e.to_string(),
            if is_root() {
                "see above"
            } else {
                "give it mode 666 (chmod 666 /dev/fuse), as udev does, or mount as root"
            },
        ),
    }
}

fn protocol() -> Finding {
    if !is_root() {
        return not_ok(
            Level::Info,
            "FUSE protocol: not asked for",
            "run as root to see which features the kernel has",
        );
    }
    match mount::probe() {
        Ok(found) if found.lacking.is_empty() => ok(format!(
            "FUSE protocol {}.{} with all features",
            found.protocol.0, found.protocol.1
        )),
        Ok(found) => not_ok(
            Level::Info,
            format!(
                "FUSE protocol {}.{} without {}",
                found.protocol.0,
                found.protocol.1,
                found.lacking.join(", ")
            ),
            "a mount works without them; a newer kernel has them",
        ),
        Err(e) => not_ok(Level::Fail, e.to_string(), "see above"),
    }
}

fn privilege() -> Finding {
    if is_root() {
        return ok("mounting as root");
    }
    let Some(path) = find_in_path("fusermount3") else {
        return not_ok(
            Level::Fail,
            "not root, and fusermount3 is not in PATH",
            "install the package fuse3, or mount as root",
        );
    };
    let set_uid = std::fs::metadata(&path).is_ok_and(|m| m.permissions().mode() & 0o4000 != 0);
    if !set_uid {
        return not_ok(
            Level::Fail,
            format!("{} is not set-uid root", path.display()),
            "reinstall the package fuse3, or mount as root",
        );
    }
    let what = format!("mounting as a user, by {}", path.display());
    if mount::user_allow_other() {
        ok(what)
    } else {
        not_ok(
            Level::Info,
            what,
            "other users cannot use your mounts; 'user_allow_other' in /etc/fuse.conf lets you \
             permit it with -o allow_other",
        )
    }
}

fn find_in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

fn limit_of_files() -> Finding {
    // Each inode that is deleted while it is in use, and each lock owner, takes a descriptor of the
    // front-end. With fewer than this an ordinary workload could run out.
    const ENOUGH: u64 = 65_536;
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((_, hard)) if hard >= ENOUGH => ok(format!("limit of open files: {hard}")),
        Ok((_, hard)) => not_ok(
            Level::Warn,
            format!("limit of open files: {hard}"),
            format!(
                "at most so many files can be in use after they were deleted; raise the hard limit \
                 to {ENOUGH} (ulimit -Hn, LimitNOFILE=)"
            ),
        ),
        Err(e) => not_ok(
            Level::Warn,
            format!("limit of open files: {e}"),
            "is /proc mounted?",
        ),
    }
}

fn limit_of_locked_memory() -> Finding {
    // The slots of one mount.
    const ENOUGH: u64 = 8 << 20;
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) if soft < ENOUGH && !is_root() => not_ok(
            Level::Warn,
            format!("limit of locked memory: {} KiB", soft >> 10),
            "the buffers of a mount may be swapped out; raise it to 8 MiB (ulimit -l), or have no \
             swap",
        ),
        _ => ok("limit of locked memory"),
    }
}

fn pid_namespace() -> Finding {
    // The initial pid namespace has this fixed inode (PROC_PID_INIT_INO of the kernel).
    const INITIAL: &str = "pid:[4026531836]";
    match std::fs::read_link("/proc/self/ns/pid") {
        Ok(ns) if ns == Path::new(INITIAL) => ok("pid namespace: the host's"),
        Ok(_) => not_ok(
            Level::Warn,
            "pid namespace: not the host's",
            "a caller outside this namespace cannot be killed while it waits in an outage; mount \
             from the host's pid namespace (hostPID)",
        ),
        Err(e) => not_ok(
            Level::Warn,
            format!("pid namespace: {e}"),
            "is /proc mounted?",
        ),
    }
}

fn file_handles() -> Finding {
    let found = File::open("/").and_then(|root| {
        let handle = FileHandle::of(root.as_fd(), c"")?;
        handle.open(root.as_fd(), libc::O_PATH)
    });
    match found {
        Ok(_) => ok("file handles can be opened (tried on /)"),
        Err(e) => not_ok(
            Level::Info,
            format!("file handles cannot be opened (tried on /): {e}"),
            "a directory is served by walking paths instead, which is slower; it needs root \
             (CAP_DAC_READ_SEARCH) and a file system that has handles (overlayfs has none)",
        ),
    }
}

fn runtime_directory() -> Finding {
    match runtime::directory() {
        Ok(path) => ok(format!("runtime directory {}", path.display())),
        Err(e) => not_ok(Level::Fail, e.to_string(), "see above"),
    }
}

fn ceph_library() -> Finding {
    match ceph::version() {
        Ok(version) => ok(format!("Ceph library: libcephfs {version}")),
        Err(e) => not_ok(
            Level::Info,
            format!("Ceph library: {}", e.cause()),
            "needed for ceph: sources only; install the package libcephfs2",
        ),
    }
}

fn request_timeouts() -> Vec<Finding> {
    let warnings = mount::sysctl_warnings();
    if warnings.is_empty() {
        return vec![ok("no request timeout of the kernel")];
    }
    (warnings.into_iter())
        .map(|w| Finding {
            level: Level::Warn,
            what: w,
            advice: None,
        })
        .collect()
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_version_is_read_from_any_release_name() {
        assert_eq!(version_of("6.1.0-37-amd64"), Some((6, 1)));
        assert_eq!(version_of("5.11"), Some((5, 11)));
        assert_eq!(version_of("6.18-rc1"), Some((6, 18)));
        assert_eq!(version_of("next"), None);
    }
}
