"""Linears of a transformers model with the engine's matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from nanoserve.models.layers.context import LinearMethod


class MethodLinear(nn.Module):
    """A linear of transformers whose weight is stored and multiplied by a linear method."""

    def __init__(self, linear: nn.Linear, method: LinearMethod) -> None:
        super().__init__()
        self.weight: Tensor | None = linear.weight
        self.bias, self.method = linear.bias, method
        self.method.process_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in_features] -> [..., out_features]."""
        y = self.method.apply(self, x.reshape(-1, x.shape[-1]))
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias


@contextmanager
def recording_linears(model: nn.Module) -> Iterator[set[str]]:
    """Yield a set that gets the names of the linears that are called in the `with` block."""
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def replace_linears(model: nn.Module, names: set[str], method: LinearMethod) -> None:
    """Let the linears of these names multiply with `method`; others stay as they are.

    A linear that is never called may be read in another way, such as an expert of a fused product.
    """
    for name in sorted(names):
        linear: Any = model.get_submodule(name)
        model.set_submodule(name, MethodLinear(linear, method))
