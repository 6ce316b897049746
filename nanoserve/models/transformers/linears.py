"""Linears of a transformers model with the engine's matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.models.layers.context import LinearMethod
from nanoserve.utils.checks import require


class MethodLinear(nn.Module):
    """A linear of transformers whose weight is stored and multiplied by a linear method."""

    def __init__(self, linear: nn.Linear, method: LinearMethod) -> None:
        super().__init__()
        self.weight: Tensor | None = linear.weight.data
        self.bias, self.method = linear.bias, method
        self.method.process_after_loading(self)
        # Some classes read the dtype of a linear's weight.
        self.weight = torch.empty_like(linear.weight, device="meta")

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


def replace_linears(
    model: nn.Module, names: set[str], method: LinearMethod, architecture: str
) -> None:
    """Let the linears of these names multiply with `method`; others stay as they are.

    A linear that is never called may be read in another way, such as an expert of a fused product.

    Raises `ValueError` if `method` is to quantize the model, and most weights are no such linears.
    """
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in sorted(names)}
    if hasattr(method, "to_integers"):
        num_replaced = sum(linear.weight.numel() for linear in linears.values())
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        known = {id(module.weight) for module in [*linears.values(), *embeddings]}
        matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in known]
        num_others = sum(matrix.numel() for matrix in matrices)
        require(
            num_replaced >= num_others,
            f"quantization: only the linears of {architecture}, {num_replaced} weights, can be "
            f"quantized, and {num_others} other weights cannot: omit the option",
        )
    for name in list(linears):
        model.set_submodule(name, MethodLinear(linears.pop(name), method))
