"""The products of low-rank adapters, compiled by numba (extra: `nanoserve[cpu]`).

With many adapters in a batch, each has a row or two, and every call of torch costs more than its
products. Here all rows of a layer are one call, whatever their adapters. Up to four rows of an
adapter are computed at once, so that its matrices are read once for them.

Both products are the same loop: out[row] += x[row, k] w[k], a vector of outputs at a time, in the
order of k. So the bits of a row do not depend on other rows.
"""

import functools
from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from nanoserve.kernels.cpu.elements import ELEMENTS, address, array_at, store, to_float
from nanoserve.kernels.cpu.tile_walk import written_by
from nanoserve.kernels.cpu.vectors import (
    FLOAT,
    FLOATS,
    HALF_WORD,
    LANES,
    WORD,
    WORDS,
    Accumulators,
    constant,
    ir,
    load,
    multiply_add,
    offset,
    prefetch,
    rounded,
    splat,
)
from nanoserve.kernels.cpu.vectors import store as store_vector

GROUP = 4  # rows of an adapter that are computed at once
_BFLOATS = ir.VectorType(HALF_WORD, LANES)
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

    Sums are float32; B A x is rounded when it has been added to y.
    """
    if y.stride(1) != 1 or a.shape[2] % LANES:
        raise ValueError(f"unsuitable strides {y.stride()} of y, or shape {tuple(a.shape)} of a")
    x = x.contiguous()
    pointers = address(x), y.data_ptr(), *map(address, (a, b, ends, firsts, tokens, starts, places))
    layout = *x.shape, y.shape[1], y.stride(0), *a.shape[::2], b.shape[1]
    sizes = (*layout, len(firsts) - 1, len(tokens), len(places))
    _make_add(_NAMES[x.dtype], len(places) > 1)(pointers, sizes, ELEMENTS[x.dtype])


def compile_low_rank(dtype: torch.dtype) -> None:
    """Compile the kernel for a data type now, so that no request waits for it."""
    ends, firsts = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    a, b = torch.zeros(1, 1, LANES, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype)
    for num_groups in (1, 2):  # for one thread, and for several
        x = torch.zeros(num_groups, 1, dtype=dtype)
        tokens = torch.arange(num_groups, dtype=torch.int32)
        starts = torch.arange(num_groups + 1, dtype=torch.int32)
        add_low_rank(x, x.clone(), a, b, ends, firsts, tokens, starts, torch.zeros_like(tokens))


def _load(b: Any, place: Any, dtype: str) -> Any:
    """Load a vector of "float32" or "bfloat16" numbers as FLOATS, from any address."""
    if dtype == "float32":
        return load(b, place, FLOATS, 4)
    bits = b.zext(load(b, place, _BFLOATS, 2), WORDS)
    return b.bitcast(b.shl(bits, constant(WORD, 16)), FLOATS)


@intrinsic(prefer_literal=True)
def _add_tile(
    typing_context, rows, vectors, w_dtype, out_dtype, x, x_stride, w, w_stride, ahead, steps, outs
):
    """Add x [rows, steps] . w [steps, vectors x 16] to the rows at the addresses `outs`.

    ahead: bytes from what is read to what is prefetched.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    w_name, out_name = w_dtype.literal_value, out_dtype.literal_value
    w_bytes, out_bytes = (LANES * (4 if name == "float32" else 2) for name in (w_name, out_name))

    def generate(context, b, signature, args):
        x, x_stride, w, w_stride, ahead, steps, outs = args[4:]
        number = x.type
        sums = Accumulators(b, num_rows, num_vectors, constant(FLOAT, 0.0))
        with cgutils.for_range(b, steps, intp=number) as loop:
            here = offset(b, w, (loop.index, w_stride))
            for line in range(0, num_vectors * w_bytes, 64):
                prefetch(b, offset(b, here, (ahead, 1), (line, 1)))
            weights = [_load(b, offset(b, here, (i, w_bytes)), w_name) for i in range(num_vectors)]
            for r in range(num_rows):
                place = offset(b, x, (r, x_stride), (loop.index, 4))
                value = splat(b, load(b, place, FLOAT, 4))
                for i in range(num_vectors):
                    sums[r, i] = multiply_add(b, weights[i], value, sums[r, i])
        for r, i in sums.places:
            place = offset(b, b.extract_value(outs, r), (i, out_bytes))
            total = b.fadd(_load(b, place, out_name), sums[r, i])
            store_vector(b, rounded(b, total, out_name), place)
        return context.get_dummy_value()

    return types.void(rows, vectors, w_dtype, out_dtype, *[types.intp] * 6, outs), generate


@functools.cache
def _make_add(dtype: str, is_parallel: bool) -> Any:
    """Return the compiled kernel for a data type, for one thread or for several."""
    sources, size = written_by(), 4 if dtype == "float32" else 2

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
            # 1) The group's rows of x in float32: [count, inputs].
            wide = np.empty((4, inputs), np.float32)
            for row in range(count):
                token = tokens[first_row + row]
                for i in range(inputs):
                    wide[row, i] = to_float(x[token, i])
            # 2) A x: [count, ranks].
            narrow = np.zeros((4, ranks), np.float32)
            wide_at, narrow_at = wide.ctypes.data, narrow.ctypes.data
            w, w_stride, by_row = a_at + place * inputs * ranks * size, ranks * size, ranks * 4
            row = 0
            while row < count:
                at_once = 4 if count - row == 4 else 1
                vector, num_vectors = 0, (total + 15) // 16
                while vector < num_vectors:
                    out = narrow_at + row * by_row + vector * 64
                    outs = (out, out + by_row, out + 2 * by_row, out + 3 * by_row)
                    here, source = w + vector * 16 * size, wide_at + row * inputs * 4
                    is_pair = num_vectors - vector >= 2
                    if at_once == 4 and is_pair:
                        _add_tile(4, 2, dtype, "float32", source, inputs * 4, here, w_stride,
                                  w_stride * 16, inputs, outs)  # fmt: skip
                    elif at_once == 4:
                        _add_tile(4, 1, dtype, "float32", source, inputs * 4, here, w_stride,
                                  w_stride * 16, inputs, outs)  # fmt: skip
                    elif is_pair:
                        _add_tile(1, 2, dtype, "float32", source, inputs * 4, here, w_stride,
                                  w_stride * 16, inputs, outs)  # fmt: skip
                    else:
                        _add_tile(1, 1, dtype, "float32", source, inputs * 4, here, w_stride,
                                  w_stride * 16, inputs, outs)  # fmt: skip
                    vector += 2 if is_pair else 1
                row += at_once
            # 3) B (A x), added to the rows of y.
            b_stride = outputs * size
            for target in range(num_targets):
                start, end = ends[place, target], ends[place, target + 1]
                if start == end:
                    continue
                first, last = firsts[target], firsts[target + 1]
                num_vectors = (last - first) // 16
                row = 0
                while row < count:
                    at_once = 4 if count - row == 4 else 1
                    source = narrow_at + row * by_row + start * 4
                    t0 = y_at + tokens[first_row + row] * stride * size + first * size
                    t1 = t2 = t3 = t0
                    if at_once == 4:
                        t1 = y_at + tokens[first_row + 1] * stride * size + first * size
                        t2 = y_at + tokens[first_row + 2] * stride * size + first * size
                        t3 = y_at + tokens[first_row + 3] * stride * size + first * size
                    w = b_at + (place * most * outputs + first) * size
                    vector = 0
                    while vector < num_vectors:
                        skip = vector * 16 * size
                        outs = (t0 + skip, t1 + skip, t2 + skip, t3 + skip)
                        here = w + skip
                        if num_vectors - vector >= 4:
                            if at_once == 4:
                                _add_tile(4, 4, dtype, dtype, source, by_row, here, b_stride,
                                          128 * size, end - start, outs)  # fmt: skip
                            else:
                                _add_tile(1, 4, dtype, dtype, source, by_row, here, b_stride,
                                          128 * size, end - start, outs)  # fmt: skip
                            vector += 4
                        else:
                            if at_once == 4:
                                _add_tile(4, 1, dtype, dtype, source, by_row, here, b_stride,
                                          32 * size, end - start, outs)  # fmt: skip
                            else:
                                _add_tile(1, 1, dtype, dtype, source, by_row, here, b_stride,
                                          32 * size, end - start, outs)  # fmt: skip
                            vector += 1
                    row += at_once
                # Columns after the last vector.
                for column in range(first + num_vectors * 16, last):
                    for row in range(count):
                        added = np.float32(0)
                        for r in range(start, end):
                            weight = to_float(b[place, r - start, column])
                            added += narrow[row, r] * weight
                        at = tokens[first_row + row] * stride + column
                        store(y, at, to_float(y[at]) + added)
            wide[0, 0] = 0  # keeps the array until here: numba does not see that addresses use it

    return add
