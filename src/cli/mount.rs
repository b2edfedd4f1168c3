//! `evermount mount`: starts a front-end and waits until the mount is served.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use zeroize::Zeroizing;

use super::frontend::Report;
use crate::backend::ceph;
use crate::control::blob;
use crate::control::message::{BackendOptions, CephOptions, Secret, SecretFiles, Secrets, Writes};
use crate::control::mountinfo::{self, MountEntry};
use crate::control::{Channel, Source};
use crate::frontend::mount::{
    Features, MountOptions, OptionList, UnknownOption, sysctl_warnings, unmount,
};
use crate::frontend::{self, FrontendConfig, OutagePolicy};

/// How long a front-end may take until the mount is served. A store that takes longer to open than
/// this is not reachable.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Least private memory of a backend, bytes: stacks of its threads and what its library needs.
const MEMORY_MIN: u64 = 512 << 20;

/// Mount SOURCE on the directory MOUNTPOINT.
#[derive(clap::Args)]
pub struct Args {
    // Not as documentation, where brackets are links.
    #[arg(help = "What to mount: dir:/path, or ceph:[FSNAME]/path")]
    source: Source,
    /// The directory to mount on
    mountpoint: PathBuf,
    /// How requests reach the backend: relay or lease
    #[arg(long, default_value_t = Channel::Relay)]
    channel: Channel,
    /// What requests get while no backend serves: queue, queue:SECONDS (then EIO) or error
    #[arg(long, default_value_t = OutagePolicy::Queue)]
    outage: OutagePolicy,
    /// Seconds the kernel may trust names without asking; names changed by others are seen this late
    /// [default: dir 1, ceph 0]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    entry_timeout: Option<Duration>,
    /// Seconds the kernel may trust attributes without asking [default: dir 1, ceph 0]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    attr_timeout: Option<Duration>,
    /// Private memory a backend may have, such as 2G. One that wants more dies and is replaced, alone;
    /// a request that needs more is answered EIO
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory_limit: Option<u64>,
    /// CephFS: a second process with a session of its own, which keeps deleted files in use while no
    /// backend does
    #[arg(long)]
    standby: bool,
    /// Seconds an unmount may take to write what was acknowledged before, and to end sessions
    /// [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    umount_flush: Option<Duration>,
    #[command(flatten)]
    ceph: CephArgs,
    /// Mount options, separated by commas: ro, suid, dev, noexec, noatime, allow_other
    #[arg(short = 'o', value_name = "OPTIONS", value_parser = check_options)]
    options: Vec<String>,
    /// Serve in this process, until unmounted; log to the standard error
    #[arg(long, conflicts_with = "log")]
    foreground: bool,
    /// Append the log of the front-end and its backends to this file
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

/// How to connect to a Ceph cluster.
#[derive(clap::Args)]
#[command(next_help_heading = "CephFS")]
struct CephArgs {
    /// The client is client.ID [default: admin]
    #[arg(long)]
    id: Option<String>,
    /// Configuration file [default: where Ceph looks, /etc/ceph/ceph.conf]
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// File with the key, as Ceph writes it [default: where Ceph looks]
    #[arg(long, value_name = "FILE", conflicts_with = "keyfile")]
    keyring: Option<PathBuf>,
    /// File with the bare key
    #[arg(long, value_name = "FILE")]
    keyfile: Option<PathBuf>,
    /// Addresses of the monitors, instead of those in the configuration
    #[arg(long, value_name = "ADDRESSES")]
    mon: Option<String>,
    /// When a write is acknowledged: when the cluster has it, or when it is retained in memory (this
    /// machine's, until the cluster has it)
    #[arg(long, value_enum, value_name = "WHEN")]
    writes: Option<Writes>,
    /// One more option of the Ceph client; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = ceph_option)]
    ceph_option: Vec<(String, String)>,
}

impl CephArgs {
    fn is_empty(&self) -> bool {
        let files = [&self.conf, &self.keyring, &self.keyfile];
        let texts = [&self.id, &self.mon];
        files.iter().all(|f| f.is_none())
            && texts.iter().all(|t| t.is_none())
            && self.writes.is_none()
            && self.ceph_option.is_empty()
    }

    fn options(&self) -> CephOptions {
        CephOptions {
            id: self.id.clone(),
            mon: self.mon.clone(),
            conf: self.ceph_option.clone(),
            writes: self.writes.unwrap_or_default(),
        }
    }

    fn files(&self) -> SecretFiles {
        let absolute = |path: &Option<PathBuf>| {
            let path = path.as_deref()?;
            Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
        };
        SecretFiles {
            conf: absolute(&self.conf),
            keyring: absolute(&self.keyring),
            keyfile: absolute(&self.keyfile),
        }
    }
}

/// Reads what is secret, now: the files may be gone when the next backend starts.
pub(super) fn secrets(files: &SecretFiles, options: &CephOptions) -> anyhow::Result<Secrets> {
    crate::sys::keep_memory_private()?;
    let read = |path: &Path, what: &str| -> anyhow::Result<Zeroizing<String>> {
        let text = File::open(path).and_then(blob::read_secret);
        let text = text.with_context(|| format!("cannot read the {what} {}", path.display()))?;
        match std::str::from_utf8(&text) {
            Ok(text) => Ok(Zeroizing::new(text.to_owned())),
            Err(_) => bail!("the {what} {} is not text", path.display()),
        }
    };
    let conf = match &files.conf {
        Some(path) => Some(read(path, "configuration")?),
        None => None,
    };
    let key = match (&files.keyring, &files.keyfile) {
        (Some(path), _) => Some(Secret::Keyring(read(path, "keyring")?)),
        (None, Some(path)) => {
            let text = read(path, "key file")?;
            if !is_bare_key(&text) {
                bail!(
                    "the key file {} does not hold a key and nothing else, as `ceph auth print-key \
                     client.ID` prints it; --keyring takes a keyring",
                    path.display()
                );
            }
            Some(Secret::Key(text))
        }
        (None, None) => ceph::login::find_key(options, conf.as_ref()),
    };
    Ok(Secrets { conf, key })
}

/// Base64 of a key's type, time, length and at least a few bytes.
fn is_bare_key(text: &str) -> bool {
    let text = text.trim();
    let digit = |b: u8| b.is_ascii_alphanumeric() || b"+/=".contains(&b);
    text.len() >= 20 && text.bytes().all(digit)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().map(Duration::try_from_secs_f64);
    match seconds {
        Some(Ok(time)) => Ok(time),
        _ => Err("write a number of seconds, such as 0.5".to_owned()),
    }
}

/// A number of bytes, in units of 1024 with a suffix.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        _ => return Err("write a number of bytes, or with K, M or G".to_owned()),
    };
    let number: Option<u64> = digits.parse().ok();
    let size = number.and_then(|n| n.checked_mul(1 << shift));
    size.filter(|size| *size >= MEMORY_MIN).ok_or_else(|| {
        let least = MEMORY_MIN >> 20;
        format!("write at least {least}M: a backend needs that much by itself")
    })
}

fn ceph_option(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    // The library takes a space, a dash and an underscore in a name for the same.
    let name = name.trim().replace([' ', '-'], "_");
    if name == "key" {
        return Err("a key on a command line can be read by everybody; use --keyfile FILE".into());
    }
    Ok((name, value.trim().to_owned()))
}

/// Checks a list; it is kept as it is, because a later one may take back what an earlier one says.
fn check_options(list: &str) -> Result<String, UnknownOption> {
    list.parse::<OptionList>().map(|_| list.to_owned())
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    if args.channel == Channel::Lease {
        bail!("channel 'lease' is not available yet; use --channel relay");
    }
    let source = absolute(&args.source)?;
    let mountpoint = mountinfo::resolve(&args.mountpoint).with_context(|| {
        format!(
            "mountpoint {}; create the directory first",
            args.mountpoint.display()
        )
    })?;
    refuse_hidden_source(&source, &mountpoint)?;
    let is_ceph = matches!(source, Source::Ceph(_));
    if !is_ceph && !args.ceph.is_empty() {
        bail!("--id, --conf, --keyring, --keyfile, --mon and --ceph-option are for ceph: sources");
    }
    if !is_ceph && args.standby {
        bail!("--standby is for ceph: sources; what dir: has is kept without it");
    }
    let (options, secret_files) = (args.ceph.options(), args.ceph.files());
    let secrets = if is_ceph {
        Some(seal(&secrets(&secret_files, &options)?)?)
    } else {
        None
    };
    let config = FrontendConfig {
        mount: MountOptions {
            mountpoint: mountpoint.clone(),
            fsname: source.to_string(),
            options: args.options.join(",").parse()?,
            features: if is_ceph {
                Features::Cluster
            } else {
                Features::Local
            },
        },
        source,
        outage: args.outage,
        channel: args.channel,
        backend: BackendOptions {
            entry_timeout: args.entry_timeout,
            attr_timeout: args.attr_timeout,
            memory_limit: args.memory_limit,
            umount_flush: args.umount_flush,
            ceph: options,
        },
        standby: args.standby,
        secrets: secrets.is_some(),
        secret_files,
    };
    for warning in sysctl_warnings() {
        eprintln!("evermount: warning: {warning}");
    }
    if args.foreground {
        return serve_here(config, secrets);
    }
    start(&config, secrets, args.log.as_deref())
        .with_context(|| format!("cannot mount {} on {}", config.source, mountpoint.display()))
}

/// The source as the front-end, whose working directory is `/`, can use it.
fn absolute(source: &Source) -> anyhow::Result<Source> {
    let Source::Dir(path) = source else {
        return Ok(source.clone());
    };
    let full = path
        .canonicalize()
        .with_context(|| format!("source directory {}", path.display()))?;
    if !full.is_dir() {
        bail!("source {} is not a directory", path.display());
    }
    if full.to_str().is_none() {
        bail!(
            "source directory {} has a name that is not UTF-8; mount it by another path",
            full.display()
        );
    }
    Ok(Source::Dir(full))
}

/// A mount must not cover its own source: the next backend would open the mount instead.
fn refuse_hidden_source(source: &Source, mountpoint: &Path) -> anyhow::Result<()> {
    match source.path() {
        Some(path) if path.starts_with(mountpoint) => bail!(
            "mountpoint {} would cover the source {}; mount on another directory",
            mountpoint.display(),
            path.display()
        ),
        _ => Ok(()),
    }
}

/// Puts conf and key where only those can read them who are given the descriptor.
fn seal(secrets: &Secrets) -> anyhow::Result<OwnedFd> {
    blob::seal("evermount-secrets", &secrets.to_bytes())
        .context("cannot make a memory file for the key")
}

fn serve_here(config: FrontendConfig, secrets: Option<OwnedFd>) -> anyhow::Result<()> {
    super::start_log();
    let mut refusal = None;
    let served = frontend::run(config, secrets, |outcome| refusal = outcome.err());
    match (served, refusal) {
        (Err(e), _) => Err(anyhow!("{e:#}")),
        (Ok(()), Some(reason)) => Err(anyhow!(reason)),
        (Ok(()), None) => Ok(()),
    }
}

/// Starts a front-end on its own and waits for its report. After an error nothing is left.
fn start(
    config: &FrontendConfig,
    secrets: Option<OwnedFd>,
    log: Option<&Path>,
) -> anyhow::Result<()> {
    let before = mountinfo::read().context("cannot read /proc/self/mountinfo")?;
    let mut child = spawn(config, secrets, log)?;
    let failure = match wait_for_report(&mut child, START_LIMIT) {
        Ok(Report::Ok(_)) => return Ok(()),
        Ok(Report::Error(reason)) => anyhow!(reason),
        Err(e) => e,
    };
    clean_up(child, &config.mount.mountpoint, &before);
    Err(failure)
}

fn spawn(
    config: &FrontendConfig,
    secrets: Option<OwnedFd>,
    log: Option<&Path>,
) -> anyhow::Result<Child> {
    // Without a log there is no standard error at all, from the beginning: the front-end starts its
    // backend before it reports, and nothing may keep the caller's open. Reasons come by the report.
    let errors = match log {
        None => Stdio::null(),
        Some(path) => {
            let file: std::io::Result<File> = OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o600)
                .open(path);
            file.with_context(|| format!("cannot open the log {}", path.display()))?
                .into()
        }
    };
    Command::new("/proc/self/exe")
        .arg0("evermount")
        .arg("__frontend")
        .arg(serde_json::to_string(config).context("a path is not UTF-8")?)
        .stdin(secrets.map_or_else(Stdio::null, Stdio::from))
        .stdout(Stdio::piped())
        .stderr(errors)
        // Not to keep the caller's directory busy.
        .current_dir("/")
        .spawn()
        .context("cannot start a front-end (/proc/self/exe); is /proc mounted?")
}

/// Reads the report, which is one line.
fn wait_for_report(child: &mut Child, limit: Duration) -> anyhow::Result<Report> {
    let deadline = Instant::now() + limit;
    let mut pipe = child.stdout.take().context("the front-end has no pipe")?;
    let mut text = Vec::new();
    while !text.contains(&b'\n') {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(0) => bail!(
                "the mount was not served within {} s and was given up; --log FILE shows why",
                limit.as_secs()
            ),
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(e) => return Err(e).context("cannot wait for the front-end"),
        }
        let mut part = [0; 4096];
        match pipe.read(&mut part).context("cannot read the report")? {
            0 => bail!("the front-end ended without a report; --log FILE shows why"),
            n => text.extend_from_slice(&part[..n]),
        }
    }
    serde_json::from_slice(&text).context("the front-end's report cannot be read")
}

/// Ends a front-end that failed, and what it may have mounted and started.
fn clean_up(mut child: Child, mountpoint: &Path, before: &[MountEntry]) {
    // After an error of its own it is about to end; give it time to do so in order.
    let deadline = Instant::now() + Duration::from_secs(5);
    while child.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    if child.try_wait().is_ok_and(|status| status.is_none()) {
        // It leads a group of its own, with its backend in it, unless it died before it could.
        let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
        let _ = child.kill();
        let _ = child.wait();
    }
    let Ok(now) = mountinfo::read() else { return };
    let left = mountinfo::topmost(&now, mountpoint).filter(|m| m.is_evermount());
    // One that was there before belongs to somebody else.
    if left.is_some_and(|m| !before.contains(m)) {
        let _ = unmount(mountpoint, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn child(script: &str) -> Child {
        Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn report(script: &str, limit: Duration) -> anyhow::Result<Report> {
        let mut child = child(script);
        let report = wait_for_report(&mut child, limit);
        let _ = child.kill();
        child.wait().unwrap();
        report
    }

    #[test]
    fn a_report_is_read_and_its_absence_noticed() {
        let long = Duration::from_secs(60);
        let read = report(r#"printf '{"ok"'; sleep 0.1; echo ':true}'"#, long);
        assert_eq!(read.unwrap(), Report::Ok(true));
        let read = report(r#"echo '{"error":"why"}'"#, long);
        assert_eq!(read.unwrap(), Report::Error("why".into()));
        let error = report("exit 3", long).unwrap_err();
        assert!(error.to_string().contains("without a report"), "{error}");
        let error = report("echo nonsense", long).unwrap_err();
        assert!(error.to_string().contains("cannot be read"), "{error}");
        let error = report("exec sleep 100", Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("given up"), "{error}");
    }

    #[test]
    fn a_mount_may_not_cover_its_source() {
        let source = Source::Dir("/a/b".into());
        for over in ["/", "/a", "/a/b"] {
            assert!(refuse_hidden_source(&source, Path::new(over)).is_err());
        }
        for beside in ["/a/bc", "/a/b/c", "/m"] {
            assert!(refuse_hidden_source(&source, Path::new(beside)).is_ok());
        }
    }

    #[test]
    fn sizes_are_numbers_with_a_unit() {
        assert_eq!(size("2G"), Ok(2 << 30));
        assert_eq!(size("1073741824"), Ok(1 << 30));
        for bad in ["", "G", "1T", "-1", "1.5G", "16M", "99999999999G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_later_option_takes_back_an_earlier_one() {
        let lists = ["ro,noatime".to_owned(), "rw".to_owned()];
        let options: OptionList = lists.join(",").parse().unwrap();
        assert_eq!(options.to_string(), "noatime");
    }
}
