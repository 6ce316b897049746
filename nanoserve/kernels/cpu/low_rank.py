"""The products of low-rank adapters, compiled by numba (extra: `nanoserve[cpu]`).

With many adapters in a batch, each has a row or two, and every call of torch costs more than its
products. Here all rows of a layer are one call, whatever their adapters. Up to eight rows of an
adapter are computed at once, so that its matrices are read once for them.

Both products are the same loop, see `low_rank_tiles`. The bits of a row do not depend on others.
"""

import functools
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanoserve.kernels.cpu.elements import ELEMENTS, address, array_at, store, to_float
from nanoserve.kernels.cpu.low_rank_tiles import GROUP, KINDS, add_product, best_kind
from nanoserve.kernels.cpu.tile_walk import SOURCES, written_by
from nanoserve.kernels.cpu.vectors import LANES

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def add_low_rank(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    firsts: Tensor,
    tokens: Tensor,
    starts: Tensor,
    places: Tensor,
    kind: str | None = None,
) -> None:
    """Add B A x to some rows of y, in place.

    x       [num_tokens, inputs]
    y       [num_tokens, outputs], rows may be apart
    a       [num_places, inputs, ranks of all targets, a multiple of 16]
    b       [num_places, largest rank, outputs]
    ends    int32 [num_places, num_targets + 1]: where the ranks of each target end, after a 0
    firsts  int32 [num_targets + 1]: the columns of y where the outputs of each target begin
    tokens  int32 [n]: the rows, group by group; starts int32 [num_groups + 1]: where groups begin,
            of up to `GROUP` rows with the same adapter; places int32 [num_groups]: their adapters

    kind: one of `low_rank_tiles.KINDS`; None is the best for this processor.

    Sums are float32; B A x is rounded when it has been added to y. Some kinds also round A x.
    """
    if y.stride(1) != 1 or a.shape[2] % LANES:
        raise ValueError(f"unsuitable strides {y.stride()} of y, or shape {tuple(a.shape)} of a")
    x = x.contiguous()
    pointers = address(x), y.data_ptr(), *map(address, (a, b, ends, firsts, tokens, starts, places))
    layout = *x.shape, y.shape[1], y.stride(0), *a.shape[::2], b.shape[1]
    sizes = (*layout, len(firsts) - 1, len(tokens), len(places))
    _make_add(kind or best_kind(_NAMES[x.dtype]), len(places) > 1)(
        pointers, sizes, ELEMENTS[x.dtype]
    )


def compile_low_rank(dtype: torch.dtype) -> None:
    """Compile the kernel for a data type now, so that no request waits for it."""
    ends, firsts = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    a, b = torch.zeros(1, 1, LANES, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype)
    for num_groups in (1, 2):  # for one thread, and for several
        x = torch.zeros(num_groups, 1, dtype=dtype)
        tokens = torch.arange(num_groups, dtype=torch.int32)
        starts = torch.arange(num_groups + 1, dtype=torch.int32)
        add_low_rank(x, x.clone(), a, b, ends, firsts, tokens, starts, torch.zeros_like(tokens))


@functools.cache
def _make_add(kind: str, is_parallel: bool) -> Any:
    """Return the compiled kernel for a kind of tiles, for one thread or for several."""
    sources, group_size = written_by(*SOURCES, "low_rank_tiles"), GROUP
    own = KINDS[kind]
    dtype, x_dtype, x_size = own.dtype, own.x_dtype, own.x_bytes
    size = 4 if dtype == "float32" else 2
    is_widened, number = x_dtype != dtype, np.float32 if x_dtype == "float32" else np.uint16

    @njit(parallel=is_parallel, cache=True, error_model="numpy")
    def add(pointers, sizes, element):
        _ = sources, is_parallel
        x_at, y_at, a_at, b_at = pointers[:4]
        num_tokens, inputs, outputs, stride, num_places, ranks, most = sizes[:7]
        num_targets, num_rows, num_groups = sizes[7:]
        integer = np.int32(0)
        x = array_at(x_at, (num_tokens, inputs), element)
        y = array_at(y_at, ((num_tokens - 1) * stride + outputs,), element)
        b = array_at(b_at, (num_places, most, outputs), element)
        ends = array_at(pointers[4], (num_places, num_targets + 1), integer)
        firsts = array_at(pointers[5], (num_targets + 1,), integer)
        tokens = array_at(pointers[6], (num_rows,), integer)
        starts = array_at(pointers[7], (num_groups + 1,), integer)
        places = array_at(pointers[8], (num_groups,), integer)
        for group in prange(num_groups):
            place, first_row = places[group], starts[group]
            count = starts[group + 1] - first_row
            total = ends[place, num_targets]
            if total == 0:
                continue
            narrow = np.zeros((group_size, ranks), number)
            wide = np.empty((group_size if is_widened else 1, inputs), np.float32)
            froms, tos = np.empty(group_size, np.int64), np.empty(group_size, np.int64)
            # 1) The addresses of the group's rows of x, widened if the kind needs it, and of A x.
            for row in range(count):
                token = tokens[first_row + row]
                froms[row] = x_at + token * inputs * size
                tos[row] = narrow.ctypes.data + row * ranks * x_size
                if is_widened:
                    for i in range(inputs):
                        wide[row, i] = to_float(x[token, i])
                    froms[row] = wide.ctypes.data + row * inputs * x_size
            # 2) A x: [count, ranks].
            w, w_stride = a_at + place * inputs * ranks * size, ranks * size
            add_product(kind, x_dtype, froms.ctypes.data, count, w, w_stride, w_stride * 16,
                        inputs, tos.ctypes.data, (total + 15) // 16)  # fmt: skip
            # 3) B (A x), added to the rows of y.
            for target in range(num_targets):
                start, end = ends[place, target], ends[place, target + 1]
                if start == end:
                    continue
                first, last = firsts[target], firsts[target + 1]
                num_vectors = (last - first) // 16
                for row in range(count):
                    froms[row] = narrow.ctypes.data + (row * ranks + start) * x_size
                    tos[row] = y_at + (tokens[first_row + row] * stride + first) * size
                w, w_stride = b_at + (place * most * outputs + first) * size, outputs * size
                add_product(kind, dtype, froms.ctypes.data, count, w, w_stride, size * 128,
                            end - start, tos.ctypes.data, num_vectors)  # fmt: skip
                # Columns after the last vector.
                for column in range(first + num_vectors * 16, last):
                    for row in range(count):
                        added = np.float32(0)
                        for r in range(start, end):
                            weight = to_float(b[place, r - start, column])
                            added += to_float(narrow[row, r]) * weight
                        at = tokens[first_row + row] * stride + column
                        store(y, at, to_float(y[at]) + added)
            # Keeps the arrays until here: numba does not see that addresses use them.
            wide[0, 0] = narrow[0, 0] = froms[0] = tos[0] = 0

    return add
