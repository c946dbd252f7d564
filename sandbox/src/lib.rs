//! gpuslice-sandbox: performs the NVIDIA ioctls of one container.

// Dispatch: what a command means and whether it may run.
pub mod dispatch;
pub mod driver;
pub mod tenant;
