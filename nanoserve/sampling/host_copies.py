"""Copies between the host's memory and a device that nobody waits for.

A GPU reads and writes page-locked (pinned) memory by itself, behind what was launched before, while
the host goes on. A copy from ordinary memory has the host wait for all of that: one such copy in a
step, and the next step is not planned before the model of this one has ended. So is a copy of a
number: `logits[index] = -torch.inf` copies it from the host, `logits.new_full(...)` does not.

Pinned memory is torch's here. Its allocator notes on which stream a copy was launched, and gives
the memory of a tensor that is gone to another one only when that copy is over.
"""

import numpy as np
import torch

_ALIGNMENT = 64  # bytes; kernels for addresses that are no multiple of 16 would be compiled anew


def to_device(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Return arrays as tensors of a device, by one copy; the arrays may be overwritten at once.

    On a CPU nothing is copied: tensors share the memory of the arrays.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for array, part in zip(arrays, pinned.split(sizes), strict=True):
        part.numpy()[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    copied = pinned.to(device, non_blocking=True)
    return [
        part[: array.nbytes].view(_dtype_of(array)).view(array.shape)
        for array, part in zip(arrays, copied.split(sizes), strict=True)
    ]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a tensor to the host, and return where it will be.

    It is there when an event that is recorded behind this call is over. On a CPU it is there.
    """
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _dtype_of(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
