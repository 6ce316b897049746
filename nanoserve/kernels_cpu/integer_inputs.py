"""The inputs of integer products: each row of x becomes integers, with one scale."""

import numpy as np
from numba import njit

from nanoserve.kernels_cpu.values import EXACT, to_float


@njit(**EXACT)
def quantize_row(x, row, largest, shift, codes, starts, sums, scale):
    """codes = x / scale, with scale = largest / 127: of a row, which becomes NaN if it holds one.

    largest: [num_rows], or [0] if it is the row's own largest magnitude.
    """
    values, bits = x[row], np.int32(0)
    for i in range(len(values)):  # magnitudes are in the order of their bits, NaN after infinity
        own = np.float32(to_float(values[i])).view(np.int32) & np.int32(0x7FFFFFFF)
        bits = max(bits, np.int32(own))
    is_finite = bits < np.int32(0x7F800000)
    top = largest[row] if len(largest) else np.int32(bits).view(np.float32)
    # What is smaller would need an inverse beyond float32, and becomes zero.
    inverse = np.float32(127) / top if is_finite and top > np.float32(1e-36) else np.float32(0)
    size = len(values) // starts.shape[1]
    for group in range(starts.shape[1]):
        part = values[group * size : (group + 1) * size]
        own_codes = codes[row, group * size : (group + 1) * size]
        total = np.int32(0)
        for i in range(size):
            code = np.int32(np.rint(to_float(part[i]) * inverse))
            own_codes[i] = code
            total += code
        starts[row, group] = -shift * total
        sums[row, group] = total
    scale[row] = top * np.float32(1 / 127) if is_finite else np.float32(np.nan)
