"""What an engine's prefix cache gains and loses, for those outside who keep count of it."""

from threading import Lock

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.listeners import BlockListener, CachedBlock


class BlockEvents(BlockListener):
    """Records the blocks that `manager` caches and evicts, by their chain hashes.

    Only *which* hashes were touched is noted. What became of them is looked up in the prefix cache
    when the events are taken, so the two cannot disagree, whatever was raised in between: a change
    that is noted after `take` has looked is noted for the next one.

    With several groups of layers (`nanoserve.engine.kv_groups`), a block counts as there if the
    first group has it. A router follows a prompt from its first block on, so to it that means:

    - Beside layers with a sliding window, the first group is one with full attention. It has every
      block of a hit, but a hit takes all groups: the router may expect more than there is.
    - If all layers have a window, blocks behind it are the first to go, and a hit does not need
      them. The router believes that nothing is left of a prompt whose first block is gone, though
      the engine may still find the end of it: such a prompt goes where least waits.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._lock = Lock()  # an engine steps in one thread, and another one takes
        self._taken: set[bytes] = set()  # what all that was taken adds up to
        self._touched: set[bytes] = set()
        manager.listeners.append(self)
        self._touched.update(manager.prefix_cache.hashes())  # what it has now is news, too

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of the blocks (stored, removed) since the last call; none is in both.

        A block that came and went meanwhile is in neither.
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
