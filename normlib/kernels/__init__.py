"""Tile kernels in Pallas: one source for the simulated AI Core, GPUs and TPUs."""
