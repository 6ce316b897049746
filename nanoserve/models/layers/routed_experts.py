"""Record which experts compute each token of a step, for trainers that replay these routes.

A trainer's router computes slightly different logits than the sampler's, and so chooses other
experts for some tokens. Rollout routing replay (R3, Ma et al. 2025, arXiv 2510.11370) trains with
the experts that the sampler has used.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.moe_config import MoEConfig


def expert_id_dtype(moe: MoEConfig) -> str:
    """Return the data type of expert ids, "uint8" if it holds all of them, else "int32"."""
    return "uint8" if moe.num_experts <= 256 else "int32"


class RoutedExperts:
    """The experts of each token of a step, [num_tokens, num_layers, top_k].

    Layers without experts have zeros. The memory stays at one address, so that CUDA graphs can
    write to it. `layers` are the indices of the layers that record their experts.
    """

    def __init__(self, model_config: ModelConfig, num_tokens: int, device: torch.device) -> None:
        """Allocate memory for steps of up to `num_tokens` tokens of a mixture of experts."""
        self.layers: set[int] = set()
        moe = model_config.moe
        shape = (num_tokens, model_config.num_hidden_layers, moe.num_experts_per_tok)
        dtype = getattr(torch, expert_id_dtype(moe))
        self._expert_ids = torch.zeros(shape, dtype=dtype, device=device)

    def of_layer(self, layer: int) -> Callable[[Tensor], None]:
        """Return the function that records a layer's experts, integers [num_tokens, top_k]."""
        self.layers.add(layer)
        return partial(self._record, layer)

    def first(self, num_tokens: int) -> Tensor:
        """Return a view of the first tokens; the next step overwrites it."""
        return self._expert_ids[:num_tokens]

    def _record(self, layer: int, expert_ids: Tensor) -> None:
        self._expert_ids[: len(expert_ids), layer] = expert_ids
