"""Tiles of the products of low-rank adapters: out[row] += x[row] . w, for a few rows at once.

The sums of a tile stay in registers during the loop over all inputs, and weights are read once for
its rows. In tiles of all shapes, a row adds up its products in the order of the inputs: its bits do
not depend on how many rows share a tile.
"""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.vectors import (
    FLOAT,
    FLOATS,
    HALF_WORD,
    LANES,
    WORD,
    WORDS,
    Accumulators,
    Rows,
    call,
    constant,
    load,
    multiply_add,
    offset,
    prefetch,
    rounded,
    shuffled,
    splat,
    store,
)

GROUP = 8  # rows of an adapter that are computed at once
# Rows of tiles, and numbers of vectors, the largest first: sums and weights must fit into the
# registers, 32 of 16 numbers or 16 of 8. One row is limited by memory: it reads whole lines.
_TILES: dict[int, tuple[int, ...]] = {GROUP: (3, 1), 4: (4, 2, 1), 1: (4, 2, 1)}
if not has("avx512f"):
    _TILES = {4: (1,), 1: (4, 2, 1)}
_BFLOATS = ir.VectorType(HALF_WORD, LANES)  # as bits
_INTERLEAVED = [lane + which * LANES for lane in range(LANES) for which in (0, 1)]


class _Bfloat(ir.Type):
    """LLVM's type of a bfloat16, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"


class Singles:
    """For every processor: one input at a time, in float32; weights of bfloat16 are widened."""

    depth, x_dtype, x_bytes = 1, "float32", 4

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def weights(self, b, rows, count):
        return _load(b, rows.address, self.dtype)

    def inputs(self, b, place, count):
        return splat(b, load(b, place, FLOAT, 4))

    def add(self, b, total, weights, inputs):
        return multiply_add(b, weights, inputs, total)

    def rounded(self, b, numbers, dtype):
        return rounded(b, numbers, dtype)


class Pairs:
    """AVX-512 BF16: one instruction adds the products of two inputs, both bfloat16, in float32.

    So A x is rounded before it is multiplied by B, as torch does it. The instructions take numbers
    below 2^-126 as 0. An odd last input is paired with 0, and so are its weights, because what lies
    behind both may be NaN.
    """

    depth, dtype, x_dtype, x_bytes = 2, "bfloat16", "bfloat16", 2

    def weights(self, b, rows, count):
        first = load(b, rows.address, _BFLOATS, 2)
        if count == 1:
            return b.zext(first, WORDS)
        second = load(b, rows.at(b, 1), _BFLOATS, 2)
        return b.bitcast(shuffled(b, first, _INTERLEAVED, second), WORDS)

    def inputs(self, b, place, count):
        if count == 1:
            return splat(b, b.zext(load(b, place, HALF_WORD, 2), WORD))
        return splat(b, load(b, place, WORD, 2))

    def add(self, b, total, weights, inputs):
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, weights, inputs)

    def rounded(self, b, numbers, dtype):
        """Round with one instruction, in place of seven that work on bits."""
        return b.bitcast(b.fptrunc(numbers, ir.VectorType(_Bfloat(), LANES)), _BFLOATS)


KINDS: dict[str, Any] = {
    "singles of float32": Singles("float32"),
    "singles of bfloat16": Singles("bfloat16"),
    "pairs of bfloat16": Pairs(),
}


@functools.cache
def best_kind(dtype: str) -> str:
    """Return the best of `KINDS` for this processor."""
    return f"{'pairs' if dtype == 'bfloat16' and has('avx512bf16') else 'singles'} of {dtype}"


def _load(b: Any, place: Any, dtype: str) -> Any:
    """Load a vector of "float32" or "bfloat16" numbers as FLOATS, from any address."""
    if dtype == "float32":
        return load(b, place, FLOATS, 4)
    bits = b.zext(load(b, place, _BFLOATS, 2), WORDS)
    return b.bitcast(b.shl(bits, constant(WORD, 16)), FLOATS)


@intrinsic(prefer_literal=True)
def add_product(
    typing_context, kind, out_dtype, xs, num_rows, w, w_stride, ahead, steps, outs, num_vectors
):
    """Add x [num_rows, steps] . w [steps, num_vectors x 16] to rows of `out_dtype`.

    xs, outs: addresses of arrays with the addresses of the rows. w_stride: bytes from the weights
    of an input to those of the next. ahead: bytes from what is read to what is prefetched.
    """
    own, out_name = KINDS[kind.literal_value], out_dtype.literal_value
    w_bytes, out_bytes = (LANES * (4 if name == "float32" else 2) for name in (own.dtype, out_name))

    def generate(context, b, signature, args):
        xs, num_rows, w, w_stride, ahead, steps, outs, num_vectors = args[2:]
        number = xs.type

        def tile(rows, vectors, row, vector):
            x_rows, out_rows = (_addresses(b, table, row, rows) for table in (xs, outs))
            of_weights = Rows(offset(b, w, (vector, w_bytes)), w_stride)
            sums = Accumulators(b, rows, vectors, constant(FLOAT, 0.0))

            def add(k, count):
                for j in range(count):
                    for line in range(0, vectors * w_bytes, 64):
                        prefetch(b, of_weights.at(b, k, (j, w_stride), (ahead, 1), (line, 1)))
                here = of_weights.moved(b, (k, w_stride))
                weights = [
                    own.weights(b, here.moved(b, (i, w_bytes)), count) for i in range(vectors)
                ]
                for r in range(rows):
                    inputs = own.inputs(b, offset(b, x_rows[r], (k, own.x_bytes)), count)
                    for i in range(vectors):
                        sums[r, i] = own.add(b, sums[r, i], weights[i], inputs)

            with cgutils.for_range(b, b.udiv(steps, number(own.depth)), intp=number) as loop:
                add(b.mul(loop.index, number(own.depth)), own.depth)
            if own.depth == 2:
                with b.if_then(b.trunc(steps, ir.IntType(1))):
                    add(b.sub(steps, number(1)), 1)
            for r, i in sums.places:
                place = offset(b, out_rows[r], (vector, out_bytes), (i, out_bytes))
                total = b.fadd(_load(b, place, out_name), sums[r, i])
                store(b, own.rounded(b, total, out_name), place)

        _walk(b, num_rows, num_vectors, tile)
        return context.get_dummy_value()

    return types.void(kind, out_dtype, *[types.intp] * 8), generate


def _addresses(b: Any, table: Any, first: Any, count: int) -> list[Any]:
    """Load `count` addresses from a table of them."""
    return [load(b, offset(b, table, (first, 8), (i, 8)), table.type, 8) for i in range(count)]


def _walk(b: Any, num_rows: Any, num_vectors: Any, tile: Callable[..., None]) -> None:
    """Generate tiles of all sizes: tile(rows, vectors, first row, first vector)."""
    number = num_rows.type
    row = number(0)
    for rows, widths in _TILES.items():
        row_times = b.udiv(b.sub(num_rows, row), number(rows))
        with cgutils.for_range(b, row_times, intp=number) as at_rows:
            vector = number(0)
            for vectors in widths:
                times = b.udiv(b.sub(num_vectors, vector), number(vectors))
                with cgutils.for_range(b, times, intp=number) as at:
                    first = offset(b, row, (at_rows.index, rows))
                    tile(rows, vectors, first, offset(b, vector, (at.index, vectors)))
                vector = offset(b, vector, (times, vectors))
        row = offset(b, row, (row_times, rows))
