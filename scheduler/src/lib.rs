//! The node's scheduler: leases, guaranteed memory, audits.
//!
//! | module | what |
//! | --- | --- |
//! | `core` | pure state: leases, uids, admission, verdicts; time is an argument |
//! | `backend` | what the driver says: cards and the memory of each sandbox |
//! | `auditor` | the one thread that asks a backend |
//! | `server` | the poll loop: peers, deadlines, budgets |
//! | `peer` | one connection: its phase and its queue |
//! | `place` | socket and lock |
//! | `confine` | what the process gives up before it serves |
//!
//! Trusts root's shims and the driver. A sandbox is trusted no more than its tenant: what it says is a claim,
//! compared with the driver. Fails closed: what can't be checked gets no lease. See `DESIGN.md`.
#![forbid(unsafe_code)]

mod auditor;
pub mod backend;
mod budget;
mod confine;
mod core;
mod log;
mod peer;
mod place;
mod processes;
mod readiness;
mod server;

pub use backend::{Backend, BackendError, Card, Holding, Rm, Stock};
pub use server::{RunError, run, run_with};
