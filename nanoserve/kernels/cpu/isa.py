"""Dot products of integer weights with integer inputs: one class per kind of instruction.

Sums are exact, in 32 bits: |code| is at most 128 for weights and 127 for inputs, so
2^31 / (128 x 127) = 132,000 inputs fit. The kinds differ in how many inputs one instruction
multiplies (`depth`) and in whether it needs one operand to be unsigned. In the latter case, a code
is stored as code + `shift`, and each sum starts at -shift times the sum of the inputs' codes, as a
correction.

Caution: AVX2's multiplication of unsigned by signed bytes adds pairs in 16 bits and saturates
silently, for instance with 2 x 255 x 127. Bytes are therefore widened to 16 bits first; nibbles, at
most 15, are not: eight pairs add up to at most 8 x 2 x 15 x 127 = 30,480, below 2^15.
"""

from llvmlite import ir

from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.vectors import (
    BYTE,
    HALF_WORD,
    LANES,
    WORD,
    WORDS,
    call,
    constant,
    joined,
    load,
    part,
    splat,
)

_HALF_VECTOR = ir.VectorType(WORD, LANES // 2)
_SHORTS = ir.VectorType(HALF_WORD, LANES)


class Kind:
    """Base class. A step is `depth` inputs: `weight_bytes` of 16 outputs, `x_bytes` of a row."""

    bits, depth, shift, steps_at_once = 8, 1, 0, 1
    weight_bytes, x_bytes = 16, 2
    is_x_wide = False  # codes of x have 16 bits, not 8
    # True if the loop over a group's steps is unrolled. For most kinds, LLVM would then reorder the
    # additions, row by row, and need more registers for the group's weights than there are.
    is_unrolled = False

    def takes(self, group_size: int) -> bool:
        return group_size % (self.depth * self.steps_at_once) == 0

    def add(self, b, totals, num_rows, num_vectors, weights_at, x_at):
        """Compute totals[row, i] += weights . x, for `steps_at_once` steps.

        weights_at(step, i) and x_at(step, row) return addresses.
        """
        weights = [self.weights(b, weights_at(0, i)) for i in range(num_vectors)]
        for row in range(num_rows):
            inputs = self.inputs(b, x_at(0, row))
            for i in range(num_vectors):
                totals[row, i] = self.dot(b, totals[row, i], weights[i], inputs)


class Bytes(Kind):
    """Any processor: one input at a time, as 32-bit integers."""

    is_x_wide = True

    def weights(self, b, address):
        return b.sext(load(b, address, ir.VectorType(BYTE, LANES), 16), WORDS)

    def inputs(self, b, address):
        return splat(b, b.sext(load(b, address, HALF_WORD, 2), WORD))

    def dot(self, b, total, weights, inputs):
        return b.add(total, b.mul(weights, inputs))


class Nibbles(Kind):
    """Any processor: a byte holds the codes of two inputs, the first in its low half."""

    bits, depth, shift, x_bytes, is_x_wide = 4, 2, 8, 4, True

    def weights(self, b, address):
        pairs = b.zext(load(b, address, ir.VectorType(BYTE, LANES), 16), WORDS)
        return b.and_(pairs, constant(WORD, 15)), b.lshr(pairs, constant(WORD, 4))

    def inputs(self, b, address):
        numbers = (load(b, b.add(address, address.type(at)), HALF_WORD, 2) for at in (0, 2))
        return [splat(b, b.sext(number, WORD)) for number in numbers]

    def dot(self, b, total, weights, inputs):
        for weight, x in zip(weights, inputs, strict=True):
            total = b.add(total, b.mul(weight, x))
        return total


class PairsOfBytes(Kind):
    """AVX2: bytes of two inputs, widened to 16 bits; products and their sum have 32 bits."""

    depth, weight_bytes, x_bytes, is_x_wide = 2, 32, 4, True

    def weights(self, b, address):
        shorts = b.sext(
            load(b, address, ir.VectorType(BYTE, 2 * LANES), 32),
            ir.VectorType(HALF_WORD, 2 * LANES),
        )
        return part(b, shorts, 0, LANES), part(b, shorts, LANES, LANES)

    def inputs(self, b, address):
        return b.bitcast(splat(b, load(b, address, WORD, 4), LANES // 2), _SHORTS)

    def dot(self, b, total, weights, inputs):
        name = "llvm.x86.avx2.pmadd.wd"
        low, high = (call(b, name, _HALF_VECTOR, weight, inputs) for weight in weights)
        return b.add(total, joined(b, low, high))


class DotsOfBytes(Kind):
    """VNNI: one instruction adds four products of an unsigned and a signed byte."""

    depth, shift, weight_bytes, x_bytes, is_unrolled = 4, 128, 64, 4, True

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes  # 16 for AVX-512, 8 for 256-bit vectors

    def weights(self, b, address):
        return load(b, address, WORDS, 64)

    def inputs(self, b, address):
        return splat(b, load(b, address, WORD, 4))

    def dot(self, b, total, weights, inputs):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self._lanes}"
        if self._lanes == LANES:
            return call(b, name, WORDS, total, weights, inputs)
        halves = (
            call(b, name, _HALF_VECTOR, *(part(b, v, at, 8) for v in (total, weights, inputs)))
            for at in (0, 8)
        )
        return joined(b, *halves)


class DotsOfNibbles(DotsOfBytes):
    """VNNI: a byte holds the codes of inputs k and k + 4 of eight."""

    bits, depth, shift, x_bytes = 4, 8, 8, 8

    def weights(self, b, address):
        return nibbles(b, address)

    def inputs(self, b, address):
        return [splat(b, load(b, b.add(address, address.type(at)), WORD, 4)) for at in (0, 4)]

    def dot(self, b, total, weights, inputs):
        for weight, x in zip(weights, inputs, strict=True):
            total = super().dot(b, total, weight, x)
        return total


class PairsOfNibbles(Kind):
    """AVX2: the layout of `DotsOfNibbles`; eight pairs are added in 16 bits, then in 32."""

    bits, depth, shift, weight_bytes, x_bytes, steps_at_once = 4, 8, 8, 64, 8, 4

    def add(self, b, totals, num_rows, num_vectors, weights_at, x_at):
        ones = constant(HALF_WORD, 1)
        halves = [(i, half) for i in range(num_vectors) for half in (0, 1)]
        sums = {(row, *at): constant(HALF_WORD, 0) for row in range(num_rows) for at in halves}
        for step in range(self.steps_at_once):
            weights = [nibbles(b, weights_at(step, i)) for i in range(num_vectors)]
            for row in range(num_rows):
                for which in (0, 1):
                    address = b.add(x_at(step, row), x_at(step, row).type(4 * which))
                    x = splat(b, load(b, address, WORD, 4), LANES // 2)
                    for i, half in halves:
                        own = part(b, weights[i][which], half * 8, 8)
                        pairs = self._pairs(b, own, x)
                        sums[row, i, half] = b.add(sums[row, i, half], pairs)
        for row in range(num_rows):
            for i in range(num_vectors):
                low, high = (
                    call(b, "llvm.x86.avx2.pmadd.wd", _HALF_VECTOR, sums[row, i, half], ones)
                    for half in (0, 1)
                )
                totals[row, i] = b.add(totals[row, i], joined(b, low, high))

    def _pairs(self, b, unsigned, signed):
        bytes_ = ir.VectorType(BYTE, 32)
        operands = (b.bitcast(value, bytes_) for value in (unsigned, signed))
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, *operands)


def nibbles(b: ir.IRBuilder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Load 64 bytes; return their low and their high nibbles, as bytes."""
    both, low = load(b, address, WORDS, 64), constant(WORD, 0x0F0F0F0F)
    return b.and_(both, low), b.and_(b.lshr(both, constant(WORD, 4)), low)


KINDS = {
    "bytes": Bytes(),
    "nibbles": Nibbles(),
    "pairs of bytes": PairsOfBytes(),
    "pairs of nibbles": PairsOfNibbles(),
    "dots of bytes": DotsOfBytes(LANES),
    "dots of nibbles": DotsOfNibbles(LANES),
    "short dots of bytes": DotsOfBytes(LANES // 2),
    "short dots of nibbles": DotsOfNibbles(LANES // 2),
}


def kinds_here() -> list[str]:
    """Return the names of the kinds that this processor supports, the best first."""
    kinds = []
    if has("avx512vnni"):
        kinds += ["dots of bytes", "dots of nibbles"]
    if has("avxvnni") or has("avx512vnni", "avx512vl"):
        kinds += ["short dots of bytes", "short dots of nibbles"]
    if has("avx2"):
        kinds += ["pairs of bytes", "pairs of nibbles"]
    return [*kinds, "bytes", "nibbles"]
