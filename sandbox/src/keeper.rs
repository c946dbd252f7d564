//! What must be done from time to time and may block in the driver, on a thread of its own.
//!
//! Once a second while anything is charged, and when a process has ended: ask the driver which clients still
//! live, audit the UVM mappings, see whether closing files blocks.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuslice_proto::SandboxToShim;

use crate::driver::Driver;
use crate::gate::locked;
use crate::log;
use crate::serve::Server;
use crate::uvm_audit;

/// Between two rounds while anything is charged.
const BUSY: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(60);
/// Between two looks at the processes after a thread has ended: its process may still be on its way.
const ENDING: Duration = Duration::from_millis(100);
const LOOKS: u32 = 5;

/// What the keeper is called for.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    state: Mutex<Called>,
    called: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Called {
    something: bool,
    thread_ended: bool,
}

impl Calls {
    /// A thread has ended, and perhaps its process.
    pub(crate) fn thread_ended(&self) {
        *locked(&self.state) = Called { something: true, thread_ended: true };
        self.called.notify_one();
    }

    /// There may be something to do.
    pub(crate) fn look(&self) {
        locked(&self.state).something = true;
        self.called.notify_one();
    }

    fn wait(&self, longest: Duration) -> Called {
        let deadline = Instant::now() + longest;
        let mut state = locked(&self.state);
        while !state.something {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.called.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut *state)
    }

    /// Does what there is to do, for ever.
    pub(crate) fn serve<D: Driver>(&self, server: &Server<D>) {
        let mut round = Instant::now();
        let mut looks = 0;
        let mut stopped = false;
        loop {
            let busy =
                server.sandbox.has_charges() || server.sandbox.has_uvm() || server.services.closer.is_busy();
            let longest = match (looks, busy) {
                (1.., _) => ENDING,
                (0, true) => BUSY.saturating_sub(round.elapsed()),
                (0, false) => IDLE,
            };
            let called = self.wait(longest);
            looks = if called.thread_ended { LOOKS } else { looks.saturating_sub(1) };
            let due = round.elapsed() >= BUSY;
            if looks > 0 || due {
                end_processes(server);
            }
            if !due {
                continue;
            }
            round = Instant::now();
            if server.sandbox.has_charges() {
                server.sandbox.sweep();
                server.activity.note();
            }
            if server.sandbox.has_uvm() {
                uvm_audit::audit(&server.sandbox, &server.services.shim);
            }
            if !stopped && server.services.closer.blocked() {
                stopped = true;
                let detail = "closing files of the container's own file systems blocked three times".into();
                if let Err(failed) = server.services.shim.send(&SandboxToShim::Stop { detail }) {
                    log::line(format_args!("asking for the container's end failed: {failed}"));
                }
            }
        }
    }
}

fn end_processes<D: Driver>(server: &Server<D>) {
    for tgid in server.services.threads.take_ended_processes() {
        server.sandbox.process_ended(tgid);
        server.activity.note();
    }
}
