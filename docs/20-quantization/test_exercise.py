"""Tests of the exercise of chapter 20, against the engine's own quantization functions."""

import numpy as np
import pytest
import torch

from nanoserve.checkpoint.formats.packed import unpack_int32
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.models.quantization.online import quantize_int4, quantize_int8

from .exercise import (
    int4_codes,
    int4_scales,
    int8_product,
    int8_rows,
    pack_nibbles,
    unpack_nibbles,
)


def floats(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def same(found: np.ndarray, expected: np.ndarray, case: str) -> None:
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype, f"{case}: {found.dtype}, not {expected.dtype}"
    assert found.tolist() == expected.tolist(), f"{case}\ngives {found}\nnot {expected}"


def test_the_largest_magnitude_gets_the_code_minus_8() -> None:
    weight = floats([1.0, -4.0, 0.5, 2.0, 8.0, 1.0, -1.0, 0.0])
    case = f"weight {weight.tolist()}, groups of 4"
    scales = int4_scales(weight, 4)
    same(scales, floats([0.5, -1.0]), case)
    codes = int4_codes(weight, scales)
    same(codes, np.array([[2, -8, 1, 4, -8, -1, 1, 0]], np.int8), case)


def test_of_equal_magnitudes_the_negative_one_counts_and_the_other_is_clamped() -> None:
    weight = floats([4.0, -4.0, 1.0, 1.25])
    case = f"weight {weight.tolist()}, one group"
    scales = int4_scales(weight, 4)
    same(scales, floats([0.5]), case)
    same(int4_codes(weight, scales), np.array([[7, -8, 2, 2]], np.int8), case)


def test_a_group_of_zeros_has_scale_and_codes_0() -> None:
    weight = floats([0.0, 0.0, 1.0, -2.0])
    case = f"weight {weight.tolist()}, groups of 2"
    with np.errstate(all="raise"):
        scales = int4_scales(weight, 2)
        codes = int4_codes(weight, scales)
    same(scales, floats([0.0, 0.25]), case)
    same(codes, np.array([[0, 0, 4, -8]], np.int8), case)


def test_two_codes_per_byte() -> None:
    codes = np.array([[-8, 7, 0, -1]], np.int8)
    packed = pack_nibbles(codes)
    case = f"codes {codes.tolist()}"
    same(packed, np.array([[0xF0, 0x78]], np.uint8), case)
    same(unpack_nibbles(packed), codes, f"bytes {packed.tolist()}")


def test_each_row_has_its_own_scale() -> None:
    x = floats([1.0, -2.0], [0.0, 0.0], [127.0, 2.5])
    codes, scales = int8_rows(x)
    case = f"x {x.tolist()}"
    same(codes, np.array([[64, -127], [0, 0], [127, 2]], np.int8), case)
    same(scales, np.array([2 / np.float32(127), 0, 1], np.float32), case)


def test_sums_need_more_than_8_or_16_bits() -> None:
    x, codes = floats([127.0] * 1000), np.full((1, 1000), -127, np.int8)
    found = int8_product(x, codes, np.array([2.0], np.float32))
    expected = -127 * 127 * 1000 * 2
    assert found.tolist() == [[expected]], f"1000 x (127 x -127) x 2 is {expected}, not {found}"


@pytest.mark.parametrize("seed", range(20))
def test_4_bit_codes_equal_the_engines(seed: int) -> None:
    """With the engine's scales, which are the best of three: the error of a group with the reader's
    scale may be larger, but not smaller (except for rounding a scale to 16 bits)."""
    rng = np.random.default_rng(seed)
    size = [32, 64, 128][seed % 3]
    weight = (rng.standard_normal((5, 2 * size)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    engine = quantize_int4(torch.from_numpy(weight), size)
    case = f"seed {seed}: normal weights {weight.shape}, groups of {size}"
    same(int4_codes(weight, engine.scale.numpy()), engine.codes.numpy(), case)
    scales = int4_scales(weight, size)
    codes = int4_codes(weight, scales)
    own = QuantizedMatrix(torch.from_numpy(codes), torch.from_numpy(scales), bits=4).dequantize()
    own_error, engine_error = (
        np.square(other.numpy() - weight).reshape(5, 2, size).sum(axis=2)
        for other in (own, engine.dequantize())
    )
    assert (engine_error <= own_error * 1.01).all(), (
        f"{case}: your scales {scales} beat the engine's {engine.scale}: "
        f"errors {own_error}, {engine_error}"
    )


@pytest.mark.parametrize("seed", range(20))
def test_errors_are_bounded_by_half_a_scale(seed: int) -> None:
    """Or by a whole scale if a value is beyond the code 7."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((4, 64)).astype(np.float32)
    scales = int4_scales(weight, 32)
    steps = np.abs(scales).repeat(32, axis=1)
    back = int4_codes(weight, scales) * scales.repeat(32, axis=1)
    is_clamped = weight / scales.repeat(32, axis=1) > 7.5
    bound = np.where(is_clamped, steps, steps / 2) * 1.0001
    worst = np.argmax(np.abs(back - weight) - bound)
    case = f"seed {seed}: weight {weight.flat[worst]}, step {steps.flat[worst]}"
    assert (np.abs(back - weight) <= bound).all(), f"{case} came back as {back.flat[worst]}"


@pytest.mark.parametrize("seed", range(20))
def test_bytes_equal_those_of_checkpoints(seed: int) -> None:
    """The 32-bit words of compressed-tensors have the same order, the lowest bits first."""
    codes = np.random.default_rng(seed).integers(-8, 8, (3, 16)).astype(np.int8)
    packed = pack_nibbles(codes)
    words = torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))
    found = unpack_int32(words, 4).numpy().astype(np.int8) - 8
    same(found, codes, f"seed {seed}: packed {packed.tolist()}, as the engine unpacks it,")
    same(unpack_nibbles(packed), codes, f"seed {seed}: bytes {packed.tolist()}")


@pytest.mark.parametrize("seed", range(20))
def test_integer_products_are_as_accurate_as_their_codes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, outputs, inputs = rng.integers(1, 6), rng.integers(1, 6), int(rng.integers(1, 400))
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    case = f"seed {seed}: normal x {x.shape}, weight {weight.shape}"
    engine = quantize_int8(torch.from_numpy(weight))
    of_x = quantize_int8(torch.from_numpy(x))
    codes, scales = int8_rows(x)
    same(codes, of_x.codes.numpy(), case)
    same(scales, of_x.scale.numpy()[:, 0], case)
    found = int8_product(x, engine.codes.numpy(), engine.scale.numpy()[:, 0])
    assert found.dtype == np.float32, f"{case}: {found.dtype}"
    sums = of_x.codes.numpy().astype(np.int64) @ engine.codes.numpy().astype(np.int64).T
    exact = sums * of_x.scale.numpy().astype(float) * engine.scale.numpy().astype(float).T
    np.testing.assert_allclose(found, exact, rtol=1e-5, err_msg=case)
    # |x w - x' w'| <= |x - x'| |w| + |x'| |w - w'|, element by element.
    errors = of_x.scale.numpy() / 2, engine.scale.numpy() / 2
    magnitude = np.abs(of_x.dequantize().numpy()).sum(axis=1, keepdims=True)
    bound = errors[0] * np.abs(weight).sum(axis=1) + magnitude * errors[1].T
    difference = np.abs(found - x.astype(float) @ weight.astype(float).T)
    assert (difference <= bound * 1.001).all(), f"{case}: off by {difference}, at most {bound}"
