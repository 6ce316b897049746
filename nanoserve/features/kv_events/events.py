"""Collect the prefix cache's events of each step, and encode them in vLLM's wire format.

A ZeroMQ message has three frames: the topic, a sequence number (8 bytes, big endian, from 0 on) and
a batch as MessagePack:

    [ts, [event, ...], data_parallel_rank]

An event is a map whose "type" is its kind (since vLLM 0.24; before, it was an array):

    BlockStored       block_hashes, parent_block_hash (null at the beginning of a prompt),
                      token_ids, block_size, lora_id, medium, lora_name, extra_keys, group_idx,
                      kv_cache_spec_kind
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

Hashes are the last 64 bits of the engine's block hashes, as integers, as in vLLM by default.
"""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

from nanoserve.engine.listeners import BlockListener, CachedBlock

_MEDIUM = "GPU"  # vLLM's name for device memory, used on a CPU as well


@dataclass
class BlockStored:
    """An event for newly cached blocks of one sequence, each the parent of the next.

    block_hashes: 16 bytes each.
    parent_block_hash: the hash of the block before the first one; None at the start of a sequence.
    token_ids: the tokens of all blocks in order, `block_size` per block.
    cache_key: names and values on which K and V depend besides the tokens, such as
        ("cache_salt", "tenant-a").
    group: the KV cache group; the K and V of its layers are in these blocks.
    has_window: True if the layers of the group use sliding window attention.
    embeds_keys: by index of a block in `block_hashes`, the hash of its prompt embeddings, if any.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    cache_key: tuple[str, ...] = ()
    group: int = 0
    has_window: bool = False
    embeds_keys: dict[int, bytes] = field(default_factory=dict)

    def wire(self) -> dict[str, Any]:
        """Return the event as vLLM's map.

        As in vLLM, the first block of a sequence has the cache salt among its extra keys, and a
        block with prompt embeddings has their hash.
        """
        extra_keys: list[Any] = [None] * len(self.block_hashes)
        for index, key in self.embeds_keys.items():
            extra_keys[index] = [key.hex()]
        if self.cache_key and self.parent_block_hash is None:
            own = self.cache_key[1::2]  # names and values alternate
            extra_keys[0] = [*own, *(extra_keys[0] or ())]
        parent = self.parent_block_hash
        return {
            "type": "BlockStored",
            "block_hashes": list(map(wire_hash, self.block_hashes)),
            "parent_block_hash": None if parent is None else wire_hash(parent),
            "token_ids": self.token_ids,
            "block_size": self.block_size,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": self.group,
            "kv_cache_spec_kind": "sliding_window" if self.has_window else "full_attention",
        }


@dataclass
class BlockRemoved:
    """An event for blocks that were evicted from the prefix cache."""

    block_hashes: list[bytes]
    group: int = 0

    def wire(self) -> dict[str, Any]:
        """Return vLLM's map of the event."""
        return {
            "type": "BlockRemoved",
            "block_hashes": list(map(wire_hash, self.block_hashes)),
            "medium": _MEDIUM,
            "group_idx": self.group,
        }


@dataclass
class AllBlocksCleared:
    """An event for the clearing of the prefix cache."""

    def wire(self) -> dict[str, Any]:
        """Return vLLM's map of the event."""
        return {"type": "AllBlocksCleared"}


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class KVEventBatch:
    """The events of one step, in order. `ts` is the time in seconds since 1970."""

    ts: float
    events: list[KVEvent] = field(default_factory=list)
    data_parallel_rank: int = 0

    def wire(self) -> list[Any]:
        """Return the batch in the form that is encoded as MessagePack."""
        return [self.ts, [event.wire() for event in self.events], self.data_parallel_rank]


def wire_hash(block_hash: bytes) -> int:
    """Return the published form of a block hash, which is its last 64 bits as an integer."""
    return int.from_bytes(block_hash[-8:], "big")


class EventCollector(BlockListener):
    """Collects events until they are taken, and merges successive events of one kind.

    windows: the sliding window of each KV cache group, None for full attention.

    Events are about block hashes, so only the first cached copy of a block and the removal of its
    last copy cause events. Groups have separate contents, so only the order within a group matters.
    """

    def __init__(self, windows: AbstractSequence[int | None] = (None,)) -> None:
        self._windows = windows
        self._events: list[KVEvent] = []
        self._last: dict[int, BlockStored | BlockRemoved] = {}  # by group, since a clear

    def on_cached(self, cached: CachedBlock) -> None:
        if cached.is_copy:
            return
        last = self._last.get(cached.group)
        if isinstance(last, BlockStored) and last.block_hashes[-1] == cached.parent_hash:
            last.block_hashes.append(cached.block_hash)
            last.token_ids += cached.token_ids
            if cached.embeds_key:
                last.embeds_keys[len(last.block_hashes) - 1] = cached.embeds_key
            return
        self._add(
            BlockStored(
                [cached.block_hash],
                cached.parent_hash,
                list(cached.token_ids),
                len(cached.token_ids),
                cached.cache_key,
                cached.group,
                self._windows[cached.group] is not None,
                {0: cached.embeds_key} if cached.embeds_key else {},
            )
        )

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        if not is_last:
            return
        last = self._last.get(group)
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._add(BlockRemoved([block_hash], group))

    def on_cleared(self) -> None:
        self._events.append(AllBlocksCleared())
        self._last = {}

    def take(self) -> list[KVEvent]:
        """Return the events since the last call."""
        events, self._events, self._last = self._events, [], {}
        return events

    def _add(self, event: BlockStored | BlockRemoved) -> None:
        self._events.append(event)
        self._last[event.group] = event
