"""The number of multiprocessors of a GPU, by which kernels choose how to split their work."""

import functools

import torch


@functools.cache
def num_multiprocessors(device: torch.device, without_gpu: int = 132) -> int:
    """Return the number of a GPU's multiprocessors; for another device `without_gpu`, an H100's."""
    if device.type != "cuda":
        return without_gpu
    return torch.cuda.get_device_properties(device).multi_processor_count
