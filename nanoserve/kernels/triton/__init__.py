"""Triton kernels for NVIDIA GPUs."""
