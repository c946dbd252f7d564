//! gpuslice-tenant
fn main() {}
