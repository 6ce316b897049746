"""Linear methods for CPUs, which store each weight in the form chosen for its type."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.quantized_loader import Weight, deferred_weight
from nanoserve.kernels.cpu.checks import check_linear
from nanoserve.kernels.cpu.torch_linear import Form
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import UnquantizedLinearMethod
from nanoserve.models.quantization.online import quantize_int8
from nanoserve.models.quantization.schemes import Scheme, describe_integers


class FormLinearMethod(UnquantizedLinearMethod):
    """A linear method for float weights. `make` converts each weight to a form.

    A tied LM head gets its own form, since the embedding needs the plain rows.
    """

    def __init__(self, make: Callable[[Tensor], Form], name: str = "torch") -> None:
        super().__init__()
        self.make, self.name = make, name

    def process_after_loading(self, layer: Any) -> None:
        layer.form, layer.weight = self.make(layer.weight.data), None

    def create_experts(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], context: LayerContext
    ) -> None:
        setattr(layer, name, context.empty(*shape))

    def process_experts(self, layer: nn.Module, name: str) -> None:
        weights = getattr(layer, name).data
        delattr(layer, name)  # nn.Module does not let a list replace a parameter
        setattr(layer, name, [self.make(weight) for weight in weights])

    def process_router(self, layer: Any) -> None:
        weight = layer.router.data
        del layer.router
        layer.router = self.make(weight)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer.form(x)


class IntegerLinearMethod(FormLinearMethod):
    """A linear method for integer weights, with floats for weights that stay unquantized.

    `make_integer` creates the form of integer weights from `QuantizedMatrix.operands`. The form
    determines whether activations are quantized; `activations` and `weights` describe both.

    Quantized activations have one scale per 32 inputs. If a rank has a multiple of 32 inputs, its
    codes equal the codes of a single rank; otherwise its groups are smaller, with less rounding
    error.
    """

    def __init__(
        self,
        scheme: Scheme,
        float_method: FormLinearMethod,
        dtype: torch.dtype,
        make_integer: Callable[..., Form],
        activations: str,
    ) -> None:
        super().__init__(float_method.make)
        self._scheme, self._dtype = scheme, dtype
        self.make_integer, self.activations = make_integer, activations
        self._made: set[str] = set()
        self._describe(scheme.description())
        self.to_integers = scheme.to_integers

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: LayerContext
    ) -> None:
        layer.weight = deferred_weight((out_features, in_features), self._scheme.most_bits)

    def create_experts(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], context: LayerContext
    ) -> None:
        setattr(layer, name, deferred_weight(shape, self._scheme.most_bits))

    def fill(self, layer: Any, name: str, weight: Weight) -> None:
        """Set the form of the deferred weight `name` of `layer`."""
        shape = getattr(layer, name).shape
        if len(shape) == 2:
            layer.form = self._form(weight)
            return
        delattr(layer, name)
        setattr(layer, name, [self._form(expert) for expert in weight.split(shape[1])])

    def process_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "form"):  # an LM head, which is loaded like an embedding
            layer.form = self._form(self._scheme.to_integers(layer.weight.data, False))
        layer.weight = None

    def process_experts(self, layer: nn.Module, name: str) -> None:
        """Do nothing: `fill` has set the forms of the experts."""

    def _form(self, weight: Weight) -> Form:
        if not isinstance(weight, QuantizedMatrix):
            return self.make(weight.to(self._dtype))
        try:
            matrix, order = weight.in_runs()
        except ValueError:  # after act-order, the groups of a rank's slice may differ in size
            matrix, order = quantize_int8(weight.dequantize()), None
        self._made.add(describe_integers(matrix.bits, matrix.group_size, matrix.shape[1]))
        self._describe(" and ".join(sorted(self._made)))
        form = self.make_integer(*matrix.operands())
        return form if order is None else _Reordered(form, order)

    def _describe(self, weights: str) -> None:
        self.weights = weights
        self.name = f"of integers (weights {weights}; activations {self.activations})"


class _Reordered:
    """A form for codes whose inputs are reordered (GPTQ's act-order)."""

    def __init__(self, form: Form, order: Tensor) -> None:
        self._form, self._order = form, order

    def __call__(self, x: Tensor) -> Tensor:
        check_linear(x, len(self._order), (torch.float32, torch.bfloat16, torch.float16))
        return self._form(x[..., self._order])
