//! gpuslice-policy
