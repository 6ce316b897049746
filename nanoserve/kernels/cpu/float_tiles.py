"""Matrix products of 16-bit or 32-bit weights with float32 sums, for any processor with vectors.

A weight is widened to 32 bits after it has been read from memory, see `tile_walk`: reading 16 bits
takes half the time of 32.

Every row adds up its products in the order of the inputs, independent of other rows: the results
are batch-invariant.
"""

import functools
from typing import Any

from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels.cpu.packing import PANEL
from nanoserve.kernels.cpu.tile_walk import ROWS_AT_ONCE, walk, write, written_by
from nanoserve.kernels.cpu.vectors import (
    FLOAT,
    FLOATS,
    HALVES,
    LANES,
    WORD,
    WORDS,
    Accumulators,
    call,
    constant,
    load,
    load_floats,
    multiply_add,
    offset,
    prefetch,
    splat,
)


class Widened:
    """Weights widened to float32, multiplied with a float32 x: for every processor.

    A step is one input, or two of bfloat16: a bfloat16 is the upper half of a float32, so of two in
    a 32-bit word, the first is shifted into place and the second is masked.
    """

    widens = True

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.depth = 2 if dtype == "bfloat16" else 1
        self.weight_bytes = LANES * (2 if dtype == "float16" else 4)  # per vector and step
        self.x_bytes = 4 * self.depth  # per step

    def weights(self, b, address):
        if self.dtype == "bfloat16":
            pairs = load(b, address, WORDS, 64)
            low, high = b.shl(pairs, constant(WORD, 16)), b.and_(pairs, constant(WORD, 0xFFFF0000))
            return [b.bitcast(low, FLOATS), b.bitcast(high, FLOATS)]
        if self.dtype == "float16":
            return [load_floats(b, address, HALVES)]
        return [load(b, address, FLOATS, 64)]

    def inputs(self, b, address):
        addresses = (b.add(address, address.type(4 * i)) for i in range(self.depth))
        return [splat(b, load(b, each, FLOAT, 4)) for each in addresses]

    def add(self, b, total, weights, inputs):
        for weight, x in zip(weights, inputs, strict=True):
            total = multiply_add(b, weight, x, total)
        return total


class PairsOfBfloat16:
    """AVX-512 BF16: one instruction adds two bfloat16 products to a float32."""

    dtype, depth, weight_bytes, x_bytes, widens = "bfloat16", 2, 64, 4, False

    def weights(self, b, address):
        return load(b, address, WORDS, 64)

    def inputs(self, b, address):
        return splat(b, load(b, address, WORD, 4))

    def add(self, b, total, weights, inputs):
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, inputs, weights)


KINDS: dict[str, Any] = {
    "widened float32": Widened("float32"),
    "widened bfloat16": Widened("bfloat16"),
    "widened float16": Widened("float16"),
    "pairs of bfloat16": PairsOfBfloat16(),
}


@intrinsic(prefer_literal=True)
def _multiply(typing_context, kind, x, x_stride, num_rows, panel, steps, out, out_stride):
    """Compute out [num_rows, PANEL] = x . panel; arguments are addresses, strides and counts."""
    own = KINDS[kind.literal_value]
    step_bytes, vector_bytes = own.weight_bytes * PANEL // LANES, own.weight_bytes

    def generate(context, b, signature, args):
        x, x_stride, num_rows, panel, steps, out, out_stride = args[1:]
        number = x.type

        at = functools.partial(offset, b)

        def tile(rows, vectors, row, vector, soon, soon_step):
            x_here, here = at(x, (row, x_stride)), at(panel, (vector, vector_bytes))
            sums = Accumulators(b, rows, vectors, constant(FLOAT, 0.0))
            with cgutils.for_range(b, steps, intp=number) as loop:
                for line in range(0, vectors * vector_bytes, 64):
                    prefetch(b, at(soon, (loop.index, soon_step), (line, 1)))
                step = at(here, (loop.index, step_bytes))
                widened = [own.weights(b, at(step, (i, vector_bytes))) for i in range(vectors)]
                for r in range(rows):
                    inputs = own.inputs(b, at(x_here, (loop.index, own.x_bytes), (r, x_stride)))
                    for i in range(vectors):
                        sums[r, i] = own.add(b, sums[r, i], widened[i], inputs)
            write(
                b, sums, (rows, vectors), at(out, (row, out_stride)), out_stride, vector, own.dtype
            )

        walk(b, num_rows, panel, b.mul(steps, number(step_bytes)), steps, tile)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 7), generate


def make_product(kind):
    """Return a compiled matrix product with weights of a kind; its arguments are integers.

    x, out: addresses of [num_rows, inputs] and [num_rows, num_panels x PANEL], in the dtypes of
    `kind`, each with its row stride in bytes. weights: the address of the result of `panels.pack`.

    Numba's cache identifies a closure by the numbers and strings in it, so it uses no functions
    from here. The unused variable `sources` is a hash of the source files: see `written_by`.
    """
    sources, step_bytes = written_by(), KINDS[kind].weight_bytes * PANEL // LANES
    out_bytes = PANEL * (4 if KINDS[kind].dtype == "float32" else 2)

    @njit(parallel=True, cache=True)
    def product(x, x_stride, num_rows, weights, num_panels, steps, out, out_stride):
        _ = sources
        num_chunks = max(1, (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
        rows_at_once = (num_rows + num_chunks - 1) // num_chunks  # even chunks, to balance threads
        for item in prange(num_chunks * num_panels * min(num_rows, 1)):
            panel = item % num_panels
            row = item // num_panels * rows_at_once
            _multiply(
                kind,
                x + row * x_stride,
                x_stride,
                min(rows_at_once, num_rows - row),
                weights + panel * steps * step_bytes,
                steps,
                out + row * out_stride + panel * out_bytes,
                out_stride,
            )

    return product
