//! gpuslice-shim
fn main() {}
