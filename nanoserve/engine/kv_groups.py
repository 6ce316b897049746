"""A layer group consists of layers whose K and V are kept for the same number of tokens.

A layer with full attention reads K and V of all earlier tokens; one with a sliding window (Mistral,
Gemma, gpt-oss) reads only K and V of the last `window` tokens, including the current one. So layers
of one kind form a group that has its own block table, and a group with a window frees the blocks
that have left the window.

All groups take their blocks from one pool, so a block must have the same size in each group. Hence
all groups have the same number of layers, and a kind with more layers forms several groups. Gemma 3
1B has 26 layers, of which 22 have a window of 512: one group of 4 layers with full attention and
six groups of up to 4 layers with the window. A block then holds the K and V of `block_size` tokens
for 4 layers.

Layers with recurrent states have no K and V, and belong to no group.
"""

from collections.abc import Container, Iterable
from typing import NamedTuple

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig

_MOST_PADDING = 1.5  # up to this ratio, the groups of the smaller kind are padded to the larger


class KVCacheGroup(NamedTuple):
    window: int | None  # tokens that a query sees, including its own; None for all
    layers: tuple[int, ...]  # layer indices in the model


def group_layers(
    sliding_windows: Iterable[int | None], without_kv: Container[int] = ()
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model whose layers have these windows, the widest window first.

    `without_kv`: indices of layers that belong to no group.

    The layers of a group are spread over the model, so that each pipeline stage has about the same
    number of layers of every group.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        if layer not in without_kv:
            kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) <= _MOST_PADDING * min(counts) else min(counts)
    groups = []
    for window in sorted(kinds, key=lambda window: (window is not None, -(window or 0))):
        layers = kinds[window]
        num_groups = -(-len(layers) // size)
        groups += [KVCacheGroup(window, tuple(layers[i::num_groups])) for i in range(num_groups)]
    return tuple(groups)


def kv_cache_groups(config: EngineConfig, model_config: ModelConfig) -> tuple[KVCacheGroup, ...]:
    """Return the layer groups of a model under this configuration.

    A window as wide as the longest sequence counts as full attention. A draft model stores its own
    K and V in the blocks of the first group, so that group must keep all of them.
    """
    longest = config.max_model_len or model_config.max_position_embeddings
    windows = [None if w is None or w >= longest else w for w in model_config.sliding_windows]
    drafts = config.speculative_config
    needs_all = drafts is not None and drafts.method == "draft_model" and None not in windows
    if config.disable_hybrid_kv_cache_manager or needs_all:
        windows = [None] * len(windows)
    return group_layers(windows, model_config.recurrent_layers)


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens; the last may be partly empty."""
    return -(-num_tokens // block_size)
