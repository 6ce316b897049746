"""A KV connector keeps KV blocks outside the engine: in files, or in another process.

    block --copy--> staging place --store--> connector --load--> staging place --copy--> block

A connector has four methods. It knows blocks as bytes under a `BlockKey`. Which blocks are stored,
and when a sequence waits for a load, is decided in `stores` and `loads` of this package.
A connector of your own is a class that `register_kv_connector` names:

    class Shelf:
        def __init__(self, context): self.blocks = {}
        def find(self, keys, prompt):
            return sum(1 for _ in takewhile(self.blocks.__contains__, keys))
        ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanoserve.engine.sequence import CacheKey
from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.utils.registry import Registry


class BlockKey(NamedTuple):
    """A block key says what a block holds: K and V of one layer group, for a chain of tokens.

    token_ids: those of the block itself; its parent has those before it.
    block_hash: SHA-256 of the parent's hash, the hash of the block's prompt embeddings, if it has
        some, and the token ids. The first block of a sequence has as
        its parent the hash of all else that K and V depend on, such as the weights: see
        `nanoserve.features.kv_transfer.fingerprint`. Processes that agree on that have the same
        keys, and no others do.
    """

    block_hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]
    group: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt of a request, for a connector that has more than blocks under their keys.

    token_ids: from the first one to the end of the last block that is sought.
    cache_key: what else its K and V depend on, such as a salt: see `Sequence.cache_key`.
    abandoned: set when no request waits for the load any more, so that it may end at once.
    """

    token_ids: list[int]
    cache_key: CacheKey = ()
    abandoned: Event = field(default_factory=Event)


class KVConnector(Protocol):
    """A place for KV blocks outside the engine.

    `find` is called by the engine's loop, which waits for it; `load` and `store` are called in
    threads of their own, also at the same time. An exception in any of them counts as "not found":
    it is logged, and the tokens are computed.

    It may have further attributes. `always_loads`: whether a load is started even if computing the
    tokens is expected to take less time. `is_awaited`: whether others wait for blocks, so that they
    are stored as soon as they are computed, and again if they are found in the KV cache.
    `counters()`: rows of name, meaning and value for the metrics.
    """

    def find(self, keys: Sequence[BlockKey], prompt: Prompt | None) -> int:
        """Return how many of these blocks, from the first one on, can be loaded. Never waits.

        prompt: None for a block that is about to be stored, unless it is there already.
        """

    def load(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray], prompt: Prompt) -> int:
        """Write block keys[i] to memory[i], uint8 [block_bytes].

        Returns how many of them, from the first one on, have been written and are known to be
        right. It may be fewer than `find` has promised.
        """

    def store(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray]) -> None:
        """Keep block keys[i], whose content is memory[i], uint8 [block_bytes], if there is room.

        The memory has another content when this has returned. Parents come before their children.
        """

    def close(self) -> None:
        """Release files, threads and connections; no other call comes after this one."""


@dataclass(frozen=True)
class ConnectorContext:
    """A connector is constructed with this context.

    config: the user's, whose `kv_connector_extra_config` has no `load_timeout` any more.
    block_bytes: of a block of one layer group. block_size: tokens per block.
    fingerprint: the hash of all that K and V depend on besides tokens.
    load_timeout: seconds after which a request does not wait for its load any more.
    """

    config: KVTransferConfig
    block_bytes: int
    block_size: int
    num_groups: int
    fingerprint: bytes
    load_timeout: float

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the connector itself."""
        return self.config.kv_connector_extra_config


KV_CONNECTORS: Registry[Callable[[ConnectorContext], Any]] = Registry(
    "KV connector",
    {
        "disk": "nanoserve.features.kv_transfer.disk:DiskConnector",
        "socket": "nanoserve.features.kv_transfer.pair.connector:SOCKET_CONNECTOR",
    },
)


def register_kv_connector(name: str, location: str) -> None:
    """Register a connector for `kv_transfer_config={"kv_connector": name}`, as "module:Class"."""
    KV_CONNECTORS.register(name, location)
