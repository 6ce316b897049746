"""Matrix products of integer weights with float inputs, in the tiles of `tile_walk`.

    y[m, n] = sum over inputs k, in their order, of x[m, k] x (codes[n, k] x scale[n, g]
                                                              + offset[n, g])

A weight is dequantized to the float32 code x scale + offset, rounded twice, after it has been read
from memory. So the result equals `float_tiles` with the dequantized weight bit for bit, and
a row's result does not depend on other rows; but 4 or 8 bits per weight are read, not 32.
"""

import functools
from typing import Any

from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels.cpu.packing import PANEL
from nanoserve.kernels.cpu.tile_walk import ROWS_AT_ONCE, IntegerPanel, walk, write, written_by
from nanoserve.kernels.cpu.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALVES,
    LANES,
    WORD,
    WORDS,
    Accumulators,
    constant,
    load,
    load_floats,
    multiply_add,
    offset,
    prefetch,
    splat,
)

_BYTES = ir.VectorType(BYTE, LANES)
# From 2^23 on, the last bits of a float32 are an integer: inserting a code there converts it.
_MAGIC = 2**23


class Bytes:
    """8-bit codes of 16 outputs; a step is one input."""

    depth = 1

    def codes(self, b, address):
        return [b.sitofp(b.sext(load(b, address, _BYTES, LANES), WORDS), FLOATS)]


class Nibbles:
    """4-bit codes of two inputs per byte, each stored as code + 8; the first in the low half."""

    depth = 2

    def codes(self, b, address):
        pairs = b.zext(load(b, address, _BYTES, LANES), WORDS)
        return [self._float(b, half) for half in (pairs, b.lshr(pairs, constant(WORD, 4)))]

    def _float(self, b, code):
        bits = b.or_(b.and_(code, constant(WORD, 15)), constant(WORD, 0x4B000000))
        return b.fsub(b.bitcast(bits, FLOATS), constant(FLOAT, _MAGIC + 8))


# Named as in `integer_kinds`, with the same memory layout.
KINDS: dict[str, Any] = {"bytes": Bytes(), "nibbles": Nibbles()}


@intrinsic(prefer_literal=True)
def _multiply(
    typing_context,
    kind,
    dtype,
    scale_dtype,
    has_offset,
    x,
    x_stride,
    num_rows,
    panel,
    shape,
    out,
    out_stride,
):
    """Compute out [num_rows, PANEL]. shape: (groups, steps per group). panel: `IntegerPanel`."""
    own, out_dtype = KINDS[kind.literal_value], dtype.literal_value
    kind_of_scale = HALVES if scale_dtype.literal_value == "float16" else FLOATS

    def generate(context, b, signature, args):
        x, x_stride, num_rows = args[4:7]
        panel = IntegerPanel(*cgutils.unpack_tuple(b, args[7]))
        groups, group_steps = cgutils.unpack_tuple(b, args[8])
        out, out_stride = args[9:]
        number, steps, x_bytes = groups.type, b.mul(groups, group_steps), 4 * own.depth
        at = functools.partial(offset, b)

        def of_group(values, kind, group, vector):
            size = LANES * (2 if kind == HALVES else 4)
            place = at(values, (group, PANEL // LANES * size), (vector, size))
            return load_floats(b, place, kind)

        def tile(rows, vectors, row, vector, soon, soon_step):
            codes, x_here = at(panel.codes, (vector, LANES)), at(x, (row, x_stride))
            sums = Accumulators(b, rows, vectors, constant(FLOAT, 0.0))
            with cgutils.for_range(b, groups, intp=number) as group:
                columns = [b.add(vector, number(i)) for i in range(vectors)]
                place = group.index
                scale = [of_group(panel.scale, kind_of_scale, place, i) for i in columns]
                shift = []
                if has_offset.literal_value:
                    shift = [of_group(panel.offset, FLOATS, place, i) for i in columns]
                with cgutils.for_range(b, group_steps, intp=number) as loop:
                    step = b.add(b.mul(group.index, group_steps), loop.index)
                    prefetch(b, at(soon, (step, soon_step)))  # at most the codes of 64 outputs
                    weights = []
                    for i in range(vectors):
                        own_codes = own.codes(b, at(codes, (step, PANEL), (i, LANES)))
                        weights.append([b.fmul(code, scale[i]) for code in own_codes])
                        if shift:
                            weights[i] = [b.fadd(weight, shift[i]) for weight in weights[i]]
                    for r in range(rows):
                        for k in range(own.depth):
                            place = at(x_here, (step, x_bytes), (r, x_stride), (k, 4))
                            value = splat(b, load(b, place, FLOAT, 4))
                            for i in range(vectors):
                                sums[r, i] = multiply_add(b, weights[i][k], value, sums[r, i])
            to = at(out, (row, out_stride))
            write(b, sums, (rows, vectors), to, out_stride, vector, out_dtype)

        walk(b, num_rows, panel.codes, b.mul(steps, number(PANEL)), steps, tile)
        return context.get_dummy_value()

    given, number = (kind, dtype, scale_dtype, has_offset), types.intp
    panel, shape = types.UniTuple(number, 3), types.UniTuple(number, 2)
    return types.void(*given, number, number, number, panel, shape, number, number), generate


def make_product(kind: str, dtype: str, scale_dtype: str, has_offset: bool):
    """Return a compiled matrix product with weights of a kind, for outputs of a dtype.

    Its arguments are integers: the address of x, float32 [num_rows, inputs], and the number of its
    rows; the addresses of weights, scales and offsets in panels, and their counts; the address of
    the output, and the bytes of one of its rows.

    Numba's cache identifies a closure by the numbers and strings in it, so it uses no functions
    from here. The unused variable `sources` is a hash of the source files: see `written_by`.
    """
    sources, depth = written_by(), KINDS[kind].depth
    out_bytes, scale_bytes = (
        PANEL * (4 if name == "float32" else 2) for name in (dtype, scale_dtype)
    )

    @njit(parallel=True, cache=True)
    def product(x, num_rows, codes, scale, offset, num_panels, groups, steps, out, stride):
        _ = sources
        x_stride = groups * steps * depth * 4
        num_chunks = max(1, (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
        rows_at_once = (num_rows + num_chunks - 1) // num_chunks  # even chunks, to balance threads
        for item in prange(num_chunks * num_panels * min(num_rows, 1)):
            panel = item % num_panels
            row = item // num_panels * rows_at_once
            weights = (
                codes + panel * groups * steps * PANEL,
                scale + panel * groups * scale_bytes,
                offset + panel * groups * PANEL * 4,
            )
            _multiply(
                kind,
                dtype,
                scale_dtype,
                has_offset,
                x + row * x_stride,
                x_stride,
                min(rows_at_once, num_rows - row),
                weights,
                (groups, steps),
                out + row * stride + panel * out_bytes,
                stride,
            )

    return product
