//! gpuslice-harness
