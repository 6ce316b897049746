"""Panels: the weight layout of the matrix products in this folder.

A *panel* is 64 outputs: 4 vectors of 16. It holds, step by step, the weights of all its outputs for
the next few inputs: [panels, steps, 64 outputs, depth]. The `depth` inputs of a step are adjacent
because one instruction multiplies and adds as many. So a product reads memory once, in order, and
no vector of sums has to be added across its lanes.

    weights [128, 8] in bfloat16, depth 2    [2 panels, 4 steps, 64, 2]

For bfloat16, oneDNN uses the same layout on processors with AVX-512.
"""

import torch
import torch.nn.functional as F
from numba import njit, prange
from torch import Tensor

from nanoserve.kernels.cpu.memory import map_zeros

PANEL = 64  # outputs
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def pack(weight: Tensor, depth: int) -> Tensor:
    """Pack [outputs, inputs] into [panels, steps, PANEL, depth], padded with zeros.

    The result is in new memory, on large pages where the system has them, aligned to 64 bytes.
    """
    is_matrix = len(weight.shape) == 2 and 0 not in weight.shape and weight.is_cpu
    if not is_matrix or depth * weight.itemsize not in _WHOLE:
        raise ValueError(
            f"a weight of {weight.dtype} {list(weight.shape)} on {weight.device} cannot be packed "
            f"with depth={depth}: it must be [outputs, inputs], neither 0, on a CPU, and depth "
            f"inputs must have one of {list(_WHOLE)} bytes"
        )
    outputs, inputs = weight.shape
    packed = empty_panels(outputs, inputs, depth, weight.dtype)
    pack_into(packed, weight)
    return packed


def empty_panels(outputs: int, inputs: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [panels, steps, PANEL, depth] for so many outputs and inputs."""
    return map_zeros((-(-outputs // PANEL), -(-inputs // depth), PANEL, depth), dtype)


def pack_into(packed: Tensor, weight: Tensor) -> None:
    """Write `weight` into `packed`, whole panels from `empty_panels`."""
    panels, steps, _, depth = packed.shape
    missing = steps * depth - weight.shape[1]
    if missing:
        weight = F.pad(weight, (0, missing))
    # The `depth` inputs of a step move as one integer.
    whole = _WHOLE[depth * weight.itemsize]
    source, target = weight.contiguous().view(whole), packed.view(whole).view(panels, steps, PANEL)
    _turn(source.numpy(), target.numpy())


def rows_of(packed: Tensor, indices: Tensor, inputs: int) -> Tensor:
    """Return the weights of some outputs as before `pack`: [len(indices), inputs]."""
    panels, steps, _, depth = packed.shape
    whole = _WHOLE[depth * packed.itemsize]
    rows = packed.new_empty(len(indices), steps * depth)
    source = packed.view(whole).view(panels, steps, PANEL)
    _gather(source.numpy(), indices.int().numpy(), rows.view(whole).numpy())
    return rows[:, :inputs]


@njit(cache=True)
def _gather(source, indices, target):
    """Compute target[i, step] = source[panel of indices[i], step, position in the panel]."""
    panels, steps, _ = source.shape
    for i in range(len(indices)):
        panel, place = divmod(indices[i], PANEL)
        if not 0 <= panel < panels:
            raise IndexError("no such row")
        for step in range(steps):
            target[i, step] = source[panel, step, place]


@njit(parallel=True, cache=True)
def _turn(source, target):
    """Compute target[panel, step, i] = source[64 * panel + i, step]."""
    outputs, steps = source.shape
    for panel in prange(len(target)):
        first = panel * PANEL
        for start in range(0, steps, 16):  # about a cache line of each row
            for i in range(min(PANEL, outputs - first)):
                for step in range(start, min(start + 16, steps)):
                    target[panel, step, i] = source[first + i, step]


def unpadded(out: Tensor, outputs: int, x: Tensor) -> Tensor:
    """Return [rows, panels x PANEL] as [..., outputs], in the dtype and dimensions of x.

    Operators without effect are skipped: each costs torch a microsecond or two.
    """
    if out.shape[1] != outputs:
        out = out[:, :outputs].contiguous()
    if out.dtype != x.dtype:
        out = out.to(x.dtype)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)
