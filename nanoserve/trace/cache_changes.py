"""Which blocks entered and left the prefix cache from one step to the next."""

from nanoserve.engine.listeners import BlockListener, CachedBlock


class CacheChanges(BlockListener):
    """Notes blocks by their numbers until they are taken."""

    def __init__(self) -> None:
        self._cached: set[int] = set()  # when changes were taken last
        self._added: dict[int, None] = {}  # since then and still cached, in order
        self._removed: set[int] = set()  # since then, even if cached again

    def on_cached(self, cached: CachedBlock) -> None:
        self._added[cached.block] = None

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        self._added.pop(block, None)
        self._removed.add(block)

    def on_cleared(self) -> None:
        self._added.clear()
        self._removed |= self._cached

    def take(self) -> tuple[list[int], list[int]]:
        """Return the blocks (evicted, cached) since the last call.

        A block that was evicted and cached anew, with other content, is in both; one that came and
        went meanwhile is in neither.
        """
        evicted = sorted(self._cached & self._removed)
        added = list(self._added)
        self._cached.difference_update(evicted)
        self._cached.update(added)
        self._added.clear()
        self._removed.clear()
        return evicted, added
