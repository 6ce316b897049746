"""`TorchOps` implemented with a Triton kernel for each operation, for tensors on a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels.triton.act_and_mul import act_and_mul
from nanoserve.kernels.triton.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.triton.experts import fused_experts
from nanoserve.kernels.triton.quantized_rows import CodeFormat
from nanoserve.kernels.triton.split_linear import (
    MOST_ROWS,
    num_parts,
    split_linear,
    tiled_linear,
)
from nanoserve.kernels.triton.split_work import Arrivals
from nanoserve.kernels.triton.store_kv import store_kv
from nanoserve.models.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod
from nanoserve.models.layers.ops import FusedOps


class TritonOps(FusedOps):
    """Triton kernels of all operations that occur in a decode step of a supported model.

    is_dependent: use programmatic dependent launch. splits_products: use `split_linear` for
    products of few rows where it splits or fuses. All steps must then be launched on one stream.
    fuses_quantization: let norms and activations compute the codes that linears need.
    is_batch_invariant: compute each row in the same way, whatever the number of rows.
    """

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    act_and_mul = staticmethod(act_and_mul)
    store_kv = staticmethod(store_kv)

    def __init__(
        self,
        is_dependent: bool = False,
        splits_products: bool = False,
        fuses_quantization: bool = False,
        is_batch_invariant: bool = False,
    ) -> None:
        self._is_dependent, self._splits_products = is_dependent, splits_products
        self._is_batch_invariant = is_batch_invariant
        self._fuses_quantization = fuses_quantization
        self._arrivals = Arrivals()
        if is_dependent:
            self._set_options(rms_norm, add_rms_norm, act_and_mul, store_kv)

    def _set_options(self, *functions: Callable[..., Any], **options: Any) -> None:
        for function in functions:
            launched = partial(function, is_dependent=self._is_dependent, **options)
            setattr(self, function.__name__, launched)

    def expect_codes(self, operation: str, code_format: CodeFormat) -> None:
        if not self._fuses_quantization:
            return
        functions = {"norm": (rms_norm, add_rms_norm), "activation": (act_and_mul,)}
        self._set_options(*functions[operation], code_format=code_format)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._is_batch_invariant:
            return tiled_linear(x.contiguous(), weight, is_dependent=self._is_dependent)
        if self._is_for_few_rows(x) and num_parts(len(x), weight) > 1:
            return self._product(x, weight)
        return F.linear(x, weight)

    def gated_product(self, gate_up: Any, x: Tensor, activation: str) -> Tensor:
        is_plain = isinstance(gate_up, ColumnParallelLinear) and gate_up.bias is None
        is_plain = is_plain and type(gate_up.method) is UnquantizedLinearMethod
        if is_plain and self._is_batch_invariant:
            weight = gate_up.weight
            return tiled_linear(x, weight, activation, is_dependent=self._is_dependent)
        if is_plain and self._is_for_few_rows(x):
            return self._product(x, gate_up.weight, activation)
        return super().gated_product(gate_up, x, activation)

    def sum_of_experts(self, *args: Any, **options: Any) -> Tensor:
        """Return what `models.layers.experts.sum_of_experts` returns, for the same arguments."""
        is_dependent, is_invariant = self._is_dependent, self._is_batch_invariant
        return fused_experts(
            *args, is_dependent=is_dependent, one_tile_shape=is_invariant, **options
        )

    def _is_for_few_rows(self, x: Tensor) -> bool:
        return self._splits_products and len(x) <= MOST_ROWS and x.is_contiguous()

    def _product(self, x: Tensor, weight: Tensor, activation: str | None = None) -> Tensor:
        arrivals, is_dependent = self._arrivals.on(x.device), self._is_dependent
        return split_linear(x, weight, arrivals, activation, is_dependent=is_dependent)
