"""RMSNorm and gated activations for CPUs, compiled by numba (extra: `nanoserve[cpu]`).

A decode step calls these about a hundred times, on little data. Each torch operator has an overhead
of a few microseconds, and an RMSNorm takes six operators: here it is one loop.
"""

import math

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanoserve.kernels.cpu import checks
from nanoserve.kernels.cpu.elements import (
    ELEMENTS,
    EXACT,
    FAST,
    address,
    array_at,
    exp,
    store,
    to_float,
)

FEW = 2**15  # values; for so few, one thread is faster than waking more threads
_TWICE_ROOT = np.float32(2 * math.sqrt(2 / math.pi))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x [..., hidden], times weight [hidden], in x's dtype."""
    checks.check_norm(x, weight)
    x = x.contiguous()
    out, (size,) = torch.empty_like(x), weight.shape
    norm = _rms_norm if x.numel() <= FEW else _rms_norm_parallel
    elements = ELEMENTS[x.dtype], ELEMENTS[weight.dtype]
    norm(*map(address, (x, out, weight)), x.numel() // size, size, eps, *elements)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, both [num_tokens, hidden], and normalise the sum, in place.

    Returns (normalised, sum), which overwrite x and residual.
    """
    checks.check_add_norm(x, residual, weight)
    add_norm = _add_rms_norm if x.numel() <= FEW else _add_rms_norm_parallel
    elements = ELEMENTS[x.dtype], ELEMENTS[weight.dtype]
    add_norm(*map(address, (x, residual, weight)), *x.shape, eps, *elements)
    return x, residual


def act_and_mul(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """Return act(gate) * up: [num_tokens, 2 x size] -> [num_tokens, size].

    act is SiLU, or GELU in its tanh form. torch's own depend on a value's place in the tensor: the
    last values, which do not fill a vector, are computed by another function.
    """
    checks.check_gate_up(gate_up)
    num_rows, both = gate_up.shape
    out = gate_up.new_empty(num_rows, both // 2)
    gate = _act_and_mul if out.numel() <= FEW // 2 else _act_and_mul_parallel
    gate(address(gate_up), address(out), num_rows, both // 2, is_gelu, ELEMENTS[out.dtype])
    return out


def swiglu_and_mul(gate_up: Tensor, alpha: float, limit: float | None, offset: float) -> Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + offset): see `act_and_mul` for shapes.

    limit: clamps gate from above and up from both sides first; None: neither.
    """
    checks.check_gate_up(gate_up)
    num_rows, both = gate_up.shape
    out = gate_up.new_empty(num_rows, both // 2)
    gate = _swiglu_and_mul if out.numel() <= FEW // 2 else _swiglu_and_mul_parallel
    constants = alpha, math.inf if limit is None else limit, offset
    gate(address(gate_up), address(out), num_rows, both // 2, constants, ELEMENTS[out.dtype])
    return out


@njit(**FAST)
def _sum_of_squares(x):
    total = np.float32(0)
    for i in range(len(x)):
        value = to_float(x[i])
        total += value * value
    return total


@njit(**EXACT)
def scale_of(x, eps):
    """Return 1 / sqrt(mean(x^2) + eps)."""
    return np.float32(1) / np.sqrt(_sum_of_squares(x) / np.float32(len(x)) + np.float32(eps))


@njit(**EXACT)
def _normalise(x, weight, eps, out):
    scale = scale_of(x, eps)
    for i in range(len(x)):
        store(out, i, to_float(x[i]) * scale * to_float(weight[i]))


@njit(**EXACT)
def _rms_norm(x, out, weight, num_rows, size, eps, element, weight_element):
    x, out = array_at(x, (num_rows, size), element), array_at(out, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in range(num_rows):
        _normalise(x[row], weight, eps, out[row])


@njit(parallel=True, **EXACT)
def _rms_norm_parallel(x, out, weight, num_rows, size, eps, element, weight_element):
    x, out = array_at(x, (num_rows, size), element), array_at(out, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in prange(num_rows):
        _normalise(x[row], weight, eps, out[row])


@njit(**EXACT)
def _add_and_normalise(x, residual, weight, eps):
    for i in range(len(x)):
        store(residual, i, to_float(x[i]) + to_float(residual[i]))
    _normalise(residual, weight, eps, x)


@njit(**EXACT)
def _add_rms_norm(x, residual, weight, num_rows, size, eps, element, weight_element):
    x = array_at(x, (num_rows, size), element)
    residual = array_at(residual, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in range(num_rows):
        _add_and_normalise(x[row], residual[row], weight, eps)


@njit(parallel=True, **EXACT)
def _add_rms_norm_parallel(x, residual, weight, num_rows, size, eps, element, weight_element):
    x = array_at(x, (num_rows, size), element)
    residual = array_at(residual, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in prange(num_rows):
        _add_and_normalise(x[row], residual[row], weight, eps)


@njit(inline="always", **EXACT)
def _sigmoid(x):
    magnitude = exp(-abs(x))  # without overflow, for either sign
    return (np.float32(1) if x >= 0 else magnitude) / (np.float32(1) + magnitude)


@njit(**EXACT)
def _silu_and_mul(gate_up, out):
    size = len(out)
    for i in range(size):
        gate, up = to_float(gate_up[i]), to_float(gate_up[size + i])
        store(out, i, gate * _sigmoid(gate) * up)


@njit(**EXACT)
def _gelu_and_mul(gate_up, out):
    """Compute gelu(gate) * up; (1 + tanh(x)) / 2 is the sigmoid of 2 x."""
    size = len(out)
    for i in range(size):
        gate, up = to_float(gate_up[i]), to_float(gate_up[size + i])
        x = _TWICE_ROOT * (gate + np.float32(0.044715) * gate * gate * gate)
        store(out, i, gate * _sigmoid(x) * up)


@njit(**EXACT)
def _act_and_mul(gate_up, out, num_rows, size, is_gelu, element):
    gate_up = array_at(gate_up, (num_rows, 2 * size), element)
    out = array_at(out, (num_rows, size), element)
    for row in range(num_rows):
        if is_gelu:
            _gelu_and_mul(gate_up[row], out[row])
        else:
            _silu_and_mul(gate_up[row], out[row])


@njit(parallel=True, **EXACT)
def _act_and_mul_parallel(gate_up, out, num_rows, size, is_gelu, element):
    gate_up = array_at(gate_up, (num_rows, 2 * size), element)
    out = array_at(out, (num_rows, size), element)
    for row in prange(num_rows):
        if is_gelu:
            _gelu_and_mul(gate_up[row], out[row])
        else:
            _silu_and_mul(gate_up[row], out[row])


@njit(**EXACT)
def _clamp_and_gate(gate_up, out, constants):
    size = len(out)
    alpha, limit = np.float32(constants[0]), np.float32(constants[1])
    offset = np.float32(constants[2])
    for i in range(size):
        gate, up = to_float(gate_up[i]), to_float(gate_up[size + i])
        gate = limit if gate > limit else gate  # NaN stays
        up = limit if up > limit else (-limit if up < -limit else up)
        store(out, i, gate * _sigmoid(alpha * gate) * (up + offset))


@njit(**EXACT)
def _swiglu_and_mul(gate_up, out, num_rows, size, constants, element):
    gate_up = array_at(gate_up, (num_rows, 2 * size), element)
    out = array_at(out, (num_rows, size), element)
    for row in range(num_rows):
        _clamp_and_gate(gate_up[row], out[row], constants)


@njit(parallel=True, **EXACT)
def _swiglu_and_mul_parallel(gate_up, out, num_rows, size, constants, element):
    gate_up = array_at(gate_up, (num_rows, 2 * size), element)
    out = array_at(out, (num_rows, size), element)
    for row in prange(num_rows):
        _clamp_and_gate(gate_up[row], out[row], constants)
