//! The device nodes and one ioctl on them: by the system call, or straight to an emulated driver.

use std::cell::RefCell;
use std::fs::OpenOptions;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect,
    recvmsg, sendmsg, socket,
};

use crate::bytes::Block;

/// Why a step failed.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The ioctl failed with an errno.
    Call {
        /// Which.
        what: String,
        /// The errno.
        error: io::Error,
    },
    /// The driver answered a status.
    Status {
        /// Which call.
        what: String,
        /// The status.
        status: u32,
    },
    /// The machine or the arguments.
    Machine(String),
}

impl Trouble {
    /// The errno, where there is one.
    pub(crate) fn errno(&self) -> Option<i32> {
        match self {
            Trouble::Call { error, .. } => error.raw_os_error(),
            Trouble::Status { .. } | Trouble::Machine(_) => None,
        }
    }

    /// The driver's status, where there is one.
    pub(crate) fn status(&self) -> Option<u32> {
        match self {
            Trouble::Status { status, .. } => Some(*status),
            Trouble::Call { .. } | Trouble::Machine(_) => None,
        }
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Call { what, error } => write!(f, "{what}: {error}"),
            Trouble::Status { what, status } => write!(f, "{what}: driver status {status:#x}"),
            Trouble::Machine(text) => f.write_str(text),
        }
    }
}

/// Where the nodes are: /dev, or GPUSLICE_TENANT_DEV.
pub(crate) fn directory() -> String {
    std::env::var("GPUSLICE_TENANT_DEV").unwrap_or_else(|_| "/dev".to_owned())
}

/// Opens a node.
pub(crate) fn open(name: &str) -> Result<OwnedFd, Trouble> {
    let path = format!("{}/{name}", directory());
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(&path);
    file.map(OwnedFd::from).map_err(|error| Trouble::Call { what: format!("open {path}"), error })
}

/// Socket of an emulated driver to be called directly.
pub(crate) fn direct() -> Option<String> {
    std::env::var("GPUSLICE_TENANT_DIRECT").ok().filter(|path| !path.is_empty())
}

/// A frontend command: number and size as `_IOWR('F', nr, size)`.
pub(crate) fn frontend(nr: u32, size: usize) -> u32 {
    0xc000_0000 | (u32::try_from(size).unwrap_or(0) & 0x3fff) << 16 | u32::from(b'F') << 8 | nr
}

/// One ioctl with a block as its argument.
pub(crate) fn ioctl(file: BorrowedFd<'_>, cmd: u32, block: &mut Block) -> io::Result<i32> {
    let address = if block.0.is_empty() { 0 } else { block.0.as_mut_ptr().expose_provenance() };
    ioctl_at(file, cmd, u64::try_from(address).unwrap_or(0))
}

/// One ioctl with any number as its argument.
pub(crate) fn ioctl_at(file: BorrowedFd<'_>, cmd: u32, address: u64) -> io::Result<i32> {
    match direct() {
        Some(path) => call_direct(&path, file, cmd, address),
        None => native(file.as_raw_fd(), u64::from(cmd), address),
    }
}

/// The ioctl system call with all 64 bits of each argument.
pub(crate) fn native(file: RawFd, cmd: u64, address: u64) -> io::Result<i32> {
    // SAFETY: syscall(SYS_ioctl) takes three register values; whether the kernel writes through the third is up
    // to the command, and every caller passes the address of a live block of its own, or an address that is
    // meant to fault.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, file, cmd, address) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(result).unwrap_or(0)) }
}

struct Connection {
    pid: u32,
    socket: OwnedFd,
}

thread_local! {
    static CONNECTION: RefCell<Option<Connection>> = const { RefCell::new(None) };
}

fn dial(path: &str) -> io::Result<OwnedFd> {
    let made = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    connect(made.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(made)
}

/// The driver takes the connecting process for the caller, so a forked child dials anew.
fn call_direct(path: &str, file: BorrowedFd<'_>, cmd: u32, address: u64) -> io::Result<i32> {
    CONNECTION.with_borrow_mut(|slot| {
        let pid = std::process::id();
        let connection = match slot.take().filter(|known| known.pid == pid) {
            Some(known) => known,
            None => Connection { pid, socket: dial(path)? },
        };
        let answer = exchange(&connection.socket, file, cmd, address);
        *slot = Some(connection);
        answer
    })
}

fn exchange(socket: &OwnedFd, file: BorrowedFd<'_>, cmd: u32, address: u64) -> io::Result<i32> {
    let mut frame = Block::zeroed(16);
    frame.set_u32(0, cmd);
    frame.set_u64(8, address);
    let files = [file.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&files)];
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&frame.0)], &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    let mut space = nix::cmsg_space!([RawFd; 2]);
    let mut answer = Block::zeroed(16);
    let mut received = None;
    {
        let mut parts = [IoSliceMut::new(&mut answer.0)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = loop {
            match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
                // A signal: the driver has the call already, as in the kernel, so only the answer is awaited.
                Err(nix::errno::Errno::EINTR) => space.clear(),
                other => break other?,
            }
        };
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(numbers) = part {
                for number in numbers {
                    // SAFETY: `from_raw_fd` needs an open number that nothing else owns: recvmsg just made it.
                    received = Some(unsafe { OwnedFd::from_raw_fd(number) });
                }
            }
        }
    }
    if let Some(file) = received {
        replace(&file, i32::from_le_bytes(answer.u32(8).to_le_bytes()))?;
    }
    let errno = i32::from_le_bytes(answer.u32(4).to_le_bytes());
    if errno != 0 {
        return Err(io::Error::from_raw_os_error(errno));
    }
    Ok(i32::from_le_bytes(answer.u32(0).to_le_bytes()))
}

/// Puts `file` in the place of number `at`, as the kernel does for a trapped call.
fn replace(file: &OwnedFd, at: RawFd) -> io::Result<()> {
    // SAFETY: dup3 takes three integers; the number it replaces belongs to a file object whose owner keeps the
    // number and from now on means the new file, which is what the driver's answer asks for.
    let result = unsafe { libc::dup3(file.as_raw_fd(), at, libc::O_CLOEXEC) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A step that must succeed: errno and status are turned into [`Trouble`].
pub(crate) fn step(
    what: &str,
    file: &impl AsFd,
    cmd: u32,
    block: &mut Block,
    status_at: usize,
) -> Result<(), Trouble> {
    ioctl(file.as_fd(), cmd, block).map_err(|error| Trouble::Call { what: what.to_owned(), error })?;
    match block.u32(status_at) {
        0 => Ok(()),
        status => Err(Trouble::Status { what: what.to_owned(), status }),
    }
}
