"""Tensor and pipeline parallelism: executors of several ranks, their processes and their memory."""
