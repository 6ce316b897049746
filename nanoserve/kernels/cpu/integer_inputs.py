"""Quantize activations for integer products, with one scale for each group of a row.

A few activations of a real model are thousands of times larger than the median of their row. With
one scale per row, all other values would become 0; so each `GROUP` of them has its own scale, as in
llama.cpp.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoserve.kernels.cpu.elements import EXACT, to_float
from nanoserve.kernels.cpu.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF_WORD,
    LANES,
    WORD,
    WORDS,
    call,
    constant,
    load,
    offset,
    splat,
)

GROUP = 32  # inputs that share a scale, at most
_SMALLEST = 1e-36  # smaller values become zero, since their inverse would overflow float32


@njit(**EXACT)
def quantize_row(x, row, size, shift, codes, scale, starts, sums):
    """Quantize a row in groups of `size` inputs: codes = x / scale, scale = max |x| / 127.

    scale, starts: [num_rows, x groups]; starts are -shift x the sum of the group's codes. sums:
    [num_rows, weight groups], the sums of codes x scale. A group with NaN or infinity has a scale
    of NaN, so that all outputs of its row become NaN.
    """
    values, own_codes, groups = x[row], codes[row], scale.shape[1]
    per_sum = groups // sums.shape[1]
    sums[row] = np.float32(0)
    for group in range(groups):
        first = group * size
        if size == GROUP:
            top, total = _quantize_vectors(values, first, own_codes)
        else:
            top, total = _quantize(values, first, size, own_codes)
        own_scale = top * np.float32(1 / 127)
        scale[row, group] = own_scale
        starts[row, group] = -shift * total
        sums[row, group // per_sum] += np.float32(total) * own_scale


@njit(**EXACT)
def _quantize(values, first, size, codes):
    """Write a group's codes; return max |x| (NaN unless all are finite) and the sum of codes."""
    bits = np.int32(0)
    for i in range(first, first + size):  # magnitudes have the order of their bits, NaN last
        own = np.float32(to_float(values[i])).view(np.int32) & np.int32(0x7FFFFFFF)
        bits = max(bits, np.int32(own))
    is_finite = bits < np.int32(0x7F800000)
    top = np.int32(bits).view(np.float32) if is_finite else np.float32(np.nan)
    inverse = np.float32(127) / top if top > np.float32(_SMALLEST) else np.float32(0)
    total = np.int32(0)
    for i in range(first, first + size):
        code = np.int32(np.rint(to_float(values[i]) * inverse)) if is_finite else np.int32(0)
        codes[i] = code
        total += code
    return top, total


@intrinsic
def _quantize_vectors(typing_context, values, first, codes):
    """Run `_quantize` for `GROUP` inputs, with vectors: numba would use only four lanes."""

    def generate(context, b, signature, args):
        of_values, first, of_codes = signature.args[0], args[1], signature.args[2]

        def start(kind, array):
            data = context.make_array(kind)(context, b, array).data
            return b.add(b.ptrtoint(data, first.type), b.mul(first, first.type(size_of(kind))))

        def size_of(kind):
            return kind.dtype.bitwidth // 8

        source, target = start(of_values, args[0]), start(of_codes, args[2])
        step = LANES * size_of(of_values)
        floats = [
            _floats(b, offset(b, source, (i, step)), of_values.dtype) for i in range(GROUP // LANES)
        ]
        # Magnitudes have the order of their bits, with NaN above infinity.
        largest = constant(WORD, 0)
        for vector in floats:
            bits = b.and_(b.bitcast(vector, WORDS), constant(WORD, 0x7FFFFFFF))
            largest = b.select(b.icmp_signed(">", bits, largest), bits, largest)
        largest = call(b, f"llvm.vector.reduce.smax.v{LANES}i32", WORD, largest)
        is_finite = b.icmp_signed("<", largest, WORD(0x7F800000))
        top = b.select(is_finite, b.bitcast(largest, FLOAT), FLOAT(float("nan")))
        is_enough = b.fcmp_ordered(">", top, FLOAT(_SMALLEST))
        inverse = splat(b, b.select(is_enough, b.fdiv(FLOAT(127), top), FLOAT(0)))
        sums = constant(WORD, 0)
        for i, vector in enumerate(floats):
            quotient = call(b, f"llvm.rint.v{LANES}f32", FLOATS, b.fmul(vector, inverse))
            numbers = b.fptosi(quotient, WORDS)
            numbers = b.select(splat(b, is_finite), numbers, constant(WORD, 0))
            kind = ir.VectorType(BYTE if size_of(of_codes) == 1 else HALF_WORD, LANES)
            to = offset(b, target, (i, LANES * size_of(of_codes)))
            b.store(b.trunc(numbers, kind), b.inttoptr(to, kind.as_pointer()), align=1)
            sums = b.add(sums, numbers)
        total = call(b, f"llvm.vector.reduce.add.v{LANES}i32", WORD, sums)
        return cgutils.pack_struct(b, (top, total))

    result = types.Tuple((types.float32, types.int32))
    return result(values, types.intp, codes), generate


def _floats(b: ir.IRBuilder, address: ir.Value, element: types.Type) -> ir.Value:
    """Load the next inputs, float32 or the bits of bfloat16, as float32."""
    if element == types.float32:
        return load(b, address, FLOATS, 4)
    words = b.zext(load(b, address, ir.VectorType(HALF_WORD, LANES), 2), WORDS)
    return b.bitcast(b.shl(words, constant(WORD, 16)), FLOATS)
