"""Products of integer weights with integer inputs: tiles as in `float_tiles`, and exact sums.

    y[m, n] = x_scale[m] x sum over groups g of (scale[n, g] x (codes . x_codes of the group)
                                                 + offset[n, g] x (sum of the group's x_codes))

Groups are added in float32, in their order: a row's result does not depend on the rows beside it.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels_cpu.integer_kinds import KINDS
from nanoserve.kernels_cpu.panels import PANEL
from nanoserve.kernels_cpu.processor import has
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

_ROWS_AT_ONCE = 256
_TILES = ((6, 4), (4, 4), (2, 4), (1, 4)) if has("avx512f") else ((6, 1), (4, 1), (2, 2), (1, 4))


class _Inputs(NamedTuple):
    """Addresses, and the bytes between rows."""

    codes: ir.Value  # int8 or int16 [num_rows, inputs]
    codes_stride: ir.Value
    starts: ir.Value  # int32 [num_rows, groups]: -shift x the sum of the codes
    sums: ir.Value  # float32 [num_rows, groups]
    groups_stride: ir.Value
    scale: ir.Value  # float32 [num_rows]


class _Weights(NamedTuple):
    """Addresses, and where the next panel's codes lie."""

    codes: ir.Value
    scale: ir.Value  # float32 [groups, PANEL]
    offset: ir.Value
    ahead: ir.Value


@intrinsic(prefer_literal=True)
def _tile(
    typing_context, kind, dtype, has_offset, rows, vectors, groups, steps, out, out_stride, x, w
):
    """out[rows, 16 x vectors]; x is `_Inputs`, w `_Weights`; a group takes `steps`."""
    own, out_dtype = KINDS[kind.literal_value], dtype.literal_value
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    step_bytes = own.weight_bytes * PANEL // LANES

    def generate(context, b, signature, args):
        groups, steps, out, out_stride = args[5:9]
        x, w = (
            _Inputs(*cgutils.unpack_tuple(b, args[9])),
            _Weights(*cgutils.unpack_tuple(b, args[10])),
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
                for s in range(own.steps_at_once):
                    for line in range(0, num_vectors * own.weight_bytes, 64):
                        prefetch(b, b.add(at(codes, (s, step_bytes), (1, line)), w.ahead))
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
    addresses = (types.UniTuple(types.intp, 6), types.UniTuple(types.intp, 4))
    return types.void(*given, *[types.intp] * 4, *addresses), generate


def make_product(kind: str, dtype: str, has_offset: bool):
    """A compiled function of the product with weights of a kind, for outputs of a dtype.

    All its arguments are integers: addresses, sizes, and the bytes from a row to the next. `x` is
    the six of `_Inputs`; weights, scale and offset are in panels.
    """
    (rows_1, vectors_1), (rows_2, vectors_2), (rows_3, vectors_3), (rows_4, vectors_4) = _TILES
    own = KINDS[kind]
    vector_bytes, step_bytes = own.weight_bytes, own.weight_bytes * PANEL // LANES
    out_bytes = LANES * (4 if dtype == "float32" else 2)

    # One function that calls no other of ours, as in `float_tiles`: so numba's cache knows it.
    @njit(parallel=True, cache=True)
    def product(x, num_rows, codes, scale, offset, num_panels, groups, steps, out, stride):
        num_chunks = max(1, (num_rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE)
        rows_at_once = (num_rows + num_chunks - 1) // num_chunks
        panel_bytes, panel_scales = groups * steps * step_bytes, groups * 4 * PANEL
        for item in prange(num_chunks * num_panels):
            panel = item % num_panels
            row = item // num_panels * rows_at_once
            end = min(row + rows_at_once, num_rows)
            to = out + panel * (PANEL // LANES) * out_bytes
            own = codes + panel * panel_bytes
            own_scale, own_offset = scale + panel * panel_scales, offset + panel * panel_scales
            ahead = panel_bytes
            while row < end:
                x_codes, codes_stride, starts, sums, groups_stride, x_scale = x
                here = (
                    x_codes + row * codes_stride,
                    codes_stride,
                    starts + row * groups_stride,
                    sums + row * groups_stride,
                    groups_stride,
                    x_scale + row * 4,
                )
                there = to + row * stride
                if end - row >= rows_1:
                    for i in range(0, PANEL // LANES, vectors_1):
                        w = own + i * vector_bytes, own_scale + i * 64, own_offset + i * 64, ahead
                        out_at = there + i * out_bytes
                        _tile(
                            kind, dtype, has_offset, rows_1, vectors_1, groups, steps, out_at,
                            stride, here, w,
                        )  # fmt: skip
                    row += rows_1
                elif end - row >= rows_2:
                    for i in range(0, PANEL // LANES, vectors_2):
                        w = own + i * vector_bytes, own_scale + i * 64, own_offset + i * 64, ahead
                        out_at = there + i * out_bytes
                        _tile(
                            kind, dtype, has_offset, rows_2, vectors_2, groups, steps, out_at,
                            stride, here, w,
                        )  # fmt: skip
                    row += rows_2
                elif end - row >= rows_3:
                    for i in range(0, PANEL // LANES, vectors_3):
                        w = own + i * vector_bytes, own_scale + i * 64, own_offset + i * 64, ahead
                        out_at = there + i * out_bytes
                        _tile(
                            kind, dtype, has_offset, rows_3, vectors_3, groups, steps, out_at,
                            stride, here, w,
                        )  # fmt: skip
                    row += rows_3
                else:
                    for i in range(0, PANEL // LANES, vectors_4):
                        w = own + i * vector_bytes, own_scale + i * 64, own_offset + i * 64, ahead
                        out_at = there + i * out_bytes
                        _tile(
                            kind, dtype, has_offset, rows_4, vectors_4, groups, steps, out_at,
                            stride, here, w,
                        )  # fmt: skip
                    row += rows_4
                ahead = 0

    return product
