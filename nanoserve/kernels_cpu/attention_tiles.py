"""The inner loops of decode attention: a few queries with the K, and with the V, of some tokens.

They are vectors, see `vectors`, because plain loops lose twice. A score is spread over a vector's
lanes, and to add those up costs as much as the products do, if it is done for each score by itself:
four share their additions. And sums of values stay in registers while a block's tokens pass by.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels_cpu.processor import has
from nanoserve.kernels_cpu.vectors import (
    BYTE,
    FLOAT,
    HALF_WORD,
    WORD,
    Accumulators,
    constant,
    load,
    multiply_add,
    offset,
    part,
    prefetch,
    splat,
    store,
)

_REGISTER = 16 if has("avx512f") else 8  # floats
_TOKENS = 4  # of one tile of scores
# (vectors, lanes) of a value's sums at once: with two queries, half of the registers.
_WIDTHS = ((4, _REGISTER), (2, _REGISTER), (1, _REGISTER), (1, 1))
if has("avx512f"):
    _WIDTHS = ((8, _REGISTER), *_WIDTHS)
_BYTES = {types.float32: 4, types.uint16: 2, types.int8: 1, types.uint8: 1}
_CODES = (types.int8, types.uint8)
_GIVEN = [types.UniTuple(types.intp, size) for size in (2, 2, 5)]


def _widened(b: ir.IRBuilder, address: ir.Value, element: types.Type, lanes: int) -> ir.Value:
    """float32 of the next elements, see `values`."""
    floats, words = ir.VectorType(FLOAT, lanes), ir.VectorType(WORD, lanes)

    def word(number: int) -> ir.Constant:
        return constant(WORD, number, lanes)

    if element == types.float32:
        return load(b, address, floats, 4)
    if element == types.uint16:
        bits = b.zext(load(b, address, ir.VectorType(HALF_WORD, lanes), 2), words)
        return b.bitcast(b.shl(bits, word(16)), floats)
    codes = b.sext(load(b, address, ir.VectorType(BYTE, lanes), 1), words)
    if element == types.int8:
        return b.sitofp(codes, floats)
    # e4m3: exponent and mantissa lie 20 places higher in a float32, and its exponent counts from
    # 127, not 7. What is too small for an exponent there is so here, until it is multiplied.
    bits = b.and_(b.shl(codes, word(20)), word(0x87F00000))
    return b.fmul(b.bitcast(bits, floats), constant(FLOAT, 2.0**120, lanes))


def _ask_for(b: ir.IRBuilder, address: ir.Value, num_bytes: ir.Value) -> None:
    number = address.type
    with cgutils.for_range_slice(b, number(0), num_bytes, number(64), number) as (line, _):
        prefetch(b, b.add(address, line))


def _sums(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """<4 x float>: the sum of each of four vectors.

    Pairs of vectors are interleaved within four neighbouring lanes and added, which halves their
    number; after that what is left are as many sums of four as there are fours of lanes.
    """

    def added(x: ir.Value, y: ir.Value, low: list[int]) -> ir.Value:
        lanes = (
            [four + at + more for four in range(0, _REGISTER, 4) for at in low] for more in (0, 2)
        )
        halves = (ir.Constant(ir.VectorType(WORD, _REGISTER), places) for places in lanes)
        return b.fadd(*(b.shuffle_vector(x, y, places) for places in halves))

    pairs = [added(x, y, [0, _REGISTER, 1, _REGISTER + 1]) for x, y in (vectors[:2], vectors[2:])]
    total, lanes = added(*pairs, [0, 1, _REGISTER, _REGISTER + 1]), _REGISTER
    while lanes > 4:
        lanes //= 2
        total = b.fadd(part(b, total, 0, lanes), part(b, total, lanes, lanes))
    return total


def _joined(b: ir.IRBuilder, numbers: list[ir.Value]) -> ir.Value:
    """A vector of vectors of one."""
    total = ir.Constant(ir.VectorType(FLOAT, len(numbers)), ir.Undefined)
    for i, number in enumerate(numbers):
        total = b.insert_element(total, b.extract_element(number, WORD(0)), WORD(i))
    return total


@intrinsic(prefer_literal=True)
def scores_of(typing_context, num_queries, element, queries, scores, given):
    """scores[query, token] = queries[query] . k[token]

    queries, scores: an address each, and the bytes from a row to the next, of float32. given: the
    address of k [num_tokens, head_dim]; that of its scales, float32 [num_tokens], if elements are
    codes; num_tokens; head_dim; from where on to ask for as many bytes.
    """
    count, own_bytes, is_coded = num_queries.literal_value, _BYTES[element], element in _CODES

    def generate(context, b, signature, args):
        queries, scores, given = (cgutils.unpack_tuple(b, value) for value in args[2:])
        (queries, queries_stride), (scores, scores_stride) = queries, scores
        k, scales, num_tokens, head_dim, soon = given
        number, row_bytes = k.type, b.mul(head_dim, k.type(own_bytes))
        first = number(0)

        def add_products(sums, token, tokens, start, end, lanes):
            with cgutils.for_range_slice(b, start, end, number(lanes), number) as (d, _):
                here = offset(b, k, (token, row_bytes), (d, own_bytes))
                at = [offset(b, here, (i, row_bytes)) for i in range(tokens)]
                keys = [_widened(b, place, element, lanes) for place in at]
                for query in range(count):
                    at = offset(b, queries, (query, queries_stride), (d, 4))
                    own = _widened(b, at, types.float32, lanes)
                    for i, key in enumerate(keys):
                        sums[query, i] = multiply_add(b, own, key, sums[query, i])

        for tokens in (_TOKENS, 1):
            tiles = b.udiv(b.sub(num_tokens, first), number(tokens))
            with cgutils.for_range(b, tiles, intp=number) as tile:
                token = b.add(first, b.mul(tile.index, number(tokens)))
                _ask_for(b, offset(b, soon, (token, row_bytes)), b.mul(row_bytes, number(tokens)))
                sums = Accumulators(b, count, _TOKENS, constant(FLOAT, 0.0, _REGISTER))
                rest = Accumulators(b, count, _TOKENS, constant(FLOAT, 0.0, 1))
                whole = b.and_(head_dim, number(-_REGISTER))
                add_products(sums, token, tokens, number(0), whole, _REGISTER)
                add_products(rest, token, tokens, whole, head_dim, 1)
                for query in range(count):
                    found = _sums(b, [sums[query, i] for i in range(_TOKENS)])
                    found = b.fadd(found, _joined(b, [rest[query, i] for i in range(_TOKENS)]))
                    found = part(b, found, 0, tokens)
                    if is_coded:
                        found = b.fmul(found, load(b, offset(b, scales, (token, 4)), found.type, 4))
                    store(b, found, offset(b, scores, (query, scores_stride), (token, 4)))
            first = b.add(first, b.mul(tiles, number(tokens)))
        return context.get_dummy_value()

    return types.void(num_queries, element, *_GIVEN), generate


@intrinsic(prefer_literal=True)
def add_values(typing_context, num_queries, element, sums, weights, given):
    """sums[query] += weights[query, token] * v[token]; arguments as for `scores_of`."""
    count, own_bytes, is_coded = num_queries.literal_value, _BYTES[element], element in _CODES

    def generate(context, b, signature, args):
        sums, weights, given = (cgutils.unpack_tuple(b, value) for value in args[2:])
        (sums, sums_stride), (weights, weights_stride) = sums, weights
        v, scales, num_tokens, head_dim, soon = given
        number, row_bytes = v.type, b.mul(head_dim, v.type(own_bytes))
        first = number(0)

        def factors(token):
            for query in range(count):
                at = offset(b, weights, (query, weights_stride), (token, 4))
                factor = load(b, at, FLOAT, 4)
                if is_coded:
                    factor = b.fmul(factor, load(b, offset(b, scales, (token, 4)), FLOAT, 4))
                yield factor

        for width, lanes in _WIDTHS:
            chunks = b.udiv(b.sub(head_dim, first), number(width * lanes))
            with cgutils.for_range(b, chunks, intp=number) as chunk:
                d = b.add(first, b.mul(chunk.index, number(width * lanes)))
                own = Accumulators(b, count, width, constant(FLOAT, 0.0, lanes))
                at = {
                    (query, i): offset(b, sums, (query, sums_stride), (d, 4), (i, lanes * 4))
                    for query in range(count)
                    for i in range(width)
                }
                for place, address in at.items():
                    own[place] = _widened(b, address, types.float32, lanes)
                with cgutils.for_range(b, num_tokens, intp=number) as token:
                    behind = (token.index, row_bytes), (d, own_bytes)
                    for line in range(0, width * lanes * own_bytes, 64):
                        prefetch(b, offset(b, soon, *behind, (line, 1)))
                    here = offset(b, v, *behind)
                    splats = [splat(b, factor, lanes) for factor in factors(token.index)]
                    for i in range(width):
                        address = offset(b, here, (i, lanes * own_bytes))
                        value = _widened(b, address, element, lanes)
                        for query, factor in enumerate(splats):
                            own[query, i] = multiply_add(b, factor, value, own[query, i])
                for place, address in at.items():
                    store(b, own[place], address)
            first = b.add(first, b.mul(chunks, number(width * lanes)))
        return context.get_dummy_value()

    return types.void(num_queries, element, *_GIVEN), generate
