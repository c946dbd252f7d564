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

const BUSY: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(60);

/// What the keeper is called for.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    state: Mutex<State>,
    called: Condvar,
}

#[derive(Debug, Default)]
struct State {
    called: bool,
    ended: Vec<u32>,
}

impl Calls {
    /// A process has ended.
    pub(crate) fn process_ended(&self, tgid: u32) {
        let mut state = locked(&self.state);
        state.called = true;
        state.ended.push(tgid);
        self.called.notify_one();
    }

    /// There may be something to do.
    pub(crate) fn look(&self) {
        locked(&self.state).called = true;
        self.called.notify_one();
    }

    fn wait(&self, longest: Duration) -> Vec<u32> {
        let deadline = Instant::now() + longest;
        let mut state = locked(&self.state);
        while !state.called {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.called.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.called = false;
        std::mem::take(&mut state.ended)
    }

    /// Does what there is to do, for ever.
    pub(crate) fn serve<D: Driver>(&self, server: &Server<D>) {
        let mut swept = Instant::now();
        let mut stopped = false;
        loop {
            let busy = server.sandbox.has_charges() || server.services.closer.is_busy();
            let longest = if busy { BUSY.saturating_sub(swept.elapsed()) } else { IDLE };
            let ended = self.wait(longest);
            for tgid in &ended {
                server.sandbox.process_ended(*tgid);
            }
            if swept.elapsed() < BUSY && ended.is_empty() {
                continue;
            }
            swept = Instant::now();
            if server.sandbox.has_charges() {
                server.sandbox.sweep();
                server.uvm.look(&server.sandbox, &server.services.shim);
                server.activity.note();
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
