//! Local sockets with files on their messages.
//!
//! [`Socket`] is SEQPACKET: one message a frame, files received close-on-exec. [`StateListener`] is the
//! stream socket to which a runtime sends a container's seccomp listener. Trusts nothing received: a
//! truncated message or a truncated list of files is an error, and the files that did arrive are closed.
//! Every wait has a deadline.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::call::{check, error, new_file, uninterrupted};
use crate::wait;

/// Most files on one message.
pub const MAX_FILES: usize = 32;
/// Most bytes of a state message.
const MAX_STATE: usize = 1 << 20;
const BACKLOG: libc::c_int = 64;

/// Who is on the other side, as the kernel recorded it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id in this process's pid namespace.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// A connected SEQPACKET socket.
#[derive(Debug)]
pub struct Socket(OwnedFd);

/// A SEQPACKET socket that accepts connections.
#[derive(Debug)]
pub struct Listening(OwnedFd);

/// The stream socket named as `listenerPath` in a container's configuration.
#[derive(Debug)]
pub struct StateListener(OwnedFd);

/// One connection of a runtime to a [`StateListener`].
#[derive(Debug)]
pub struct StateStream(OwnedFd);

/// Room for the ancillary data of [`MAX_FILES`] files, aligned as its header must be.
type Control = [u64; 24];

impl Socket {
    /// Two sockets connected to each other.
    ///
    /// # Errors
    /// Those of socketpair(2).
    pub fn pair() -> io::Result<(Socket, Socket)> {
        let mut numbers: [RawFd; 2] = [-1; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: socketpair writes two file numbers: `numbers` has room for them.
        check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, numbers.as_mut_ptr()) })?;
        let [a, b] = numbers;
        Ok((Socket(new_file(a.into())?), Socket(new_file(b.into())?)))
    }

    /// Connects to the listening socket at `path`.
    ///
    /// # Errors
    /// Those of connect(2); `TimedOut` when the queue there stays full until `deadline`.
    pub fn connect(path: &Path, deadline: Instant) -> io::Result<Socket> {
        let socket = new_socket(libc::SOCK_SEQPACKET)?;
        let (address, length) = address(path)?;
        loop {
            // SAFETY: connect reads `length` bytes of an address: `address` holds that many.
            let result = unsafe {
                libc::connect(socket.as_raw_fd(), (&raw const address).cast::<libc::sockaddr>(), length)
            };
            match check(result) {
                Ok(_) => return Ok(Socket(socket)),
                Err(failed) if failed.kind() == io::ErrorKind::WouldBlock => {}
                Err(failed) if failed.kind() == io::ErrorKind::Interrupted => continue,
                Err(failed) => return Err(failed),
            }
            if Instant::now() >= deadline {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Listens at `path`: mode 0600, its directory created with mode 0700 where it doesn't exist. A socket
    /// left there by a program that is gone is replaced.
    ///
    /// # Errors
    /// `AddrInUse` when somebody answers there, or when `path` is something else than a socket.
    pub fn listen(path: &Path) -> io::Result<Listening> {
        listen(path, libc::SOCK_SEQPACKET).map(Listening)
    }

    /// Takes over a connected SEQPACKET socket.
    pub fn from_fd(file: OwnedFd) -> Socket {
        Socket(file)
    }

    /// Sends one message with these files.
    ///
    /// # Errors
    /// `TimedOut` when the queue stays full until `deadline`; EPIPE or ECONNRESET when the peer is gone;
    /// EMSGSIZE for a message or list of files that is too long.
    pub fn send(&self, message: &[u8], files: &[BorrowedFd<'_>], deadline: Instant) -> io::Result<()> {
        let numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let mut control = Control::default();
        let control_length = write_control(&mut control, &numbers)?;
        let mut part = libc::iovec { iov_base: message.as_ptr().cast_mut().cast(), iov_len: message.len() };
        let mut header = empty_header();
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        if control_length != 0 {
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = control_length;
        }
        loop {
            let result = uninterrupted(|| {
                // SAFETY: sendmsg reads the header, its one part and its control data: all are locals that
                // live on, with their true lengths.
                let sent = unsafe {
                    libc::sendmsg(
                        self.0.as_raw_fd(),
                        &raw const header,
                        libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                    )
                };
                usize::try_from(sent).map_err(|_| io::Error::last_os_error())
            });
            match result {
                Ok(sent) if sent == message.len() => return Ok(()),
                Ok(_) => return Err(error(libc::EMSGSIZE)),
                Err(failed) if failed.kind() == io::ErrorKind::WouldBlock => {}
                Err(failed) => return Err(failed),
            }
            if Instant::now() >= deadline {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            wait::poll(&[wait::Wanted { file: self.as_fd(), read: false, write: true }], Some(deadline))?;
        }
    }

    /// Receives one message into `buf`; (0, no files) when the peer closed. At most `max_files` files; with
    /// 0 the kernel drops the files of a message itself, and none ever enters this process's table.
    ///
    /// # Errors
    /// `TimedOut`; EMSGSIZE when the message or its list of files was longer than there was room for.
    pub fn recv(
        &self,
        buf: &mut [u8],
        max_files: usize,
        deadline: Instant,
    ) -> io::Result<(usize, Vec<OwnedFd>)> {
        loop {
            match receive(self.as_fd(), buf, max_files > 0) {
                Ok((_, files)) if files.len() > max_files => return Err(error(libc::EMSGSIZE)),
                Ok(received) => return Ok(received),
                Err(failed) if failed.kind() == io::ErrorKind::WouldBlock => {}
                Err(failed) if failed.raw_os_error() == Some(libc::ECONNRESET) => return Ok((0, Vec::new())),
                Err(failed) => return Err(failed),
            }
            if !wait::readable(self.as_fd(), Some(deadline))? {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
        }
    }

    /// Who is on the other side.
    ///
    /// # Errors
    /// Those of getsockopt(2).
    pub fn peer(&self) -> io::Result<Peer> {
        peer(self.as_fd())
    }

    /// Gives the file up.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Listening {
    /// Accepts one connection.
    ///
    /// # Errors
    /// `TimedOut`, and those of accept4(2).
    pub fn accept(&self, deadline: Instant) -> io::Result<Socket> {
        accept(self.as_fd(), deadline).map(Socket)
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl StateListener {
    /// Listens at `path`, as [`Socket::listen`] does.
    ///
    /// # Errors
    /// As [`Socket::listen`].
    pub fn bind(path: &Path) -> io::Result<StateListener> {
        listen(path, libc::SOCK_STREAM).map(StateListener)
    }

    /// Accepts one runtime's connection.
    ///
    /// # Errors
    /// `TimedOut`, and those of accept4(2).
    pub fn accept(&self, deadline: Instant) -> io::Result<StateStream> {
        accept(self.as_fd(), deadline).map(StateStream)
    }
}

impl AsFd for StateListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl StateStream {
    /// Who is on the other side.
    ///
    /// # Errors
    /// Those of getsockopt(2).
    pub fn peer(&self) -> io::Result<Peer> {
        peer(self.0.as_fd())
    }

    /// Receives the state (JSON, up to the end of the stream) and the one file that comes with it.
    ///
    /// # Errors
    /// `TimedOut`; EMSGSIZE when there is not exactly one file, or more than 1 MiB of state.
    pub fn receive(self, deadline: Instant) -> io::Result<(Vec<u8>, OwnedFd)> {
        let mut state = Vec::new();
        let mut found: Vec<OwnedFd> = Vec::new();
        let mut buf = vec![0; 16 * 1024];
        loop {
            let (count, files) = match receive(self.0.as_fd(), &mut buf, true) {
                Err(failed) if failed.kind() == io::ErrorKind::WouldBlock => {
                    if !wait::readable(self.0.as_fd(), Some(deadline))? {
                        return Err(io::Error::from(io::ErrorKind::TimedOut));
                    }
                    continue;
                }
                result => result?,
            };
            found.extend(files);
            state.extend_from_slice(buf.get(..count).unwrap_or_default());
            if found.len() > 1 || state.len() > MAX_STATE {
                return Err(error(libc::EMSGSIZE));
            }
            if count == 0 {
                break;
            }
        }
        match found.pop() {
            Some(file) => Ok((state, file)),
            None => Err(error(libc::EMSGSIZE)),
        }
    }
}

fn new_socket(kind: libc::c_int) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket takes its arguments by value.
    new_file(i64::from(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }))
}

fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let mut address = libc::sockaddr_un {
        sun_family: libc::sa_family_t::try_from(libc::AF_UNIX).unwrap_or(1),
        sun_path: [0; 108],
    };
    let bytes = path.as_os_str().as_bytes();
    // One byte is kept for the NUL; a leading NUL would be an abstract name.
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(error(libc::ENAMETOOLONG));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    let length =
        libc::socklen_t::try_from(size_of::<libc::sockaddr_un>()).map_err(|_| error(libc::EINVAL))?;
    Ok((address, length))
}

fn listen(path: &Path, kind: libc::c_int) -> io::Result<OwnedFd> {
    if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    remove_stale(path, kind)?;
    let socket = new_socket(kind)?;
    let (address, length) = address(path)?;
    // SAFETY: bind reads `length` bytes of an address: `address` holds that many.
    let bound =
        unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast::<libc::sockaddr>(), length) };
    check(bound)?;
    // Nobody can connect before listen(2), so nobody gets in before the mode is right.
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    // SAFETY: listen takes its arguments by value.
    check(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) })?;
    Ok(socket)
}

/// Removes a socket that nobody listens on any more.
fn remove_stale(path: &Path, kind: libc::c_int) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(failed) if failed.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(failed) => return Err(failed),
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => return Err(error(libc::EADDRINUSE)),
    }
    let probe = new_socket(kind)?;
    let (address, length) = address(path)?;
    // SAFETY: connect reads `length` bytes of an address: `address` holds that many.
    let result =
        unsafe { libc::connect(probe.as_raw_fd(), (&raw const address).cast::<libc::sockaddr>(), length) };
    match check(result) {
        Err(failed) if failed.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        _ => Err(error(libc::EADDRINUSE)),
    }
}

fn accept(listening: BorrowedFd<'_>, deadline: Instant) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    loop {
        let result = uninterrupted(|| {
            // SAFETY: accept4 takes null for an address that is not wanted.
            let accepted = unsafe {
                libc::accept4(listening.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags)
            };
            new_file(i64::from(accepted))
        });
        match result {
            Err(failed) if failed.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
        if !wait::readable(listening, Some(deadline))? {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
    }
}

fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(|_| error(libc::EINVAL))?;
    // SAFETY: getsockopt writes at most `length` bytes: the size of `found`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    check(result)?;
    Ok(Peer { pid: found.pid.unsigned_abs(), uid: found.uid, gid: found.gid })
}

fn empty_header() -> libc::msghdr {
    let header = MaybeUninit::<libc::msghdr>::zeroed();
    // SAFETY: assume_init needs a valid value: null pointers and zero lengths are valid in a msghdr.
    unsafe { header.assume_init() }
}

/// Bytes of a control header; its data follows directly, for 16 is a multiple of its alignment.
const CONTROL_HEADER: usize = size_of::<libc::cmsghdr>();
const _: () = assert!(CONTROL_HEADER == 16);
const _: () = assert!(size_of::<Control>() >= CONTROL_HEADER + MAX_FILES * size_of::<RawFd>());

/// Fills in one SCM_RIGHTS message and returns its length; 0 without files.
fn write_control(control: &mut Control, numbers: &[RawFd]) -> io::Result<usize> {
    if numbers.is_empty() {
        return Ok(0);
    }
    if numbers.len() > MAX_FILES {
        return Err(error(libc::EMSGSIZE));
    }
    let length = CONTROL_HEADER + size_of_val(numbers);
    let mut bytes = Vec::with_capacity(size_of::<Control>());
    bytes.extend((length as u64).to_ne_bytes());
    bytes.extend(libc::SOL_SOCKET.to_ne_bytes());
    bytes.extend(libc::SCM_RIGHTS.to_ne_bytes());
    for number in numbers {
        bytes.extend(number.to_ne_bytes());
    }
    for (word, from) in control.iter_mut().zip(bytes.chunks(8)) {
        let mut padded = [0; 8];
        for (to, from) in padded.iter_mut().zip(from) {
            *to = *from;
        }
        *word = u64::from_ne_bytes(padded);
    }
    Ok(length)
}

/// Takes ownership of every file in the control data.
fn read_control(control: &Control, length: usize) -> Vec<OwnedFd> {
    let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).take(length).collect();
    let mut files = Vec::new();
    let mut rest = bytes.as_slice();
    while let Some((size, level, kind)) = control_header(rest) {
        let Some(data) = rest.get(CONTROL_HEADER..size) else { break };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            for number in data.chunks_exact(size_of::<RawFd>()) {
                let Ok(number) = number.try_into().map(RawFd::from_ne_bytes) else { continue };
                // SAFETY: from_raw_fd needs an open file that nobody else owns: the kernel has just put
                // this one into our table for this message.
                files.push(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
        rest = rest.get(size.next_multiple_of(8)..).unwrap_or_default();
    }
    files
}

fn control_header(bytes: &[u8]) -> Option<(usize, libc::c_int, libc::c_int)> {
    let size = u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?);
    let level = libc::c_int::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?);
    let kind = libc::c_int::from_ne_bytes(bytes.get(12..16)?.try_into().ok()?);
    let size = usize::try_from(size).ok().filter(|size| *size >= CONTROL_HEADER)?;
    Some((size, level, kind))
}

fn receive(socket: BorrowedFd<'_>, buf: &mut [u8], take_files: bool) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = Control::default();
    let mut part = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let mut header = empty_header();
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    if take_files {
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of::<Control>();
    }
    let count = uninterrupted(|| {
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: recvmsg writes to the header, its one part and its control data: all are mutable and live
        // on, with their true lengths.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    })?;
    let files = read_control(&control, header.msg_controllen);
    if header.msg_flags & (libc::MSG_CTRUNC | libc::MSG_TRUNC) != 0 {
        return Err(error(libc::EMSGSIZE));
    }
    Ok((count, files))
}
