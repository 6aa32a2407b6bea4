"""Measures this project's kernels and engine on one NVIDIA GPU, beside the GPU's own limits and other software."""
