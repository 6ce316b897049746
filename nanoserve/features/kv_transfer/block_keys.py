"""Keys of KV blocks that other processes compute, too."""

import hashlib
from collections.abc import Sequence

import numpy as np

from nanoserve.engine.prefix_cache import Prefix
from nanoserve.engine.sequence import CacheKey
from nanoserve.engine.sequence import Sequence as Seq
from nanoserve.features.kv_transfer.connector import BlockKey

_MOST_REMEMBERED = 2**16


class BlockKeys:
    """Computes the keys of sequences and of cached prefixes.

    The prefix cache compares prefixes in memory, and its hashes need not withstand an attack. Here
    a hash is all that is left of a block's parents, so it is SHA-256.
    """

    def __init__(self, fingerprint: bytes, block_size: int, num_groups: int) -> None:
        self._fingerprint, self._block_size = fingerprint, block_size
        self._groups = range(num_groups)
        self._hashes: dict[Prefix, bytes] = {}  # of prefixes met lately

    def of_sequence(self, seq: Seq, first: int, end: int) -> list[BlockKey]:
        """Return the keys of blocks [first, end) of a sequence: those of all groups, in turn."""
        keys: list[BlockKey] = []
        parent, size = self._root(seq.cache_key), self._block_size
        embeds = seq.prompt_embeds
        for index, start in enumerate(range(0, end * size, size)):
            token_ids = tuple(seq.token_ids[start : start + size])
            embeds_key = b"" if embeds is None else embeds.key_of_block(index)
            block_hash = _hash(parent, token_ids, embeds_key)
            if start >= first * size:
                keys += (BlockKey(block_hash, parent, token_ids, g) for g in self._groups)
            parent = block_hash
        return keys

    def of_prefix(self, prefix: Prefix, group: int) -> BlockKey:
        """Return the key of the block that ends a prefix."""
        parent = self._hash_of(prefix.parent)
        token_ids = tuple(prefix.token_ids)
        block_hash = _hash(parent, token_ids, prefix.embeds_key)
        return BlockKey(block_hash, parent, token_ids, group)

    def _hash_of(self, prefix: Prefix | CacheKey) -> bytes:
        if len(self._hashes) > _MOST_REMEMBERED:
            self._hashes = {}
        path: list[Prefix] = []
        while isinstance(prefix, Prefix) and prefix not in self._hashes:
            path.append(prefix)
            prefix = prefix.parent
        block_hash = self._hashes[prefix] if isinstance(prefix, Prefix) else self._root(prefix)
        for each in reversed(path):
            self._hashes[each] = block_hash = _hash(block_hash, each.token_ids, each.embeds_key)
        return block_hash

    def _root(self, cache_key: CacheKey) -> bytes:
        return hashlib.sha256(self._fingerprint + repr(cache_key).encode()).digest()


def _hash(parent: bytes, token_ids: Sequence[int], embeds_key: bytes) -> bytes:
    """Return the hash of a block. Its parts have fixed lengths, so none can stand for another."""
    content = parent + embeds_key + np.array(token_ids, dtype="<i4").tobytes()
    return hashlib.sha256(content).digest()
