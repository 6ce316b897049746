"""Copies between the host's memory and a device that nobody waits for.

A GPU reads and writes page-locked (pinned) memory by itself, behind what was launched before, while
the host goes on. A copy from ordinary memory has the host wait for all of that: one such copy in a
step, and the next step is not planned before the model of this one has ended. A number may be such
a copy, too: `logits[index] = -torch.inf` brings it from the host, `logits.new_full(...)` does not.

Pinned memory is torch's here. Its allocator notes on which stream a copy was launched, and gives
the memory of a tensor that is gone to another one only when that copy is over.
"""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 64  # bytes; kernels for addresses that are no multiple of 16 would be compiled anew


def to_device(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Return arrays as tensors of a device, which are on their way there by one copy.

    On a CPU nothing is copied: the tensors share the memory of the arrays.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    pinned = _pinned((sum(sizes),), torch.uint8, device)
    for array, part in zip(arrays, pinned.split(sizes), strict=True):
        part.numpy()[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    copied = torch.empty_like(pinned, device=device, pin_memory=False)
    copied.copy_(pinned, non_blocking=True)
    return [
        part[: array.nbytes].view(_dtype_of(array)).view(array.shape)
        for array, part in zip(arrays, copied.split(sizes), strict=True)
    ]


def copy_into(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Overwrite a tensor of a device by an array, which may itself be overwritten at once."""
    pinned = _pinned(tensor.shape, tensor.dtype, tensor.device)
    pinned.numpy()[...] = array
    tensor.copy_(pinned, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a tensor to the host, and return where it will be.

    It is there when an event that is recorded behind this call is over. On a CPU it is there.
    """
    if not tensor.is_cuda:
        return tensor
    return _pinned(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def _pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The other devices are stand-ins: without CUDA there is no pinned memory.
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def _dtype_of(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
