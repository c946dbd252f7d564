//! Starting a program with exactly the files and the environment that it is given.
//!
//! Owns nothing after the start: the exit is collected by the one reaper. A program is the leader of a process
//! group of its own, so that it can be killed with its helpers. Every other file of the shim is close-on-exec.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::SigSet;
use nix::unistd::Pid;

/// Where files are parked in the child while they move to their numbers: above any number they have.
const PARKING: i32 = 200;

/// A program about to be started.
pub(crate) struct Program<'a> {
    /// Absolute path.
    pub(crate) path: CString,
    /// Arguments, the program's name first.
    pub(crate) arguments: Vec<CString>,
    /// The whole environment.
    pub(crate) environment: &'a [CString],
    /// These become descriptors 0, 1, 2, ...
    pub(crate) files: Vec<BorrowedFd<'a>>,
}

impl Program<'_> {
    /// Starts it; whoever calls must tell the reaper before it can collect the exit.
    pub(crate) fn start(&self) -> io::Result<Pid> {
        let mut actions = PosixSpawnFileActions::init()?;
        for (number, file) in (0_i32..).zip(&self.files) {
            actions.add_dup2(file.as_raw_fd(), PARKING.saturating_add(number))?;
        }
        for (number, _) in (0_i32..).zip(&self.files) {
            actions.add_dup2(PARKING.saturating_add(number), number)?;
            actions.add_close(PARKING.saturating_add(number))?;
        }
        let mut attributes = PosixSpawnAttr::init()?;
        attributes.set_flags(
            PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF
                | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
                | PosixSpawnFlags::POSIX_SPAWN_SETPGROUP,
        )?;
        attributes.set_sigdefault(&SigSet::all())?;
        attributes.set_sigmask(&SigSet::empty())?;
        attributes.set_pgroup(Pid::from_raw(0))?;
        Ok(posix_spawn(self.path.as_c_str(), &actions, &attributes, &self.arguments, self.environment)?)
    }
}
