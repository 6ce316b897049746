"""Every block type of GGUF against `gguf.quants.dequantize`, on quantized and on random blocks."""

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")

from gguf_models import KINDS, decode, encode  # noqa: E402

from nanoserve.checkpoint.gguf.blocks import read_values  # noqa: E402
from nanoserve.checkpoint.gguf.container import _TYPES, BLOCKS  # noqa: E402


def random_data(kind: str, rows: int, columns: int) -> np.ndarray:
    """Any bits at all, but for exponents of float16 numbers that are nan or infinite."""
    if kind.endswith("_K"):
        return encode(np.empty((rows, columns), np.float32), kind, seed=1)
    block, size = BLOCKS[kind]
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    data[..., [1, 3] if kind in ("Q4_1", "Q5_1") else [1]] &= 0xBF
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_type_is_read_as_its_own_library_reads_it(kind: str) -> None:
    """Offsets of 4-bit codes are rounded once more: w = (q - 8) s + (8 s + m)."""
    data = random_data(kind, rows=37, columns=768)
    matrix, expected = read_values(kind, data), torch.from_numpy(decode(data, kind).copy())
    rounding = 2e-7 * 24 * matrix.scale.abs().max().item() if kind in ("Q4_1", "Q4_K") else 0
    assert matrix.shape == (37, 768)
    assert matrix.group_size == (16 if kind == "Q6_K" else 32)
    assert matrix.bits == (4 if kind.startswith("Q4") else 8)
    torch.testing.assert_close(matrix.dequantize(), expected, rtol=2e-7, atol=rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_use_the_range_that_they_claim(kind: str) -> None:
    codes = read_values(kind, random_data(kind, rows=64, columns=1024)).codes
    low, high = codes.min().item(), codes.max().item()
    ranges = {"Q8_0": (-128, 127), "Q5_0": (-16, 15), "Q6_K": (-32, 31), "MXFP4": (-12, 12)}
    ranges |= dict.fromkeys(("Q5_1", "Q5_K"), (0, 31))
    assert (low, high) == ranges.get(kind, (-8, 7))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_stay_what_they_are(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 64), np.float32)
    data = encode(values, kind).view(np.uint8).reshape(5, -1)
    read = read_values(kind, data)
    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    assert read.dtype == names[kind]
    stored = data.view({"F32": np.float32, "F16": np.float16, "BF16": np.uint8}[kind])
    torch.testing.assert_close(read.float(), torch.from_numpy(decode(stored, kind).copy()))


def test_sizes_and_numbers_of_types_are_those_of_the_package() -> None:
    kinds = gguf.GGMLQuantizationType
    assert {k: tuple(gguf.GGML_QUANT_SIZES[kinds[k]]) for k in BLOCKS} == BLOCKS
    assert {number: kinds(number).name for number in _TYPES} == _TYPES


def test_a_vector_in_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="type Q8_0 must have 2 dimensions, not 1"):
        read_values("Q8_0", np.zeros(34, np.uint8))
