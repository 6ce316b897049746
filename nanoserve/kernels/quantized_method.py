"""The `LinearMethod` of quantised weights on a GPU."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.kernels.expert_codes import ExpertCodes
from nanoserve.kernels.grouped_linear import grouped_product, pack_groups
from nanoserve.kernels.quantized_linear import scaled_product
from nanoserve.kernels.quantized_rows import quantize_rows
from nanoserve.layers.context import LayerContext
from nanoserve.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from nanoserve.quantization.deferred import Weight, deferred_weight
from nanoserve.quantization.matrix import QuantizedMatrix, stack_rows
from nanoserve.quantization.online import quantize_int8
from nanoserve.quantization.schemes import Scheme

_MAX_VALUES = 2**26  # that are float32 at a time, while codes are made: 256 MiB, several times


class QuantizedLinearMethod(UnquantizedLinearMethod):
    """Codes of 8 bits with a scale per output get activations of 8 bits; others, floats.

    A token's activations get one scale. Where the inputs are split over ranks, it is that of all of
    them: the ranks' codes are those of one rank, and so are the sums of int8. Experts keep int8
    with a scale per output, whatever the other weights have, and their activations are floats.
    """

    def __init__(self, scheme: Scheme, device: torch.device, dtype: torch.dtype) -> None:
        self._scheme, self._device, self._dtype = scheme, device, dtype

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: LayerContext
    ) -> None:
        layer.weight = deferred_weight((out_features, in_features), self._scheme.most_bits)

    def create_experts(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], context: LayerContext
    ) -> None:
        setattr(layer, name, deferred_weight(shape, 8))

    def to_integers(self, weight: Weight, is_quantized: bool) -> Weight:
        """As of a `Scheme`; computed on the GPU, and there all parts of a weight meet."""
        if isinstance(weight, QuantizedMatrix):
            return _on(weight, self._device)
        pieces = weight.split(max(1, _MAX_VALUES // weight.shape[1]))
        make = self._scheme.to_integers
        return stack_rows([make(piece.to(self._device), is_quantized) for piece in pieces])

    def fill(self, layer: nn.Module, name: str, weight: Weight) -> None:
        """Give `layer` the form of its weight `name`, of which it has none yet."""
        shape = getattr(layer, name).shape
        if len(shape) == 2:
            layer.form = self._form(weight)
            return
        delattr(layer, name)  # a parameter has to go before anything else can have its name
        if isinstance(weight, QuantizedMatrix):
            experts = ExpertCodes.of([_on(part, self._device) for part in weight.split(shape[1])])
        else:
            experts = weight.to(self._device, self._dtype).view(shape)
        setattr(layer, name, experts)

    def process_after_loading(self, layer: nn.Module) -> None:
        if not hasattr(layer, "form"):  # an LM head, which is loaded as an embedding is
            layer.form = self._form(self.to_integers(layer.weight.data, False))
        layer.weight = None

    def process_experts(self, layer: nn.Module, name: str) -> None:
        """They have their codes."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        has_codes = isinstance(layer.form, _Scaled)
        if has_codes and isinstance(layer, RowParallelLinear) and layer.tp.size > 1:
            largest = x.abs().amax(dim=-1).float()
            layer.tp.group.largest(largest)
            return layer.form(x, largest)
        return layer.form(x)

    def _form(self, weight: Weight) -> "_Scaled | _Grouped | partial[Tensor]":
        if not isinstance(weight, QuantizedMatrix):
            return partial(F.linear, weight=weight.to(self._device, self._dtype))
        weight = _on(weight, self._device)
        try:
            matrix, order = weight.in_runs()
        except ValueError:  # a rank's part of groups that are spread over all inputs
            matrix, order = quantize_int8(weight.dequantize()), None
        if order is None and matrix.scale.shape[1] == 1 and _is_plain(matrix):
            return _Scaled(matrix)
        return _Grouped(matrix, order)


def _on(matrix: QuantizedMatrix, device: torch.device) -> QuantizedMatrix:
    tensors = {
        name: tensor.to(device)
        for name in ("codes", "scale", "offset", "group_of_input")
        if (tensor := getattr(matrix, name)) is not None
    }
    return replace(matrix, **tensors)


def _is_plain(matrix: QuantizedMatrix) -> bool:
    return matrix.bits == 8 and matrix.offset is None


class _Scaled:
    """A scale per output: activations get codes of the same kind."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        codes = matrix.codes.contiguous()
        self.codes = codes.view(torch.float8_e4m3fn) if matrix.is_e4m3 else codes
        self.scale = matrix.scale[:, 0].contiguous()

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """largest: float32 [rows], where x is a part of them."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        codes, scale = quantize_rows(rows, self.codes.dtype, largest)
        product = scaled_product(codes, scale, self.codes, self.scale, x.dtype)
        return product.view(*x.shape[:-1], len(self.scale))


class _Grouped:
    """Scales for groups of inputs. `order`: how these are to be ordered for it (GPTQ)."""

    def __init__(self, matrix: QuantizedMatrix, order: Tensor | None) -> None:
        self.weight, self.order = pack_groups(matrix), order

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = (rows if self.order is None else rows[:, self.order]).contiguous()
        return grouped_product(rows, self.weight).view(*x.shape[:-1], len(self.weight.codes))
