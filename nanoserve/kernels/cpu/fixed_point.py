"""Integer arithmetic for attention over an int8 KV cache, for `attention_tiles`.

A vector holds twice as many 16-bit integers as floats, and one instruction, which LLVM selects,
multiplies them and adds adjacent products. So queries are quantized to 16 bits, and so are the
weights of `TOKENS` tokens, relative to the largest of them. It is used for 16-bit models only.
"""

from collections.abc import Iterator

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.vectors import (
    BYTE,
    FLOAT,
    HALF_WORD,
    REGISTER,
    WORD,
    Accumulators,
    Rows,
    call,
    constant,
    load,
    multiply_add,
    offset,
    prefetch,
    shuffled,
    splat,
    store,
)

TOKENS = 16  # tokens whose weights share a scale
UNIT = 2 * REGISTER  # values multiplied by one instruction
LARGEST = 32767
# Units whose sums stay in registers, by queries.
_WIDTHS = {6: (2, 1), 2: (4, 1), 1: (4, 1)} if has("avx512f") else {6: (1,), 2: (2, 1), 1: (2, 1)}
# The values of a unit that are interleaved in one vector: within 16 bytes it is one instruction.
_HALVES = [[at + i for at in range(half, UNIT, 16) for i in range(8)] for half in (0, 8)]
_PLACES = sorted(range(UNIT), key=[i for half in _HALVES for i in half].__getitem__)
_SHORTS = ir.VectorType(HALF_WORD, UNIT)


class Shorts:
    """Scores as sums of products of 16-bit integers, see `attention_tiles.scores_of`."""

    sums, step, query = WORD, UNIT, types.int16

    @staticmethod
    def read(b: ir.IRBuilder, address: ir.Value, element: types.Type, lanes: int) -> ir.Value:
        """Load the next elements, int16 or int8, as 16-bit integers."""
        kind, align = (BYTE, 1) if element == types.int8 else (HALF_WORD, 2)
        loaded = load(b, address, ir.VectorType(kind, lanes), align)
        return b.sext(loaded, ir.VectorType(HALF_WORD, lanes))

    @staticmethod
    def add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
        """Return total + x * y; for vectors, adjacent products are added."""
        count = x.type.count
        products = b.mul(*(b.sext(value, ir.VectorType(WORD, count)) for value in (x, y)))
        if count > 1:
            products = b.add(*(shuffled(b, products, range(at, count, 2)) for at in (0, 1)))
        return b.add(total, products)

    @staticmethod
    def floats(b: ir.IRBuilder, sums: ir.Value) -> ir.Value:
        return b.sitofp(sums, ir.VectorType(FLOAT, sums.type.count))


def is_for(of_model: types.Type, of_cache: types.Type) -> bool:
    """Return True if 16-bit integers are used for these types: bfloat16 models and int8 caches."""
    return of_model == types.uint16 and of_cache == types.int8


def add_values(
    b: ir.IRBuilder,
    count: int,
    sums: Rows,
    weights: Rows,
    v: Rows,
    scales: ir.Value,
    head_dim: ir.Value,
    soon: Rows,
) -> None:
    """Compute sums[query] += weights[query, token] * v[token], for `TOKENS` tokens and whole units.

    The adjacent products belong to two tokens, whose values are interleaved.
    """
    number, first = head_dim.type, head_dim.type(0)
    coded = [_coded(b, weights.at(b, query), scales) for query in range(count)]
    for width in _WIDTHS[count]:
        chunks = b.udiv(b.sub(head_dim, first), number(width * UNIT))
        with cgutils.for_range(b, chunks, intp=number) as chunk:
            d = b.add(first, b.mul(chunk.index, number(width * UNIT)))
            own = Accumulators(b, count, 2 * width, constant(WORD, 0, REGISTER))
            with cgutils.for_range(b, number(TOKENS // 2), intp=number) as pair:
                tokens = [b.add(b.mul(pair.index, number(2)), number(i)) for i in (0, 1)]
                for token in tokens:
                    for line in range(0, width * UNIT, 64):
                        prefetch(b, soon.at(b, token, (d, 1), (line, 1)))
                pairs = [_pair(b, offset(b, codes, (pair.index, 4))) for codes, _ in coded]
                for unit in range(width):
                    at = [v.at(b, token, (d, 1), (unit, UNIT)) for token in tokens]
                    for half, values in enumerate(_interleaved(b, at)):
                        for query, weight in enumerate(pairs):
                            place = query, 2 * unit + half
                            own[place] = Shorts.add(b, values, weight, own[place])
            for query, (_, factor) in enumerate(coded):
                for unit in range(width):
                    both = own[query, 2 * unit], own[query, 2 * unit + 1]
                    found = shuffled(b, both[0], _PLACES, both[1])
                    found = b.sitofp(found, ir.VectorType(FLOAT, UNIT))
                    at = sums.at(b, query, (d, 4), (unit, 4 * UNIT))
                    before = load(b, at, found.type, 4)
                    store(b, multiply_add(b, found, splat(b, factor, UNIT), before), at)
        first = b.add(first, b.mul(chunks, number(width * UNIT)))


def _coded(b: ir.IRBuilder, weights: ir.Value, scales: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return (address of int16 [TOKENS], factor), whose product is weights * scales.

    If one of these is NaN, so is the factor.
    """
    floats, words = ir.VectorType(FLOAT, TOKENS), ir.VectorType(WORD, TOKENS)
    products = b.fmul(load(b, weights, floats, 4), load(b, scales, floats, 4))
    # Magnitudes have the order of their bits, with NaN above infinity.
    bits = b.and_(b.bitcast(products, words), constant(WORD, 0x7FFFFFFF, TOKENS))
    largest = b.bitcast(call(b, f"llvm.vector.reduce.umax.v{TOKENS}i32", WORD, bits), FLOAT)
    # The inverse of a smaller value would overflow float32: such values become zero.
    is_enough = b.fcmp_ordered(">", largest, FLOAT(1e-30))
    inverse = b.select(is_enough, b.fdiv(FLOAT(LARGEST), largest), FLOAT(0))
    scaled = b.fadd(b.fmul(products, splat(b, inverse, TOKENS)), constant(FLOAT, 0.5, TOKENS))
    codes = b.fptosi(scaled, words)  # rounds to nearest, as none is negative
    place = cgutils.alloca_once(b, ir.VectorType(HALF_WORD, TOKENS))
    b.store(b.trunc(codes, place.type.pointee), place)
    return b.ptrtoint(place, weights.type), b.fdiv(largest, FLOAT(LARGEST))


def _pair(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return a vector of two tokens' weights, alternating."""
    return b.bitcast(splat(b, load(b, address, WORD, 4), REGISTER), _SHORTS)


def _interleaved(b: ir.IRBuilder, two: list[ir.Value]) -> Iterator[ir.Value]:
    """Yield the interleaved values at two addresses, as two vectors of 16-bit integers."""
    first, second = (load(b, address, ir.VectorType(BYTE, UNIT), 1) for address in two)
    for half in _HALVES:
        places = [place for i in half for place in (i, UNIT + i)]
        yield b.sext(shuffled(b, first, places, second), _SHORTS)
