"""Groups of layers whose K and V are needed equally long.

A layer with full attention reads K and V of all earlier tokens; one with a sliding window (Mistral,
Gemma, gpt-oss) reads the last `window` only, its own included. So layers of one kind form a group
that has a block table of its own, and a group with a window gives back the blocks behind it.

All groups take their blocks from one pool. For that a block must be equally large in each of them:
groups have equally many layers, and a kind that has more of them has several groups. Gemma 3 1B,
26 layers, of which 22 have a window of 512: one group of 4 layers with full attention, six groups
of up to 4 with the window. A block then holds 4 layers' K and V of `block_size` tokens.
"""

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import NamedTuple

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig

_MOST_PADDING = 1.5  # up to here, a kind of fewer layers is padded to the size of one of more


class KVCacheGroup(NamedTuple):
    window: int | None  # how many tokens a query sees, its own included; None for all
    layers: tuple[int, ...]  # indices in the model


def group_layers(sliding_windows: Iterable[int | None]) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model whose layers have these windows, the widest kind first.

    A group's layers are spread over the model, so that each stage of a pipeline has about as many
    of one group as of another.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
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
    """Return the groups of a model as this engine runs it.

    A window as wide as the longest sequence is none. A draft model keeps its own K and V in the
    blocks of the first group, which must then have them all.
    """
    longest = config.max_model_len or model_config.max_position_embeddings
    windows = [None if w is None or w >= longest else w for w in model_config.sliding_windows]
    drafts = config.speculative_config
    needs_all = drafts is not None and drafts.method == "draft_model" and None not in windows
    if config.disable_hybrid_kv_cache_manager or needs_all:
        windows = [None] * len(windows)
    return group_layers(windows)


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens; the last one may be partly empty."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True)
class SequenceRoom:
    """How much of the pool a sequence takes, whose groups have these windows.

    Behind a window of w tokens, a step of n reads w - 1 + n tokens, in blocks of which the first
    may begin before them. Two blocks are there in any case: `BlockManager` caches a block behind
    the one before it, perhaps a step late.
    """

    windows: AbstractSequence[int | None]
    block_size: int
    max_step_tokens: int

    def num_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of so many tokens holds at a time."""
        whole = blocks_needed(num_tokens, self.block_size)
        return sum(whole if w is None else min(whole, self._behind(w)) for w in self.windows)

    def longest(self, num_blocks: int) -> int:
        """Return how many tokens a sequence may have in a pool of so many blocks."""
        low, high = 0, num_blocks if None in self.windows else 2**31 // self.block_size - 1
        while low < high:  # the longest table, in blocks
            middle = (low + high + 1) // 2
            fits = self.num_blocks(middle * self.block_size) <= num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * self.block_size

    def _behind(self, window: int) -> int:
        tokens = max(window - 1, 2 * self.block_size) + self.max_step_tokens
        return blocks_needed(tokens, self.block_size) + 1
