//! gpuslice-emulator
fn main() {}
