"""Kernels for GPUs (`triton/`) and CPUs (`cpu/`). They import nothing else from nanoserve."""
