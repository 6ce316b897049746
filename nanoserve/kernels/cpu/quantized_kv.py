"""Quantisation of K and V to 8 bits, compiled by numba: a head's codes and its scale.

A value is code x scale, with one scale per token and head; the largest magnitude of a head gets the
largest code. The results equal those of the torch and Triton versions bit for bit.
"""

import numpy as np
import torch
from numba import njit

from nanoserve.kernels.cpu.elements import EXACT, store

LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 448.0}  # uint8: the bits of e4m3
_SMALLEST_SCALE = np.finfo(np.float32).tiny


@njit(**EXACT)
def quantize_head(values, largest_code, codes):
    """Write the codes of a head's float32 values; return the scale, NaN if any is not finite."""
    bits = values.view(np.int32)
    largest = np.int32(0)
    for i in range(len(bits)):  # magnitudes have the order of their bits; infinity, then NaN last
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    is_finite = largest < np.int32(0x7F800000)
    scale = max(np.int32(largest).view(np.float32) / largest_code, _SMALLEST_SCALE)
    for i in range(len(values)):
        store(codes, i, values[i] / scale if is_finite else np.float32(0))
    return scale if is_finite else np.float32(np.nan)
