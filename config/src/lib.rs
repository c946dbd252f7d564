//! gpuslice-config
