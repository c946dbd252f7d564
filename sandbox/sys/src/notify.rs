//! Seccomp user notification, the supervisor's side (kernel: `kernel/seccomp.c`).
//!
//! Owns: one listener file. Trusts: the kernel's structure sizes, checked once. A notification's id is
//! unique for its listener only. Any call may fail with ENOENT: the caller's call was cancelled.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use libc::{
    SECCOMP_ADDFD_FLAG_SEND, SECCOMP_ADDFD_FLAG_SETFD, SECCOMP_IOCTL_NOTIF_ADDFD,
    SECCOMP_IOCTL_NOTIF_ID_VALID, SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND,
    SECCOMP_USER_NOTIF_FLAG_CONTINUE, c_int, seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp,
    seccomp_notif_sizes,
};

use crate::call::{check, check_long, error};

/// The kernel's ERESTARTSYS: the call is made again after the thread has handled what stopped it.
const ERESTARTSYS: i32 = 512;
/// `SECCOMP_IOCTL_NOTIF_SET_FLAGS`, kernel 6.6.
const NOTIF_SET_FLAGS: libc::Ioctl = 0x4008_2104;
/// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`.
const SYNC_WAKE_UP: u64 = 1;

/// A call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Names it on its listener.
    pub id: u64,
    /// The calling thread, in this process's pid namespace; 0 = not visible from here.
    pub tid: u32,
    /// System call number.
    pub nr: i32,
    /// `AUDIT_ARCH_*`.
    pub arch: u32,
    /// Registers.
    pub args: [u64; 6],
}

/// What a call gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This return value.
    Return(i64),
    /// This error number, positive.
    Error(i32),
    /// Done by the kernel as if there were no filter.
    Continue,
    /// Made again, after the thread has been stopped or has handled a signal (-ERESTARTSYS).
    Restart,
}

/// The supervisor's end of one seccomp filter.
#[derive(Debug)]
pub struct Listener(OwnedFd);

fn check_sizes() -> io::Result<()> {
    static SIZES: OnceLock<bool> = OnceLock::new();
    let known = SIZES.get_or_init(|| {
        let mut sizes = seccomp_notif_sizes { seccomp_notif: 0, seccomp_notif_resp: 0, seccomp_data: 0 };
        // SAFETY: GET_NOTIF_SIZES writes one seccomp_notif_sizes: `sizes` is one, borrowed mutably.
        let result =
            unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes) };
        check_long(result).is_ok()
            && usize::from(sizes.seccomp_notif) == size_of::<seccomp_notif>()
            && usize::from(sizes.seccomp_notif_resp) == size_of::<seccomp_notif_resp>()
    });
    if *known { Ok(()) } else { Err(io::Error::from(io::ErrorKind::Unsupported)) }
}

impl Listener {
    /// Takes over `file`, which must be a seccomp listener.
    ///
    /// # Errors
    /// `Unsupported` when the kernel's structures have other sizes than this program was built for.
    pub fn new(file: OwnedFd) -> io::Result<Listener> {
        check_sizes()?;
        Ok(Listener(file))
    }

    fn ioctl<T>(&self, command: libc::Ioctl, value: &mut T) -> io::Result<c_int> {
        // SAFETY: the command must touch only what `value` holds: each caller in this module passes the
        // structure that the kernel defines for the command, with its size checked in `new`.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), command, std::ptr::from_mut(value)) })
    }

    /// Waits for a call. Blocks; on some kernels for ever once nobody is left under the filter.
    ///
    /// # Errors
    /// EINTR; ENOENT when the call was cancelled meanwhile or nobody is left under the filter.
    pub fn recv(&self) -> io::Result<Notification> {
        let mut raw = seccomp_notif {
            id: 0,
            pid: 0,
            flags: 0,
            data: libc::seccomp_data { nr: 0, arch: 0, instruction_pointer: 0, args: [0; 6] },
        };
        self.ioctl(SECCOMP_IOCTL_NOTIF_RECV, &mut raw)?;
        let data = raw.data;
        Ok(Notification { id: raw.id, tid: raw.pid, nr: data.nr, arch: data.arch, args: data.args })
    }

    /// The call still waits. False once it was cancelled, answered, or its thread died.
    pub fn is_valid(&self, id: u64) -> bool {
        let mut id = id;
        self.ioctl(SECCOMP_IOCTL_NOTIF_ID_VALID, &mut id).is_ok()
    }

    /// Answers a call.
    ///
    /// # Errors
    /// ENOENT when nobody waits for the answer any more.
    pub fn answer(&self, id: u64, answer: Answer) -> io::Result<()> {
        let mut raw = seccomp_notif_resp { id, val: 0, error: 0, flags: 0 };
        match answer {
            Answer::Return(value) => raw.val = value,
            Answer::Error(errno) => raw.error = -errno.saturating_abs(),
            Answer::Restart => raw.error = -ERESTARTSYS,
            // The flag is bit 0 of a 32-bit field.
            Answer::Continue => raw.flags = u32::try_from(SECCOMP_USER_NOTIF_FLAG_CONTINUE).unwrap_or(1),
        }
        self.ioctl(SECCOMP_IOCTL_NOTIF_SEND, &mut raw).map(|_| ())
    }

    /// Puts a copy of `file` into the caller's file table, close-on-exec, and returns its number there.
    /// `at` replaces the file of that number. With `then_answer` the call is answered with the number in
    /// the same step.
    ///
    /// # Errors
    /// ENOENT when nobody waits any more, EMFILE when the table is full.
    pub fn add_file(
        &self,
        id: u64,
        file: BorrowedFd<'_>,
        at: Option<u32>,
        then_answer: bool,
    ) -> io::Result<u32> {
        let source = u32::try_from(file.as_raw_fd()).map_err(|_| error(libc::EBADF))?;
        let mut flags = 0;
        if at.is_some() {
            flags |= SECCOMP_ADDFD_FLAG_SETFD;
        }
        if then_answer {
            flags |= SECCOMP_ADDFD_FLAG_SEND;
        }
        let mut raw = seccomp_notif_addfd {
            id,
            flags: u32::try_from(flags).map_err(|_| error(libc::EINVAL))?,
            srcfd: source,
            newfd: at.unwrap_or(0),
            newfd_flags: u32::try_from(libc::O_CLOEXEC).map_err(|_| error(libc::EINVAL))?,
        };
        let number = self.ioctl(SECCOMP_IOCTL_NOTIF_ADDFD, &mut raw)?;
        u32::try_from(number).map_err(|_| error(libc::EBADF))
    }

    /// Lets a notification wake a thread blocked in [`Listener::recv`] on the caller's own CPU, and the
    /// answer the caller likewise.
    ///
    /// # Errors
    /// EINVAL or ENOTTY before kernel 6.6; the listener works all the same.
    pub fn sync_wake_up(&self) -> io::Result<()> {
        // SAFETY: SET_FLAGS takes its flags by value and touches no memory.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), NOTIF_SET_FLAGS, SYNC_WAKE_UP) }).map(|_| ())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
