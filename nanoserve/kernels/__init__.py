"""Kernels: functions of tensors that import nothing of nanoserve; `triton/` for GPUs, `cpu/`."""
