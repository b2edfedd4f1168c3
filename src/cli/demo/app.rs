//! The application of the demonstration: it does to a directory what real ones do, with its files
//! open all the time, and says at the end what it saw.
//!
//! It is driven by lines on its standard input (`step`, `stop`) and answers each with one line of
//! JSON on its standard output. It knows nothing of mounts.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, bail};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde::{Deserialize, Serialize};

/// Name of the file that records are appended to.
pub const RECORDS: &str = "records";
/// Name of the file that is locked.
pub const LOCKED: &str = "locked";
/// Name of the directory that is listed.
pub const LISTED: &str = "listed";
/// Entries in it: several `getdents` calls' worth, so that a kill falls in between.
pub const ENTRIES: usize = 3000;
/// Records between two `fsync`.
const SYNC_EVERY: u64 = 16;
/// Length of the file that is deleted while open.
const DELETED_LEN: usize = 256 * 1024;

/// Write to a directory, for `evermount demo`.
#[derive(clap::Args)]
pub struct Args {
    /// Where to write
    directory: PathBuf,
    /// Into how many parts the listing of the directory is divided
    #[arg(long, default_value_t = 6)]
    parts: usize,
}

/// What the application has seen so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sighting {
    /// Records the kernel has acknowledged.
    pub records: u64,
    /// How many times `fsync` has succeeded.
    pub syncs: u64,
    /// Names created, changed and deleted.
    pub names: u64,
    /// Directory entries read so far, each counted once.
    pub entries: usize,
    /// Entries that came again.
    pub repeated: usize,
    /// The file that was deleted while open has the content that was written, before and now.
    pub deleted_is_intact: bool,
    /// Its link count, which must be 0.
    pub deleted_links: u64,
    /// The error that ended the application's work, if one did.
    pub error: Option<String>,
}

/// The text of a record: fixed length, and checkable by itself.
pub fn record(number: u64) -> String {
    let check = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("record {number:010} {check:016x} {}\n", "~".repeat(28))
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut app = App::start(&args.directory, args.parts)?;
    for line in io::stdin().lock().lines() {
        match line.context("cannot read the standard input")?.as_str() {
            "step" => app.step(),
            "stop" => {
                app.stop();
                return app.tell();
            }
            other => bail!("order '{other}' is not known"),
        }
        app.tell()?;
    }
    Ok(())
}

type Worker = std::thread::JoinHandle<io::Result<()>>;

struct App {
    workers: Vec<(&'static str, Worker)>,
    progress: Arc<Progress>,
    /// Held for its lock. Any other descriptor of that file which this process closed would release
    /// it (that is how fcntl locks are), so there is none.
    _locked: File,
    deleted: File,
    deleted_content: Vec<u8>,
    listing: nix::dir::OwningIter,
    parts: usize,
    seen: std::collections::HashSet<Vec<u8>>,
    sighting: Sighting,
}

#[derive(Default)]
struct Progress {
    stop: AtomicBool,
    records: AtomicU64,
    syncs: AtomicU64,
    names: AtomicU64,
}

impl App {
    fn start(directory: &Path, parts: usize) -> anyhow::Result<App> {
        let new = |name: &str| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(directory.join(name))
                .with_context(|| format!("cannot create {name} in {}", directory.display()))
        };
        let locked = new(LOCKED)?;
        lock(&locked).context("cannot take the first lock")?;

        let mut deleted = new("deleted")?;
        let deleted_content: Vec<u8> = (0..DELETED_LEN).map(|i| (i * 7 + i / 251) as u8).collect();
        deleted.write_all(&deleted_content)?;
        fs::remove_file(directory.join("deleted"))?;

        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let listing = nix::dir::Dir::open(
            &directory.join(LISTED),
            flags,
            nix::sys::stat::Mode::empty(),
        )
        .context("cannot open the directory to list")?
        .into_iter();

        let progress = Arc::new(Progress::default());
        let records = OpenOptions::new()
            .append(true)
            .create_new(true)
            .open(directory.join(RECORDS))
            .context("cannot create the file of records")?;
        let shared = progress.clone();
        let writer = std::thread::spawn(move || write_records(records, &shared));
        let (shared, own) = (progress.clone(), directory.to_owned());
        let namer = std::thread::spawn(move || change_names(&own, &shared));
        Ok(App {
            workers: vec![("writing records", writer), ("changing names", namer)],
            progress,
            _locked: locked,
            deleted,
            deleted_content,
            listing,
            parts,
            seen: Default::default(),
            sighting: Sighting::default(),
        })
    }

    /// Reads on where the listing stands, and looks at the deleted file.
    fn step(&mut self) {
        self.list(ENTRIES / self.parts.max(1));
        self.look_at_deleted();
    }

    /// Stops writing and reads the rest.
    fn stop(&mut self) {
        self.progress.stop.store(true, Ordering::Relaxed);
        self.list(usize::MAX);
        self.look_at_deleted();
        for (what, worker) in std::mem::take(&mut self.workers) {
            match worker.join() {
                Ok(Ok(())) => {}
                Ok(Err(e)) => self.fail(what, &e),
                Err(_) => self.fail(what, &io::Error::other("the thread panicked")),
            }
        }
    }

    fn list(&mut self, count: usize) {
        let mut taken = 0;
        while taken < count {
            match self.listing.next() {
                None => return,
                Some(Err(e)) => return self.fail("listing", &e.into()),
                Some(Ok(entry)) => {
                    let name = entry.file_name().to_bytes();
                    if name == b"." || name == b".." {
                        continue;
                    }
                    taken += 1;
                    if self.seen.insert(name.to_vec()) {
                        self.sighting.entries += 1;
                    } else {
                        self.sighting.repeated += 1;
                    }
                }
            }
        }
    }

    fn look_at_deleted(&mut self) {
        let mut content = Vec::new();
        let read = (self.deleted.seek(SeekFrom::Start(0)))
            .and_then(|_| self.deleted.read_to_end(&mut content));
        if let Err(e) = read {
            self.sighting.deleted_is_intact = false;
            return self.fail("reading the deleted file", &e);
        }
        self.sighting.deleted_is_intact = content == self.deleted_content;
        // Change it, so that the next look also shows that it can still be written.
        let byte = !self.deleted_content[0];
        self.deleted_content[0] = byte;
        match self.deleted.write_all_at(&[byte], 0) {
            Ok(()) => {}
            Err(e) => return self.fail("writing the deleted file", &e),
        }
        match self.deleted.metadata() {
            Ok(meta) => self.sighting.deleted_links = meta.nlink(),
            Err(e) => self.fail("looking at the deleted file", &e),
        }
    }

    fn fail(&mut self, what: &str, error: &io::Error) {
        self.sighting
            .error
            .get_or_insert(format!("{what}: {error}"));
    }

    fn tell(&mut self) -> anyhow::Result<()> {
        self.sighting.records = self.progress.records.load(Ordering::Relaxed);
        self.sighting.syncs = self.progress.syncs.load(Ordering::Relaxed);
        self.sighting.names = self.progress.names.load(Ordering::Relaxed);
        super::super::print(&(serde_json::to_string(&self.sighting)? + "\n"))
    }
}

fn write_records(mut file: File, progress: &Progress) -> io::Result<()> {
    let mut number = 0;
    while !progress.stop.load(Ordering::Relaxed) {
        let text = record(number);
        // One call per record: what is tested is that each call happens exactly once.
        let written = file.write(text.as_bytes())?;
        if written != text.len() {
            return Err(io::Error::other(format!("record {number} was cut off")));
        }
        number += 1;
        progress.records.store(number, Ordering::Relaxed);
        if number % SYNC_EVERY == 0 {
            file.sync_all()?;
            progress.syncs.fetch_add(1, Ordering::Relaxed);
        }
    }
    file.sync_all()?;
    progress.syncs.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Creates, renames and deletes without a pause. A call that happened twice would fail: the name is
/// there already, or not any more.
fn change_names(directory: &Path, progress: &Progress) -> io::Result<()> {
    let (first, second) = (directory.join("first"), directory.join("second"));
    while !progress.stop.load(Ordering::Relaxed) {
        fs::create_dir(&first)?;
        File::create_new(first.join("file"))?;
        fs::rename(&first, &second)?;
        fs::remove_file(second.join("file"))?;
        fs::remove_dir(&second)?;
        progress.names.fetch_add(5, Ordering::Relaxed);
    }
    Ok(())
}

/// Takes an exclusive `fcntl` lock on the whole file, without waiting.
pub fn lock(file: &File) -> io::Result<()> {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_SETLK(&lock))?;
    Ok(())
}

/// Makes the directory that is listed.
pub fn prepare(directory: &Path) -> io::Result<()> {
    let listed = directory.join(LISTED);
    fs::create_dir(&listed)?;
    for i in 0..ENTRIES {
        // Long names: about 500 entries go into one getdents call.
        File::create(listed.join(format!("entry-{i:05}-{}", "x".repeat(24))))?;
    }
    Ok(())
}

/// Checks that the records are those of `0..count`, each once, in order and whole.
pub fn check_records(text: &[u8], count: u64) -> Result<(), String> {
    let len = record(0).len();
    for number in 0..count {
        let expected = record(number);
        match text.get(number as usize * len..(number as usize + 1) * len) {
            Some(found) if found == expected.as_bytes() => {}
            Some(found) => {
                return Err(format!(
                    "instead of record {number} there is {:?}",
                    String::from_utf8_lossy(found)
                ));
            }
            None => {
                return Err(format!(
                    "record {number} of {count} was acknowledged and is missing"
                ));
            }
        }
    }
    match text.len() - count as usize * len {
        0 => Ok(()),
        more => Err(format!("{more} bytes are there that nobody wrote")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_missing_a_repeated_and_a_torn_record_are_found() {
        let all: String = (0..4).map(record).collect();
        let len = record(0).len();
        assert_eq!(check_records(all.as_bytes(), 4), Ok(()));
        assert!(check_records(all.as_bytes(), 5).is_err());
        assert!(check_records(all.as_bytes(), 3).is_err());
        let repeated = format!("{}{}", record(0), &all[..3 * len]);
        assert!(check_records(repeated.as_bytes(), 4).is_err());
        let torn = all.replacen('~', "-", 1);
        assert!(check_records(torn.as_bytes(), 4).is_err());
    }

    #[test]
    fn the_application_sees_nothing_wrong_in_a_plain_directory() {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path()).unwrap();
        let mut app = App::start(dir.path(), 6).unwrap();
        app.step();
        assert!(app.sighting.entries < ENTRIES);
        std::thread::sleep(Duration::from_millis(50));
        app.stop();
        app.sighting.records = app.progress.records.load(Ordering::Relaxed);
        let seen = &app.sighting;
        assert_eq!((seen.entries, seen.repeated), (ENTRIES, 0));
        assert!(seen.deleted_is_intact && seen.deleted_links == 0);
        assert_eq!(seen.error, None);
        let text = fs::read(dir.path().join(RECORDS)).unwrap();
        assert_eq!(check_records(&text, seen.records), Ok(()));
    }
}
