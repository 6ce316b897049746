"""Tiling and prefetching for matrix products with weights in panels.

A *tile* is a few rows of x and 16 to 64 outputs, whose sums stay in registers during the loop over
all inputs (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). A weight
is read once for all rows of the tile.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.packing import PANEL
from nanoserve.kernels.cpu.vectors import LANES, Accumulators, offset, rounded, store

# Rows that are multiplied with one panel before the next: their x stays in the processor's cache.
ROWS_AT_ONCE = 256
# (rows, vectors) of tiles, the largest first: sums, weights and an x must fit into the registers,
# 32 of 16 numbers or 16 of 8. A single row has many vectors to hide the latency of additions.
TILES = ((6, 4), (4, 4), (2, 4), (1, 4)) if has("avx512f") else ((6, 1), (4, 1), (2, 2), (1, 4))
_VECTORS = PANEL // LANES
# Prefetch distance in bytes: 10 % faster than a whole panel, with two threads on an EPYC.
_AHEAD = 1024

SOURCES = ("tile_walk", "vectors", "elements", "integer_inputs", "isa")  # see `written_by`

# (rows, vectors, first row, first vector, prefetch address, bytes to prefetch per step)
Tile = Callable[[int, int, ir.Value, ir.Value, ir.Value, ir.Value], None]


def walk(
    b: ir.IRBuilder,
    num_rows: ir.Value,
    panel: ir.Value,
    num_bytes: ir.Value,
    steps: ir.Value,
    tile: Tile,
    tiles: Sequence[tuple[int, int]] = TILES,
) -> None:
    """Generate the product of `num_rows` rows with the panel at an address, as tiles of all sizes.

    Meanwhile the next panel is prefetched, a part of it in each tile. A single row is limited by
    memory bandwidth: it prefetches the following bytes of its own panel.
    """
    number = panel.type
    is_single = b.icmp_signed("==", num_rows, number(1))
    following = b.add(panel, b.select(is_single, number(_AHEAD), num_bytes))
    first = number(0)
    share = b.udiv(num_bytes, b.mul(num_rows, number(_VECTORS)))  # per row and vector
    for rows, vectors in tiles:
        count = b.udiv(b.sub(num_rows, first), number(rows))
        step_bytes = b.udiv(b.mul(share, number(rows * vectors)), steps)
        with cgutils.for_range(b, count, intp=number) as at_rows:
            row = b.add(first, b.mul(at_rows.index, number(rows)))
            with cgutils.for_range(b, number(_VECTORS // vectors), intp=number) as at_vectors:
                vector = b.mul(at_vectors.index, number(vectors))
                done = b.add(b.mul(row, number(_VECTORS)), b.mul(vector, number(rows)))
                soon = b.add(following, b.mul(share, done))
                tile(rows, vectors, row, vector, soon, step_bytes)
        first = b.add(first, b.mul(count, number(rows)))


class IntegerPanel(NamedTuple):
    """Addresses of a panel of integer weights."""

    codes: ir.Value
    scale: ir.Value  # float32 or float16 [groups, PANEL]
    offset: ir.Value  # float32 [groups, PANEL]


def write(
    b: ir.IRBuilder,
    sums: Accumulators,
    shape: tuple[int, int],
    out: ir.Value,
    stride: ir.Value,
    vector: ir.Value,
    dtype: str,
) -> None:
    """Store a tile's sums of `shape` (rows, vectors), rounded to `dtype`, from address `out` on.

    stride: bytes from one row to the next; vector: index of the first vector in the panel.
    """
    rows, vectors = shape
    num_bytes = LANES * (4 if dtype == "float32" else 2)
    to = offset(b, out, (vector, num_bytes))
    for r in range(rows):
        for i in range(vectors):
            values = rounded(b, sums[r, i], dtype)
            store(b, values, offset(b, to, (r, stride), (i, num_bytes)))


def written_by(*names: str) -> str:
    """Return a hash of the source files that generate a kernel's instructions (default: `SOURCES`).

    Numba's cache identifies a function by its own file, and by the numbers and strings that it
    uses: the hash makes changes of other files count.
    """
    texts = (Path(__file__).with_name(f"{name}.py").read_bytes() for name in names or SOURCES)
    return hashlib.sha256(b"".join(texts)).hexdigest()
