"""The `LinearMethod` of a CPU: every weight is kept in the form that was chosen for its kind."""

from collections.abc import Callable

from torch import Tensor, nn

from nanoserve.layers.context import LayerContext
from nanoserve.layers.linear import UnquantizedLinearMethod

Form = Callable[[Tensor], Tensor]


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
