"""Convert GGUF blocks to the canonical form (`QuantizedMatrix`), or to a float tensor.

A row is a run of blocks. Blocks of 32 values (Q8_0, Q4_0, ...) have a scale, and some a minimum, in
float16. Blocks of 256 (the "K" types) are 8 or 16 groups whose scales and minima are integers of 6
or 8 bits times one float16. The layouts follow ggml-quants.c; the tests compare with
`gguf.quants`. Q4_1, Q5_0 and Q5_1 are included because llama.cpp falls back to them in files of the
K types if rows are not a multiple of 256, as in Qwen2.5-0.5B.

Arrays are bytes, uint8 [rows, blocks, ...].
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from nanoserve.checkpoint.formats.mxfp4 import E2M1_CODES
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.gguf.container import BLOCKS

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# (codes, scale, offset or None), each [rows, blocks, values or groups of a block]
Parts = tuple[ndarray, ndarray, ndarray | None]


def read_values(kind: str, data: ndarray) -> Tensor | QuantizedMatrix:
    """Convert `data`, uint8 [..., bytes of a row], which must be 2-dimensional for block types.

    Floats keep their type. Raises `ValueError` for blocks that do not form a matrix.
    """
    if kind in FLOATS:
        return torch.from_numpy(np.array(data)).view(FLOATS[kind])
    if data.ndim != 2:
        raise ValueError(f"a tensor of type {kind} must have 2 dimensions, not {data.ndim}")
    blocks = np.array(data).reshape(len(data), -1, BLOCKS[kind][1])
    read, bits = _READERS[kind]
    codes, scale, *offset = (
        torch.from_numpy(part.reshape(len(data), -1)) for part in read(blocks) if part is not None
    )
    return QuantizedMatrix(codes, scale, offset[0] if offset else None, bits)


def _q8_0(blocks: ndarray) -> Parts:
    return blocks[..., 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: ndarray) -> Parts:
    return _nibbles(blocks[..., 2:], 16).view(np.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: ndarray) -> Parts:
    scale = _half(blocks, 0)
    return _centred(_nibbles(blocks[..., 4:], 16), scale, _half(blocks, 2))


def _q5_0(blocks: ndarray) -> Parts:
    codes = _nibbles(blocks[..., 6:], 16) | _high_bits(blocks[..., 2:6])
    return codes.view(np.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: ndarray) -> Parts:
    codes = _nibbles(blocks[..., 8:], 16) | _high_bits(blocks[..., 4:8])
    return codes.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: ndarray) -> Parts:
    """Decode Q4_K: 256 weights in 144 bytes, w = scale x nibble - minimum in groups of 32.

    Bytes 0 to 3 are two float16 and 4 to 15 the integers of `_scales_and_minima`; then 128 bytes of
    nibbles, of which 32 bytes hold two groups.
    """
    scale, minimum = _scales_and_minima(blocks)
    return _centred(_nibbles(blocks[..., 16:], 32), scale, -minimum)


def _q5_k(blocks: ndarray) -> Parts:
    """Decode Q5_K: bit g of byte i, of 32 bytes at 16, is the high bit of value i in group g."""
    scale, minimum = _scales_and_minima(blocks)
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> bits & 1) << 4
    codes = _nibbles(blocks[..., 48:], 32) | high.reshape(*blocks.shape[:2], 256)
    return codes.view(np.int8), scale, -minimum


def _q6_k(blocks: ndarray) -> Parts:
    """Decode Q6_K, in halves of 128 values.

    A half has 64 bytes of low nibbles, and 32 bytes with two high bits for each of four runs. 16
    values share a scale of 8 bits.
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3
    codes = _nibbles(blocks[..., :128], 64) | high.reshape(*blocks.shape[:2], 256) << 4
    scale = _half(blocks, 208) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return codes.view(np.int8) - 32, scale, None


def _mxfp4(blocks: ndarray) -> Parts:
    """Decode MXFP4: the exponent of a scale, and the codes of `formats.mxfp4`."""
    codes = E2M1_CODES.numpy()[_nibbles(blocks[..., 1:], 16)]
    return codes, np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128), None


_READERS: dict[str, tuple[Callable[[ndarray], Parts], int]] = {
    "Q8_0": (_q8_0, 8), "Q4_0": (_q4_0, 4), "Q4_1": (_q4_1, 4), "Q5_0": (_q5_0, 8),
    "Q5_1": (_q5_1, 8), "Q4_K": (_q4_k, 4), "Q5_K": (_q5_k, 8), "Q6_K": (_q6_k, 8),
    "MXFP4": (_mxfp4, 8),
}  # fmt: skip


def _half(blocks: ndarray, start: int) -> ndarray:
    """Return the float16 at byte `start` of each block, as float32 [rows, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: ndarray, run: int) -> ndarray:
    """Return, for each `run` of bytes, the low nibbles followed by the high ones."""
    runs = packed.reshape(*packed.shape[:2], -1, 1, run)
    halves = runs >> np.array([[0], [4]], np.uint8) & 15
    return halves.reshape(*packed.shape[:2], -1)


def _high_bits(packed: ndarray) -> ndarray:
    """Return the fifth bits of 32 codes, stored in order in 4 bytes, as 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _centred(codes: ndarray, scale: ndarray, minimum: ndarray) -> Parts:
    """Shift codes from 0..15, with w = code x scale + minimum, to -8..7."""
    return codes.view(np.int8) - 8, scale, minimum + 8 * scale


def _scales_and_minima(blocks: ndarray) -> tuple[ndarray, ndarray]:
    """Return scales and minima of the 8 groups of a Q4_K or Q5_K block, float32 [rows, blocks, 8].

    They are stored as two float16, and 12 bytes with 16 integers of 6 bits. Bytes 0 to 3 and 4 to 7
    hold the first four scales and minima, and, in their upper two bits, the high bits of the last
    four. The low four bits of these are the nibbles of bytes 8 to 11. Minima are subtracted.
    """
    scales, minima, rest = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([scales & 63, (rest & 15) | (scales >> 6 << 4)], axis=-1)
    minima = np.concatenate([minima & 63, (rest >> 4) | (minima >> 6 << 4)], axis=-1)
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minima.astype(
        np.float32
    )
