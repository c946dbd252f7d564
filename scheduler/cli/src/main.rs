//! gpuslice-cli
fn main() {}
