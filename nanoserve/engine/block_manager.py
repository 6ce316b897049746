"""Manage the KV cache's blocks: which are free, who holds the others, which are cached.

PagedAttention (Kwon et al. 2023, section 4): the cache is a pool of blocks of `block_size` tokens,
and a sequence's *block table* lists the blocks that hold its tokens. With block size 16 and block
table [5, 2, 8, 12], position 35 is token 3 of logical block 2, which is physical block 8: slot
8 x 16 + 3 = 131. At most the last block of a sequence is partly empty, so waste is bounded by
`block_size - 1` tokens a sequence.

This module knows blocks, not tensors. Block 0 is never given out: it is the dummy block into which
padding may write.
"""

import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
import xxhash

from nanoserve.engine.listeners import BlockListener, CachedBlock, Listeners
from nanoserve.engine.sequence import Sequence

# The parent, as the number of its content or, for a first block, the sequence's key; token ids.
Parent = int | tuple[str, ...]
Content = tuple[Parent, list[int]]


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens; the last one may be partly empty."""
    return -(-num_tokens // block_size)


def chain_hash(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Return a hash of a block *and all that came before it*: 128 bits over parent and token ids.

    K and V of a token depend on its whole prefix, so equal tokens under different prefixes must
    not share a block; chaining makes the prefix part of the key. It finds a block and proves
    nothing: XXH3 is no cryptographic hash, and pairs of blocks that collide under *every* parent
    are found in seconds. `BlockManager.lookup` compares what it has found.
    """
    return xxhash.xxh3_128_digest(parent + token_ids.astype(np.int32, copy=False).tobytes())


class BlockManager:
    """Allocation by reference count, and a prefix cache over the blocks that are full.

    A freed block keeps its content and its hash until it is needed for something else, so the
    free queue *is* the prefix cache's eviction order: least recently used first. Each operation is
    O(1) per block, plus hashing each token once. `listeners` hear of what enters and leaves the
    prefix cache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        prefix_cache_seed: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        if prefix_cache_seed is None:
            prefix_cache_seed = secrets.randbits(64)
        self.listeners: Listeners[BlockListener] = Listeners()
        self._num_contents = 0
        self._root = chain_hash(str(prefix_cache_seed).encode(), np.empty(0))
        self.clear()

    def clear(self) -> None:
        """Free all blocks and empty the prefix cache, as after a step that raised.

        Block tables that name some of them mean nothing from now on. O(pool).
        """
        self._ref_counts = [0] * (self.num_blocks + 1)  # by block id; entry 0 is the dummy block
        self._hash_of: list[bytes | None] = [None] * (self.num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        # What proves a hit, by block: which content its parent has, and its own token ids.
        # Contents are numbered as they are cached, and no number is given twice, so a parent
        # whose block has long been taken for something else is not mistaken for its successor.
        self._content_of: list[Content | None] = [None] * (self.num_blocks + 1)
        self._content_ids = [0] * (self.num_blocks + 1)
        # Draining an OrderedDict from the front is O(1); a plain dict scans its own tombstones.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks + 1))
        if self.listeners:
            self.listeners.notify(lambda listener: listener.on_cleared())

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        return blocks_needed(num_tokens, self.block_size)

    def lookup(self, seq: Sequence) -> list[int]:
        """Return the cached blocks that hold the longest known prefix of `seq`. Changes nothing.

        A block counts only if it holds these very tokens behind this very parent; one whose hash
        merely collides is a miss.

        A hit never covers the last token: its logits are needed, so it must be computed. A block
        cache rounds that down, so a fully cached prompt of 64 tokens reuses 48 of them, in
        blocks of 16. If something of every token of the prompt is wanted, all are computed.
        """
        if not self.enable_prefix_caching or seq.needs_prompt_outputs:
            return []
        hits: list[int] = []
        max_hits = (len(seq.token_ids) - 1) // self.block_size
        self._hash_blocks(seq, max_hits)
        parent: Parent = seq.cache_key
        for index in range(max_hits):
            block = self._block_of.get(seq.block_hashes[index])
            if block is None or not self._is_at(block, seq, index, parent):
                break
            hits.append(block)
            parent = self._content_ids[block]
        return hits

    def allocate(self, seq: Sequence, num_tokens: int, cached_blocks: Collection[int] = ()) -> bool:
        """Extend the block table to hold `num_tokens` tokens; False, and no change, if it cannot.

        `cached_blocks`, from `lookup`, come first in the table of a sequence that has none yet.
        """
        table = seq.block_table
        num_new = self.blocks_needed(num_tokens) - len(table) - len(cached_blocks)
        # A cached block without users is in the free queue, and sharing it takes it out.
        num_revived = sum(self._ref_counts[block] == 0 for block in cached_blocks)
        if max(num_new, 0) + num_revived > len(self._free):
            return False
        for block in cached_blocks:
            self._share(block)
            table.append(block)
        seq.num_cached_blocks += len(cached_blocks)
        for _ in range(num_new):
            table.append(self._take())
        return True

    def cache(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Cache the blocks that the first `num_tokens` tokens fill, and return the new ones.

        `num_tokens` are those whose K and V are in the KV cache when the step that is being planned
        has run. A token that is known but not computed has none yet; one that is pending has no
        id yet, and its block is cached later. If another block already holds the same content
        (two sequences computed it side by side), or one whose hash collides, that one stays the
        cached one.
        """
        first = seq.num_cached_blocks
        end = min(num_tokens, len(seq.token_ids)) // self.block_size
        if first >= end or not self.enable_prefix_caching:
            return []
        seq.num_cached_blocks = end
        self._hash_blocks(seq, end)
        cached = []
        for index, block in enumerate(seq.block_table[first:end], first):
            block_hash = seq.block_hashes[index]
            parent = self._content_ids[seq.block_table[index - 1]] if index else seq.cache_key
            found = self._block_of.get(block_hash)
            if found is not None and self._is_at(found, seq, index, parent):
                self._content_ids[block] = self._content_ids[found]
                continue
            self._num_contents += 1
            self._content_ids[block] = self._num_contents
            if found is None:
                self._content_of[block] = (parent, self._token_ids(seq, index))
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
                cached.append(block)
                if self.listeners:
                    self._notify_cached(seq, index)
        return cached

    def is_cached(self, block: int) -> bool:
        """Return whether lookups can find `block`, in use or free."""
        return self._hash_of[block] is not None

    def find(self, block_hash: bytes) -> int | None:
        """Return the cached block with this chain hash, or None."""
        return self._block_of.get(block_hash)

    def cached_hashes(self) -> list[bytes]:
        """Return the chain hashes of all cached blocks, a parent not always before its child."""
        return list(self._block_of)

    def content_id(self, block: int) -> int:
        """Return the number of the content that `block` was cached with; never given to another."""
        return self._content_ids[block]

    def next_free_block(self) -> int:
        """Return the block that would be given out next; 0 if there is none."""
        return next(iter(self._free), 0)

    def evict(self, block: int) -> None:
        """Remove a block from the prefix cache, if it is there: its content is about to change."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        del self._block_of[block_hash]
        self._hash_of[block] = self._content_of[block] = None
        if self.listeners:
            self.listeners.notify(lambda listener: listener.on_removed(block, block_hash))

    def evict_all(self) -> None:
        """Empty the prefix cache, as when the weights have changed.

        Sequences keep their blocks, which no later request will find. O(pool).
        """
        self._block_of = {}
        self._hash_of = [None] * (self.num_blocks + 1)
        self._content_of = [None] * (self.num_blocks + 1)
        if self.listeners:
            self.listeners.notify(lambda listener: listener.on_cleared())

    def free(self, seq: Sequence, keep: int = 0) -> None:
        """Give back the blocks of `seq`, all but the first `keep`, last first.

        Blocks are reused in the order in which they are freed, so a cached chain loses its tail
        before its head: [1, 2, 3, 4] is evicted as 4, 3, 2, 1. The other way round, losing the
        head would make the whole chain unreachable.
        """
        seq.num_cached_blocks = min(seq.num_cached_blocks, keep)
        while len(seq.block_table) > keep:
            block = seq.block_table.pop()
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)  # nothing to keep: reuse it first

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise `RuntimeError` unless the pool agrees with the tables of all sequences. O(pool).

        Tests call it after everything they do.
        """
        ref_counts = [0] * (self.num_blocks + 1)
        for seq in sequences:
            for block in seq.block_table:
                ref_counts[block] += 1
        num_used = sum(count > 0 for count in self._ref_counts)
        cached = {hash_: block for block, hash_ in enumerate(self._hash_of) if hash_ is not None}
        problems = {
            "reference counts differ from the tables": ref_counts != self._ref_counts,
            "the dummy block was given out": self._ref_counts[0] != 0,
            "free + used != num_blocks": len(self._free) + num_used != self.num_blocks,
            "a free block is in use": any(self._ref_counts[block] for block in self._free),
            "hash and block maps disagree": self._block_of != cached,
            "a cached block has nothing that proves a hit": any(
                self._content_of[block] is None for block in cached.values()
            ),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found:
            raise RuntimeError(f"the block pool is inconsistent: {found}")

    def snapshot(self) -> bytes:
        """Return by block, as a copy, 1 if it is cached and else 0; entry 0 is the dummy block.

        O(pool), and milliseconds for 100,000 blocks.
        """
        return bytes(map(bool, self._hash_of))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.evict(block)
        self._ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _root_of(self, seq: Sequence) -> bytes:
        """Return where its chain begins: all that gives equal tokens other K and V is folded in."""
        return self._root + repr(seq.cache_key).encode() if seq.cache_key else self._root

    def _is_at(self, block: int, seq: Sequence, index: int, parent: Parent) -> bool:
        """Return whether a cached block holds what `seq` has at `index`: tokens and parent."""
        return self._content_of[block] == (parent, self._token_ids(seq, index))

    def _token_ids(self, seq: Sequence, index: int) -> list[int]:
        """Return the token ids of block `index` of `seq`."""
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _hash_blocks(self, seq: Sequence, num_blocks: int) -> None:
        """Extend `seq.block_hashes` to at least `num_blocks` hashes, each token hashed once."""
        hashes, size = seq.block_hashes, self.block_size
        first = len(hashes)
        if first >= num_blocks:
            return
        token_ids = np.array(seq.token_ids[first * size : num_blocks * size], dtype=np.int32)
        for start in range(0, len(token_ids), size):
            parent = hashes[-1] if hashes else self._root_of(seq)
            hashes.append(chain_hash(parent, token_ids[start : start + size]))

    def _notify_cached(self, seq: Sequence, index: int) -> None:
        block = seq.block_table[index]
        parent_hash = seq.block_hashes[index - 1] if index else None
        _, token_ids = self._content_of[block]
        cached = CachedBlock(block, seq.block_hashes[index], parent_hash, token_ids, seq.cache_key)
        self.listeners.notify(lambda listener: listener.on_cached(cached))
