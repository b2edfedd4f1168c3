//! libcephfs as safe Rust. All foreign calls are here.
//!
//! A [`Client`] is one session with the metadata server. Objects are reference counted by the
//! library; here each reference is a value that gives itself back when it is dropped. Every call may
//! block for as long as the cluster does not answer, and may be made from any thread.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_uint};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::ffi::{
    CallbackArgs, CephDir, CephFh, CephInode, CephMount, CephPerms, DONT_SYNC, Functions, LIBRARY,
    RECLAIM_RESET, STATX_BASIC, STATX_BTIME, STATX_MTIME, STATX_VERSION, Statx, Vino, delegation,
};
use crate::region::memory::{Span, iovecs};
use crate::region::retained::Stamp;
use crate::wire::Errno;

/// What is asked of an object whenever attributes are wanted.
const WANT: c_uint = STATX_BASIC | STATX_BTIME;

/// The library cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot load {LIBRARY}: {cause}; install the package libcephfs2")]
pub struct NoLibrary {
    cause: String,
}

impl NoLibrary {
    fn new(error: &libloading::Error) -> NoLibrary {
        // What the loader says is the error's source, not the error.
        let source = std::error::Error::source(error).map(ToString::to_string);
        NoLibrary {
            cause: source.unwrap_or_else(|| error.to_string()),
        }
    }

    /// What is wrong, without what to do.
    pub fn cause(&self) -> &str {
        &self.cause
    }
}

fn library() -> Result<&'static Functions, NoLibrary> {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    if let Some(functions) = FUNCTIONS.get() {
        return Ok(functions);
    }
    let functions = Functions::load().map_err(|e| NoLibrary::new(&e))?;
    Ok(FUNCTIONS.get_or_init(|| functions))
}

/// Version of the library, if there is one.
pub fn version() -> Result<String, NoLibrary> {
    let lib = library()?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three places for numbers; the text it returns is not used.
    unsafe { (lib.version)(&mut major, &mut minor, &mut patch) };
    Ok(format!("{major}.{minor}.{patch}"))
}

fn check(ret: c_int) -> Result<c_int, Errno> {
    if ret < 0 {
        Err(Errno::from_raw(ret.saturating_neg()))
    } else {
        Ok(ret)
    }
}

/// Data of a file may be old: `len` bytes from `off` on, or (0) all that follow. Called from a thread
/// of the library that holds no lock.
type Listener = Box<dyn Fn(Vino, i64, i64) + Send + Sync>;

/// An instance of the library, with at most one session.
pub struct Client {
    lib: &'static Functions,
    mount: NonNull<CephMount>,
    /// The session is being ended from here.
    ending: AtomicBool,
    /// The library does one at a time.
    reclaiming: Mutex<()>,
}

// SAFETY: libcephfs takes its own locks (one mutex per client); any thread may call it.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl Client {
    /// An instance for the entity `client.ID`; the library's default is `client.admin`.
    pub fn create(id: Option<&CStr>) -> Result<Arc<Client>, ClientError> {
        let lib = library()?;
        let mut mount = ptr::null_mut();
        let id = id.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: `mount` is a place for the instance; `id` is a string or null.
        check(unsafe { (lib.create)(&mut mount, id) })?;
        let mount = NonNull::new(mount).ok_or(Errno::ENOMEM)?;
        Ok(Arc::new(Client {
            lib,
            mount,
            ending: AtomicBool::new(false),
            reclaiming: Mutex::default(),
        }))
    }

    fn raw(&self) -> *mut CephMount {
        self.mount.as_ptr()
    }

    /// Reads a configuration file; without a path those of the default places.
    pub fn read_conf(&self, path: Option<&CStr>) -> Result<(), Errno> {
        let path = path.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: a string or null.
        check(unsafe { (self.lib.conf_read_file)(self.raw(), path) }).map(drop)
    }

    /// Sets an option.
    pub fn set_conf(&self, option: &CStr, value: &CStr) -> Result<(), Errno> {
        // SAFETY: two strings, which are copied.
        check(unsafe { (self.lib.conf_set)(self.raw(), option.as_ptr(), value.as_ptr()) }).map(drop)
    }

    /// Value of an option.
    pub fn conf(&self, option: &CStr) -> Result<String, Errno> {
        let mut value = [0u8; 4096];
        // SAFETY: writes at most the given length, with a NUL at the end.
        check(unsafe {
            (self.lib.conf_get)(
                self.raw(),
                option.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        })?;
        let text = CStr::from_bytes_until_nul(&value).map_err(|_| Errno::ERANGE)?;
        Ok(text.to_string_lossy().into_owned())
    }

    /// Chooses one of several file systems. Before [`mount`](Client::mount).
    pub fn select_file_system(&self, name: &CStr) -> Result<(), Errno> {
        // SAFETY: a string, which is copied.
        check(unsafe { (self.lib.select_filesystem)(self.raw(), name.as_ptr()) }).map(drop)
    }

    /// Connects to the monitors' addresses; reads the key.
    pub fn init(&self) -> Result<(), Errno> {
        // SAFETY: the instance is live.
        check(unsafe { (self.lib.init)(self.raw()) }).map(drop)
    }

    /// Name of the session. Two live ones of a name are refused. After [`init`](Client::init), before
    /// [`mount`](Client::mount).
    pub fn set_uuid(&self, uuid: &CStr) {
        // SAFETY: a string, which is copied.
        unsafe { (self.lib.set_uuid)(self.raw(), uuid.as_ptr()) };
    }

    /// Begins the session. Blocks while a dead client holds the capabilities of the root.
    pub fn mount(&self, root: &CStr) -> Result<(), Errno> {
        // SAFETY: a string.
        check(unsafe { (self.lib.mount)(self.raw(), root.as_ptr()) }).map(drop)
    }

    /// Ends the session in order: writes back, gives everything back.
    pub fn unmount(&self) -> Result<(), Errno> {
        self.ending.store(true, Ordering::SeqCst);
        // SAFETY: whoever calls this uses nothing of the session afterwards, and has dropped all
        // references to inodes, or lets the process end without: the library has freed them (16.2.15).
        check(unsafe { (self.lib.unmount)(self.raw()) }).map(drop)
    }

    /// The session is about to be ended by another one of this process.
    pub fn will_end(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }

    /// Gives the instance's memory and threads back. After [`unmount`](Client::unmount).
    pub fn release(self) {
        // SAFETY: nothing refers to it: it is not shared any more. One with a session is left alone.
        unsafe { (self.lib.release)(self.raw()) };
    }

    /// Ends the session of that name, with everything it held. Works before, during and after
    /// [`mount`](Client::mount). ENOENT: there is none.
    pub fn reclaim(&self, uuid: &CStr) -> Result<(), Errno> {
        let _turn = self.reclaiming.lock();
        // SAFETY: a string.
        let done = unsafe { (self.lib.start_reclaim)(self.raw(), uuid.as_ptr(), RECLAIM_RESET) };
        // SAFETY: the instance is live.
        unsafe { (self.lib.finish_reclaim)(self.raw()) };
        check(done).map(drop)
    }

    /// The metadata server still knows this client, and has done all it was sent before. Unlike
    /// [`Inode::has_lost_its_session`] this always asks. A session that was ended takes 0.2 s to answer.
    pub fn has_a_session(&self) -> bool {
        // Ending a session that never was is the smallest thing one can ask for.
        !matches!(
            self.reclaim(c"nobody's"),
            Err(Errno::EPERM | Errno::ESHUTDOWN | Errno::ENOTCONN)
        )
    }

    /// The session is being ended, from here.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Has `listener` told of data that is old, for the life of the process. After [`init`](Client::init), before
    /// [`mount`](Client::mount).
    pub fn listen(
        &self,
        listener: impl Fn(Vino, i64, i64) + Send + Sync + 'static,
    ) -> Result<(), Errno> {
        let listener: Listener = Box::new(listener);
        let listener: &'static Listener = Box::leak(Box::new(listener));
        let mut args = CallbackArgs {
            handle: ptr::from_ref(listener).cast_mut().cast(),
            ino_cb: Some(on_data),
            // Nothing is held for the kernel's knowledge of a name or a node, so there is nothing to
            // let go of.
            dentry_cb: None,
            switch_intr_cb: None,
            remount_cb: None,
            umask_cb: Some(on_umask),
            ino_release_cb: None,
        };
        match self.lib.ll_register_callbacks2 {
            // SAFETY: the library copies the struct; the handle lives for ever.
            Some(register) => check(unsafe { register(self.raw(), &mut args) }).map(drop),
            None => {
                // SAFETY: as above.
                unsafe { (self.lib.ll_register_callbacks)(self.raw(), &mut args) };
                Ok(())
            }
        }
    }

    /// Makes [`File::may_cache`] possible. After [`mount`](Client::mount). Without it nothing may ever
    /// be cached.
    pub fn enable_may_cache(&self) -> Result<(), Errno> {
        // Seconds in which a delegation must be given back; ours lasts for two calls.
        const LIMIT: u32 = 20;
        // SAFETY: the instance is live.
        check(unsafe { (self.lib.set_deleg_timeout)(self.raw(), LIMIT) }).map(drop)
    }

    /// Makes everything this client did durable.
    pub fn sync(&self) -> Result<(), Errno> {
        // SAFETY: the instance is live.
        check(unsafe { (self.lib.sync_fs)(self.raw()) }).map(drop)
    }

    // ---- inodes ------------------------------------------------------------------------------

    fn inode(self: &Arc<Self>, ptr: *mut CephInode) -> Result<Inode, Errno> {
        let ptr = NonNull::new(ptr).ok_or(Errno::EIO)?;
        Ok(Inode {
            client: self.clone(),
            ptr,
        })
    }

    /// The root of the mount.
    pub fn root(self: &Arc<Self>) -> Result<Inode, Errno> {
        let mut ptr = ptr::null_mut();
        // SAFETY: a place for the inode.
        check(unsafe { (self.lib.ll_lookup_root)(self.raw(), &mut ptr) })?;
        self.inode(ptr)
    }

    /// An inode by its number. ENOTCONN until the mount has begun.
    pub fn find(self: &Arc<Self>, vino: Vino) -> Result<Inode, Errno> {
        let mut ptr = ptr::null_mut();
        // SAFETY: a place for the inode.
        check(unsafe { (self.lib.ll_lookup_vino)(self.raw(), vino, &mut ptr) })?;
        self.inode(ptr)
    }

    /// An inode by its number if the client has it in its cache. Never blocks.
    pub fn cached(self: &Arc<Self>, vino: Vino) -> Option<Inode> {
        // SAFETY: the instance is live; null if there is none.
        let ptr = unsafe { (self.lib.ll_get_inode)(self.raw(), vino) };
        self.inode(ptr).ok()
    }

    /// What a name in a directory refers to.
    pub fn lookup(
        self: &Arc<Self>,
        parent: &Inode,
        name: &CStr,
        perms: &Perms,
    ) -> Result<(Inode, Statx), Errno> {
        self.made(|inode, st| {
            // SAFETY: live parent, name, two places, perms.
            unsafe {
                (self.lib.ll_lookup)(
                    self.raw(),
                    parent.raw(),
                    name.as_ptr(),
                    inode,
                    st,
                    WANT,
                    0,
                    perms.raw(),
                )
            }
        })
    }

    /// Calls something that returns a new reference and attributes.
    fn made(
        self: &Arc<Self>,
        call: impl FnOnce(*mut *mut CephInode, *mut Statx) -> c_int,
    ) -> Result<(Inode, Statx), Errno> {
        let mut ptr = ptr::null_mut();
        let mut st = Statx::default();
        check(call(&mut ptr, &mut st))?;
        Ok((self.inode(ptr)?, st))
    }

    /// Makes a file, device, pipe or socket.
    pub fn mknod(
        self: &Arc<Self>,
        parent: &Inode,
        name: &CStr,
        mode: u32,
        rdev: libc::dev_t,
        perms: &Perms,
    ) -> Result<(Inode, Statx), Errno> {
        self.made(|inode, st| {
            // SAFETY: as in `lookup`.
            unsafe {
                (self.lib.ll_mknod)(
                    self.raw(),
                    parent.raw(),
                    name.as_ptr(),
                    mode,
                    rdev,
                    inode,
                    st,
                    WANT,
                    0,
                    perms.raw(),
                )
            }
        })
    }

    /// Makes a directory; in `.snap`, a snapshot.
    pub fn mkdir(
        self: &Arc<Self>,
        parent: &Inode,
        name: &CStr,
        mode: u32,
        perms: &Perms,
    ) -> Result<(Inode, Statx), Errno> {
        self.made(|inode, st| {
            // SAFETY: as in `lookup`.
            unsafe {
                (self.lib.ll_mkdir)(
                    self.raw(),
                    parent.raw(),
                    name.as_ptr(),
                    mode,
                    inode,
                    st,
                    WANT,
                    0,
                    perms.raw(),
                )
            }
        })
    }

    /// Makes a symbolic link.
    pub fn symlink(
        self: &Arc<Self>,
        parent: &Inode,
        name: &CStr,
        target: &CStr,
        perms: &Perms,
    ) -> Result<(Inode, Statx), Errno> {
        self.made(|inode, st| {
            // SAFETY: as in `lookup`.
            unsafe {
                (self.lib.ll_symlink)(
                    self.raw(),
                    parent.raw(),
                    name.as_ptr(),
                    target.as_ptr(),
                    inode,
                    st,
                    WANT,
                    0,
                    perms.raw(),
                )
            }
        })
    }

    /// Makes and opens a file, or opens one that is there.
    pub fn create_file(
        self: &Arc<Self>,
        parent: &Inode,
        name: &CStr,
        mode: u32,
        flags: c_int,
        perms: &Perms,
    ) -> Result<(Inode, Statx, File), Errno> {
        let mut fh = ptr::null_mut();
        let (inode, st) = self.made(|inode, st| {
            // SAFETY: as in `lookup`, and a place for the open file.
            unsafe {
                (self.lib.ll_create)(
                    self.raw(),
                    parent.raw(),
                    name.as_ptr(),
                    mode,
                    flags,
                    inode,
                    &mut fh,
                    st,
                    WANT,
                    0,
                    perms.raw(),
                )
            }
        })?;
        Ok((inode, st, self.file(fh)?))
    }

    fn file(self: &Arc<Self>, fh: *mut CephFh) -> Result<File, Errno> {
        let fh = NonNull::new(fh).ok_or(Errno::EIO)?;
        Ok(File {
            client: self.clone(),
            fh,
        })
    }
}

/// Why there is no instance.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The library is missing or too old.
    #[error(transparent)]
    Library(#[from] NoLibrary),
    /// It refused.
    #[error("libcephfs: {0}")]
    Refused(#[from] Errno),
}

/// # Safety
///
/// `handle` is the listener that was leaked in [`Client::listen`].
unsafe extern "C" fn on_data(handle: *mut libc::c_void, vino: Vino, off: i64, len: i64) {
    // SAFETY: the caller promises it.
    let listener: &Listener = unsafe { &*handle.cast_const().cast() };
    listener(vino, off, len);
}

extern "C" fn on_recall(_fh: *mut CephFh, _private: *mut libc::c_void) {}

extern "C" fn on_umask(_handle: *mut libc::c_void) -> libc::mode_t {
    UMASK.get()
}

thread_local! {
    static UMASK: Cell<libc::mode_t> = const { Cell::new(0) };
}

/// Sets the umask the library applies for this thread, if it applies one (with ACLs).
pub fn set_umask(umask: u32) {
    UMASK.set(umask);
}

/// Who asks.
pub struct Perms {
    lib: &'static Functions,
    perms: NonNull<CephPerms>,
    /// The library keeps a pointer to these.
    groups: Box<[libc::gid_t]>,
}

// SAFETY: it is never changed after it was made.
unsafe impl Send for Perms {}
// SAFETY: as above.
unsafe impl Sync for Perms {}

impl Perms {
    /// A user with a group and supplementary groups.
    pub fn new(client: &Client, uid: u32, gid: u32, groups: &[u32]) -> Result<Perms, Errno> {
        let mut groups: Box<[libc::gid_t]> = groups.into();
        // SAFETY: the groups live in a box as long as the value; -1 means "this process" to the
        // library, and no caller has that uid.
        let perms = unsafe {
            (client.lib.userperm_new)(uid, gid, groups.len() as c_int, groups.as_mut_ptr())
        };
        Ok(Perms {
            lib: client.lib,
            perms: NonNull::new(perms).ok_or(Errno::ENOMEM)?,
            groups,
        })
    }

    /// Supplementary groups.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    fn raw(&self) -> *const CephPerms {
        self.perms.as_ptr()
    }
}

impl Drop for Perms {
    fn drop(&mut self) {
        // SAFETY: made by `userperm_new`, destroyed once.
        unsafe { (self.lib.userperm_destroy)(self.perms.as_ptr()) };
    }
}

/// A reference to an inode, which keeps it alive.
pub struct Inode {
    client: Arc<Client>,
    ptr: NonNull<CephInode>,
}

// SAFETY: the library takes its own locks.
unsafe impl Send for Inode {}
// SAFETY: as above.
unsafe impl Sync for Inode {}

impl Drop for Inode {
    fn drop(&mut self) {
        // SAFETY: this value is one reference.
        unsafe { (self.client.lib.ll_put)(self.client.raw(), self.raw()) };
    }
}

impl Inode {
    fn raw(&self) -> *mut CephInode {
        self.ptr.as_ptr()
    }

    fn lib(&self) -> &'static Functions {
        self.client.lib
    }

    fn mount(&self) -> *mut CephMount {
        self.client.raw()
    }

    /// Attributes, from the metadata server if need be.
    pub fn stat(&self, perms: &Perms) -> Result<Statx, Errno> {
        self.ask(WANT, 0, perms)
    }

    /// The version, which grows with every change. `known`: as this client knows it, without asking.
    pub fn version(&self, known: bool, perms: &Perms) -> Result<u64, Errno> {
        let flags = if known { DONT_SYNC } else { 0 };
        Ok(self.ask(STATX_VERSION, flags, perms)?.version)
    }

    /// Version and modification time. `known`: as this client knows them, without asking.
    pub fn stamp(&self, known: bool, perms: &Perms) -> Result<Stamp, Errno> {
        let flags = if known { DONT_SYNC } else { 0 };
        let st = self.ask(STATX_VERSION | STATX_MTIME, flags, perms)?;
        Ok(st.stamp())
    }

    /// Attributes as this client knows them, without asking.
    pub fn known(&self, perms: &Perms) -> Result<Statx, Errno> {
        self.ask(WANT | STATX_VERSION, DONT_SYNC, perms)
    }

    fn ask(&self, want: c_uint, flags: c_uint, perms: &Perms) -> Result<Statx, Errno> {
        let mut st = Statx::default();
        // SAFETY: a place for the attributes.
        check(unsafe {
            (self.lib().ll_getattr)(self.mount(), self.raw(), &mut st, want, flags, perms.raw())
        })?;
        Ok(st)
    }

    /// The session of this client was ended by somebody else. Asks the metadata server once the
    /// capability for the inode's attributes is lost, so that the answer is a proof; otherwise it
    /// costs nothing.
    pub fn has_lost_its_session(&self, perms: &Perms) -> bool {
        let refused = matches!(self.stat(perms), Err(Errno::ESHUTDOWN | Errno::ENOTCONN));
        refused && !self.client.is_ending()
    }

    /// Has the metadata server know that this client refers to the object. Costs nothing while it does:
    /// the capability for that is the only one that is never taken back.
    pub fn hold(&self, perms: &Perms) -> Result<(), Errno> {
        self.ask(0, 0, perms).map(drop)
    }

    /// Changes the attributes named by `mask` (`ffi::setattr`).
    pub fn set_stat(&self, st: &Statx, mask: c_int, perms: &Perms) -> Result<(), Errno> {
        let mut st = *st;
        // SAFETY: a copy that may be changed.
        check(unsafe {
            (self.lib().ll_setattr)(self.mount(), self.raw(), &mut st, mask, perms.raw())
        })
        .map(drop)
    }

    /// Opens a file. Never creates.
    pub fn open(&self, flags: c_int, perms: &Perms) -> Result<File, Errno> {
        let mut fh = ptr::null_mut();
        // The library asserts that nothing is created here.
        let flags = flags & !libc::O_CREAT;
        // SAFETY: a place for the open file.
        check(unsafe {
            (self.lib().ll_open)(self.mount(), self.raw(), flags, &mut fh, perms.raw())
        })?;
        self.client.file(fh)
    }

    /// Opens a directory.
    pub fn open_dir(&self, perms: &Perms) -> Result<Directory, Errno> {
        let mut dir = ptr::null_mut();
        // SAFETY: a place for the open directory.
        check(unsafe { (self.lib().ll_opendir)(self.mount(), self.raw(), &mut dir, perms.raw()) })?;
        Ok(Directory {
            client: self.client.clone(),
            dir: NonNull::new(dir).ok_or(Errno::EIO)?,
        })
    }

    /// Makes the object durable; `data_only` as `fdatasync(2)`.
    pub fn sync(&self, data_only: bool) -> Result<(), Errno> {
        // SAFETY: live inode.
        check(unsafe { (self.lib().ll_sync_inode)(self.mount(), self.raw(), data_only.into()) })
            .map(drop)
    }

    /// Gives this file another name.
    pub fn link(&self, parent: &Inode, name: &CStr, perms: &Perms) -> Result<(), Errno> {
        // SAFETY: live inodes, name.
        check(unsafe {
            (self.lib().ll_link)(
                self.mount(),
                self.raw(),
                parent.raw(),
                name.as_ptr(),
                perms.raw(),
            )
        })
        .map(drop)
    }

    /// Removes a name of a file.
    pub fn unlink(&self, name: &CStr, perms: &Perms) -> Result<(), Errno> {
        // SAFETY: live inode, name.
        check(unsafe {
            (self.lib().ll_unlink)(self.mount(), self.raw(), name.as_ptr(), perms.raw())
        })
        .map(drop)
    }

    /// Removes a directory.
    pub fn rmdir(&self, name: &CStr, perms: &Perms) -> Result<(), Errno> {
        // SAFETY: live inode, name.
        check(unsafe {
            (self.lib().ll_rmdir)(self.mount(), self.raw(), name.as_ptr(), perms.raw())
        })
        .map(drop)
    }

    /// Renames a name of this directory.
    pub fn rename(
        &self,
        name: &CStr,
        new_parent: &Inode,
        new_name: &CStr,
        perms: &Perms,
    ) -> Result<(), Errno> {
        // SAFETY: live inodes, names.
        check(unsafe {
            (self.lib().ll_rename)(
                self.mount(),
                self.raw(),
                name.as_ptr(),
                new_parent.raw(),
                new_name.as_ptr(),
                perms.raw(),
            )
        })
        .map(drop)
    }

    /// Target of a symbolic link.
    pub fn read_link(&self, perms: &Perms) -> Result<Vec<u8>, Errno> {
        let mut target = vec![0u8; libc::PATH_MAX as usize];
        // SAFETY: writes at most the given length.
        let len = check(unsafe {
            (self.lib().ll_readlink)(
                self.mount(),
                self.raw(),
                target.as_mut_ptr().cast(),
                target.len(),
                perms.raw(),
            )
        })?;
        target.truncate(len as usize);
        Ok(target)
    }

    /// Value of an extended attribute of at most `room` bytes; with no room only its length.
    pub fn xattr(&self, name: &CStr, room: usize, perms: &Perms) -> Result<Xattr, Errno> {
        let mut value = vec![0u8; room];
        // SAFETY: writes at most the given length.
        let len = check(unsafe {
            (self.lib().ll_getxattr)(
                self.mount(),
                self.raw(),
                name.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
                perms.raw(),
            )
        })?;
        Ok(Xattr::new(value, len as usize))
    }

    /// Names of the extended attributes, each with a NUL; with no room only their length.
    pub fn xattrs(&self, room: usize, perms: &Perms) -> Result<Xattr, Errno> {
        let mut list = vec![0u8; room];
        let mut len = 0;
        // SAFETY: writes at most the given length.
        check(unsafe {
            (self.lib().ll_listxattr)(
                self.mount(),
                self.raw(),
                list.as_mut_ptr().cast(),
                list.len(),
                &mut len,
                perms.raw(),
            )
        })?;
        Ok(Xattr::new(list, len))
    }

    /// Sets an extended attribute; `flags` of `setxattr(2)`.
    pub fn set_xattr(
        &self,
        name: &CStr,
        value: &[u8],
        flags: c_int,
        perms: &Perms,
    ) -> Result<(), Errno> {
        // SAFETY: reads the given length.
        check(unsafe {
            (self.lib().ll_setxattr)(
                self.mount(),
                self.raw(),
                name.as_ptr(),
                value.as_ptr().cast(),
                value.len(),
                flags,
                perms.raw(),
            )
        })
        .map(drop)
    }

    /// Removes an extended attribute.
    pub fn remove_xattr(&self, name: &CStr, perms: &Perms) -> Result<(), Errno> {
        // SAFETY: live inode, name.
        check(unsafe {
            (self.lib().ll_removexattr)(self.mount(), self.raw(), name.as_ptr(), perms.raw())
        })
        .map(drop)
    }

    /// Numbers of the file system.
    pub fn statfs(&self) -> Result<libc::statvfs, Errno> {
        let mut st = MaybeUninit::zeroed();
        // SAFETY: a place for the numbers.
        check(unsafe { (self.lib().ll_statfs)(self.mount(), self.raw(), st.as_mut_ptr()) })?;
        // SAFETY: numbers only; all zero is a value.
        Ok(unsafe { st.assume_init() })
    }
}

/// Bytes, or only how many there are.
pub enum Xattr {
    /// All of them.
    Bytes(Vec<u8>),
    /// There was no room: this many.
    Len(usize),
}

impl Xattr {
    fn new(mut bytes: Vec<u8>, len: usize) -> Xattr {
        if bytes.is_empty() {
            return Xattr::Len(len);
        }
        bytes.truncate(len);
        Xattr::Bytes(bytes)
    }
}

/// An open file. Closing it drops the locks that were taken through it.
pub struct File {
    client: Arc<Client>,
    fh: NonNull<CephFh>,
}

// SAFETY: the library takes its own locks.
unsafe impl Send for File {}
// SAFETY: as above.
unsafe impl Sync for File {}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: open, and closed once. What could not be written was told by the write itself.
        unsafe { (self.client.lib.ll_close)(self.client.raw(), self.raw()) };
    }
}

impl File {
    fn raw(&self) -> *mut CephFh {
        self.fh.as_ptr()
    }

    /// Reads into shared memory.
    pub fn read(&self, into: &[Span<'_>], offset: u64) -> Result<usize, Errno> {
        let offset = i64::try_from(offset).map_err(|_| Errno::EINVAL)?;
        // SAFETY: spans are valid for their lifetime; at most their length is written.
        let read = unsafe {
            (self.client.lib.ll_readv)(
                self.client.raw(),
                self.raw(),
                iovecs(into),
                into.len() as c_int,
                offset,
            )
        };
        transferred(read)
    }

    /// Writes from shared memory.
    pub fn write(&self, from: &[Span<'_>], offset: u64) -> Result<usize, Errno> {
        let offset = i64::try_from(offset).map_err(|_| Errno::EINVAL)?;
        // SAFETY: as for `read`, reading.
        let written = unsafe {
            (self.client.lib.ll_writev)(
                self.client.raw(),
                self.raw(),
                iovecs(from),
                from.len() as c_int,
                offset,
            )
        };
        transferred(written)
    }

    /// As [`read`](File::read), into private memory.
    pub fn read_bytes(&self, into: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let offset = i64::try_from(offset).map_err(|_| Errno::EINVAL)?;
        let iov = libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: into.len(),
        };
        // SAFETY: at most the given length is written.
        transferred(unsafe {
            (self.client.lib.ll_readv)(self.client.raw(), self.raw(), &iov, 1, offset)
        })
    }

    /// As [`write`](File::write), from private memory.
    pub fn write_bytes(&self, from: &[u8], offset: u64) -> Result<usize, Errno> {
        let offset = i64::try_from(offset).map_err(|_| Errno::EINVAL)?;
        let iov = libc::iovec {
            iov_base: from.as_ptr().cast_mut().cast(),
            iov_len: from.len(),
        };
        // SAFETY: the given length is only read.
        transferred(unsafe {
            (self.client.lib.ll_writev)(self.client.raw(), self.raw(), &iov, 1, offset)
        })
    }

    /// Makes the file durable; `data_only` as `fdatasync(2)`. After an eviction the library says
    /// success here although it has dropped the data: see `Ceph::verified`.
    pub fn sync(&self, data_only: bool) -> Result<(), Errno> {
        // SAFETY: open file.
        check(unsafe {
            (self.client.lib.ll_fsync)(self.client.raw(), self.raw(), data_only.into())
        })
        .map(drop)
    }

    /// `fallocate(2)`.
    pub fn allocate(&self, mode: c_int, offset: i64, length: i64) -> Result<(), Errno> {
        // SAFETY: open file.
        check(unsafe {
            (self.client.lib.ll_fallocate)(self.client.raw(), self.raw(), mode, offset, length)
        })
        .map(drop)
    }

    /// This client has the right to cache the file, and is told when it goes. `writes`: the file is
    /// open for writing. Asked by taking a delegation and giving it back, which the library grants from
    /// what it knows, and only for the one open file there is of an inode, or for readers only.
    pub fn may_cache(&self, writes: bool) -> bool {
        let kind = if writes {
            delegation::WR
        } else {
            delegation::RD
        };
        let ask = |kind| {
            // SAFETY: open file; the callback does nothing with its arguments.
            let done = unsafe {
                (self.client.lib.ll_delegation)(
                    self.client.raw(),
                    self.raw(),
                    kind,
                    on_recall,
                    ptr::null_mut(),
                )
            };
            done == 0
        };
        let granted = ask(kind);
        if granted {
            ask(delegation::NONE);
        }
        granted
    }

    /// Sets or removes a `fcntl(2)` lock of an owner; never waits (EAGAIN).
    pub fn lock(&self, mut lock: libc::flock, owner: u64) -> Result<(), Errno> {
        // SAFETY: open file, a lock of ours.
        check(unsafe {
            (self.client.lib.ll_setlk)(self.client.raw(), self.raw(), &mut lock, owner, 0)
        })
        .map(drop)
    }

    /// Takes a `fcntl(2)` lock as soon as nobody has it any more. There is no way to end the wait but
    /// the end of the session.
    pub fn wait_for_lock(&self, mut lock: libc::flock, owner: u64) -> Result<(), Errno> {
        // SAFETY: open file, which this value keeps open, a lock of ours.
        check(unsafe {
            (self.client.lib.ll_setlk)(self.client.raw(), self.raw(), &mut lock, owner, 1)
        })
        .map(drop)
    }

    /// A lock that is in the way of this one.
    pub fn test_lock(&self, mut lock: libc::flock, owner: u64) -> Result<libc::flock, Errno> {
        // SAFETY: open file, a place for the answer.
        check(unsafe {
            (self.client.lib.ll_getlk)(self.client.raw(), self.raw(), &mut lock, owner)
        })?;
        Ok(lock)
    }
}

fn transferred(count: i64) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| {
        let errno = i32::try_from(count.saturating_neg()).unwrap_or(libc::EIO);
        Errno::from_raw(errno)
    })
}

/// An entry of a directory.
pub struct Entry {
    /// Its name.
    pub name: CString,
    /// Attributes of what it refers to.
    pub stat: Statx,
    /// `DT_*`.
    pub file_type: u8,
    /// Cookie of the entry after it.
    pub next: i64,
}

/// An open directory. One user at a time.
pub struct Directory {
    client: Arc<Client>,
    dir: NonNull<CephDir>,
}

// SAFETY: methods that change it take `&mut`; the library takes its own locks besides.
unsafe impl Send for Directory {}

impl Drop for Directory {
    fn drop(&mut self) {
        // SAFETY: open, and closed once.
        unsafe { (self.client.lib.ll_releasedir)(self.client.raw(), self.dir.as_ptr()) };
    }
}

impl Directory {
    /// The next entry; `None` at the end.
    pub fn read(&mut self) -> Result<Option<Entry>, Errno> {
        let mut de = MaybeUninit::<libc::dirent>::zeroed();
        let mut stat = Statx::default();
        // SAFETY: places for entry and attributes; no reference to the inode is asked for.
        let more = check(unsafe {
            (self.client.lib.readdirplus_r)(
                self.client.raw(),
                self.dir.as_ptr(),
                de.as_mut_ptr(),
                &mut stat,
                WANT,
                0,
                ptr::null_mut(),
            )
        })?;
        if more == 0 {
            return Ok(None);
        }
        // SAFETY: numbers and bytes only; all zero is a value.
        let de = unsafe { de.assume_init() };
        let name: Vec<u8> = (de.d_name.iter().map(|&c| c as u8))
            .take_while(|&c| c != 0)
            .collect();
        Ok(Some(Entry {
            name: CString::new(name).map_err(|_| Errno::EIO)?,
            stat,
            file_type: de.d_type,
            next: de.d_off,
        }))
    }

    /// Goes to the entry of a cookie; 0 is the beginning, read anew.
    pub fn seek(&mut self, cookie: i64) {
        // SAFETY: open directory; any number is a position.
        unsafe {
            if cookie == 0 {
                (self.client.lib.rewinddir)(self.client.raw(), self.dir.as_ptr());
            } else {
                (self.client.lib.seekdir)(self.client.raw(), self.dir.as_ptr(), cookie);
            }
        }
    }
}
