"""Products with weights of 16 or 32 bits and sums of 32, on every processor with vectors.

A *tile* is a few rows of x and 16 to 64 outputs, whose sums stay in registers while all inputs pass
by (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). A weight is read
once for all rows of the tile, and widened to 32 bits on the way: 16 bits in memory cost half the
time of 32.

Every row adds up its products in the order of the inputs, one after the other, whatever rows are
beside it: the same numbers come out for a row alone and for one among thousands.
"""

from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels_cpu.panels import PANEL
from nanoserve.kernels_cpu.processor import has
from nanoserve.kernels_cpu.vectors import (
    FLOAT,
    FLOATS,
    HALF,
    LANES,
    WORD,
    WORDS,
    Accumulators,
    call,
    constant,
    load,
    multiply_add,
    prefetch,
    rounded,
    splat,
    store,
)

# Rows that are computed with one panel before the next: their x stays in the processor's cache.
ROWS_AT_ONCE = 256
# (rows, vectors) of tiles, the largest first: sums, weights and an x are to fit into the registers,
# 32 of 16 numbers or 16 of 8. A single row has many vectors: a sum waits for the one before it.
TILES = ((6, 4), (4, 4), (2, 4), (1, 4)) if has("avx512f") else ((6, 1), (4, 1), (2, 2), (1, 4))


class Widened:
    """Weights become float32 and meet a float32 x: for every processor.

    A step is one input, or of bfloat16 two: a bfloat16 is the upper half of a float32, so of two in
    a word one is shifted into its place and the other is there already.
    """

    widens = True

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.depth = 2 if dtype == "bfloat16" else 1
        self.weight_bytes = LANES * (2 if dtype == "float16" else 4)  # of a vector and a step
        self.x_bytes = 4 * self.depth  # of a step

    def weights(self, b, address):
        if self.dtype == "bfloat16":
            pairs = load(b, address, WORDS, 64)
            low, high = b.shl(pairs, constant(WORD, 16)), b.and_(pairs, constant(WORD, 0xFFFF0000))
            return [b.bitcast(low, FLOATS), b.bitcast(high, FLOATS)]
        if self.dtype == "float16":
            return [b.fpext(load(b, address, ir.VectorType(HALF, LANES), 32), FLOATS)]
        return [load(b, address, FLOATS, 64)]

    def inputs(self, b, address):
        addresses = (b.add(address, address.type(4 * i)) for i in range(self.depth))
        return [splat(b, load(b, each, FLOAT, 4)) for each in addresses]

    def add(self, b, total, weights, inputs):
        for weight, x in zip(weights, inputs, strict=True):
            total = multiply_add(b, weight, x, total)
        return total


class PairsOfBfloat16:
    """Two products of bfloat16 and their sum in float32 are one instruction of AVX-512 BF16."""

    dtype, depth, weight_bytes, x_bytes, widens = "bfloat16", 2, 64, 4, False

    def weights(self, b, address):
        return load(b, address, WORDS, 64)

    def inputs(self, b, address):
        return splat(b, load(b, address, WORD, 4))

    def add(self, b, total, weights, inputs):
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, inputs, weights)


KINDS = {
    "widened float32": Widened("float32"),
    "widened bfloat16": Widened("bfloat16"),
    "widened float16": Widened("float16"),
    "pairs of bfloat16": PairsOfBfloat16(),
}


@intrinsic(prefer_literal=True)
def _tile(typing_context, kind, rows, vectors, x, x_stride, weights, steps, ahead, out, out_stride):
    """out[rows, 16 x vectors] = x[rows] . weights; from x on, arguments are addresses and bytes.

    ahead: an address, and the bytes from a step to the next: what is asked for meanwhile.
    """
    own = KINDS[kind.literal_value]
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    out_bytes = 4 if own.dtype == "float32" else 2

    def generate(context, b, signature, args):
        x, x_stride, weights, steps, ahead, out, out_stride = args[3:]
        number = x.type
        next_at, next_step = cgutils.unpack_tuple(b, ahead)
        sums = Accumulators(b, num_rows, num_vectors, constant(FLOAT, 0.0))
        with cgutils.for_range(b, steps, intp=number) as loop:
            here = b.add(weights, b.mul(loop.index, number(own.weight_bytes * PANEL // LANES)))
            soon = b.add(next_at, b.mul(loop.index, next_step))
            for line in range(0, num_vectors * own.weight_bytes, 64):
                prefetch(b, b.add(soon, number(line)))
            offsets = [number(i * own.weight_bytes) for i in range(num_vectors)]
            widened = [own.weights(b, b.add(here, offset)) for offset in offsets]
            x_here = b.add(x, b.mul(loop.index, number(own.x_bytes)))
            for row in range(num_rows):
                inputs = own.inputs(b, b.add(x_here, b.mul(x_stride, number(row))))
                for i in range(num_vectors):
                    sums[row, i] = own.add(b, sums[row, i], widened[i], inputs)
        for row in range(num_rows):
            row_at = b.add(out, b.mul(out_stride, number(row)))
            for i in range(num_vectors):
                values = rounded(b, sums[row, i], own.dtype)
                store(b, values, b.add(row_at, number(i * LANES * out_bytes)))
        return context.get_dummy_value()

    addresses = [types.intp] * 4 + [types.UniTuple(types.intp, 2)] + [types.intp] * 2
    return types.void(kind, rows, vectors, *addresses), generate


def make_product(kind):
    """A compiled function of the product with weights of a kind; all its arguments are integers.

    x, out: addresses of [num_rows, inputs] and [num_rows, num_panels x PANEL], as `kind` has them,
    with the bytes from a row to the next. weights: the address of what `panels.pack` gives.

    Numba's cache tells functions apart by their numbers and strings; hence no function is inside.
    """
    (rows_1, vectors_1), (rows_2, vectors_2), (rows_3, vectors_3), (rows_4, vectors_4) = TILES
    vector_bytes = KINDS[kind].weight_bytes
    step_bytes = vector_bytes * PANEL // LANES
    out_bytes = LANES * (4 if KINDS[kind].dtype == "float32" else 2)

    @njit(parallel=True, cache=True)
    def product(x, x_stride, num_rows, weights, num_panels, steps, out, out_stride):
        num_chunks = max(1, (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
        rows_at_once = (num_rows + num_chunks - 1) // num_chunks  # even chunks: threads share them
        panel_bytes = steps * step_bytes
        for item in prange(num_chunks * num_panels):
            panel = item % num_panels
            row = item // num_panels * rows_at_once
            last = min(row + rows_at_once, num_rows)
            soon, chunk = weights + (panel + 1) * panel_bytes, last - row
            while row < last:
                if last - row >= rows_1:
                    rows, vectors = rows_1, vectors_1
                elif last - row >= rows_2:
                    rows, vectors = rows_2, vectors_2
                elif last - row >= rows_3:
                    rows, vectors = rows_3, vectors_3
                else:
                    rows, vectors = rows_4, vectors_4
                # While a tile is computed, its share of the next panel is asked for.
                part = panel_bytes * rows // chunk * vectors * LANES // PANEL
                at = x + row * x_stride
                for i in range(0, PANEL // LANES, vectors):
                    own = weights + panel * panel_bytes + i * vector_bytes
                    to = out + row * out_stride + (panel * (PANEL // LANES) + i) * out_bytes
                    ahead = soon, part // steps
                    if rows == rows_1:
                        _tile(
                            kind, rows_1, vectors_1, at, x_stride, own, steps, ahead, to, out_stride
                        )
                    elif rows == rows_2:
                        _tile(
                            kind, rows_2, vectors_2, at, x_stride, own, steps, ahead, to, out_stride
                        )
                    elif rows == rows_3:
                        _tile(
                            kind, rows_3, vectors_3, at, x_stride, own, steps, ahead, to, out_stride
                        )
                    else:
                        _tile(
                            kind, rows_4, vectors_4, at, x_stride, own, steps, ahead, to, out_stride
                        )
                    soon += part
                row += rows

    return product
