//! One message per packet, with file descriptors beside it.
//!
//! `SOCK_SEQPACKET` keeps messages apart and whole, so a peer that dies while it writes leaves no
//! half message, and several threads may send and receive on one [`Conn`] without a lock.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message in bytes. Far more than any message needs, and far less than a socket's buffer,
/// so that sending one never depends on the size of the buffer.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// Most descriptors beside one message. The kernel's limit (`SCM_MAX_FD`) is 253.
pub const MAX_FDS: usize = 250;

/// Why a conversation failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A system call failed.
    #[error("control socket: cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A system call on a socket in the file system failed.
    #[error("control socket {}: cannot {what}: {source}", path.display())]
    Path {
        /// What was tried.
        what: &'static str,
        /// The socket or its directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another process listens there.
    #[error(
        "control socket {} is in use by a live process; unmount what it serves first, or set \
         EVERMOUNT_RUNTIME_DIR to another directory",
        path.display()
    )]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The peer is gone; what was sent is lost.
    #[error("control socket: the peer has closed the conversation")]
    PeerClosed,
    /// Nothing came in time (see [`Conn::set_timeout`]).
    #[error("control socket: the peer did not answer in time; it may be stopped or overloaded")]
    TimedOut,
    /// The message is too long to send.
    #[error("control message of {len} bytes is longer than the limit of {MAX_MESSAGE}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// Too many descriptors to send.
    #[error("control message with {count} file descriptors; the limit is {MAX_FDS}")]
    TooManyFds {
        /// How many.
        count: usize,
    },
    /// The message, or the descriptors beside it, did not arrive whole.
    #[error(
        "control message arrived cut off ({what}); the peer does not keep to the protocol, or this \
         process has reached its limit of open files (ulimit -n)"
    )]
    Truncated {
        /// Bytes or file descriptors.
        what: &'static str,
    },
    /// The message cannot be read, or cannot be written.
    #[error("control message is malformed: {0}; do both programs have compatible versions?")]
    Malformed(#[from] serde_json::Error),
}

impl ControlError {
    fn io(what: &'static str) -> impl FnOnce(Errno) -> ControlError {
        move |errno| ControlError::Io {
            what,
            source: errno.into(),
        }
    }
}

/// One end of a conversation. Every method takes `&self` and may be called from any thread.
#[derive(Debug)]
pub struct Conn(OwnedFd);

impl Conn {
    /// Two connected ends. Both are close-on-exec.
    pub fn pair() -> Result<(Conn, Conn), ControlError> {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(ControlError::io("create a socket pair"))?;
        Ok((Conn(a), Conn(b)))
    }

    /// Takes an end that was inherited or received.
    pub fn from_fd(fd: OwnedFd) -> Conn {
        Conn(fd)
    }

    /// Connects to a [`Listener`].
    pub fn connect(path: &Path) -> Result<Conn, ControlError> {
        let failed = |what| {
            move |errno: Errno| ControlError::Path {
                what,
                path: path.to_owned(),
                source: errno.into(),
            }
        };
        let socket = seqpacket().map_err(failed("create a socket"))?;
        let address = SocketAddrUnix::new(path).map_err(failed("use this path"))?;
        rustix::net::connect(&socket, &address).map_err(failed("connect"))?;
        Ok(Conn(socket))
    }

    /// Sends a message and duplicates of these descriptors. Waits while the peer's buffer is full.
    pub fn send(&self, msg: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), ControlError> {
        let bytes = serde_json::to_vec(msg)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(ControlError::TooLong { len: bytes.len() });
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        // The length is checked first: the buffer's alignment slack may have room for one more.
        if fds.len() > MAX_FDS
            || !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds))
        {
            return Err(ControlError::TooManyFds { count: fds.len() });
        }
        loop {
            let iov = [IoSlice::new(&bytes)];
            match rustix::net::sendmsg(&self.0, &iov, &mut beside, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()), // a packet is sent whole or not at all
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ControlError::PeerClosed),
                Err(Errno::AGAIN) => return Err(ControlError::TimedOut),
                Err(errno) => return Err(ControlError::io("send")(errno)),
            }
        }
    }

    /// Waits for a message. `None`: the peer has closed its end, and everything it sent was read.
    ///
    /// Descriptors that come with a message nobody wants are closed when they are dropped.
    pub fn recv<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>, ControlError> {
        self.receive(RecvFlags::empty())
    }

    /// Like [`Conn::recv`], without waiting: [`Received::Nothing`] if no message is there.
    pub fn try_recv<T: DeserializeOwned>(&self) -> Result<Received<T>, ControlError> {
        match self.receive(RecvFlags::DONTWAIT) {
            Ok(Some((msg, fds))) => Ok(Received::Message(msg, fds)),
            Ok(None) => Ok(Received::Closed),
            Err(ControlError::TimedOut) => Ok(Received::Nothing),
            Err(error) => Err(error),
        }
    }

    fn receive<T: DeserializeOwned>(
        &self,
        flags: RecvFlags,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ControlError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            let mut iov = [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.0, &mut iov, &mut beside, flags) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                // The peer closed its end before it had read what we sent.
                Err(Errno::CONNRESET) => return Ok(None),
                Err(Errno::AGAIN) => return Err(ControlError::TimedOut),
                Err(errno) => return Err(ControlError::io("receive")(errno)),
            }
        };
        let mut fds = Vec::new();
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(ControlError::Truncated { what: "bytes" });
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(ControlError::Truncated {
                what: "file descriptors",
            });
        }
        if received.bytes == 0 {
            return Ok(None); // JSON is never empty, so this is the end
        }
        Ok(Some((
            serde_json::from_slice(&bytes[..received.bytes])?,
            fds,
        )))
    }

    /// Bounds how long [`Conn::send`] and [`Conn::recv`] wait; they fail with
    /// [`ControlError::TimedOut`]. `None` is for ever, as is the beginning.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> Result<(), ControlError> {
        for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&self.0, direction, timeout)
                .map_err(ControlError::io("set a time limit"))?;
        }
        Ok(())
    }

    /// The process that made the other end: of a [`Conn::connect`], the one that listens.
    pub fn peer_pid(&self) -> Result<u32, ControlError> {
        sockopt::socket_peercred(&self.0)
            .map(|cred| cred.pid.as_raw_nonzero().get() as u32)
            .map_err(ControlError::io("ask for the peer's credentials"))
    }

    /// The uid of the process that made the other end, as the kernel recorded it (`SO_PEERCRED`).
    pub fn peer_uid(&self) -> Result<u32, ControlError> {
        sockopt::socket_peercred(&self.0)
            .map(|cred| cred.uid.as_raw())
            .map_err(ControlError::io("ask for the peer's credentials"))
    }
}

/// What [`Conn::try_recv`] found.
#[derive(Debug)]
pub enum Received<T> {
    /// A message and the descriptors beside it.
    Message(T, Vec<OwnedFd>),
    /// No message now.
    Nothing,
    /// The peer has closed its end.
    Closed,
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Conn> for OwnedFd {
    fn from(conn: Conn) -> OwnedFd {
        conn.0
    }
}

/// Listens on a socket in the file system. The socket file is removed when this is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
}

impl Listener {
    /// Creates the socket `path`, and its directory (mode 0700) if there is none.
    ///
    /// A socket file that nobody listens on is replaced: it was left by a process that was killed.
    pub fn bind(path: &Path) -> Result<Listener, ControlError> {
        let failed = |what, source: io::Error| ControlError::Path {
            what,
            path: path.to_owned(),
            source,
        };
        if let Some(parent) = path.parent() {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(parent)
                .map_err(|e| failed("create its directory", e))?;
        }
        let address = SocketAddrUnix::new(path).map_err(|e| failed("use this path", e.into()))?;
        let socket = seqpacket().map_err(|e| failed("create", e.into()))?;
        match rustix::net::bind(&socket, &address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => {
                match Conn::connect(path) {
                    Ok(_) => {
                        return Err(ControlError::InUse {
                            path: path.to_owned(),
                        });
                    }
                    Err(ControlError::Path { source, .. })
                        if source.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(error) => return Err(error),
                }
                std::fs::remove_file(path).map_err(|e| failed("replace the stale one", e))?;
                rustix::net::bind(&socket, &address).map_err(|e| failed("create", e.into()))?;
            }
            Err(errno) => return Err(failed("create", errno.into())),
        }
        let listener = Listener {
            socket,
            path: path.to_owned(),
        };
        // The directory already keeps others out; this is for one somebody has opened up.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
            .map_err(|e| failed("set its mode", e))?;
        rustix::net::listen(&listener.socket, 16).map_err(|e| failed("listen", e.into()))?;
        Ok(listener)
    }

    /// Waits for a client. Check [`Conn::peer_uid`] before listening to it.
    pub fn accept(&self) -> Result<Conn, ControlError> {
        loop {
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(fd) => return Ok(Conn(fd)),
                // The client went away before it was accepted: not an error of this socket.
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(ControlError::io("accept a client")(errno)),
            }
        }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn seqpacket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    fn null() -> File {
        File::open("/dev/null").unwrap()
    }

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (a, b) = Conn::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        a.send(&("hello", 7), &[writer.as_fd()]).unwrap();
        drop(writer);
        let (message, mut fds) = b.recv::<(String, u32)>().unwrap().unwrap();
        assert_eq!(message, ("hello".into(), 7));
        assert_eq!(fds.len(), 1);
        let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let mut writer = File::from(fds.remove(0));
        writer.write_all(b"through").unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }

    #[test]
    fn as_many_descriptors_as_promised_arrive_and_one_more_is_refused() {
        let (a, b) = Conn::pair().unwrap();
        let file = null();
        let fds = vec![file.as_fd(); MAX_FDS];
        a.send(&1, &fds).unwrap();
        assert_eq!(b.recv::<u32>().unwrap().unwrap().1.len(), MAX_FDS);
        let fds = vec![file.as_fd(); MAX_FDS + 1];
        assert!(matches!(
            a.send(&1, &fds),
            Err(ControlError::TooManyFds { count: 251 })
        ));
    }

    #[test]
    fn a_long_message_is_refused_by_the_sender_and_detected_by_the_receiver() {
        let (a, b) = Conn::pair().unwrap();
        let text = "x".repeat(MAX_MESSAGE);
        assert!(matches!(
            a.send(&text, &[]),
            Err(ControlError::TooLong { .. })
        ));
        rustix::net::send(&a, text.repeat(2).as_bytes(), SendFlags::empty()).unwrap();
        assert!(matches!(
            b.recv::<String>(),
            Err(ControlError::Truncated { what: "bytes" })
        ));
        let longest = "x".repeat(MAX_MESSAGE - 2);
        a.send(&longest, &[]).unwrap();
        assert_eq!(b.recv::<String>().unwrap().unwrap().0, longest);
    }

    #[test]
    fn the_end_comes_after_everything_that_was_sent() {
        let (a, b) = Conn::pair().unwrap();
        a.send(&1, &[]).unwrap();
        b.send(&2, &[]).unwrap(); // unread by `a`: the kernel reports a reset
        drop(a);
        let mut seen = Vec::new();
        while let Some((n, _)) = b.recv::<u32>().unwrap() {
            seen.push(n);
        }
        assert!(seen.is_empty() || seen == [1], "{seen:?}");
        assert!(matches!(b.send(&3, &[]), Err(ControlError::PeerClosed)));
    }

    #[test]
    fn nothing_to_receive_is_not_the_end() {
        let (a, b) = Conn::pair().unwrap();
        assert!(matches!(b.try_recv::<u32>().unwrap(), Received::Nothing));
        b.set_timeout(Some(Duration::from_millis(20))).unwrap();
        assert!(matches!(b.recv::<u32>(), Err(ControlError::TimedOut)));
        drop(a);
        // Not at once if another test is just starting a program, which has a copy until its exec.
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while matches!(b.try_recv::<u32>().unwrap(), Received::Nothing) {
            assert!(std::time::Instant::now() < deadline, "never closed");
            std::thread::yield_now();
        }
        assert!(matches!(b.try_recv::<u32>().unwrap(), Received::Closed));
    }

    #[test]
    fn a_malformed_message_is_an_error_and_the_next_one_is_read() {
        let (a, b) = Conn::pair().unwrap();
        rustix::net::send(&a, b"{\xff", SendFlags::empty()).unwrap();
        a.send(&5, &[]).unwrap();
        assert!(matches!(b.recv::<u32>(), Err(ControlError::Malformed(_))));
        assert_eq!(b.recv::<u32>().unwrap().unwrap().0, 5);
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/mount-1.sock");
        let first = Listener::bind(&path).unwrap();
        let mode = std::fs::metadata(path.parent().unwrap()).unwrap();
        assert_eq!(mode.permissions().mode() & 0o7777, 0o700);
        assert!(matches!(
            Listener::bind(&path),
            Err(ControlError::InUse { .. })
        ));
        // A killed process leaves the file: close the socket without running Drop.
        let file = first.socket.try_clone().unwrap();
        std::mem::forget(first);
        rustix::net::shutdown(&file, rustix::net::Shutdown::Both).unwrap();
        let second = Listener::bind(&path).unwrap();
        let client = Conn::connect(&path).unwrap();
        let served = second.accept().unwrap();
        assert_eq!(client.peer_pid().unwrap(), std::process::id());
        assert_eq!(served.peer_uid().unwrap(), nix::unistd::getuid().as_raw());
        client.send(&"hi", &[]).unwrap();
        assert_eq!(served.recv::<String>().unwrap().unwrap().0, "hi");
        drop(second);
        assert!(!path.exists());
    }
}
