//! gpuslice-scheduler
