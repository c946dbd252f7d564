//! gpuslice-scheduler
fn main() {}
