//! From a notification to its answer.
//!
//! Trusts: nothing in the registers. Promises: a call is left to the kernel (CONTINUE) only on register values
//! that no node of the driver acts on, or when it maps a file (see below); every other call is performed on
//! copies or refused; a call whose result found nobody is not performed twice ([`crate::kept`]).
//!
//! Mapping a file shared is judged and then left to the kernel, since nobody can map for another process. A
//! mapping of the UVM file is charged first; what the process really maps is compared with the charges at
//! each audit ([`crate::uvm_audit`]), and a mapping that was not charged ends the container.
//!
//! Failure: an error number for the call, never the worker.

use std::os::fd::AsFd;
use std::sync::Arc;

use gpuslice_sys::{Answer, Listener, Notification};
use nix::errno::Errno;
use nix::libc;

use crate::activity::Activity;
use crate::caller::{Call, Services};
use crate::dispatch::{Outcome, Sandbox};
use crate::driver::{Driver, Node};
use crate::kept::{Answered, Begin, Finished, Registers, Trace};
use crate::log;
use crate::tenant::Caller;
use crate::threads::Thread;
use crate::uvm_audit;

/// `AUDIT_ARCH_X86_64`.
const ARCH: u32 = 0xc000_003e;

/// Everything that the workers share.
pub(crate) struct Server<D: Driver> {
    pub(crate) sandbox: Sandbox<D>,
    pub(crate) services: Services,
    pub(crate) activity: Activity,
}

/// The low half of a register, which is what the kernel looks at where it takes an `unsigned int`.
fn low(register: u64) -> u32 {
    let [a, b, c, d, ..] = register.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Answers; false when nobody waits for it any more.
fn reply(listener: &Listener, id: u64, answer: Answer) -> bool {
    match listener.answer(id, answer) {
        Ok(()) => true,
        Err(failed) if failed.raw_os_error() == Some(libc::ENOENT) => false,
        Err(failed) => {
            log::line(format_args!("answering a call failed: {failed}"));
            false
        }
    }
}

fn refuse(listener: &Listener, id: u64, errno: Errno) {
    reply(listener, id, Answer::Error(errno as i32));
}

/// Whether the same command again, with what it returned as its parameters, can't be meant: it makes or removes
/// something. Not: RM_CONTROL, RM_GET_EVENT_DATA, and the front end's queries. IOCTL_XFER_CMD may be any.
fn is_final(command: u32) -> bool {
    !matches!(command.to_le_bytes(), [0x2a | 0x52 | 0xc8 | 0xd1..=0xd3 | 0xd6 | 0xd7 | 0xda, b'F', ..])
}

impl<D: Driver> Server<D> {
    /// Serves one notification. `scratch` is the worker's own, to be used again.
    pub(crate) fn serve(&self, listener: &Listener, call: &Notification, scratch: &mut Trace) {
        self.activity.note();
        if call.arch != ARCH || call.tid == 0 {
            refuse(listener, call.id, Errno::EPERM);
            return;
        }
        match i64::from(call.nr) {
            libc::SYS_ioctl => self.serve_ioctl(listener, call, scratch),
            libc::SYS_mmap => self.serve_mmap(listener, call),
            _ => refuse(listener, call.id, Errno::EPERM),
        }
    }

    /// The calling thread; `None` when the call was answered or cancelled meanwhile.
    fn thread(&self, listener: &Listener, call: &Notification) -> Option<Arc<Thread>> {
        if let Some(thread) = self.services.threads.known(call.tid) {
            return Some(thread);
        }
        match self.services.threads.ask(&self.services.shim, call.tid) {
            // The id named the caller when the shim looked only if the call still waits.
            Ok(thread) => listener.is_valid(call.id).then_some(thread),
            Err(errno) => {
                refuse(listener, call.id, if errno == Errno::EIO { Errno::EIO } else { Errno::EPERM });
                None
            }
        }
    }

    fn serve_ioctl(&self, listener: &Listener, call: &Notification, scratch: &mut Trace) {
        let [file, command, argument, ..] = call.args;
        let registers: Registers = [file, command, argument];
        if !gpuslice_policy::acts_on(low(command)) {
            reply(listener, call.id, Answer::Continue);
            return;
        }
        if command > u64::from(u32::MAX) {
            // The kernel would drop the high half; no library sets it.
            refuse(listener, call.id, Errno::EINVAL);
            return;
        }
        let Some(thread) = self.thread(listener, call) else { return };
        let finished = match thread.calls.begin(registers, &thread.memory, || listener.is_valid(call.id)) {
            Begin::Cancelled => return,
            Begin::Repeat(finished) => Some((finished, Arc::clone(&thread))),
            Begin::Perform => self.perform(listener, call, &thread, std::mem::take(scratch)),
        };
        let answered = match finished {
            None => Answered::Nothing,
            Some((finished, _)) if finished.outcome == Outcome::Restart => {
                reply(listener, call.id, Answer::Restart);
                Answered::Nothing
            }
            Some((finished, owner)) if !self.finish(listener, call.id, &owner, &finished) => {
                Answered::Nobody(finished)
            }
            Some((finished, _)) if is_final(low(command)) => Answered::Final(finished),
            Some((finished, _)) => {
                *scratch = finished.trace;
                scratch.clear();
                Answered::Query
            }
        };
        thread.calls.end(registers, answered);
    }

    /// The result, and the thread whose memory it goes to (found anew if it has executed a program); `None` when
    /// the call was cancelled before the driver acted.
    fn perform(
        &self,
        listener: &Listener,
        call: &Notification,
        thread: &Arc<Thread>,
        trace: Trace,
    ) -> Option<(Finished, Arc<Thread>)> {
        let [file, command, argument, ..] = call.args;
        let driver = self.sandbox.driver();
        let caller = Call::new(&self.services, listener, (call.id, call.tid), Arc::clone(thread), trace);
        let outcome = match caller.file(low(file).cast_signed()) {
            Err(errno) => Outcome::Error(errno),
            Ok(file) => match driver.node_of(file.as_fd()) {
                Ok(Some(node)) => self.sandbox.ioctl(&caller, &file, node, low(command), argument),
                Ok(None) | Err(_) => {
                    caller.discard(file);
                    Outcome::Error(Errno::ENOTTY)
                }
            },
        };
        caller.finish().map(|(trace, thread)| (Finished { outcome, trace }, thread))
    }

    /// Writes a result and answers; false when nobody waits for it.
    fn finish(&self, listener: &Listener, id: u64, thread: &Arc<Thread>, finished: &Finished) -> bool {
        let mut answer = match finished.outcome {
            Outcome::Return(value) => Answer::Return(value.into()),
            Outcome::Error(errno) => Answer::Error(errno as i32),
            Outcome::Restart => Answer::Restart,
        };
        if !finished.trace.is_empty() {
            if !listener.is_valid(id) {
                return false;
            }
            // What the driver did stays done, as when the kernel's own copy-out fails.
            if let Err(failed) = finished.trace.install_files(listener, id) {
                match failed.raw_os_error() {
                    Some(libc::ENOENT) => return false,
                    errno => answer = Answer::Error(errno.unwrap_or(libc::EMFILE)),
                }
            } else if finished.trace.flush(&thread.memory).is_err() {
                answer = Answer::Error(libc::EFAULT);
            }
        }
        reply(listener, id, answer)
    }

    fn serve_mmap(&self, listener: &Listener, call: &Notification) {
        let [_, length, _, _, file, _] = call.args;
        let Some(thread) = self.thread(listener, call) else { return };
        let driver = self.sandbox.driver();
        let caller = Call::new(&self.services, listener, (call.id, call.tid), thread, Trace::default());
        let answer = match caller.file(low(file).cast_signed()) {
            // The kernel will say so itself.
            Err(Errno::EBADF) => Answer::Continue,
            Err(errno) => Answer::Error(errno as i32),
            Ok(file) => match driver.node_of(file.as_fd()) {
                Ok(Some(Node::Uvm)) => match uvm_audit::charge(&self.sandbox, &self.services.shim, length) {
                    Ok(()) => Answer::Continue,
                    Err(errno) => Answer::Error(errno as i32),
                },
                Ok(Some(Node::UvmTools)) => Answer::Error(libc::EPERM),
                Ok(Some(Node::Control | Node::Gpu { .. })) => Answer::Continue,
                Ok(None) | Err(_) => {
                    caller.discard(file);
                    Answer::Continue
                }
            },
        };
        if caller.still_waiting() {
            reply(listener, call.id, answer);
        }
    }
}
