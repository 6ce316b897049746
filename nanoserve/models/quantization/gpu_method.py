"""`LinearMethod` for quantized weights on a GPU."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix, stack_rows
from nanoserve.checkpoint.quantized_loader import Weight, deferred_weight
from nanoserve.kernels.triton.experts import ExpertCodes
from nanoserve.kernels.triton.grouped_linear import GroupedWeight, grouped_product, pack_groups
from nanoserve.kernels.triton.quantized_linear import least_scaled_mm_rows, scaled_product
from nanoserve.kernels.triton.quantized_rows import (
    CodeFormat,
    RowCodes,
    attached_codes,
    quantize_rows,
)
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.quantization.online import quantize_int8
from nanoserve.models.quantization.schemes import Scheme
from nanoserve.utils.checks import require

GROUP_SIZE = 32  # inputs of a token per scale, as on a CPU
_MAX_VALUES = 2**26  # values quantized at a time: several float32 tensors of 256 MiB


class QuantizedLinearMethod(UnquantizedLinearMethod):
    """A linear method that dequantizes weights in registers, or multiplies 8-bit operands.

    By default, weights are dequantized and activations are floats. There are two exceptions. With
    e4m3 weights, activations are quantized to e4m3, with a scale per token, unless `activations` is
    "none". If `activations` is "int8", weights must be int8 with per-channel scales, and
    activations are quantized to int8 with a scale per token and 32 inputs. With one scale per
    token, the few large inputs of a real model would make all other inputs 0. Other weights then
    raise `ValueError`.

    Where the inputs are split over ranks, scales are computed for the whole row, so the codes equal
    the codes of a single rank. Experts are int8 with per-channel scales, whatever the format of
    other weights, and their activations are floats.

    is_dependent: use programmatic dependent launch.
    """

    def __init__(
        self,
        scheme: Scheme,
        device: torch.device,
        dtype: torch.dtype,
        activations: str | None = None,
        is_dependent: bool = False,
    ) -> None:
        super().__init__()
        self._scheme, self._device, self._dtype = scheme, device, dtype
        self._activations, self._is_dependent = activations, is_dependent
        self._ops = TorchOps()

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: LayerContext
    ) -> None:
        layer.weight = deferred_weight((out_features, in_features), self._scheme.most_bits)
        self._ops = context.ops

    def create_experts(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], context: LayerContext
    ) -> None:
        setattr(layer, name, deferred_weight(shape, 8))

    def to_integers(self, weight: Weight, is_quantized: bool) -> Weight:
        """Quantize a weight like `Scheme.to_integers`, on the GPU; the result stays there."""
        if isinstance(weight, QuantizedMatrix):
            return _on(weight, self._device)
        pieces = weight.split(max(1, _MAX_VALUES // weight.shape[1]))
        make = self._scheme.to_integers
        return stack_rows([make(piece.to(self._device), is_quantized) for piece in pieces])

    def fill(self, layer: nn.Module, name: str, weight: Weight) -> None:
        """Set the form of the deferred weight `name` of `layer`."""
        shape = getattr(layer, name).shape
        if len(shape) == 2:
            layer.form = self._form(layer, weight)
            return
        delattr(layer, name)  # nn.Module does not let another object replace a parameter
        if isinstance(weight, QuantizedMatrix):
            parts = [_on(part, self._device) for part in weight.split(shape[1])]
            experts: Any = expert_codes(parts)
        else:
            experts = weight.to(self._device, self._dtype).view(shape)
        setattr(layer, name, experts)

    def process_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "form"):  # an LM head, which is loaded like an embedding
            layer.form = self._form(layer, self.to_integers(layer.weight.data, False))
        layer.weight = None

    def process_experts(self, layer: nn.Module, name: str) -> None:
        """Do nothing: `fill` has set the codes of the experts."""

    def process_router(self, layer: nn.Module) -> None:
        """Do nothing: torch multiplies with the router."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer.form(x)

    def _form(self, layer: nn.Module, weight: Weight) -> nn.Module:
        """Return the module that `apply` calls; its tensors are buffers, which move with it."""
        if not isinstance(weight, QuantizedMatrix):
            return _Floats(weight.to(self._device, self._dtype))
        weight = _on(weight, self._device)
        try:
            matrix, order = weight.in_runs()
        except ValueError:  # after act-order, the groups of a rank's slice may differ in size
            matrix, order = quantize_int8(weight.dequantize()), None
        tp = layer.tp if isinstance(layer, RowParallelLinear) else TensorParallel()
        if order is None and _is_row_scaled(matrix):
            form: _RowScaled | _GroupScaled | None = None
            if matrix.is_e4m3 and self._activations is None:
                form = _RowScaled(matrix, self._dtype, tp, self._is_dependent)
            elif not matrix.is_e4m3 and self._activations == "int8":
                form = _GroupScaled(matrix, tp, self._is_dependent)
            if form is not None:
                self._request_codes(layer, form)
                return form
        require(
            self._activations != "int8",
            f"quantization_activations='int8' on a GPU needs per-channel int8 weights, "
            f"but a linear has {'e4m3' if matrix.is_e4m3 else f'{matrix.bits}-bit'} "
            f"weights with {matrix.scale.shape[1]} scales per output: omit the option",
        )
        return _Grouped(matrix, order, self._is_dependent)

    def _request_codes(self, layer: nn.Module, form: "_RowScaled | _GroupScaled") -> None:
        """Request codes from the operation whose results the layer multiplies."""
        if form.takes_codes:
            source = "activation" if isinstance(layer, RowParallelLinear) else "norm"
            self._ops.expect_codes(source, form.code_format)


def _on(matrix: QuantizedMatrix, device: torch.device) -> QuantizedMatrix:
    tensors = {
        name: tensor.to(device)
        for name in ("codes", "scale", "offset", "group_of_input")
        if (tensor := getattr(matrix, name)) is not None
    }
    return replace(matrix, **tensors)


def expert_codes(experts: list[QuantizedMatrix]) -> ExpertCodes:
    """Stack experts as int8 with per-channel scales, requantizing other formats."""
    experts = [each if _is_int8(each) else quantize_int8(each.dequantize()) for each in experts]
    codes = torch.stack([each.codes for each in experts])
    return ExpertCodes(codes, torch.stack([each.scale[:, 0] for each in experts]))


def _is_int8(matrix: QuantizedMatrix) -> bool:
    return _is_row_scaled(matrix) and not matrix.is_e4m3


def _is_row_scaled(matrix: QuantizedMatrix) -> bool:
    """Return True for 8-bit codes with per-channel scales and no offset."""
    return matrix.bits == 8 and matrix.offset is None and matrix.scale.shape[1] == 1


class _Floats(nn.Module):
    """A float weight that the checkpoint has not quantized."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _RowScaled(nn.Module):
    """An e4m3 weight with e4m3 activations. A row's scale covers the inputs of all ranks.

    takes_codes: whether codes can be attached to inputs; they cannot if other ranks have a part.
    """

    code_format = CodeFormat(torch.float8_e4m3fn)

    def __init__(
        self, matrix: QuantizedMatrix, dtype: torch.dtype, tp: TensorParallel, is_dependent: bool
    ) -> None:
        super().__init__()
        codes = matrix.codes.contiguous().view(torch.float8_e4m3fn)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", matrix.scale[:, 0].contiguous(), persistent=False)
        self.scaled_mm_from = least_scaled_mm_rows(self.codes, self.scale, dtype)
        self._tp, self._is_dependent = tp, is_dependent
        self.takes_codes = tp.size == 1

    def forward(self, x: Tensor) -> Tensor:
        attached = attached_codes(x, self.code_format) if self.takes_codes else None
        codes, scale = self._quantize(x) if attached is None else attached
        product = scaled_product(
            *(codes, scale, self.codes, self.scale, x.dtype),
            scaled_mm_from=self.scaled_mm_from,
            is_dependent=self._is_dependent,
        )
        return product.view(*x.shape[:-1], len(self.scale))

    def _quantize(self, x: Tensor) -> RowCodes:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        largest = None
        if self._tp.size > 1:
            largest = rows.abs().amax(dim=1).float()
            self._tp.group.largest(largest)
        return quantize_rows(rows, self.codes.dtype, largest, is_dependent=self._is_dependent)


class _GroupScaled(nn.Module):
    """An int8 weight with int8 activations, which have a scale per 32 inputs of a row.

    Groups are formed over the whole row. If a group is split over ranks, a rank's inputs and codes
    are padded with zeros at the front, up to the beginning of the group, and the ranks exchange the
    largest magnitudes.

    takes_codes: whether codes can be attached to inputs; they cannot if a group is split.
    """

    code_format = CodeFormat(torch.int8, GROUP_SIZE)

    def __init__(self, matrix: QuantizedMatrix, tp: TensorParallel, is_dependent: bool) -> None:
        super().__init__()
        inputs = matrix.shape[1]
        first = tp.rank * inputs
        self._tp, self._inputs, self._is_dependent = tp, tp.size * inputs, is_dependent
        self._cuts_groups = tp.size > 1 and inputs % GROUP_SIZE != 0
        self._front = first % GROUP_SIZE
        self.takes_codes = not self._cuts_groups
        self._first_group = first // GROUP_SIZE
        codes = F.pad(matrix.codes, (self._front, 0)).contiguous()
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", matrix.scale[:, 0].contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        attached = attached_codes(x, self.code_format) if self.takes_codes else None
        codes, scale = self._quantize(x) if attached is None else attached
        operands = codes, scale, self.codes, self.scale, x.dtype, GROUP_SIZE
        product = scaled_product(*operands, is_dependent=self._is_dependent)
        return product.view(*x.shape[:-1], len(self.scale))

    def _quantize(self, x: Tensor) -> RowCodes:
        rows = x.reshape(-1, x.shape[-1])
        if self._front:  # padding by nothing would copy
            rows = F.pad(rows, (self._front, 0))
        rows = rows.contiguous()
        largest = self._largest_of_groups(rows) if self._cuts_groups else None
        options = {"is_dependent": self._is_dependent}
        return quantize_rows(rows, torch.int8, largest, GROUP_SIZE, **options)

    def _largest_of_groups(self, rows: Tensor) -> Tensor:
        """Return the largest magnitudes of groups over all ranks: float32 [rows, groups]."""
        num_groups = -(-rows.shape[1] // GROUP_SIZE)
        padded = F.pad(rows, (0, num_groups * GROUP_SIZE - rows.shape[1]))
        total = -(-self._inputs // GROUP_SIZE)
        largest = torch.zeros(len(rows), total, dtype=torch.float32, device=rows.device)
        mine = largest[:, self._first_group : self._first_group + num_groups]
        mine.copy_(padded.unflatten(1, (-1, GROUP_SIZE)).abs().amax(dim=2))
        self._tp.group.largest(largest)
        return mine.contiguous()


class _Grouped(nn.Module):
    """A weight in groups, with float activations. `order`: the inputs sorted by group (GPTQ)."""

    def __init__(self, matrix: QuantizedMatrix, order: Tensor | None, is_dependent: bool) -> None:
        super().__init__()
        self._is_dependent = is_dependent
        for name, tensor in pack_groups(*matrix.operands())._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("order", order, persistent=False)

    @property
    def weight(self) -> GroupedWeight:
        return GroupedWeight(self.codes, self.scale, self.offset)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = (rows if self.order is None else rows[:, self.order]).contiguous()
        product = grouped_product(rows, self.weight, is_dependent=self._is_dependent)
        return product.view(*x.shape[:-1], len(self.codes))
