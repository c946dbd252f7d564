//! Connections to the emulator: as many calls at a time as there are connections.
//!
//! Failure: a connection on which an answer failed is dropped; with none left every call fails with EIO.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuslice_emulator::{FRAME, Reply, Request, SOCKET};
use gpuslice_sys::{Arg, Socket, with_addresses};

/// Longest time that a call may take: the kernel's driver has no limit, a hanging test has.
const PATIENCE: Duration = Duration::from_secs(3600);
/// Longest time until the emulator's socket answers.
const DIAL: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Pool {
    idle: Vec<Socket>,
    live: usize,
}

/// Open connections of this process. They count as its calls as long as it lives, whatever rights it drops.
#[derive(Debug)]
pub struct Connections {
    pool: Mutex<Pool>,
    returned: Condvar,
}

impl Connections {
    /// Opens `count` connections to the emulator under `root`.
    ///
    /// # Errors
    /// It doesn't answer.
    pub fn open(root: &Path, count: usize) -> io::Result<Self> {
        let socket = root.join(SOCKET);
        let deadline = Instant::now() + DIAL;
        let idle = (0..count).map(|_| Socket::connect(&socket, deadline)).collect::<io::Result<Vec<_>>>()?;
        Ok(Connections { pool: Mutex::new(Pool { live: idle.len(), idle }), returned: Condvar::new() })
    }

    fn take(&self) -> io::Result<Socket> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(socket) = pool.idle.pop() {
                return Ok(socket);
            }
            if pool.live == 0 {
                return Err(io::Error::from_raw_os_error(nix::libc::EIO));
            }
            pool = self.returned.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn put(&self, socket: Option<Socket>) {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        match socket {
            Some(socket) => pool.idle.push(socket),
            None => pool.live = pool.live.saturating_sub(1),
        }
        self.returned.notify_one();
    }

    /// Performs `cmd` on `file`; the value, and a file that is to replace one of this process's numbers.
    ///
    /// # Errors
    /// The driver's errno.
    pub fn ioctl(
        &self,
        file: BorrowedFd<'_>,
        cmd: u32,
        arg: &mut Arg,
    ) -> io::Result<(i32, Option<(i32, OwnedFd)>)> {
        let socket = self.take()?;
        let answer = with_addresses(arg, |address| exchange(&socket, file, Request { cmd, address }))
            .and_then(|answer| answer);
        let (reply, files) = match answer {
            Ok(answer) => {
                self.put(Some(socket));
                answer
            }
            Err(error) => {
                self.put(None);
                return Err(error);
            }
        };
        if reply.errno != 0 {
            return Err(io::Error::from_raw_os_error(reply.errno));
        }
        Ok((reply.value, reply.replaces.zip(files.into_iter().next())))
    }
}

fn exchange(socket: &Socket, file: BorrowedFd<'_>, request: Request) -> io::Result<(Reply, Vec<OwnedFd>)> {
    let deadline = Instant::now() + PATIENCE;
    socket.send(&request.encode(), &[file], deadline)?;
    let mut frame = [0; FRAME];
    let (length, files) = socket.recv(&mut frame, 1, deadline)?;
    if length == 0 {
        return Err(io::Error::from_raw_os_error(nix::libc::EIO));
    }
    Ok((Reply::decode(frame.get(..length).unwrap_or_default())?, files))
}
