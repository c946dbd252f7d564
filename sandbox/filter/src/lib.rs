//! gpuslice-filter
