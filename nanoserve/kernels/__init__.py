"""Triton kernels: what the layers and the attention backends launch on a GPU."""
