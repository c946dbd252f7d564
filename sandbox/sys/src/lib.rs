//! gpuslice-sys
