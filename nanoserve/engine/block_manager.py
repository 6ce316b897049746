"""The block manager allocates KV cache blocks and tracks which sequences use them.

PagedAttention (Kwon et al. 2023, section 4): the cache is a pool of blocks of `block_size` tokens,
and a sequence's *block table* lists the blocks that hold its tokens. With block size 16 and block
table [5, 2, 8, 12], position 35 is token 3 of logical block 2, which is physical block 8: KV slot
8 x 16 + 3 = 131. At most the last block of a sequence is partly empty, so at most `block_size - 1`
KV slots per sequence are wasted.

A model with several kinds of attention layers has one block table per layer group
(`nanoserve.engine.kv_groups`); all groups take their blocks from this one pool. A group with a
sliding window frees the blocks that have left the window.

This module handles block ids, not tensors. Block 0 is never allocated: it is the dummy block that
padding may write to.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from itertools import islice

from nanoserve.config import EngineConfig
from nanoserve.engine.kv_groups import blocks_needed
from nanoserve.engine.listeners import BlockListener, Listeners
from nanoserve.engine.prefix_cache import PrefixCache
from nanoserve.engine.sequence import BlockTable, Sequence

Hits = AbstractSequence[
    tuple[int, ...]
]  # for each block of tokens: by layer group, the KV block that holds it


class BlockManager:
    """A block allocator with reference counts and a prefix cache over the full blocks.

    A freed block keeps its content and stays in the prefix cache until it is allocated again, so
    the free queue *is* the prefix cache's eviction order: least recently used first, after the
    blocks at its front that no lookup needs (see `_give_back`). Each operation is O(1) per block,
    plus hashing each token once.

    `windows` are the sliding windows of the layer groups, None for full attention.
    `max_step_tokens` is the maximum number of tokens in a step; it bounds the blocks that a group
    with a window needs for a long prompt.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        prefix_cache_seed: int | None = None,
        windows: AbstractSequence[int | None] = (None,),
        max_step_tokens: int = 2**31,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows, self.max_step_tokens = tuple(windows), max_step_tokens
        self.has_windows = any(windows)
        # A new token sees the `window - 1` tokens before it. The last block is needed in any case,
        # because the next block is cached as its child.
        tails = [w and max(1, blocks_needed(w - 1, block_size)) for w in self.windows]
        self.prefix_cache = PrefixCache(num_blocks, block_size, tails, prefix_cache_seed)
        self._free_all()

    @classmethod
    def for_config(
        cls, config: EngineConfig, num_blocks: int, windows: AbstractSequence[int | None]
    ) -> "BlockManager":
        return cls(
            num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            config.prefix_cache_seed,
            windows,
            config.max_num_batched_tokens,
        )

    @property
    def listeners(self) -> Listeners[BlockListener]:
        """Listeners that are notified of blocks entering and leaving the prefix cache."""
        return self.prefix_cache.listeners

    def clear(self) -> None:
        """Free all blocks and empty the prefix cache, as after a step that raised.

        All existing block tables become invalid. O(pool).
        """
        self._free_all()
        self.prefix_cache.clear()

    def _free_all(self) -> None:
        self._ref_counts = [0] * (self.num_blocks + 1)  # by block id; entry 0 is the dummy block
        # Draining an OrderedDict from the front is O(1); a plain dict scans its own tombstones.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks + 1))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        return blocks_needed(num_tokens, self.block_size)

    def lookup(self, seq: Sequence) -> Hits:
        """Return the cached blocks that hold the longest cached prefix of `seq`. Changes nothing.

        A hit never covers the last token: its logits are needed, so it must be computed. Because
        only whole blocks are shared, a fully cached prompt of 64 tokens reuses 48 of them with
        blocks of 16. A request that needs an output of every prompt token, such as its
        log-probability, gets no hit.
        """
        if not self.enable_prefix_caching or seq.needs_prompt_outputs:
            return []
        return self.prefix_cache.lookup(seq, (len(seq.token_ids) - 1) // self.block_size)

    def allocate(self, seq: Sequence, num_tokens: int, hits: Hits = ()) -> bool:
        """Extend the block tables to hold `num_tokens` tokens; returns False if too few are free.

        `hits`, from `lookup`, come first in the tables of a sequence that has none yet. A group
        with a window gets no blocks for tokens that are computed in later steps, after earlier
        blocks have been freed; so even a long prompt needs no more of its blocks than the window
        and one step.
        """
        if not seq.block_tables:
            seq.block_tables = [BlockTable() for _ in self.windows]
        tables, lengths = seq.block_tables, [self.blocks_needed(num_tokens)] * len(self.windows)
        if self.has_windows:
            self._release_behind_windows(seq)
            start = max(seq.num_computed_tokens, len(hits) * self.block_size)
            lengths = [self._length_of_table(num_tokens, start, w) for w in self.windows]
        # A cached block without users is in the free queue; sharing it removes it from there.
        shared = [block for blocks in hits for block in blocks if block] if hits else ()
        num_taken = sum(self._ref_counts[block] == 0 for block in shared) if hits else 0
        for table, length in zip(tables, lengths, strict=True):
            num_taken += max(0, length - len(table) - len(hits))
        if num_taken > len(self._free):
            return False
        for block in shared:
            self._share(block)
        for group, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            if hits:
                table.add_hits(blocks[group] for blocks in hits)
            while len(table) < length:
                table.append(self._take())
        seq.num_cached_blocks += len(hits)
        seq.num_allocated_tokens = min(map(len, tables)) * self.block_size
        return True

    def cache(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the blocks that the first `num_tokens` tokens fill.

        `num_tokens` counts the tokens whose K and V are in the KV cache once the step being planned
        has run. A known token that is not computed has no K and V yet; a pending token has no id
        yet, so its block is cached later.
        """
        first = seq.num_cached_blocks
        end = min(num_tokens, len(seq.token_ids)) // self.block_size
        if first >= end or not self.enable_prefix_caching:
            return
        seq.num_cached_blocks = end
        for index in range(first, end):
            self.prefix_cache.add(seq, index)

    def has_spare_blocks(self) -> bool:
        """Return True if every group could get a block that is free and not cached."""
        first = list(islice(self._free, len(self.windows)))
        return len(first) == len(self.windows) and not any(map(self.prefix_cache.has, first))

    def free(self, seq: Sequence, keep: int = 0) -> None:
        """Free the blocks of `seq`, except the first `keep` of each table, in reverse order.

        Blocks are reused in the order in which they are freed, so a cached chain loses its tail
        before its head: [1, 2, 3, 4] is evicted as 4, 3, 2, 1. In the opposite order, evicting the
        head would make the whole chain unreachable.
        """
        seq.num_cached_blocks = min(seq.num_cached_blocks, keep)
        seq.num_allocated_tokens = min(seq.num_allocated_tokens, keep * self.block_size)
        tables = seq.block_tables
        for length in range(max(map(len, tables), default=0), keep, -1):
            for table in tables:
                if len(table) == length and (block := table.pop_last()):
                    self._give_back(block)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise `RuntimeError` unless the pool agrees with the tables of all sequences. O(pool).

        Tests call it after every operation.
        """
        ref_counts = [0] * (self.num_blocks + 1)
        for seq in sequences:
            for table in seq.block_tables:
                for block in table[table.num_released :]:
                    ref_counts[block] += 1
        num_used = sum(count > 0 for count in self._ref_counts)
        problems = {
            "reference counts differ from the tables": ref_counts != self._ref_counts,
            "the dummy block was given out": self._ref_counts[0] != 0,
            "free + used != num_blocks": len(self._free) + num_used != self.num_blocks,
            "a free block is in use": any(self._ref_counts[block] for block in self._free),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        found += self.prefix_cache.problems()
        if found:
            raise RuntimeError(f"the block pool is inconsistent: {found}")

    def snapshot(self) -> bytes:
        """Return by block id, as a copy, 1 if the block is cached and 0 if not.

        Entry 0 is the dummy block. O(pool): milliseconds for 100,000 blocks.
        """
        return bytes(map(self.prefix_cache.has, range(self.num_blocks + 1)))

    def _length_of_table(self, num_tokens: int, start: int, window: int | None) -> int:
        """Return the table length for `num_tokens` tokens, of which `start` are computed."""
        if window is not None:
            num_tokens = min(num_tokens, max(start, window - 1) + self.max_step_tokens)
        return self.blocks_needed(num_tokens)

    def _release_behind_windows(self, seq: Sequence) -> None:
        """Free the blocks that no later token of `seq` sees.

        Only computed tokens that cannot be rejected count, so the sequence must have no draft
        tokens in flight. A block that other sequences use stays allocated to them.
        """
        num_prompt_blocks = seq.num_prompt_tokens // self.block_size
        for table, window in zip(seq.block_tables, self.windows, strict=True):
            if window is None:
                continue
            end = (seq.num_computed_tokens - window + 1) // self.block_size
            if self.enable_prefix_caching:
                end = min(end, seq.num_cached_blocks - 1)  # the next block is cached as its child
            for index in range(table.num_released, end):
                # Other requests may share a prefix of this prompt, but hardly ever of its output.
                self._give_back(table.release_first(), is_useful=index < num_prompt_blocks)

    def _give_back(self, block: int, is_useful: bool = True) -> None:
        """Drop one reference; a block without references joins the free queue, to be evicted.

        It joins at the back, or at the front if no lookup needs its content: it is not cached,
        another block of its group has the same prefix, or `is_useful` is False.
        """
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        self._free[block] = None
        cache = self.prefix_cache
        if not is_useful or not cache.needs(block):
            cache.remove(block)
            self._free.move_to_end(block, last=False)  # its content is not needed: reuse it first

    def _take(self) -> int:
        """Allocate the block at the front of the free queue; if it is cached, it is evicted."""
        block, _ = self._free.popitem(last=False)
        self.prefix_cache.remove(block)
        self._ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1
