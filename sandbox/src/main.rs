//! gpuslice-sandbox
fn main() {}
