"""Matrix products of integer weights with integer inputs, in the tiles of `tile_walk`.

    y[m, n] = sum over weight groups g of
                  scale[n, g] x (sum over g's x groups u of x_scale[m, u] x (codes . x_codes of u))
                + offset[n, g] x (sum over g's x groups u of x_scale[m, u] x (sum of x_codes of u))

The sum over a group's codes is exact. Groups are added in float32, in their order: a row's result
does not depend on other rows.
"""

import functools
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.elements import FAST, array_at
from nanoserve.kernels.cpu.integer_inputs import quantize_row
from nanoserve.kernels.cpu.isa import KINDS
from nanoserve.kernels.cpu.ops import FEW
from nanoserve.kernels.cpu.packing import PANEL
from nanoserve.kernels.cpu.tile_walk import (
    ROWS_AT_ONCE,
    TILES,
    IntegerPanel,
    walk,
    write,
    written_by,
)
from nanoserve.kernels.cpu.vectors import (
    FLOAT,
    FLOATS,
    HALVES,
    LANES,
    WORD,
    Accumulators,
    constant,
    load,
    load_floats,
    multiply_add,
    offset,
    prefetch,
    splat,
)

# Smaller tiles, as both integer and float sums must stay in registers.
_TILES = ((6, 2), (4, 2), (2, 4), (1, 4)) if has("avx512f") else TILES


class _Inputs(NamedTuple):
    """Addresses of quantized inputs, and their row strides in bytes."""

    codes: ir.Value  # int8 or int16 [num_rows, inputs]
    codes_stride: ir.Value
    scale: ir.Value  # float32 [num_rows, x groups]
    starts: ir.Value  # int32 [num_rows, x groups]: -shift x the sum of the codes
    stride: ir.Value  # of `scale` and `starts`
    sums: ir.Value  # float32 [num_rows, weight groups]: of codes x scale
    sums_stride: ir.Value


@intrinsic(prefer_literal=True)
def _multiply(
    typing_context,
    kind,
    group_steps,
    is_one_to_one,
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
    """Compute out [num_rows, PANEL]; x is `_Inputs`, panel `IntegerPanel`.

    group_steps: steps in a group of x. shape: the number of weight groups, the groups of x in each
    (1 if is_one_to_one), and `group_steps` again, as a variable, so that LLVM cannot unroll the
    loop.
    """
    own, out_dtype, num_steps = (
        KINDS[kind.literal_value],
        dtype.literal_value,
        group_steps.literal_value,
    )
    step_bytes, vector_bytes = own.weight_bytes * PANEL // LANES, own.weight_bytes
    is_half = scale_dtype.literal_value == "float16"
    kind_of_scale, scale_bytes = (HALVES, LANES * 2) if is_half else (FLOATS, LANES * 4)

    def generate(context, b, signature, args):
        x = _Inputs(*cgutils.unpack_tuple(b, args[6]))
        panel = IntegerPanel(*cgutils.unpack_tuple(b, args[8]))
        groups, x_groups, loop_steps = cgutils.unpack_tuple(b, args[9])
        num_rows, (out, out_stride) = args[7], args[10:]
        number = groups.type
        steps = b.mul(b.mul(groups, x_groups), number(num_steps))

        at = functools.partial(offset, b)

        def dots(totals, rows, vectors, row, codes, index, soon, soon_step):
            """Compute totals = codes . x_codes over the group `index` of x."""
            of_group = (row, x.stride), (index, 4)
            for r in range(rows if own.shift else 0):
                start = splat(b, load(b, at(x.starts, *of_group, (r, x.stride)), WORD, 4))
                for i in range(vectors):
                    totals[r, i] = start
            if not own.shift:
                totals.clear()
            first = b.mul(index, number(num_steps))
            codes = at(codes, (first, step_bytes))
            x_codes = at(x.codes, (row, x.codes_stride), (first, own.x_bytes))
            soon = at(soon, (first, soon_step))
            # With many rows there are many tiles, and each prefetches little of the next panel.
            ahead = 64 if rows > 4 else own.steps_at_once * vectors * vector_bytes

            def add_steps(step):
                for line in range(0, ahead, 64):
                    prefetch(b, at(soon, (step, soon_step), (line, 1)))
                here, x_here = at(codes, (step, step_bytes)), at(x_codes, (step, own.x_bytes))
                own.add(
                    b,
                    totals,
                    rows,
                    vectors,
                    lambda s, i: at(here, (s, step_bytes), (i, vector_bytes)),
                    lambda s, r: at(x_here, (s, own.x_bytes), (r, x.codes_stride)),
                )

            if own.is_unrolled:
                for step in range(0, num_steps, own.steps_at_once):
                    add_steps(step)
            else:
                stride = number(own.steps_at_once)
                with cgutils.for_range_slice(b, number(0), loop_steps, stride, number) as (
                    step,
                    _,
                ):
                    add_steps(step)

        def weight_scale(place):
            return load_floats(b, at(panel.scale, (place, scale_bytes)), kind_of_scale)

        def tile(rows, vectors, row, vector, soon, soon_step):
            codes = at(panel.codes, (vector, vector_bytes))
            zero = constant(FLOAT, 0.0)
            floats, totals = (
                Accumulators(b, rows, vectors, zero),
                Accumulators(b, rows, vectors, constant(WORD, 0)),
            )
            parts = floats if is_one_to_one.literal_value else Accumulators(b, rows, vectors, zero)

            def x_group(index, scales):
                dots(totals, rows, vectors, row, codes, index, soon, soon_step)
                for r in range(rows):
                    here = at(x.scale, (row, x.stride), (index, 4), (r, x.stride))
                    x_scale = splat(b, load(b, here, FLOAT, 4))
                    for i in range(vectors):
                        value = b.sitofp(totals[r, i], FLOATS)
                        own_scale = b.fmul(x_scale, scales[i]) if scales else x_scale
                        parts[r, i] = multiply_add(b, value, own_scale, parts[r, i])

            with cgutils.for_range(b, groups, intp=number) as group:
                first = b.add(b.mul(group.index, number(PANEL // LANES)), vector)
                places = [b.add(first, number(i)) for i in range(vectors)]
                if is_one_to_one.literal_value:
                    x_group(group.index, [weight_scale(places[i]) for i in range(vectors)])
                else:
                    parts.clear()
                    with cgutils.for_range(b, x_groups, intp=number) as inner:
                        x_group(b.add(b.mul(group.index, x_groups), inner.index), [])
                    for i in range(vectors):
                        scale = weight_scale(places[i])
                        for r in range(rows):
                            floats[r, i] = multiply_add(b, parts[r, i], scale, floats[r, i])
                for r in range(rows if has_offset.literal_value else 0):
                    here = at(x.sums, (row, x.sums_stride), (group.index, 4), (r, x.sums_stride))
                    sums = splat(b, load(b, here, FLOAT, 4))
                    for i in range(vectors):
                        own_offset = load_floats(b, at(panel.offset, (places[i], 64)), FLOATS)
                        floats[r, i] = multiply_add(b, sums, own_offset, floats[r, i])
            to = at(out, (row, out_stride))
            write(b, floats, (rows, vectors), to, out_stride, vector, out_dtype)

        walk(b, num_rows, panel.codes, b.mul(steps, number(step_bytes)), steps, tile, _TILES)
        return context.get_dummy_value()

    given = (kind, group_steps, is_one_to_one, dtype, scale_dtype, has_offset)
    x, number, shape = types.UniTuple(types.intp, 7), types.intp, types.UniTuple(types.intp, 3)
    panel = shape
    return types.void(*given, x, number, panel, shape, number, number), generate


def make_product(
    dtype: str, kind: str, size: int, is_one_to_one: bool, scale_dtype: str, has_offset: bool
):
    """Return a compiled matrix product with weights of a kind, for outputs of a dtype.

    size: the inputs of a group of x, which is a weight's whole group if is_one_to_one, else a part.

    Its arguments are integers, except `element`, see `nanoserve.kernels.cpu.elements`: the address
    of x [num_rows, inputs]; the addresses of weights, scales and offsets in panels; the numbers of
    panels, of weight groups, of x's groups in each and of steps in each of these; the address of
    the output, and the bytes of one of its rows.

    Numba's cache identifies a closure by the numbers and strings in it, so it uses no functions
    from here. The unused variable `sources` is a hash of the source files: see `written_by`.
    """
    own, sources = KINDS[kind], written_by()
    group_steps, shift = size // own.depth, own.shift
    group_bytes = group_steps * own.weight_bytes * PANEL // LANES
    out_bytes, scale_bytes = (
        PANEL * (4 if name == "float32" else 2) for name in (dtype, scale_dtype)
    )
    code_type, code_bytes = (np.int16, 2) if own.is_x_wide else (np.int8, 1)

    @njit(parallel=True, **FAST)
    def product(
        x, num_rows, element, codes, scale, offset, num_panels, groups, x_groups, steps, out, stride
    ):
        _ = sources
        # 1) Quantize each row of x: codes, and scales and sums of its groups.
        all_groups = groups * x_groups
        inputs = all_groups * size
        x = array_at(x, (num_rows, inputs), element)
        x_codes = np.empty((num_rows, inputs), dtype=code_type)
        x_scale = np.empty((num_rows, all_groups), dtype=np.float32)
        starts = np.empty((num_rows, all_groups), dtype=np.int32)
        sums = np.empty((num_rows, groups), dtype=np.float32)
        if num_rows * inputs <= FEW:
            for row in range(num_rows):
                quantize_row(x, row, size, shift, x_codes, x_scale, starts, sums)
        else:
            for row in prange(num_rows):
                quantize_row(x, row, size, shift, x_codes, x_scale, starts, sums)
        # 2) Distribute panels, and even chunks of rows, over the threads.
        num_chunks = max(1, (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
        rows_at_once = (num_rows + num_chunks - 1) // num_chunks
        for item in prange(num_chunks * num_panels * min(num_rows, 1)):
            panel = item % num_panels
            row = item // num_panels * rows_at_once
            # Take the addresses inside the loop: otherwise numba would free the arrays before it.
            rows = (
                np.intp(x_codes.ctypes.data) + row * inputs * code_bytes,
                inputs * code_bytes,
                np.intp(x_scale.ctypes.data) + row * all_groups * 4,
                np.intp(starts.ctypes.data) + row * all_groups * 4,
                all_groups * 4,
                np.intp(sums.ctypes.data) + row * groups * 4,
                groups * 4,
            )
            weights = (
                codes + panel * all_groups * group_bytes,
                scale + panel * groups * scale_bytes,
                offset + panel * groups * PANEL * 4,
            )
            _multiply(
                kind,
                group_steps,
                is_one_to_one,
                dtype,
                scale_dtype,
                has_offset,
                rows,
                min(rows_at_once, num_rows - row),
                weights,
                (groups, x_groups, steps),
                out + row * stride + panel * out_bytes,
                stride,
            )

    return product
