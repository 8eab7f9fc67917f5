"""Kernels behind the algorithms: numba on the CPU, Triton on a CUDA device."""
