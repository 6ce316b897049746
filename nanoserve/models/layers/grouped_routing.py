"""The router of DeepSeek V2 and V3: experts in groups, of which a token's experts come from a few.

Groups were made for expert parallelism: with one group per device, a token is sent to few devices.
"""

import torch
from torch import Tensor

from nanoserve.checkpoint.moe_config import RoutingConfig


def choose_experts(
    logits: Tensor, bias: Tensor | None, routing: RoutingConfig, top_k: int, normalises: bool
) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [num_tokens, top_k], and weights, float32 of that shape.

    logits: float32 [num_tokens, num_experts]. bias: float32 [num_experts], added to scores while
    experts are chosen, but not to their weights; None for none. normalises: the weights of the
    chosen experts sum to `routing.scaling`.
    """
    scores = logits.sigmoid() if routing.topk_method == "noaux_tc" else logits.softmax(dim=-1)
    chosen_by = scores if bias is None else scores + bias
    if routing.topk_method != "greedy":
        chosen_by = _of_best_groups(chosen_by, routing)
    ids = chosen_by.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * routing.scaling


def _of_best_groups(scores: Tensor, routing: RoutingConfig) -> Tensor:
    """Return scores [num_tokens, num_experts] with -inf outside of the best groups.

    A group's score is that of its best expert, or the sum of its two best.
    """
    groups = scores.unflatten(1, (routing.num_groups, -1))
    num_best = 2 if routing.topk_method == "noaux_tc" else 1
    of_groups = groups.topk(num_best, dim=-1).values.sum(dim=-1)
    best = of_groups.topk(routing.topk_group, dim=-1).indices
    is_out = scores.new_ones(of_groups.shape, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)
