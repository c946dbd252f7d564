//! The sockets: one for ioctls, one for tests, a thread per connection.
//!
//! Failure: a connection that sends anything but a frame is closed; the others don't notice.

use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    accept4, bind, getsockopt, listen, recvmsg, sendmsg, socket, sockopt::PeerCredentials,
};

use crate::caller::Caller;
use crate::ctl;
use crate::emulator::Emulator;
use crate::wire::{CONTROL_SOCKET, FRAME, Reply, Request, SOCKET};

/// Time between two ticks.
const TICK: Duration = Duration::from_millis(5);
/// Ticks between two looks at all processes' maps.
const SLOW: u32 = 100;

/// Opens the sockets and serves in background threads.
///
/// # Errors
/// A socket can't be made.
pub fn start(emulator: &Arc<Emulator>) -> io::Result<()> {
    let calls = listen_at(&emulator.root().join(SOCKET))?;
    let served = Arc::clone(emulator);
    thread::Builder::new().name("calls".into()).spawn(move || accept_calls(&served, &calls))?;
    let path = emulator.root().join(CONTROL_SOCKET);
    drop(std::fs::remove_file(&path));
    let control = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let served = Arc::clone(emulator);
    thread::Builder::new().name("control".into()).spawn(move || accept_control(&served, &control))?;
    let ticking = Arc::clone(emulator);
    thread::Builder::new().name("tick".into()).spawn(move || tick(&ticking))?;
    Ok(())
}

fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    drop(std::fs::remove_file(path));
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    // Any container that has it bound in may call the driver, as any may open a device node.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    listen(&listener, Backlog::MAXCONN)?;
    Ok(listener)
}

fn tick(emulator: &Emulator) {
    let mut count: u32 = 0;
    loop {
        thread::sleep(TICK);
        count = count.wrapping_add(1);
        emulator.tick(count.is_multiple_of(SLOW));
    }
}

fn accept_calls(emulator: &Arc<Emulator>, listener: &OwnedFd) {
    loop {
        let connection = match accept4(listener, SockFlag::SOCK_CLOEXEC) {
            Ok(connection) => connection,
            Err(nix::errno::Errno::EINTR | nix::errno::Errno::ECONNABORTED) => continue,
            Err(error) => {
                eprintln!("gpuslice-emulator: no more calls are accepted: {error}");
                return;
            }
        };
        let served = Arc::clone(emulator);
        let spawned = thread::Builder::new().name("caller".into()).stack_size(256 << 10).spawn(move || {
            if let Err(error) = serve(&served, &connection) {
                eprintln!("gpuslice-emulator: connection closed: {error}");
            }
        });
        if let Err(error) = spawned {
            eprintln!("gpuslice-emulator: no thread for a caller: {error}");
        }
    }
}

fn serve(emulator: &Emulator, connection: &OwnedFd) -> io::Result<()> {
    let peer = getsockopt(connection, PeerCredentials)?;
    let pid = u32::try_from(peer.pid()).map_err(|_| io::Error::other("peer without a pid"))?;
    let caller = Caller::new(pid)?;
    while let Some((request, file)) = receive(connection)? {
        let answer = emulator.ioctl(&caller, &file, request.cmd, request.address);
        drop(file);
        let replaces = answer.install.as_ref().map(|install| install.at);
        let reply = Reply { value: answer.value, errno: answer.errno, replaces };
        let files: Vec<RawFd> = answer.install.iter().map(|install| install.file.as_raw_fd()).collect();
        send(connection, &reply.encode(), &files)?;
    }
    Ok(())
}

fn receive(connection: &OwnedFd) -> io::Result<Option<(Request, OwnedFd)>> {
    let mut frame = [0; FRAME + 1];
    let mut space = nix::cmsg_space!([RawFd; 4]);
    let (length, files) = {
        let mut parts = [IoSliceMut::new(&mut frame)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = match recvmsg::<()>(connection.as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Ok(message) => message,
            Err(nix::errno::Errno::ECONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut numbers = Vec::new();
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(received) = part {
                numbers.extend(received);
            }
        }
        (message.bytes, crate::sys::received(&numbers))
    };
    if length == 0 && files.is_empty() {
        return Ok(None);
    }
    let request = Request::decode(frame.get(..length).unwrap_or_default())?;
    let mut files = files.into_iter();
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(Some((request, file))),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a request carries exactly one file")),
    }
}

fn send(connection: &OwnedFd, frame: &[u8], files: &[RawFd]) -> io::Result<()> {
    let parts = [IoSlice::new(frame)];
    let rights = [ControlMessage::ScmRights(files)];
    let attached: &[ControlMessage<'_>] = if files.is_empty() { &[] } else { &rights };
    match sendmsg::<()>(connection.as_raw_fd(), &parts, attached, MsgFlags::MSG_NOSIGNAL, None) {
        // The caller died while the driver worked: what it did stands, as with a killed process.
        Ok(_) | Err(nix::errno::Errno::EPIPE) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn accept_control(emulator: &Arc<Emulator>, listener: &UnixListener) {
    for connection in listener.incoming().flatten() {
        let served = Arc::clone(emulator);
        let spawned = thread::Builder::new().name("tests".into()).spawn(move || {
            if let Err(error) = converse(&served, connection) {
                eprintln!("gpuslice-emulator: control connection closed: {error}");
            }
        });
        if let Err(error) = spawned {
            eprintln!("gpuslice-emulator: no thread for a control connection: {error}");
        }
    }
}

/// One JSON object a line, answered by one JSON object a line.
fn converse(emulator: &Emulator, connection: UnixStream) -> io::Result<()> {
    let mut writer = connection.try_clone()?;
    for line in BufReader::new(connection).lines() {
        let mut answer = ctl::answer(emulator, &line?).to_string();
        answer.push('\n');
        writer.write_all(answer.as_bytes())?;
    }
    Ok(())
}
