"""Products of integer weights with integer inputs: tiles as in `float_tiles`, and exact sums.

    y[m, n] = x_scale[m] x sum over groups g of (scale[n, g] x (codes . x_codes of the group)
                                                 + offset[n, g] x (sum of the group's x_codes))

Groups are added in float32, in their order: a row's result does not depend on the rows beside it.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels_cpu.float_tiles import ROWS_AT_ONCE, TILES
from nanoserve.kernels_cpu.integer_inputs import quantize_row
from nanoserve.kernels_cpu.integer_kinds import KINDS
from nanoserve.kernels_cpu.ops import FEW
from nanoserve.kernels_cpu.panels import PANEL
from nanoserve.kernels_cpu.values import FAST, array_at
from nanoserve.kernels_cpu.vectors import (
    FLOAT,
    FLOATS,
    LANES,
    WORD,
    Accumulators,
    constant,
    load,
    multiply_add,
    prefetch,
    rounded,
    splat,
    store,
)


class _Inputs(NamedTuple):
    """Addresses, and the bytes between rows."""

    codes: ir.Value  # int8 or int16 [num_rows, inputs]
    codes_stride: ir.Value
    starts: ir.Value  # int32 [num_rows, groups]: -shift x the sum of the codes
    sums: ir.Value  # float32 [num_rows, groups]
    groups_stride: ir.Value
    scale: ir.Value  # float32 [num_rows]


class _Weights(NamedTuple):
    """Addresses; of what is asked for meanwhile also the bytes from a step to the next."""

    codes: ir.Value
    scale: ir.Value  # float32 [groups, PANEL]
    offset: ir.Value
    ahead: ir.Value
    ahead_step: ir.Value


@intrinsic(prefer_literal=True)
def _tile(typing_context, kind, dtype, has_offset, rows, vectors, shape, out, out_stride, x, w):
    """out[rows, 16 x vectors]; shape: groups and a group's steps; x is `_Inputs`, w `_Weights`."""
    own, out_dtype = KINDS[kind.literal_value], dtype.literal_value
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    step_bytes = own.weight_bytes * PANEL // LANES

    def generate(context, b, signature, args):
        (groups, steps), (out, out_stride) = cgutils.unpack_tuple(b, args[5]), args[6:8]
        x, w = (
            _Inputs(*cgutils.unpack_tuple(b, args[8])),
            _Weights(*cgutils.unpack_tuple(b, args[9])),
        )
        number = groups.type
        floats = Accumulators(b, num_rows, num_vectors, constant(FLOAT, 0.0))
        totals = Accumulators(b, num_rows, num_vectors, constant(WORD, 0))

        def at(address, *pairs):
            for times, stride in pairs:
                stride = stride if isinstance(stride, ir.Value) else number(stride)
                times = times if isinstance(times, ir.Value) else number(times)
                address = b.add(address, b.mul(times, stride))
            return address

        with cgutils.for_range(b, groups, intp=number) as group:
            totals.clear()
            if own.shift:
                for row in range(num_rows):
                    place = at(x.starts, (row, x.groups_stride), (group.index, 4))
                    for i in range(num_vectors):
                        totals[row, i] = splat(b, load(b, place, WORD, 4))
            first = b.mul(group.index, steps)
            with cgutils.for_range_slice(
                b, number(0), steps, number(own.steps_at_once), number
            ) as (step, _):
                here = b.add(first, step)
                codes, x_codes = at(w.codes, (here, step_bytes)), at(x.codes, (here, own.x_bytes))
                soon = at(w.ahead, (here, w.ahead_step))
                for line in range(0, own.steps_at_once * num_vectors * own.weight_bytes, 64):
                    prefetch(b, b.add(soon, number(line)))
                own.add(
                    b,
                    totals,
                    num_rows,
                    num_vectors,
                    lambda s, i: at(codes, (s, step_bytes), (i, own.weight_bytes)),
                    lambda s, row: at(x_codes, (s, own.x_bytes), (row, x.codes_stride)),
                )
            for i in range(num_vectors):
                place = ((group.index, 4 * PANEL), (i, 4 * LANES))
                scale = load(b, at(w.scale, *place), FLOATS, 64)
                for row in range(num_rows):
                    value = b.sitofp(totals[row, i], FLOATS)
                    floats[row, i] = multiply_add(b, value, scale, floats[row, i])
                if has_offset.literal_value:
                    offset = load(b, at(w.offset, *place), FLOATS, 64)
                    for row in range(num_rows):
                        here = at(x.sums, (row, x.groups_stride), (group.index, 4))
                        sums = splat(b, load(b, here, FLOAT, 4))
                        floats[row, i] = multiply_add(b, sums, offset, floats[row, i])
        for row in range(num_rows):
            x_scale = splat(b, load(b, at(x.scale, (row, 4)), FLOAT, 4))
            for i in range(num_vectors):
                values = rounded(b, b.fmul(floats[row, i], x_scale), out_dtype)
                size = LANES * (4 if out_dtype == "float32" else 2)
                store(b, values, at(out, (row, out_stride), (i, size)))
        return context.get_dummy_value()

    given = (kind, dtype, has_offset, rows, vectors)
    tuples = [types.UniTuple(types.intp, size) for size in (2, 6, 5)]
    return types.void(*given, tuples[0], types.intp, types.intp, *tuples[1:]), generate


def make_product(kind: str, dtype: str, has_offset: bool):
    """A compiled function of the product with weights of a kind, for outputs of a dtype.

    Its arguments are integers, but for `element`, see `nanoserve.kernels_cpu.values`: the addresses
    of x [num_rows, inputs] and of the largest values, see `quantize_row`; those of weights, scales
    and offsets in panels, and their numbers; the output's, and the bytes of one of its rows.

    Numba's cache tells functions apart by their numbers and strings; hence no function is inside.
    """
    (rows_1, vectors_1), (rows_2, vectors_2), (rows_3, vectors_3), (rows_4, vectors_4) = TILES
    own = KINDS[kind]
    vector_bytes, step_bytes = own.weight_bytes, own.weight_bytes * PANEL // LANES
    out_bytes, shift, depth = LANES * (4 if dtype == "float32" else 2), own.shift, own.depth
    code_type, code_bytes = (np.int16, 2) if own.is_x_wide else (np.int8, 1)

    @njit(parallel=True, **FAST)
    def product(
        x, num_rows, element, largest, codes, scale, offset, num_panels, groups, steps, out, stride
    ):
        # 1) Each row of x in integers, with the sums of its groups and one scale.
        inputs = groups * steps * depth
        x = array_at(x, (num_rows, inputs), element)
        largest = array_at(largest, (num_rows if largest else 0,), np.float32(0))
        x_codes = np.empty((num_rows, inputs), dtype=code_type)
        starts = np.empty((num_rows, groups), dtype=np.int32)
        sums = np.empty((num_rows, groups), dtype=np.float32)
        x_scale = np.empty(num_rows, dtype=np.float32)
        if num_rows * inputs <= FEW:
            for row in range(num_rows):
                quantize_row(x, row, largest, shift, x_codes, starts, sums, x_scale)
        else:
            for row in prange(num_rows):
                quantize_row(x, row, largest, shift, x_codes, starts, sums, x_scale)
        # 2) Panels, and rows in even chunks, are shared out to the threads.
        num_chunks = max(1, (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
        rows_at_once = (num_rows + num_chunks - 1) // num_chunks
        panel_bytes, panel_scales = groups * steps * step_bytes, groups * 4 * PANEL
        for item in prange(num_chunks * num_panels):
            panel = item % num_panels
            row = item // num_panels * rows_at_once
            last = min(row + rows_at_once, num_rows)
            soon, chunk = codes + (panel + 1) * panel_bytes, last - row
            while row < last:
                if last - row >= rows_1:
                    rows, vectors = rows_1, vectors_1
                elif last - row >= rows_2:
                    rows, vectors = rows_2, vectors_2
                elif last - row >= rows_3:
                    rows, vectors = rows_3, vectors_3
                else:
                    rows, vectors = rows_4, vectors_4
                # Addresses are taken here, where the arrays still are: else they would be freed.
                here = (
                    np.intp(x_codes.ctypes.data) + row * inputs * code_bytes,
                    inputs * code_bytes,
                    np.intp(starts.ctypes.data) + row * groups * 4,
                    np.intp(sums.ctypes.data) + row * groups * 4,
                    groups * 4,
                    np.intp(x_scale.ctypes.data) + row * 4,
                )
                # While a tile is computed, its share of the next panel is asked for.
                part = panel_bytes * rows // chunk * vectors * LANES // PANEL
                for i in range(0, PANEL // LANES, vectors):
                    w = (
                        codes + panel * panel_bytes + i * vector_bytes,
                        scale + panel * panel_scales + i * 4 * LANES,
                        offset + panel * panel_scales + i * 4 * LANES,
                        soon,
                        part // (groups * steps),
                    )
                    to = out + row * stride + (panel * (PANEL // LANES) + i) * out_bytes
                    shape = groups, steps
                    if rows == rows_1:
                        _tile(
                            kind, dtype, has_offset, rows_1, vectors_1, shape, to, stride, here, w
                        )
                    elif rows == rows_2:
                        _tile(
                            kind, dtype, has_offset, rows_2, vectors_2, shape, to, stride, here, w
                        )
                    elif rows == rows_3:
                        _tile(
                            kind, dtype, has_offset, rows_3, vectors_3, shape, to, stride, here, w
                        )
                    else:
                        _tile(
                            kind, dtype, has_offset, rows_4, vectors_4, shape, to, stride, here, w
                        )
                    soon += part
                row += rows

    return product
