"""The products of low-rank adapters for few rows each, compiled by numba (nanoserve[cpu]).

With many adapters in a batch, each has a row or two, and every call of torch costs more than its
products. Here all rows of a layer are one call, whatever their adapters. The bits of a row do not
depend on other rows.
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanoserve.kernels.cpu.elements import ELEMENTS, EXACT, FAST, address, array_at, store, to_float

_FEW = 2**16  # products; for so few, one thread is faster than waking more threads


def add_low_rank(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    firsts: Tensor,
    tokens: Tensor,
    places: Tensor,
) -> None:
    """Add B A x to some rows of y, in place.

    x       [num_tokens, inputs]
    y       [num_tokens, outputs], rows may be apart
    a       [num_places, ranks of all targets, inputs]
    b       [num_places, largest rank, outputs]
    ends    int32 [num_places, num_targets + 1]: where the rows of each target's A end, after a 0
    firsts  int32 [num_targets + 1]: the columns of y where the outputs of each target begin
    tokens, places  int32 [n]: the rows, and the adapter of each

    Sums are float32, and rounded once to y's data type.
    """
    if y.stride(1) != 1:
        raise ValueError(f"the outputs of a row must be contiguous, not {y.stride()} apart")
    x = x.contiguous()
    num_rows, most = len(tokens), b.shape[1] * (x.shape[1] + y.shape[1])
    add = _add if num_rows == 1 or num_rows * most <= _FEW else _add_parallel
    pointers = address(x), y.data_ptr(), *map(address, (a, b, ends, firsts, tokens, places))
    layout = *x.shape, y.shape[1], y.stride(0), *a.shape[:2], b.shape[1]
    add(pointers, (*layout, len(firsts) - 1, num_rows), ELEMENTS[x.dtype])


def compile_low_rank(dtype: torch.dtype) -> None:
    """Compile the kernel for a data type now, so that no request waits for it."""
    ends, firsts = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for num_rows in (1, _FEW):  # for one thread, and for several
        x = torch.zeros(1, 1, dtype=dtype)
        index = torch.zeros(num_rows, dtype=torch.int32)
        add_low_rank(x, x.clone(), x[None], x[None], ends, firsts, index, index)


@njit(**FAST)
def _dot(x, y):
    total = np.float32(0)
    for i in range(len(x)):
        total += to_float(x[i]) * to_float(y[i])
    return total


@njit(**EXACT)
def _axpy(factor, x, out):
    for i in range(len(x)):
        out[i] += factor * to_float(x[i])


@njit(**EXACT)
def _add_row(x, y, a, b, ends, firsts):
    """Add the products of one row; shapes as for `add_low_rank`, without rows and places."""
    for target in range(len(firsts) - 1):
        start, end = ends[target], ends[target + 1]
        if start == end:
            continue
        first, last = firsts[target], firsts[target + 1]
        added = np.zeros(last - first, np.float32)
        for r in range(start, end):
            _axpy(_dot(a[r], x), b[r - start, first:last], added)
        for i in range(last - first):
            store(y, first + i, to_float(y[first + i]) + added[i])


@njit(**EXACT)
def _arrays(pointers, sizes, element):
    """Return the arguments of `add_low_rank` as arrays; y is flat, since its rows may be apart."""
    x, y, a, b, ends, firsts, tokens, places = pointers
    num_tokens, inputs, outputs, stride, num_places, ranks, most, num_targets, num_rows = sizes
    integer = np.int32(0)
    return (
        array_at(x, (num_tokens, inputs), element),
        array_at(y, ((num_tokens - 1) * stride + outputs,), element),
        array_at(a, (num_places, ranks, inputs), element),
        array_at(b, (num_places, most, outputs), element),
        array_at(ends, (num_places, num_targets + 1), integer),
        array_at(firsts, (num_targets + 1,), integer),
        array_at(tokens, (num_rows,), integer),
        array_at(places, (num_rows,), integer),
    )


@njit(**EXACT)
def _add(pointers, sizes, element):
    x, y, a, b, ends, firsts, tokens, places = _arrays(pointers, sizes, element)
    outputs, stride = sizes[2], sizes[3]
    for i in range(len(tokens)):
        start, place = tokens[i] * stride, places[i]
        row = y[start : start + outputs]
        _add_row(x[tokens[i]], row, a[place], b[place], ends[place], firsts)


@njit(parallel=True, **EXACT)
def _add_parallel(pointers, sizes, element):
    x, y, a, b, ends, firsts, tokens, places = _arrays(pointers, sizes, element)
    outputs, stride = sizes[2], sizes[3]
    for i in prange(len(tokens)):
        start, place = tokens[i] * stride, places[i]
        row = y[start : start + outputs]
        _add_row(x[tokens[i]], row, a[place], b[place], ends[place], firsts)
