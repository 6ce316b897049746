"""The events of the prefix cache, step by step, and their wire format, which is vLLM's.

A message of ZeroMQ has three frames: the topic, a sequence number (8 bytes, big endian, from 0 on)
and a batch as MessagePack:

    [ts, [event, ...], data_parallel_rank]

An event is a map with its kind as "type" (since vLLM 0.24; before, it was an array):

    BlockStored       block_hashes, parent_block_hash (null at the beginning of a prompt),
                      token_ids, block_size, lora_id, medium, lora_name, extra_keys, group_idx,
                      kv_cache_spec_kind
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

Hashes are the last 64 bits of those of the engine, as integers, as vLLM's are by default.
"""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

from nanoserve.engine.listeners import BlockListener, CachedBlock

_MEDIUM = "GPU"  # vLLM's name of the device's own memory, also where that is a CPU's


@dataclass
class BlockStored:
    """Blocks of one sequence, each the parent of the next, that are in the prefix cache now.

    block_hashes: 16 bytes each.
    parent_block_hash: of the block before the first one; None if that begins its sequence.
    token_ids: `block_size` for each of the blocks, in order.
    cache_key: what else K and V depend on, such as ("cache_salt", "tenant-a").
    group: the group of layers whose K and V they hold, and whether these see a window only.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    cache_key: tuple[str, ...] = ()
    group: int = 0
    has_window: bool = False

    def wire(self) -> dict[str, Any]:
        """Return vLLM's map. As there, the first block of a sequence has the salt as extra key."""
        extra_keys: list[Any] = [None] * len(self.block_hashes)
        if self.cache_key and self.parent_block_hash is None:
            extra_keys[0] = list(self.cache_key[1::2])  # names and values take turns
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
    """Blocks that are not in the prefix cache any more."""

    block_hashes: list[bytes]
    group: int = 0

    def wire(self) -> dict[str, Any]:
        return {
            "type": "BlockRemoved",
            "block_hashes": list(map(wire_hash, self.block_hashes)),
            "medium": _MEDIUM,
            "group_idx": self.group,
        }


@dataclass
class AllBlocksCleared:
    """The prefix cache is empty."""

    def wire(self) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"}


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class KVEventBatch:
    """The events of one step, in order. `ts` is in seconds since 1970."""

    ts: float
    events: list[KVEvent] = field(default_factory=list)
    data_parallel_rank: int = 0

    def wire(self) -> list[Any]:
        return [self.ts, [event.wire() for event in self.events], self.data_parallel_rank]


def wire_hash(block_hash: bytes) -> int:
    """Return a block's hash as it is published: 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")


class EventCollector(BlockListener):
    """Collects events until they are taken; neighbours of one kind become one event.

    They are about contents, so copies of a block make none. `windows` are those of the groups.
    Groups do not share contents, so only the order within each of them counts.
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
