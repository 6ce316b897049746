"""What the CPU kernels compute with: elements of arrays, e^x.

bfloat16 has no type in numba. It is the upper half of a float32, so its bits, shifted, are one.
Nor has e4m3, the 8 bits of which are a sign, 4 of exponent (bias 7) and 3 of mantissa. An array's
type says what its elements are: float32, uint16 for bfloat16, int8 for integers, uint8 for e4m3.
"""

import math

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype
from torch import Tensor

# Sums may be reordered, which is what makes vectors of them; infinities and NaN stay what they are.
FAST = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "cache": True}
# What makes no sums gains nothing by it and would lose: how (a * b) * c is reordered depends on
# what is compiled around it, and a row would get other bits where there are many.
EXACT = {**FAST, "fastmath": False}
_LOG2_E = np.float32(math.log2(math.e))


# What an array holds is said by one of its elements.
ELEMENTS = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.int8: np.int8(0),
    torch.uint8: np.uint8(0),
    torch.int32: np.int32(0),
}


def address(x: Tensor) -> int:
    """For `array_at`. A tensor that becomes an array here costs 2 microseconds, its address 0.2."""
    if not (x.is_contiguous() and x.is_cpu):
        raise ValueError(
            f"a tensor of strides {x.stride()} on {x.device} has to be contiguous, and on a CPU"
        )
    return x.data_ptr()


def array_at(address, shape, element):
    """The contiguous array of such elements at an address."""


@overload(array_at, inline="always")
def _array_at(address, shape, element):
    dtype = as_dtype(element)
    return lambda address, shape, element: carray(_pointer(address), shape, dtype)


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


def to_float(x):
    """The float32 that an element of such an array stands for."""


@overload(to_float, inline="always")
def _to_float(x):
    if x == types.float32:
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


def store(out, i, x):
    """out[i] = x, a float32, rounded to the nearest, ties to even."""


@overload(store, inline="always")
def _store(out, i, x):
    if out.dtype == types.float32:

        def assign(out, i, x):
            out[i] = x

        return assign
    if out.dtype in (types.int8, types.int16):

        def round_to_integer(out, i, x):
            out[i] = np.int32(np.rint(x))

        return round_to_integer
    if out.dtype == types.uint8:

        def round_to_e4m3(out, i, x):
            out[i] = _to_e4m3(x)

        return round_to_e4m3

    def round_and_assign(out, i, x):
        bits = np.float32(x).view(np.uint32)
        is_odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        out[i] = np.uint16((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16))

    return round_and_assign


@njit(**FAST)
def _to_e4m3(x):
    bits = np.float32(x).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    is_odd = np.uint32((magnitude >> np.uint32(20)) & np.uint32(1))
    rounded = np.uint32((magnitude + np.uint32(0x7FFFF) + is_odd) >> np.uint32(20))
    # Below 2^-6 numbers are multiples of 2^-9; the eighth of them has the first exponent.
    small = np.uint32(np.int32(np.rint(magnitude.view(np.float32) * np.float32(2**9))))
    is_small = magnitude < np.uint32((127 - 6) << 23)
    code = small if is_small else np.uint32(rounded - np.uint32((127 - 7) << 3))
    return np.uint8(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80) | code)


@njit(inline="always", **FAST)
def exp(x):
    """e^x of x <= 0, to 2e-7, from operations that vectors have: 2^n is n in a float's exponent."""
    y = max(x * _LOG2_E, np.float32(-126))
    n = np.floor(y)
    f = y - n
    p = np.float32(1.8775767e-3)
    p = p * f + np.float32(8.9893397e-3)
    p = p * f + np.float32(5.5826318e-2)
    p = p * f + np.float32(2.4015361e-1)
    p = p * f + np.float32(6.9315308e-1)
    p = p * f + np.float32(9.9999994e-1)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
