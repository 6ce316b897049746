"""Mixture of experts, in place of the feed-forward (Shazeer et al. 2017; Fedus et al. 2021).

A router, which is a small linear, selects `num_experts_per_tok` of many feed-forwards for each
token. Only these are computed, and the router's weights weight the sum of their outputs. So a model
has the parameters of all experts, but the computation of a few.

Shapes: T tokens with K experts each make T x K *pairs*, numbered token x K + choice. To multiply
with every expert's weights only once, pairs are sorted by expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.moe_config import PLAIN_SWIGLU, SwiGLU
from nanoserve.models.layers.context import LayerContext, LinearMethod
from nanoserve.models.layers.ops import TorchOps

_TORCH = TorchOps()


class ExpertsMethod(LinearMethod, Protocol):
    """Extension of `LinearMethod` for the weights of experts."""

    def create_experts(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], context: LayerContext
    ) -> None:
        """Create the parameter `name` [experts, outputs, inputs] of `layer`."""

    def process_experts(self, layer: nn.Module, name: str) -> None:
        """Replace the loaded parameter by a sequence of functions, one for each expert's input."""

    def process_router(self, layer: nn.Module) -> None:
        """Replace `layer.router`, whose weight is never quantized, by a function if that helps."""


class SparseMoE(nn.Module):
    """Mixture of experts: [num_tokens, hidden] -> [num_tokens, hidden].

    Whole experts are distributed over the ranks: each has a contiguous range of them and a copy of
    the router, computes the contribution of its experts to all tokens, and an all-reduce sums over
    the ranks. The number of experts need not be a multiple of the ranks: some ranks then have one
    more.
    """

    # Names in checkpoints: of this module, None if it is the same, of its router, and of an
    # expert's linears.
    stored_as: str | None = None
    router_name = "gate"
    projections = ("gate_proj", "up_proj", "down_proj")
    rounds_weights = True  # True: the router's float32 weights are rounded to the model's dtype
    router_dtype: torch.dtype | None = None  # None: the router's matrix has the model's dtype
    has_biases = False  # of the router and of the experts' linears

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act={config.hidden_act!r} is not supported for experts")
        moe, tp, hidden = config.moe, context.tp, config.hidden_size
        self.num_experts, self.top_k = moe.num_experts, moe.num_experts_per_tok
        self.norm_topk_prob = moe.norm_topk_prob
        self.first_expert = tp.rank * moe.num_experts // tp.size
        num_here = (tp.rank + 1) * moe.num_experts // tp.size - self.first_expert
        of_router = replace(context, dtype=self.router_dtype or context.dtype)
        self.router = of_router.empty(moe.num_experts, hidden)
        self.router_bias = self.biases = None
        if self.has_biases:
            self.router_bias = context.empty(moe.num_experts)
            self.gate_up_bias = context.empty(num_here, 2 * moe.intermediate_size)
            self.down_bias = context.empty(num_here, hidden)
            self.biases = (self.gate_up_bias, self.down_bias)
        self.method: Any = context.linear_method  # an `ExpertsMethod`, or None
        self._create("gate_up", (num_here, 2 * moe.intermediate_size, hidden), context)
        self._create("down", (num_here, hidden, moe.intermediate_size), context)
        self.linear = context.ops.linear
        one_by_one = partial(sum_of_experts, ops=context.ops)
        self.sum_of_experts, self.tp = context.ops.sum_of_experts or one_by_one, tp
        self.swiglu = moe.swiglu
        routes = context.routed_experts
        self.record = None if routes is None else routes.of_layer(index)

    def _create(self, name: str, shape: tuple[int, int, int], context: LayerContext) -> None:
        if self.method is None:
            setattr(self, name, context.empty(*shape))
        else:
            self.method.create_experts(self, name, shape, context)

    def process_after_loading(self) -> None:
        if self.method is not None:
            self.method.process_experts(self, "gate_up")
            self.method.process_experts(self, "down")
            if self.router_dtype is None:
                self.method.process_router(self)

    def forward(self, hidden: Tensor) -> Tensor:
        expert_ids, expert_weights = self.route(hidden)
        if self.record is not None:
            self.record(expert_ids)
        weights = (self.gate_up, self.down, self.first_expert, self.num_experts)
        out = self.sum_of_experts(
            *(hidden, expert_ids, expert_weights, *weights), biases=self.biases, swiglu=self.swiglu
        )
        return self.tp.all_reduce(out)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, int64 [num_tokens, top_k], and weights of the same shape."""
        logits = self.router_logits(hidden)
        # In float32: among many experts, 16-bit values would often be equal.
        weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights.to(hidden.dtype) if self.rounds_weights else weights

    def router_logits(self, hidden: Tensor) -> Tensor:
        """Return the router's logits, [num_tokens, num_experts], in hidden's dtype."""
        logits = product(hidden, self.router, self.linear)
        return logits if self.router_bias is None else logits + self.router_bias

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        """Yield the router's tensors, and those of each expert's linears."""
        name, size = self.stored_as or own_name, self.down.shape[2]
        for kind, own in (("weight", self.router), ("bias", self.router_bias)):
            if own is not None:
                yield CheckpointTensor(f"{name}.{self.router_name}.{kind}", own, tuple(own.shape))
        kinds = {"weight": _linears(size, self.gate_up, self.down)}
        if self.biases is not None:
            kinds["bias"] = _linears(size, *self.biases)
        for expert in range(self.num_experts):
            here = expert - self.first_expert
            for kind, wholes in kinds.items():
                for projection, whole in zip(self.projections, wholes, strict=True):
                    shape = tuple(whole.shape[1:])
                    # An expert of another rank is required in the checkpoint, but not kept.
                    is_here = 0 <= here < len(whole)
                    part = whole[here] if is_here else self.router.new_empty(0, *shape[1:])
                    yield CheckpointTensor(
                        f"{name}.experts.{expert}.{projection}.{kind}", part, shape
                    )

    def stacked_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        """Yield the tensors, each of all experts, that a checkpoint may have instead of theirs."""
        name, first = self.stored_as or own_name, self.first_expert
        for stack, own in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            shape = (self.num_experts, *own.shape[1:])
            yield CheckpointTensor(f"{name}.experts.{stack}", own, shape, 0, first)


def _linears(size: int, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up and down of all experts here: their weights, or their biases."""
    return gate_up[:, :size], gate_up[:, size:], down


def sum_of_experts(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: "Tensor | Sequence[Callable[[Tensor], Tensor]]",
    down: "Tensor | Sequence[Callable[[Tensor], Tensor]]",
    first_expert: int = 0,
    num_experts: int | None = None,
    *,
    biases: tuple[Tensor, Tensor] | None = None,
    swiglu: SwiGLU = PLAIN_SWIGLU,
    ops: TorchOps = _TORCH,
) -> Tensor:
    """Return the weighted sum of each token's experts, over the experts of this rank.

    hidden          [num_tokens, hidden]
    expert_ids      integers [num_tokens, top_k], of all experts
    expert_weights  [num_tokens, top_k]
    gate_up         [experts here, 2 x size, hidden]: of `first_expert` and those that follow it
    down            [experts here, hidden, size]; either may be a function for each expert
    num_experts     of all ranks together; None if all are here
    biases          of gate_up [experts here, 2 x size] and of down [experts here, hidden]
    swiglu          the gate of all experts
    ops             what computes it

    Returns [num_tokens, hidden] in hidden's dtype. A token's experts are added in their order and
    in float32, so its sum does not depend on other tokens.
    """
    gate = partial(ops.swiglu or swiglu_and_mul, swiglu=swiglu)
    if swiglu == PLAIN_SWIGLU:
        gate = partial(ops.act_and_mul, activation="silu")
    out = torch.zeros_like(hidden, dtype=torch.float32)
    ids, weights, top_k = expert_ids.flatten(), expert_weights.flatten(), expert_ids.shape[1]
    end = first_expert + len(down)
    counts = torch.bincount(ids, minlength=num_experts or end).tolist()
    pairs_of_experts = ids.argsort(stable=True).split(counts)[first_expert:end]
    experts = zip(pairs_of_experts, gate_up, down, strict=True)
    for expert, (pairs, expert_gate_up, expert_down) in enumerate(experts):
        if len(pairs):
            tokens = pairs // top_k
            both = product(hidden[tokens], expert_gate_up)
            if biases is not None:
                both = both + biases[0][expert]
            result = product(gate(both), expert_down)
            if biases is not None:
                result = result + biases[1][expert]
            out.index_add_(0, tokens, result * weights[pairs, None].float())
    return out.to(hidden.dtype)


def swiglu_and_mul(gate_up: Tensor, swiglu: SwiGLU) -> Tensor:
    """Return the gate of experts, [..., 2 x size] -> [..., size], with any constants."""
    gate, up = gate_up.chunk(2, dim=-1)
    alpha, limit, offset = swiglu
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + offset)


def product(
    x: Tensor,
    weight: "Tensor | Callable[[Tensor], Tensor]",
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """Return the product of x with a weight, or with what a linear method has made of it."""
    return linear(x, weight) if isinstance(weight, Tensor) else weight(x)
