"""Tensor and pipeline parallelism, with executors of several ranks and their processes."""
