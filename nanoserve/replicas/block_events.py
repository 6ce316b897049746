"""What an engine's prefix cache gains and loses, for those outside who keep count of it."""

from threading import Lock

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence


class BlockEvents:
    """Records the blocks that `manager` publishes and evicts, by their chain hashes.

    It puts itself before three methods of this one manager; an engine that nobody asks pays
    nothing. Only *which* hashes were touched is noted: what became of them is seen in the manager's
    own table when somebody asks, so the two cannot disagree, whatever was raised in between.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._lock = Lock()  # an engine steps in one thread, and another one asks
        self._told: set[bytes] = set()  # what all that was taken adds up to
        self._touched = set(manager._block_of)  # what it has now is news, too
        self._register, self._forget = manager.register, manager.forget
        self._clear = manager.clear
        manager.register, manager.forget = self._on_register, self._on_forget
        manager.clear = self._on_clear

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes of the blocks (stored, removed) since the last call; none is in both.

        A block that came and went meanwhile is in neither.
        """
        stored: list[bytes] = []
        removed: list[bytes] = []
        with self._lock:
            for block_hash in self._touched:
                is_there, was_there = (
                    block_hash in self._manager._block_of,
                    block_hash in self._told,
                )
                if is_there and not was_there:
                    stored.append(block_hash)
                elif was_there and not is_there:
                    removed.append(block_hash)
            self._touched.clear()
            self._told.update(stored)
            self._told.difference_update(removed)
        return stored, removed

    def _on_register(self, seq: Sequence, num_tokens: int) -> list[int]:
        with self._lock:
            published = self._register(seq, num_tokens)
            self._touched.update(self._manager._hash_of[block] for block in published)
        return published

    def _on_forget(self, block: int) -> None:
        block_hash = self._manager._hash_of[block]
        if block_hash is None:
            return
        with self._lock:
            self._forget(block)
            self._touched.add(block_hash)

    def _on_clear(self) -> None:
        with self._lock:
            self._clear()
            self._touched |= self._told
