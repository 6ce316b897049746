"""Products of integer weights with integer inputs: tiles as in `tile_walk`, and exact sums.

    y[m, n] = x_scale[m] x sum over groups g of (scale[n, g] x (codes . x_codes of the group)
                                                 + offset[n, g] x (sum of the group's x_codes))

Groups are added in float32, in their order: a row's result does not depend on the rows beside it.
"""

import functools
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels_cpu.integer_inputs import quantize_row
from nanoserve.kernels_cpu.integer_kinds import KINDS
from nanoserve.kernels_cpu.ops import FEW
from nanoserve.kernels_cpu.panels import PANEL
from nanoserve.kernels_cpu.tile_walk import ROWS_AT_ONCE, walk, written_by
from nanoserve.kernels_cpu.values import FAST, array_at
from nanoserve.kernels_cpu.vectors import (
    FLOAT,
    FLOATS,
    HALVES,
    LANES,
    WORD,
    Accumulators,
    constant,
    load,
    multiply_add,
    offset,
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


class _Panel(NamedTuple):
    """Addresses."""

    codes: ir.Value
    scale: ir.Value  # float32 or float16 [groups, PANEL]
    offset: ir.Value  # float32 [groups, PANEL]


@intrinsic(prefer_literal=True)
def _multiply(
    typing_context,
    kind,
    dtype,
    scale_dtype,
    has_offset,
    x,
    num_rows,
    panel,
    shape,
    out,
    out_stride,
):
    """out[num_rows, PANEL]; shape: groups and a group's steps; x is `_Inputs`, panel `_Panel`."""
    own, out_dtype = KINDS[kind.literal_value], dtype.literal_value
    step_bytes, vector_bytes = own.weight_bytes * PANEL // LANES, own.weight_bytes
    is_half = scale_dtype.literal_value == "float16"
    scale_bytes, out_bytes = (
        LANES * (2 if is_half else 4),
        LANES * (4 if out_dtype == "float32" else 2),
    )

    def generate(context, b, signature, args):
        x = _Inputs(*cgutils.unpack_tuple(b, args[4]))
        panel = _Panel(*cgutils.unpack_tuple(b, args[6]))
        groups, group_steps = cgutils.unpack_tuple(b, args[7])
        num_rows, out, out_stride = args[5], *args[8:]
        number, steps = groups.type, b.mul(groups, group_steps)

        at = functools.partial(offset, b)

        def add_codes(totals, rows, vectors, x_codes, codes, first, soon, soon_step):
            """totals += codes . x_codes of a group, whose first step is `first`."""
            with cgutils.for_range_slice(
                b, number(0), group_steps, number(own.steps_at_once), number
            ) as (step, _):
                here = b.add(first, step)
                step_codes, step_x = at(codes, (here, step_bytes)), at(x_codes, (here, own.x_bytes))
                for line in range(0, own.steps_at_once * vectors * vector_bytes, 64):
                    prefetch(b, at(soon, (here, soon_step), (line, 1)))
                own.add(
                    b,
                    totals,
                    rows,
                    vectors,
                    lambda s, i: at(step_codes, (s, step_bytes), (i, vector_bytes)),
                    lambda s, r: at(step_x, (s, own.x_bytes), (r, x.codes_stride)),
                )

        def tile(rows, vectors, row, vector, soon, soon_step):
            x_codes, codes = (
                at(x.codes, (row, x.codes_stride)),
                at(panel.codes, (vector, vector_bytes)),
            )
            floats = Accumulators(b, rows, vectors, constant(FLOAT, 0.0))
            totals = Accumulators(b, rows, vectors, constant(WORD, 0))
            with cgutils.for_range(b, groups, intp=number) as group:
                of_group = (row, x.groups_stride), (group.index, 4)
                totals.clear()
                if own.shift:
                    for r in range(rows):
                        start = load(b, at(x.starts, *of_group, (r, x.groups_stride)), WORD, 4)
                        for i in range(vectors):
                            totals[r, i] = splat(b, start)
                first = b.mul(group.index, group_steps)
                add_codes(totals, rows, vectors, x_codes, codes, first, soon, soon_step)
                for i in range(vectors):
                    place = b.add(
                        b.mul(group.index, number(PANEL // LANES)), b.add(vector, number(i))
                    )
                    kind = HALVES if is_half else FLOATS
                    scale = load(b, at(panel.scale, (place, scale_bytes)), kind, scale_bytes)
                    scale = b.fpext(scale, FLOATS) if is_half else scale
                    for r in range(rows):
                        value = b.sitofp(totals[r, i], FLOATS)
                        floats[r, i] = multiply_add(b, value, scale, floats[r, i])
                    if has_offset.literal_value:
                        own_offset = load(b, at(panel.offset, (place, 64)), FLOATS, 64)
                        for r in range(rows):
                            sums = load(b, at(x.sums, *of_group, (r, x.groups_stride)), FLOAT, 4)
                            floats[r, i] = multiply_add(b, splat(b, sums), own_offset, floats[r, i])
            to = at(out, (row, out_stride), (vector, out_bytes))
            for r in range(rows):
                x_scale = splat(b, load(b, at(x.scale, (row, 4), (r, 4)), FLOAT, 4))
                for i in range(vectors):
                    values = rounded(b, b.fmul(floats[r, i], x_scale), out_dtype)
                    store(b, values, at(to, (r, out_stride), (i, out_bytes)))

        walk(b, num_rows, panel.codes, b.mul(steps, number(step_bytes)), steps, tile)
        return context.get_dummy_value()

    given = (kind, dtype, scale_dtype, has_offset)
    x, number, pair = types.UniTuple(types.intp, 6), types.intp, types.UniTuple(types.intp, 2)
    panel = types.UniTuple(types.intp, 3)
    return types.void(*given, x, number, panel, pair, number, number), generate


def make_product(kind: str, dtype: str, scale_dtype: str, has_offset: bool):
    """A compiled function of the product with weights of a kind, for outputs of a dtype.

    Its arguments are integers, but for `element`, see `nanoserve.kernels_cpu.values`: the addresses
    of x [num_rows, inputs] and of the largest values, see `quantize_row`; those of weights, scales
    and offsets in panels, and their numbers; the output's, and the bytes of one of its rows.

    Numba's cache tells functions apart by their numbers and strings; hence no function is inside,
    but `sources`, with which nothing is done: see `written_by`.
    """
    own, sources = KINDS[kind], written_by()
    step_bytes, depth, shift = own.weight_bytes * PANEL // LANES, own.depth, own.shift
    out_bytes, scale_bytes = (
        PANEL * (4 if name == "float32" else 2) for name in (dtype, scale_dtype)
    )
    code_type, code_bytes = (np.int16, 2) if own.is_x_wide else (np.int8, 1)

    @njit(parallel=True, **FAST)
    def product(
        x, num_rows, element, largest, codes, scale, offset, num_panels, groups, steps, out, stride
    ):
        _ = sources
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
        for item in prange(num_chunks * num_panels * min(num_rows, 1)):
            panel = item % num_panels
            row = item // num_panels * rows_at_once
            # Addresses are taken here, where the arrays still are: else they would be freed.
            rows = (
                np.intp(x_codes.ctypes.data) + row * inputs * code_bytes,
                inputs * code_bytes,
                np.intp(starts.ctypes.data) + row * groups * 4,
                np.intp(sums.ctypes.data) + row * groups * 4,
                groups * 4,
                np.intp(x_scale.ctypes.data) + row * 4,
            )
            weights = (
                codes + panel * groups * steps * step_bytes,
                scale + panel * groups * scale_bytes,
                offset + panel * groups * PANEL * 4,
            )
            _multiply(
                kind,
                dtype,
                scale_dtype,
                has_offset,
                rows,
                min(rows_at_once, num_rows - row),
                weights,
                (groups, steps),
                out + row * stride + panel * out_bytes,
                stride,
            )

    return product
