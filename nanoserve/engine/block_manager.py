"""Who owns which block of the KV cache.

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
from collections.abc import Collection

import numpy as np
import xxhash

from nanoserve.engine.sequence import Sequence

# The parent, as the number of its content or, for a first block, the root of the chain; token ids.
Content = tuple[int | bytes, list[int]]


def chain_hash(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Hash of a block *and all that came before it*: 128 bits over the parent's hash and the ids.

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
    O(1) per block, plus hashing each token once.
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
        self._root = chain_hash(str(prefix_cache_seed).encode(), np.empty(0))
        self._ref_counts = [0] * (num_blocks + 1)  # by block id; entry 0 is the dummy block
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        # What proves a hit, by block: which content its parent has, and its own token ids.
        # Contents are numbered as they are published, and no number is given twice, so a parent
        # whose block has long been taken for something else is not mistaken for its successor.
        self._content_of: list[Content | None] = [None] * (num_blocks + 1)
        self._content_ids = [0] * (num_blocks + 1)
        self._num_contents = 0
        # Draining an OrderedDict from the front is O(1); a plain dict scans its own tombstones.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _root_for(self, seq: Sequence) -> bytes | None:
        """Where the hash chain of `seq` begins: sequences share blocks only under one root.

        The completions of one prompt share among themselves even without prefix caching, under a
        root of their own. None shares nothing.
        """
        if self.enable_prefix_caching:
            return self._root
        leader = seq.arrival - seq.index  # siblings arrive one after the other
        return self._root + str(leader).encode() if seq.params.n > 1 else None

    def lookup(self, seq: Sequence) -> list[int]:
        """The cached blocks that hold the longest known prefix of `seq`. Changes nothing.

        A block counts only if it holds these very tokens behind this very parent; one whose hash
        merely collides is a miss.

        A hit never covers the last token: its logits are needed, so it must be computed. A block
        cache rounds that down, so a fully cached prompt of 64 tokens reuses 48 of them, in
        blocks of 16. A sequence whose prompt logits are needed computes all of its prompt.
        """
        parent: int | bytes | None = self._root_for(seq)
        if parent is None or seq.needs_prompt_logits:
            return []
        hits: list[int] = []
        max_hits = (seq.num_tokens - 1) // self.block_size
        self._hash_blocks(seq, max_hits)
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
        # A cached block that nobody uses is in the free queue, and sharing it takes it out.
        num_revived = sum(self._ref_counts[block] == 0 for block in cached_blocks)
        if max(num_new, 0) + num_revived > len(self._free):
            return False
        for block in cached_blocks:
            self._share(block)
            table.append(block)
        for _ in range(num_new):
            table.append(self._take())
        return True

    def register(self, seq: Sequence, num_new_tokens: int) -> list[int]:
        """Publish the blocks that this step's `num_new_tokens` fill, and return them.

        Only blocks whose last token lies inside what this step computes: a token that is known
        but not computed has no K and V yet. If another block already holds the same content (two
        sequences computed it side by side), or one whose hash collides, that one stays the
        published one.
        """
        first = seq.num_computed_tokens // self.block_size
        end = (seq.num_computed_tokens + num_new_tokens) // self.block_size
        root = self._root_for(seq)
        if first == end or root is None:
            return []
        self._hash_blocks(seq, end)
        published = []
        for index, block in enumerate(seq.block_table[first:end], first):
            block_hash = seq.block_hashes[index]
            parent = self._content_ids[seq.block_table[index - 1]] if index else root
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
                published.append(block)
        return published

    def is_cached(self, block: int) -> bool:
        """Whether the prefix cache has `block`, in use or free."""
        return self._hash_of[block] is not None

    def forget(self, block: int) -> None:
        """Withdraw a published block, because its content is about to change or never came."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = self._content_of[block] = None

    def free(self, seq: Sequence) -> None:
        """Give back every block of `seq`, last first.

        Blocks are reused in the order in which they are freed, so a cached chain loses its tail
        before its head: [1, 2, 3, 4] is evicted as 4, 3, 2, 1. The other way round, losing the
        head would make the whole chain unreachable.
        """
        while seq.block_table:
            block = seq.block_table.pop()
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)  # nothing to keep: reuse it first

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self._ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _is_at(self, block: int, seq: Sequence, index: int, parent: int | bytes) -> bool:
        """Whether published `block` holds what `seq` has at `index`: its tokens, its parent."""
        return self._content_of[block] == (parent, self._token_ids(seq, index))

    def _token_ids(self, seq: Sequence, index: int) -> list[int]:
        """Those of the block `index` of `seq`."""
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _hash_blocks(self, seq: Sequence, num_blocks: int) -> None:
        """Extend `seq.block_hashes` to at least `num_blocks` hashes, each token hashed once."""
        hashes, size = seq.block_hashes, self.block_size
        first = len(hashes)
        if first >= num_blocks:
            return
        token_ids = np.array(seq.token_ids[first * size : num_blocks * size], dtype=np.int32)
        for start in range(0, len(token_ids), size):
            parent = hashes[-1] if hashes else self._root_for(seq)
            hashes.append(chain_hash(parent, token_ids[start : start + size]))
