"""Cache and evict events of an engine's prefix cache, for routers outside the engine."""

from threading import Lock

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.listeners import BlockListener, CachedBlock


class BlockEvents(BlockListener):
    """A listener that records the blocks that `manager` caches and evicts, by their chain hashes.

    It only records *which* hashes were touched. Their state is looked up in the prefix cache when
    the events are taken, so events and cache cannot disagree, whatever was raised in between. A
    change that is recorded after the look-up of `take` is reported by the next `take`.

    With several KV cache groups (`nanoserve.engine.kv_groups`), a block counts as cached if the
    first group has it. A router matches a prompt from its first block on, which means:

    - In a model with sliding window layers and full attention layers, the first group has full
      attention. It has every block of a hit, but a hit needs all groups, so the router may
      expect more cached tokens than there are.
    - If all layers have a sliding window, the blocks before the window are evicted first, and a hit
      does not need them. For a prompt whose first block was evicted, the router expects no hit,
      although the engine may still find the last blocks; it sends such a prompt to the least loaded
      replica.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._lock = Lock()  # the engine's thread records events, and another thread takes them
        self._taken: set[bytes] = set()  # cached hashes according to all events taken so far
        self._touched: set[bytes] = set()
        manager.listeners.append(self)
        self._touched.update(manager.prefix_cache.hashes())  # report the initial content, too

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of the blocks (stored, removed) since the last call, without overlap.

        A block that was both cached and evicted meanwhile is in neither list.
        """
        stored: list[bytes] = []
        removed: list[bytes] = []
        with self._lock:
            for block_hash in self._touched:
                is_there = self._manager.prefix_cache.find(block_hash) is not None
                was_there = block_hash in self._taken
                if is_there and not was_there:
                    stored.append(block_hash)
                elif was_there and not is_there:
                    removed.append(block_hash)
            self._touched.clear()
            self._taken.update(stored)
            self._taken.difference_update(removed)
        return stored, removed

    def on_cached(self, cached: CachedBlock) -> None:
        with self._lock:
            self._touched.add(cached.block_hash)

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        with self._lock:
            self._touched.add(block_hash)

    def on_cleared(self) -> None:
        with self._lock:
            self._touched |= self._taken
