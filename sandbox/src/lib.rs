//! gpuslice-sandbox: performs the NVIDIA ioctls of one container.

// Dispatch: what a command means and whether it may run.
pub mod dispatch;
pub mod driver;
pub mod tenant;

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
mod uvm_audit;

pub use start::run;
