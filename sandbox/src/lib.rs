//! gpuslice-sandbox
