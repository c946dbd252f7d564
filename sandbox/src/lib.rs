//! gpuslice-sandbox: performs the NVIDIA ioctls of one container.
#![forbid(unsafe_code)]

// Dispatch: what a command means and whether it may run.
mod alloc;
mod bytes;
mod control;
pub mod dispatch;
pub mod driver;
mod exports;
mod frontend;
mod ledger;
mod lifecycle;
mod mapped;
mod objects;
mod own_client;
mod refusals;
mod rewrite;
mod rules;
pub mod tenant;
#[cfg(test)]
mod testing;
mod uvm;
mod uvm_files;

// The process: confinement, threads, notifications, sockets.
mod activity;
mod caller;
mod closer;
mod confine;
mod crew;
mod gate;
mod keeper;
mod kept;
mod link;
mod log;
mod pinned;
mod serve;
mod start;
mod supervise;
mod threads;
mod turns;
mod uvm_audit;

pub use start::run;
