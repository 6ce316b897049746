"""Counts the KV blocks that a sequence takes at most, by which pools are sized."""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.kv_groups import blocks_needed, kv_cache_groups


@dataclass(frozen=True)
class SequenceRoom:
    """Computes the number of KV blocks that a sequence needs, given the layer groups' windows.

    A step of n tokens in a group with a window of w tokens reads w - 1 + n tokens, in blocks of
    which the first may begin before them. Two blocks are kept in any case: `BlockManager` caches a
    block as the child of the block before it, perhaps one step late.
    """

    windows: AbstractSequence[int | None]
    block_size: int
    max_step_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, model_config: ModelConfig) -> "SequenceRoom":
        windows = [group.window for group in kv_cache_groups(config, model_config)]
        return cls(windows, config.block_size, config.max_num_batched_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of `num_tokens` holds at a time."""
        whole = blocks_needed(num_tokens, self.block_size)
        return sum(whole if w is None else min(whole, self._behind(w)) for w in self.windows)

    def longest(self, num_blocks: int) -> int:
        """Return the maximum number of tokens of a sequence in a pool of `num_blocks` blocks."""
        low, high = 0, num_blocks if None in self.windows else 2**31 // self.block_size - 1
        while low < high:  # the longest table, in blocks
            middle = (low + high + 1) // 2
            fits = self.num_blocks(middle * self.block_size) <= num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * self.block_size

    def _behind(self, window: int) -> int:
        tokens = max(window - 1, 2 * self.block_size) + self.max_step_tokens
        return blocks_needed(tokens, self.block_size) + 1
