//! The emulated driver as the scheduler calls it.

use std::io;
use std::os::fd::BorrowedFd;

use gpuslice_scheduler::Rm;
use gpuslice_sys::Arg;

use crate::Connections;

/// Driver calls over the emulator's socket.
#[derive(Debug)]
pub struct EmulatedRm(pub Connections);

impl Rm for EmulatedRm {
    fn ioctl(&self, file: BorrowedFd<'_>, cmd: u32, arg: &mut Arg) -> io::Result<i32> {
        self.0.ioctl(file, cmd, arg).map(|(value, _)| value)
    }
}
