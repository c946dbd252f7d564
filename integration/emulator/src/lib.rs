//! gpuslice-emulator
