"""Inner loops of attention: a few queries with the K, or the V, of some tokens.

They are explicit vector code, see `vectors`, for two reasons. The partial sums of a score are
spread over a vector's lanes, and adding these up for each score separately would cost as much as
the products: here four scores share the additions. And the sums of values stay in registers during
the loop over a block's tokens.
"""

from collections.abc import Iterator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels.cpu import fixed_point
from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.vectors import (
    BYTE,
    FLOAT,
    HALF_WORD,
    REGISTER,
    WORD,
    Accumulators,
    Rows,
    constant,
    load,
    multiply_add,
    offset,
    part,
    prefetch,
    shuffled,
    splat,
    store,
)

# A call has 6, 2 or 1 queries. More queries share the conversion of a K or V to floats; decode rows
# have few. By queries: the tokens in one tile of scores, and the vectors of values per pass. Their
# sums take up to three quarters of the registers, 32 of AVX-512 or 16 of others.
if has("avx512f"):
    _TOKENS = {6: 4, 2: 4, 1: 4}
    _WIDTHS = {6: (4, 2, 1), 2: (8, 4, 2, 1), 1: (8, 4, 2, 1)}
else:
    _TOKENS = {6: 2, 2: 4, 1: 4}
    _WIDTHS = {6: (2, 1), 2: (4, 2, 1), 1: (4, 2, 1)}
_BYTES = {types.float32: 4, types.uint16: 2, types.int16: 2, types.int8: 1, types.uint8: 1}
_CODES = (types.int8, types.uint8)
_GIVEN = [types.UniTuple(types.intp, size) for size in (2, 2, 5)]


def _widened(b: ir.IRBuilder, address: ir.Value, element: types.Type, lanes: int) -> ir.Value:
    """Load the next elements and convert them to float32, see `values`."""
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
    # e4m3: exponent and mantissa move up by 20 bits to their place in a float32. The exponent bias
    # is 127 instead of 7, which the factor 2^120 corrects. Subnormal e4m3 are subnormal float32
    # before the multiplication.
    bits = b.and_(b.shl(codes, word(20)), word(0x87F00000))
    return b.fmul(b.bitcast(bits, floats), constant(FLOAT, 2.0**120, lanes))


class _Floats:
    """Scores as sums of float32 products; `fixed_point.Shorts` is the integer version."""

    sums, step, query = FLOAT, REGISTER, types.float32
    read, add = staticmethod(_widened), staticmethod(multiply_add)

    @staticmethod
    def floats(b: ir.IRBuilder, sums: ir.Value) -> ir.Value:
        return sums


def _prefetch_bytes(b: ir.IRBuilder, address: ir.Value, num_bytes: ir.Value) -> None:
    number = address.type
    with cgutils.for_range_slice(b, number(0), num_bytes, number(64), number) as (line, _):
        prefetch(b, b.add(address, line))


def _sums(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Return <4 x float>: the sum of each of four vectors.

    Pairs of vectors are interleaved within groups of four lanes and added, which halves their
    number. Then each group of four lanes holds partial sums of all four vectors, and the groups are
    added.
    """

    def added(x: ir.Value, y: ir.Value, low: list[int]) -> ir.Value:
        fours = range(0, REGISTER, 4)
        places = ([four + at + more for four in fours for at in low] for more in (0, 2))
        return b.fadd(*(shuffled(b, x, own, y) for own in places))

    pairs = [added(x, y, [0, REGISTER, 1, REGISTER + 1]) for x, y in (vectors[:2], vectors[2:])]
    first, other = pairs
    total, lanes = added(first, other, [0, 1, REGISTER, REGISTER + 1]), REGISTER
    while lanes > 4:
        lanes //= 2
        total = b.fadd(part(b, total, 0, lanes), part(b, total, lanes, lanes))
    return total


def _sums_of_rows(b: ir.IRBuilder, vectors: list[ir.Value], size: int) -> Iterator[ir.Value]:
    """Yield <size x float>, the sum of each vector, for every `size` vectors; size is 1, 2 or 4."""
    for i in range(0, len(vectors), 4):
        four = vectors[i : i + 4]
        found = _sums(b, four + [constant(FLOAT, 0.0, REGISTER)] * (4 - len(four)))
        for first in range(0, len(four), size):
            yield part(b, found, first, size)


def _joined(b: ir.IRBuilder, numbers: list[ir.Value]) -> ir.Value:
    """Join vectors of one lane each into one vector."""
    total = ir.Constant(ir.VectorType(FLOAT, len(numbers)), ir.Undefined)
    for i, number in enumerate(numbers):
        total = b.insert_element(total, b.extract_element(number, WORD(0)), WORD(i))
    return total


@intrinsic(prefer_literal=True)
def scores_of(typing_context, num_queries, elements, queries, scores, given):
    """Compute scores[query, token] = queries[query] . k[token].

    elements: types of the model's values and of k. queries, scores: (address, row stride in bytes)
    of float32, or of int16 queries if `fixed_point.is_for` is True. given: the address of k
    [num_tokens, head_dim]; the address of its scales, float32 [num_tokens], if k holds codes;
    num_tokens; head_dim; the address from which as many bytes are prefetched.
    """
    count, (_, element) = num_queries.literal_value, tuple(elements)
    own_bytes, is_coded = _BYTES[element], element in _CODES
    kind = fixed_point.Shorts if fixed_point.is_for(*elements) else _Floats

    def generate(context, b, signature, args):
        queries, scores, given = (cgutils.unpack_tuple(b, value) for value in args[2:])
        queries, scores = Rows(*queries), Rows(*scores)
        k, scales, num_tokens, head_dim, soon = given
        number, row_bytes = k.type, b.mul(head_dim, k.type(own_bytes))
        k, soon = Rows(k, row_bytes), Rows(soon, row_bytes)
        first = number(0)

        def add_products(sums, token, tokens, start, end, step):
            with cgutils.for_range_slice(b, start, end, number(step), number) as (d, _):
                at = [k.at(b, token, (i, row_bytes), (d, own_bytes)) for i in range(tokens)]
                keys = [kind.read(b, place, element, step) for place in at]
                for query in range(count):
                    at = queries.at(b, query, (d, _BYTES[kind.query]))
                    own = kind.read(b, at, kind.query, step)
                    for i, key in enumerate(keys):
                        sums[query, i] = kind.add(b, own, key, sums[query, i])

        def add_rests(found, token, tokens):
            """Add the products of the head's last values, if it is no multiple of a vector."""
            rest = Accumulators(b, count, tokens, constant(kind.sums, 0, 1))
            add_products(rest, token, tokens, whole, head_dim, 1)
            for query in range(count):
                sums = [kind.floats(b, rest[query, i]) for i in range(tokens)]
                found[query, 0] = b.fadd(found[query, 0], _joined(b, sums))

        whole = b.and_(head_dim, number(-kind.step))
        has_rest = b.icmp_signed("<", whole, head_dim)
        for tokens in (_TOKENS[count], 1):
            tiles = b.udiv(b.sub(num_tokens, first), number(tokens))
            with cgutils.for_range(b, tiles, intp=number) as tile:
                token = b.add(first, b.mul(tile.index, number(tokens)))
                _prefetch_bytes(b, soon.at(b, token), b.mul(row_bytes, number(tokens)))
                sums = Accumulators(b, count, tokens, constant(kind.sums, 0, REGISTER))
                add_products(sums, token, tokens, number(0), whole, kind.step)
                vectors = [kind.floats(b, sums[place]) for place in sums.places]
                found = Accumulators(b, count, 1, constant(FLOAT, 0.0, tokens))
                for query, scores_of_query in enumerate(_sums_of_rows(b, vectors, tokens)):
                    found[query, 0] = scores_of_query
                with b.if_then(has_rest):
                    add_rests(found, token, tokens)
                for query in range(count):
                    own = found[query, 0]
                    if is_coded:
                        own = b.fmul(own, load(b, offset(b, scales, (token, 4)), own.type, 4))
                    store(b, own, scores.at(b, query, (token, 4)))
            first = b.add(first, b.mul(tiles, number(tokens)))
        return context.get_dummy_value()

    return types.void(num_queries, elements, *_GIVEN), generate


@intrinsic(prefer_literal=True)
def add_values(typing_context, num_queries, elements, sums, weights, given):
    """Compute sums[query] += weights[query, token] * v[token]; arguments as for `scores_of`."""
    count, (_, element) = num_queries.literal_value, tuple(elements)
    own_bytes, is_coded = _BYTES[element], element in _CODES

    def generate(context, b, signature, args):
        sums, weights, given = (cgutils.unpack_tuple(b, value) for value in args[2:])
        sums, weights = Rows(*sums), Rows(*weights)
        v, scales, num_tokens, head_dim, soon = given
        number, row_bytes = v.type, b.mul(head_dim, v.type(own_bytes))
        v, soon = Rows(v, row_bytes), Rows(soon, row_bytes)

        def factors(token):
            for query in range(count):
                factor = load(b, weights.at(b, query, (token, 4)), FLOAT, 4)
                if is_coded:
                    factor = b.fmul(factor, load(b, offset(b, scales, (token, 4)), FLOAT, 4))
                yield factor

        def add_floats(start):
            """Add the values of the tokens from `start` on, in float32."""
            first = number(0)
            for width, lanes in (*((width, REGISTER) for width in _WIDTHS[count]), (1, 1)):
                chunks = b.udiv(b.sub(head_dim, first), number(width * lanes))
                with cgutils.for_range(b, chunks, intp=number) as chunk:
                    d = b.add(first, b.mul(chunk.index, number(width * lanes)))
                    own = Accumulators(b, count, width, constant(FLOAT, 0.0, lanes))
                    at = {
                        (query, i): sums.at(b, query, (d, 4), (i, lanes * 4))
                        for query in range(count)
                        for i in range(width)
                    }
                    for place, address in at.items():
                        own[place] = _widened(b, address, types.float32, lanes)
                    with cgutils.for_range_slice(b, start, num_tokens, number(1), number) as (t, _):
                        for line in range(0, width * lanes * own_bytes, 64):
                            prefetch(b, soon.at(b, t, (d, own_bytes), (line, 1)))
                        here = v.at(b, t, (d, own_bytes))
                        at_values = [offset(b, here, (i, lanes * own_bytes)) for i in range(width)]
                        values = [_widened(b, place, element, lanes) for place in at_values]
                        for query, factor in enumerate(factors(t)):
                            factor = splat(b, factor, lanes)
                            for i, value in enumerate(values):
                                own[query, i] = multiply_add(b, factor, value, own[query, i])
                    for place, address in at.items():
                        store(b, own[place], address)
                first = b.add(first, b.mul(chunks, number(width * lanes)))

        if not fixed_point.is_for(*elements):
            add_floats(number(0))
            return context.get_dummy_value()
        tokens = number(fixed_point.TOKENS)
        is_whole = b.icmp_signed("==", b.urem(head_dim, number(fixed_point.UNIT)), number(0))
        tiles = b.select(is_whole, b.udiv(num_tokens, tokens), number(0))
        with cgutils.for_range(b, tiles, intp=number) as tile:
            first = b.mul(tile.index, tokens)
            fixed_point.add_values(
                b,
                count,
                sums,
                weights.moved(b, (first, 4)),
                v.moved(b, (first, row_bytes)),
                offset(b, scales, (first, 4)),
                head_dim,
                soon.moved(b, (first, row_bytes)),
            )
        rest = b.mul(tiles, tokens)
        with b.if_then(b.icmp_signed("<", rest, num_tokens)):
            add_floats(rest)
        return context.get_dummy_value()

    return types.void(num_queries, elements, *_GIVEN), generate
