"""Listeners are notified of what an engine does. They only observe; extensions take part.

`LLMEngine.listeners` are notified of requests, `BlockManager.listeners` of blocks in the prefix
cache (*KV events*), and `LLMEngine.observers` of steps: each observer is called as `observer(plan,
batch, result, times)` at the end of a step.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nanoserve.outputs import RequestOutput

if TYPE_CHECKING:
    from nanoserve.engine.request import Request

logger = logging.getLogger(__name__)

L = TypeVar("L")


class RequestListener:
    """The base class of listeners to requests; every method does nothing."""

    def on_start(self, request: "Request") -> None:
        """Called when a request has been added."""

    def on_finish(self, output: RequestOutput) -> None:
        """Called once for each request, with its last output: finished, aborted or failed."""


class CachedBlock(NamedTuple):
    """A full block that has been added to the prefix cache.

    block: its id in the pool.
    block_hash, parent_hash: the chain hashes of this block and of the block before it; the latter
        is None for the first block of a sequence.
    token_ids: its `block_size` token ids. The list belongs to the prefix cache: do not change it.
    cache_key: what else its K and V depend on, such as a tenant's salt; see `Sequence.cache_key`.
    group: the layer group of its K and V: an index of `nanoserve.engine.kv_groups.group_layers`.
    is_copy: True if another block of the group already holds the same.
    embeds_key: the hash of the prompt embeddings in the block: see `Prefix.embeds_key`.
    """

    block: int
    block_hash: bytes
    parent_hash: bytes | None
    token_ids: list[int]
    cache_key: tuple[str, ...]
    group: int = 0
    is_copy: bool = False
    embeds_key: bytes = b""


class BlockListener:
    """The base class of listeners to blocks in the prefix cache; every method does nothing.

    A block is cached when the step that fills it is planned, so its K and V are valid when that
    step has run. Methods are called after the change, in the thread that makes it.
    """

    def on_cached(self, cached: CachedBlock) -> None:
        """Called when lookups can find a block that they could not find before."""

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        """Called when a cached block has been evicted, so that lookups no longer find it.

        is_last: True if no other block of the group holds the same.
        """

    def on_cleared(self) -> None:
        """Called when all cached blocks have been removed at once; there may have been none."""


class Listeners(list[L]):
    """A list of listeners. An exception in one of them does not affect the step.

    The first exception of each listener is logged with its name; it is still called afterwards, and
    so are the listeners after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._failed: set[int] = set()  # ids of listeners that have raised

    def notify(self, call: Callable[[L], None]) -> None:
        """Call `call` with each listener."""
        for listener in list(self):  # a copy: a listener may remove itself
            try:
                call(listener)
            except Exception:
                self._note_failure(listener)

    def _note_failure(self, listener: L) -> None:
        if id(listener) not in self._failed:
            self._failed.add(id(listener))
            name = type(listener).__qualname__
            logger.exception(
                "the listener %s raised an exception; its later exceptions are not logged", name
            )
