"""Measure the highest rate of a CPU's matrix products with torch and nanoserve's kernels."""

from importlib.util import find_spec

import torch

from nanoserve.cli.bench import hardware
from nanoserve.kernels.cpu.gemm_select import forms

_SIZE = 2048


def best_rates(dtype: torch.dtype, of_torch: float, num_threads: int) -> tuple[float, float]:
    """Return operations per second of matrix products in `dtype`, and of integers.

    of_torch: the rate of torch in `dtype`.
    """
    weight = torch.randn(_SIZE, _SIZE).to(dtype)
    found = forms(dtype)
    hardware.set_threads(num_threads)  # the forms import numba, which has threads of its own
    rate = max(of_torch, *(hardware.form_rate(make, weight) for make in found.values()))
    if find_spec("numba") is None:
        return rate, rate
    from nanoserve.kernels.cpu.integer_linear import IntegerPanels
    from nanoserve.models.quantization.online import quantize_int8

    def integers(weight: torch.Tensor) -> IntegerPanels:
        return IntegerPanels(*quantize_int8(weight).operands())

    return rate, hardware.form_rate(integers, weight)
