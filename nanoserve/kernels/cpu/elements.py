"""Array elements of the CPU kernels, their conversion to float32, and e^x.

numba has no type for bfloat16, which is the upper half of a float32: shifted bits are a float32.
Nor has it one for e4m3: a sign bit, 4 bits of exponent (bias 7) and 3 of mantissa. An array's type
determines its elements: float32, uint16 for bfloat16, int8 for integers, uint8 for e4m3.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype
from torch import Tensor

# Sums may be reordered, which allows vectorisation; infinities and NaN are preserved.
FAST: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}
# Functions without sums gain nothing from it, and would not be batch-invariant: the reordering of
# (a * b) * c depends on the code around it, so a row's bits could depend on the number of rows.
EXACT = {**FAST, "fastmath": False}
_LOG2_E = np.float32(math.log2(math.e))


# An example element determines an array's type.
ELEMENTS = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.int8: np.int8(0),
    torch.uint8: np.uint8(0),
    torch.int32: np.int32(0),
}


def address(x: Tensor) -> int:
    """Return a tensor's address, for `array_at`: 0.2 microseconds; numba's own conversion: 2.

    Raises `ValueError` for a tensor that is not contiguous or not on a CPU.
    """
    if not (x.is_contiguous() and x.is_cpu):
        raise ValueError(
            f"a tensor of strides {x.stride()} on {x.device} must be contiguous and on a CPU"
        )
    return x.data_ptr()


def array_at(address, shape, element):
    """Return the contiguous array of such elements at an address."""


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
    """Convert an array element, float32 or the bits of bfloat16, to float32."""


@overload(to_float, inline="always")
def _to_float(x):
    if x == types.float32:
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


def store(out, i, x):
    """Store x, a float32, in out[i], rounded to nearest, ties to even."""


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
    # Below 2^-6, values are subnormal, multiples of 2^-9; the code 8 is the first normal value.
    small = np.uint32(np.int32(np.rint(magnitude.view(np.float32) * np.float32(2**9))))
    is_small = magnitude < np.uint32((127 - 6) << 23)
    code = small if is_small else np.uint32(rounded - np.uint32((127 - 7) << 3))
    return np.uint8(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80) | code)


@njit(inline="always", **FAST)
def exp(x):
    """Return e^x for x <= 0, to 2e-7, from vectorisable operations only.

    2^n is computed by setting a float's exponent bits to n.
    """
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
