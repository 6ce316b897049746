"""Asynchronous copies between the host's memory and a device.

A GPU reads and writes page-locked (pinned) memory by itself, after the work launched before, while
the host goes on. A copy from ordinary memory makes the host wait for all of that: with a single
such copy in a step, the next step is not planned before the model of this one has finished. A
number may cause such a copy, too: `logits[index] = -torch.inf` copies it from the host,
`logits.new_full(...)` does not.

Pinned memory is allocated by torch. Its allocator records the stream of a copy, and reuses the
memory of a released tensor only after that copy has finished.
"""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 64  # bytes; a kernel is compiled again for addresses that are not multiples of 16


def to_device(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Return arrays as tensors of a device, sent there by one asynchronous copy.

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
    """Overwrite a device tensor with an array, which may be modified as soon as this returns."""
    pinned = _pinned(tensor.shape, tensor.dtype, tensor.device)
    pinned.numpy()[...] = array
    tensor.copy_(pinned, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to the host, and return the destination.

    The copy has finished when an event that is recorded after this call has. On a CPU the tensor
    itself is returned.
    """
    if not tensor.is_cuda:
        return tensor
    return _pinned(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def _pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Without CUDA there is no pinned memory; tests use other devices as stand-ins.
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def _dtype_of(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
