"""The prefix cache finds blocks whose K and V can be reused.

K and V of a token depend on its whole prefix. So a cache entry is a *prefix*: a full block of
tokens together with its parent, which is a prefix again, up to the root. The prefixes form a tree:

    [the quick brown fox] -- [jumps over the lazy] -- [dog and so on and]
                         \\-- [runs away from the ]

A prefix lists the blocks that hold its K and V. A prefix without blocks is kept while one of its
descendants has some, because lookups compare the whole chain of prefixes; it is removed with the
last of them.
"""

import secrets
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import xxhash

from nanoserve.engine.listeners import BlockListener, CachedBlock, Listeners
from nanoserve.engine.sequence import CacheKey, Sequence


def chain_hash(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Return the 128-bit hash of a block *and all that came before it*: parent hash and token ids.

    Equal tokens after different prefixes must not share a block; chaining makes the prefix part of
    the key. The hash finds a prefix and proves nothing: XXH3 is not a cryptographic hash, and pairs
    of blocks that collide under *every* parent are found in seconds. `PrefixCache.chain` compares
    the tokens of what it has found.
    """
    return xxhash.xxh3_128_digest(parent + token_ids.astype(np.int32, copy=False).tobytes())


def root_key(seq: Sequence) -> CacheKey:
    """Return what K and V of `seq` depend on besides its tokens; it is hashed into the root.

    Sequences with different keys share no blocks: those of different tenants, and those that were
    added before and after the weights were replaced. So K and V of old weights are never found.
    """
    if not seq.weights_id:
        return seq.cache_key
    return (*seq.cache_key, "weights", str(seq.weights_id))


@dataclass(slots=True, eq=False)
class Prefix:
    """A full block of tokens and its chain of parents.

    embeds_key: the hash of the prompt embeddings in the block, see `PromptEmbeds.key_of_block`.
    blocks: by layer group, the blocks that hold its K and V. Usually one; several if sequences have
        computed the same tokens at the same time.
    """

    parent: "Prefix | CacheKey"
    token_ids: list[int]
    embeds_key: bytes
    block_hash: bytes
    blocks: list[list[int]]
    num_children: int = 0
    num_kept: int = 0  # calls of `PrefixCache.keep` without `let_go`

    def count_children(self, change: int) -> None:
        self.num_children += change

    def count_kept(self, change: int) -> None:
        self.num_kept += change

    @property
    def is_needed(self) -> bool:
        return self.num_kept + self.num_children > 0 or any(self.blocks)


class PrefixCache:
    """A tree of prefixes, found by chain hash. `listeners` are notified of every change.

    `num_needed` is, by layer group, the number of last blocks of a hit that must be cached: None
    for all of them, a number for layers with a sliding window.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_needed: AbstractSequence[int | None] = (None,),
        seed: int | None = None,
    ) -> None:
        self.block_size, self.num_needed = block_size, tuple(num_needed)
        seed = secrets.randbits(64) if seed is None else seed
        self.listeners: Listeners[BlockListener] = Listeners()
        self._root = chain_hash(str(seed).encode(), np.empty(0))
        self._num_added = 0
        self._num_blocks = num_blocks
        self._prefixes: dict[bytes, Prefix] = {}
        # By block: the prefix that it holds, and a serial number that is never used twice.
        self._prefix_of: list[Prefix | None] = [None] * (num_blocks + 1)
        self._numbers = [0] * (num_blocks + 1)

    def clear(self) -> None:
        """Remove all entries. O(pool)."""
        self._prefixes = {}
        self._prefix_of = [None] * (self._num_blocks + 1)
        if self.listeners:
            self.listeners.notify(lambda listener: listener.on_cleared())

    # ------------------------------------------------------------------ lookup

    def lookup(self, seq: Sequence, max_blocks: int) -> list[tuple[int, ...]]:
        """Return the longest cached prefix of `seq`, of up to `max_blocks` blocks.

        For each block of tokens it has a tuple: by layer group, the KV block, or 0 where none is
        needed. The hit ends at the same block for all groups: a group with full attention has all
        blocks before it, and a group with a window the last `num_needed` ones.
        """
        chain = self.chain(seq, max_blocks)
        if self.num_needed == (None,):  # fast path of most models: each waiting prompt is looked up
            owners = takewhile(bool, (prefix.blocks[0] for prefix in chain))
            return [(own[0],) for own in owners]
        end, runs = 0, [0] * len(self.num_needed)  # blocks in a row, by group
        for length, prefix in enumerate(chain, 1):
            runs = [run + 1 if own else 0 for run, own in zip(runs, prefix.blocks, strict=True)]
            wanted = (length if n is None else min(n, length) for n in self.num_needed)
            if all(run >= n for run, n in zip(runs, wanted, strict=True)):
                end = length
        starts = [0 if n is None else max(0, end - n) for n in self.num_needed]
        return [
            tuple(
                own[0] if index >= start else 0
                for own, start in zip(prefix.blocks, starts, strict=True)
            )
            for index, prefix in enumerate(chain[:end])
        ]

    def chain(self, seq: Sequence, max_blocks: int) -> list[Prefix]:
        """Return the known prefixes of `seq`, from the first one on.

        A prefix counts only if it has the same tokens and the same parent; one whose hash merely
        collides ends the chain.
        """
        self.hash_blocks(seq, max_blocks)
        chain: list[Prefix] = []
        parent: Prefix | CacheKey = root_key(seq)
        for index in range(max_blocks):
            prefix = self._prefixes.get(seq.block_hashes[index])
            if prefix is None or not self._is_at(prefix, seq, index, parent):
                break
            chain.append(prefix)
            parent = prefix
        return chain

    def find(self, block_hash: bytes) -> int | None:
        """Return a block of the first layer group with this chain hash, or None."""
        prefix = self._prefixes.get(block_hash)
        return prefix.blocks[0][0] if prefix is not None and prefix.blocks[0] else None

    def hashes(self) -> list[bytes]:
        """Return the chain hashes that `find` can find; parents do not always come first."""
        return [hash_ for hash_, prefix in self._prefixes.items() if prefix.blocks[0]]

    def number_of(self, block: int) -> int:
        """Return the serial number of the cache entry of `block`; 0 if it is not cached.

        A block that is cached again gets another number, even if it holds the same prefix again: it
        may have held other tokens in between.
        """
        return self._numbers[block] if self.has(block) else 0

    def has(self, block: int) -> bool:
        """Return True if lookups can find `block`, in use or free."""
        return self._prefix_of[block] is not None

    def needs(self, block: int) -> bool:
        """Return True if `block` is cached and is the only block of its group with this prefix."""
        prefix = self._prefix_of[block]
        if prefix is not None:
            for own in prefix.blocks:
                if block in own:
                    return len(own) == 1
        return False

    # ------------------------------------------------------------------ adding and removing blocks

    def add(self, seq: Sequence, index: int) -> None:
        """Cache the blocks, one per layer group, that hold the tokens of block `index` of `seq`.

        If another prefix has the same hash, the other prefix stays, and neither this prefix nor its
        descendants are cached.
        """
        tables = seq.block_tables
        parent = self._prefix_of[tables[0][index - 1]] if index else root_key(seq)
        if parent is None:
            return
        self.hash_blocks(seq, index + 1)
        prefix = self._prefixes.get(seq.block_hashes[index])
        if prefix is None:
            prefix = self._grow(parent, seq, index)
        elif not self._is_at(prefix, seq, index, parent):
            return
        for group, (own, table) in enumerate(zip(prefix.blocks, tables, strict=True)):
            block = table[index]
            if block and self._prefix_of[block] is None:
                self._prefix_of[block] = prefix
                self._num_added += 1
                self._numbers[block] = self._num_added
                own.append(block)
                if self.listeners:
                    self._notify_cached(prefix, block, group, root_key(seq))

    def remove(self, block: int) -> None:
        """Remove `block` from the prefix cache, if it is cached: its content is about to change."""
        prefix = self._prefix_of[block]
        if prefix is None:
            return
        self._prefix_of[block] = None
        for group, own in enumerate(prefix.blocks):
            if block in own:
                own.remove(block)
                self._notify_removed(block, prefix.block_hash, group, not own)
                break
        self._prune(prefix)

    def keep(self, block_hash: bytes) -> Prefix:
        """Keep a prefix in the tree, with or without blocks, until `let_go` is called as often."""
        prefix = self._prefixes[block_hash]
        prefix.count_kept(1)
        return prefix

    def let_go(self, prefix: Prefix) -> None:
        """Undo one `keep`; nothing happens if the cache has been cleared since then."""
        prefix.count_kept(-1)
        self._prune(prefix)

    def is_known(self, prefix: Prefix) -> bool:
        """Return True if `prefix` is in the tree, where lookups find it."""
        return self._prefixes.get(prefix.block_hash) is prefix

    def _prune(self, prefix: Prefix | CacheKey) -> None:
        """Remove a prefix that is not needed, and the parents that it alone needed."""
        while isinstance(prefix, Prefix) and not prefix.is_needed and self.is_known(prefix):
            del self._prefixes[prefix.block_hash]
            prefix = prefix.parent
            if isinstance(prefix, Prefix):
                prefix.count_children(-1)

    def hash_blocks(self, seq: Sequence, num_blocks: int) -> None:
        """Extend `seq.block_hashes` to at least `num_blocks` hashes, each token hashed once."""
        hashes, size = seq.block_hashes, self.block_size
        first = len(hashes)
        if first >= num_blocks:
            return
        token_ids = np.array(seq.token_ids[first * size : num_blocks * size], dtype=np.int32)
        for start in range(0, len(token_ids), size):
            parent = hashes[-1] if hashes else self._root_of(seq)
            if seq.prompt_embeds is not None:
                parent += seq.prompt_embeds.key_of_block(len(hashes))
            hashes.append(chain_hash(parent, token_ids[start : start + size]))

    def problems(self) -> list[str]:
        """Return a list of inconsistencies, which is empty if there are none."""
        held = {b: p for p in self._prefixes.values() for own in p.blocks for b in own}
        cached = {block: p for block, p in enumerate(self._prefix_of) if p is not None}
        prefixes = set(self._prefixes.values())
        parents = [p.parent for p in prefixes if isinstance(p.parent, Prefix)]
        problems = {
            "prefixes and blocks disagree": held != cached,
            "a cached prefix has lost its parent": not prefixes.issuperset(parents),
            "children are miscounted": sum(p.num_children for p in prefixes) != len(parents),
            "a prefix without blocks and children is kept": any(
                not prefix.is_needed for prefix in prefixes
            ),
        }
        return [problem for problem, is_there in problems.items() if is_there]

    def _grow(self, parent: Prefix | CacheKey, seq: Sequence, index: int) -> Prefix:
        """Add the prefix that ends with block `index` of `seq`."""
        hash_ = seq.block_hashes[index]
        blocks: list[list[int]] = [[] for _ in self.num_needed]
        prefix = Prefix(parent, *self._content(seq, index), hash_, blocks)
        if isinstance(parent, Prefix):
            parent.count_children(1)
        self._prefixes[hash_] = prefix
        return prefix

    def _root_of(self, seq: Sequence) -> bytes:
        key = root_key(seq)
        return self._root + repr(key).encode() if key else self._root

    def _is_at(self, prefix: Prefix, seq: Sequence, index: int, parent: Prefix | CacheKey) -> bool:
        """Return True if `prefix` has the content and the parent of block `index` of `seq`."""
        content = prefix.token_ids, prefix.embeds_key
        return prefix.parent == parent and content == self._content(seq, index)

    def _content(self, seq: Sequence, index: int) -> tuple[list[int], bytes]:
        """Return the token ids of block `index` of `seq`, and the hash of its embeddings."""
        token_ids = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
        embeds = seq.prompt_embeds
        return token_ids, b"" if embeds is None else embeds.key_of_block(index)

    def _notify_removed(self, *removed: Any) -> None:
        if self.listeners:
            self.listeners.notify(lambda listener: listener.on_removed(*removed))

    def _notify_cached(self, prefix: Prefix, block: int, group: int, key: CacheKey) -> None:
        parent = prefix.parent
        cached = CachedBlock(
            block,
            prefix.block_hash,
            parent.block_hash if isinstance(parent, Prefix) else None,
            prefix.token_ids,
            key,
            group,
            is_copy=len(prefix.blocks[group]) > 1,
            embeds_key=prefix.embeds_key,
        )
        self.listeners.notify(lambda listener: listener.on_cached(cached))
