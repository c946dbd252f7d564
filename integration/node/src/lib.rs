//! gpuslice-node
