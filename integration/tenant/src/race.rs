//! Attacks that need threads, odd processes or another entry into the kernel.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use crate::attack::in_jail;
use crate::bytes::Block;
use crate::driver::{self, Trouble, direct, frontend};
use crate::report;

/// A system call by number; the negative errno on failure.
pub(crate) fn syscall3(number: i64, a: i64, b: i64, c: i64) -> i64 {
    // SAFETY: the callers pass numbers of ioctl and io_uring calls with registers that hold file numbers, command
    // numbers and addresses of live blocks of theirs.
    let result = unsafe { libc::syscall(number, a, b, c) };
    if result < 0 { -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { result }
}

/// A system call by the 32-bit gate; the negative errno on failure.
pub(crate) fn int80(number: u32, a: u32, b: u32, c: u32) -> i64 {
    let mut result = i64::from(number);
    // SAFETY: int 0x80 enters the kernel with 32-bit registers and returns in rax; rbx, which the compiler
    // reserves, is saved and restored around it; the kernel clobbers r8 to r11 only, all declared here; memory
    // is touched at most at the 32-bit address in `c`, which the callers leave unmapped.
    unsafe {
        core::arch::asm!(
            "push rbx", "mov ebx, {a:e}", "int 0x80", "pop rbx",
            a = in(reg) a, inout("rax") result, in("rcx") b, in("rdx") c,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    result
}

fn dup_onto(from: RawFd, to: RawFd) {
    // SAFETY: dup2 takes two integers; `to` is a number that this attack made for being swapped, owned by a value
    // that only ever closes the number.
    let result = unsafe { libc::dup2(from, to) };
    if result < 0 {
        std::process::abort();
    }
}

/// One thread keeps swapping a harmless file and a node under one number, the other calls FIGETBSZ on it: natively
/// that succeeds on an emulated node, so a proxy that looks at the file and lets the call continue is caught.
pub(crate) fn swap() -> Result<bool, Trouble> {
    const ROUNDS: u32 = 20_000;
    let node = driver::open("nvidia-uvm")?;
    let harmless = std::fs::File::open("/dev/null").map_err(|error| Trouble::Machine(error.to_string()))?;
    let target = node.try_clone().map_err(|error| Trouble::Machine(error.to_string()))?;
    let (from, to, number) = (node.as_raw_fd(), harmless.as_raw_fd(), target.as_raw_fd());
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let swapper = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            dup_onto(to, number);
            dup_onto(from, number);
        }
    });
    let mut natively = 0_u32;
    let mut errnos = std::collections::BTreeMap::<i32, u32>::new();
    for _ in 0..ROUNDS {
        let mut block = Block::zeroed(8);
        match driver::native(number, 2, block.0.as_mut_ptr().expose_provenance().try_into().unwrap_or(0)) {
            Ok(_) => natively += 1,
            Err(error) => *errnos.entry(error.raw_os_error().unwrap_or(0)).or_default() += 1,
        }
    }
    stop.store(true, Ordering::Relaxed);
    if swapper.join().is_err() {
        return Err(Trouble::Machine("the swapping thread died".to_owned()));
    }
    report::line(
        &json!({"attack": "swap", "case": "FIGETBSZ", "rounds": ROUNDS, "natively": natively, "errnos": errnos}),
    );
    Ok(natively > 0)
}

/// Answer of NV_ESC_SYS_PARAMS on a node: 0 served, ENOTTY executed outside the proxy.
fn probe(file: RawFd) -> i64 {
    let mut block = Block::zeroed(8);
    block.set_u64(0, 0x4000_0000);
    // SAFETY: borrow_raw needs a number that stays open for the call: each caller owns the file across it.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(file) };
    match driver::ioctl(file, frontend(0xd6, 8), &mut block) {
        Ok(value) => i64::from(value),
        Err(error) => -i64::from(error.raw_os_error().unwrap_or(0)),
    }
}

/// Children and threads of every kind: each must be under the same rules, with its own file table looked at.
pub(crate) fn clones() -> Result<bool, Trouble> {
    let control = driver::open("nvidiactl")?;
    let number = control.as_raw_fd();
    let mut escaped = false;
    let mut seen = |what: &str, result: i64| {
        let out = direct().is_none() && result == -i64::from(libc::ENOTTY);
        report::line(&json!({"attack": "clone", "case": what, "result": result, "reached": out}));
        escaped |= out;
    };
    seen("first thread", probe(number));
    seen("thread", std::thread::spawn(move || probe(number)).join().unwrap_or(-1));
    let own_table = std::thread::spawn(move || {
        // A file table of its own: the same number now means another file than in the other threads.
        // SAFETY: unshare takes an integer.
        if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
            return -1;
        }
        let Ok(null) = std::fs::File::open("/dev/null") else { return -1 };
        dup_onto(null.as_raw_fd(), number);
        probe(number)
    });
    // /dev/null under that number: ENOTTY is the right answer here, success means a foreign table was used.
    let result = own_table.join().unwrap_or(-1);
    let confused = result >= 0;
    report::line(
        &json!({"attack": "clone", "case": "thread with its own files", "result": result, "reached": confused}),
    );
    escaped |= confused;
    escaped |= forked("fork", number)?;
    for (what, flags) in [
        ("vfork", libc::CLONE_VFORK),
        ("shared files", libc::CLONE_FILES),
        ("untraced", libc::CLONE_UNTRACED),
        ("shared file system", libc::CLONE_FS),
    ] {
        escaped |= cloned(what, flags, number)?;
    }
    Ok(escaped)
}

fn forked(what: &str, number: RawFd) -> Result<bool, Trouble> {
    if direct().is_some() {
        return Ok(false);
    }
    in_jail("clone", what, || {
        let result = probe(number);
        // Served is fine; in_jail takes anything but an errno for an escape, so say so with one.
        if result >= 0 { -i64::from(libc::EALREADY) } else { result }
    })
}

fn cloned(what: &str, flags: libc::c_int, number: RawFd) -> Result<bool, Trouble> {
    const ESCAPED: i32 = 42;
    let flags = i64::from(flags | libc::SIGCHLD);
    // SAFETY: clone with a null stack and without CLONE_VM is a fork with more flags: the child runs on a copy of
    // this thread's stack; the attack runs before any other thread is left.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0_i64, 0_i64, 0_i64, 0_i64) };
    if child == 0 {
        let result = probe(number);
        let status = if direct().is_none() && result == -i64::from(libc::ENOTTY) { ESCAPED } else { 0 };
        // SAFETY: _exit takes an integer and does not return.
        unsafe { libc::_exit(status) }
    }
    if child < 0 {
        return Err(Trouble::Machine(format!("clone {what}: {}", std::io::Error::last_os_error())));
    }
    let child = nix::unistd::Pid::from_raw(i32::try_from(child).unwrap_or(0));
    let status = nix::sys::wait::waitpid(child, None).map_err(|error| Trouble::Machine(error.to_string()))?;
    let out = matches!(status, nix::sys::wait::WaitStatus::Exited(_, ESCAPED));
    report::line(&json!({"attack": "clone", "case": what, "status": format!("{status:?}"), "reached": out}));
    Ok(out)
}
