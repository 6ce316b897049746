"""Rotary embeddings for contexts longer than a model was first trained on.

Pair i of a head is rotated by an angle of position x f[i], where f[i] = theta^(-2i/d). At positions
beyond the original context, slow pairs have angles that did not occur in training. Every type below
reduces frequencies; they differ in which pairs, and by how much. Two of them also multiply cos and
sin by an attention factor, which makes attention logits larger by its square.

Tables are computed once, for all sequences of a batch: a key in the cache was rotated when it was
stored, and can meet any later query. So "dynamic" and "longrope", whose frequencies depend on the
length of a sequence, use the longest that the engine allows: `max_model_len` if it was given, else
the model's own limit. The size of the KV pool does not matter.
"""

import math

import torch
from torch import Tensor

from nanoserve.checkpoint.rope_config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Return f, float32 [head_dim / 2], and the attention factor that multiplies cos and sin.

    `max_positions` is the length of the longest sequence, used by "dynamic" and "longrope".
    """
    if rope.rope_type == "linear":
        return _unscaled(rope.theta, head_dim) / rope.factor, 1.0
    if rope.rope_type == "dynamic":
        return _dynamic(rope, head_dim, max_positions), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, head_dim), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(rope)
    if rope.rope_type == "longrope":
        return _longrope(rope, head_dim, max_positions), _longrope_attention_factor(rope)
    return _unscaled(rope.theta, head_dim), 1.0


def _unscaled(theta: float, head_dim: int) -> Tensor:
    return 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """NTK-aware scaling (bloc97 and emozilla, r/LocalLLaMA 2023; also Peng et al. 2023, 3.1).

    A larger theta slows down slow pairs and keeps fast ones. At a sequence length of n times the
    original context, theta grows by (factor x n - factor + 1) ^ (d / (d - 2)), which slows the
    slowest pair by exactly the term in parentheses. A `factor` of 1 stretches it as far as the
    context grew; a larger one stretches it further.

    transformers takes n from each forward pass, so theta changes while a sequence grows, and keys
    in its cache were rotated with other thetas than the query that meets them. Here n belongs to
    the longest sequence; in vLLM, to the model's limit. Our result equals transformers' result for
    a sequence of `max_positions` tokens that transformers computes in one pass, and for all
    sequences if `max_positions` is within the original context. Otherwise, below that length, ours
    equals a model with the larger theta, and transformers' result does not.
    """
    if head_dim < 4:
        raise ValueError(f"rope_type='dynamic': head_dim={head_dim} must be at least 4")
    growth = max(1.0, max_positions / rope.original_max_position_embeddings)
    stretch = rope.factor * growth - (rope.factor - 1)
    return _unscaled(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> Tensor:
    """Llama 3.1 scaling (Grattafiori et al. 2024, arXiv 2407.21783; Meta's reference code).

    It depends on how many rotations a pair makes over the original context. With `high_freq_factor`
    rotations or more it is kept, with `low_freq_factor` or fewer it is slowed down by `factor`, and
    in between the two frequencies are interpolated, linearly in the number of rotations. Llama 3.1:
    original context 8,192, factor 8, 1 and 4 rotations; so pairs with up to 2,048 positions per
    rotation are kept.
    """
    frequencies = _unscaled(rope.theta, head_dim)
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * (frequencies / rope.factor) + kept * frequencies


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN scaling (Peng et al. 2023, arXiv 2309.00071), "NTK-by-parts".

    Pairs that make more than `beta_fast` rotations over the original context are kept, those that
    make fewer than `beta_slow` are slowed down by `factor`. In between, the weight is linear in the
    index of the pair. `truncate` rounds both indices outwards to whole pairs.
    """
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    first, last = (_pair_with_turns(rope, head_dim, t) for t in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bound is a dimension, not a pair: this follows the paper's code and all later ones.
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return 1 / (rope.factor * periods) * (1 - kept) + 1 / periods * kept


def _pair_with_turns(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """Return the index i, as a real number, of the pair with `turns` over the original context.

    It solves original x theta^(-2i/d) = 2 pi turns.
    """
    ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Return YaRN's attention factor (section 3.4): 0.1 ln(factor) + 1, so 1.139 for factor 4.

    `mscale` and `mscale_all_dim` (DeepSeek-V2, arXiv 2405.04434) weight the logarithm in a
    numerator and a denominator of that form. `attention_factor` replaces all of it.
    """
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    log = 0.1 * math.log(rope.factor)
    if rope.mscale is None:
        return log + 1.0
    return (rope.mscale * log + 1.0) / (rope.mscale_all_dim * log + 1.0)


def _longrope(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """LongRoPE scaling (Ding et al. 2024, arXiv 2402.13753), the type of Phi-3.

    Each pair is slowed down by its own factor, which was found by a search: `short_factor` within
    the original context, `long_factor` beyond it.

    transformers chooses by the length of each forward pass; keys in its cache keep the choice that
    was valid when they were stored. Here, as in vLLM, the choice is made once, by the longest
    sequence. If that exceeds the original context, all sequences use `long_factor`, and those that
    fit into the original context get other logits than from transformers. With a `max_model_len`
    within the original context, all use `short_factor`, as in transformers.
    """
    is_long = max_positions > rope.original_max_position_embeddings
    factors = torch.tensor(rope.long_factor if is_long else rope.short_factor, dtype=torch.float32)
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return 1 / (factors * periods)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """Return sqrt(1 + ln(factor) / ln(original context)): 1.19 for 128 Ki positions from 4 Ki.

    `attention_factor` replaces it. It applies to both lists of factors.
    """
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
