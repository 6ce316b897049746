"""The linear methods of a CPU: every weight is kept in the form that was chosen for its kind."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.quantized_loader import Weight, deferred_weight
from nanoserve.kernels.cpu.checks import check_linear
from nanoserve.kernels.cpu.torch_linear import Form
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import UnquantizedLinearMethod
from nanoserve.models.quantization.online import quantize_int8
from nanoserve.models.quantization.schemes import Scheme, in_words


class FormLinearMethod(UnquantizedLinearMethod):
    """A tied LM head gets a form of its own: the embedding needs plain rows."""

    def __init__(self, make: Callable[[Tensor], Form], name: str = "torch") -> None:
        self.make, self.name = make, name

    def process_after_loading(self, layer: nn.Module) -> None:
        layer.form, layer.weight = self.make(layer.weight.data), None

    def create_experts(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], context: LayerContext
    ) -> None:
        setattr(layer, name, context.empty(*shape))

    def process_experts(self, layer: nn.Module, name: str) -> None:
        weights = getattr(layer, name).data
        delattr(layer, name)  # a parameter has to go before a list can have its name
        setattr(layer, name, [self.make(weight) for weight in weights])

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer.form(x)


class IntegerLinearMethod(FormLinearMethod):
    """Weights are integers, if the scheme or the checkpoint says so, and else floats.

    `make_integer` makes the form of integers out of `QuantizedMatrix.operands`. The form decides
    what becomes of their inputs: `activations` says it in words, as `weights` says it of those
    that there are.
    Integer inputs have a scale for every 32. Ranks that have multiples of 32 inputs have the
    integers of one rank; others have smaller groups, which are rounded less.
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
        self._tell(scheme.in_words())
        self.to_integers = scheme.to_integers

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: LayerContext
    ) -> None:
        layer.weight = deferred_weight((out_features, in_features), self._scheme.most_bits)

    def create_experts(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], context: LayerContext
    ) -> None:
        setattr(layer, name, deferred_weight(shape, self._scheme.most_bits))

    def fill(self, layer: nn.Module, name: str, weight: Weight) -> None:
        """Give `layer` the form of its weight `name`, of which it has none yet."""
        shape = getattr(layer, name).shape
        if len(shape) == 2:
            layer.form = self._form(weight)
            return
        delattr(layer, name)
        setattr(layer, name, [self._form(expert) for expert in weight.split(shape[1])])

    def process_after_loading(self, layer: nn.Module) -> None:
        if not hasattr(layer, "form"):  # an LM head, which is loaded as an embedding is
            layer.form = self._form(self._scheme.to_integers(layer.weight.data, False))
        layer.weight = None

    def process_experts(self, layer: nn.Module, name: str) -> None:
        """They have their forms."""

    def _form(self, weight: Weight) -> Form:
        if not isinstance(weight, QuantizedMatrix):
            return self.make(weight.to(self._dtype))
        try:
            matrix, order = weight.in_runs()
        except ValueError:  # a rank's part of groups that are spread over all inputs
            matrix, order = quantize_int8(weight.dequantize()), None
        self._made.add(in_words(matrix.bits, matrix.group_size, matrix.shape[1]))
        self._tell(" and ".join(sorted(self._made)))
        form = self.make_integer(*matrix.operands())
        return form if order is None else _Reordered(form, order)

    def _tell(self, weights: str) -> None:
        self.weights = weights
        self.name = f"of integers (weights {weights}; activations {self.activations})"


class _Reordered:
    """For codes whose inputs stand in another order (GPTQ's act-order)."""

    def __init__(self, form: Form, order: Tensor) -> None:
        self._form, self._order = form, order

    def __call__(self, x: Tensor) -> Tensor:
        check_linear(x, len(self._order), (torch.float32, torch.bfloat16, torch.float16))
        return self._form(x[..., self._order])
