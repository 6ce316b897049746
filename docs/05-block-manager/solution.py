"""A solution of `exercise.py`."""

from collections import Counter, deque

Key = tuple[int, ...]


class PrefixCache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_queue = deque(range(1, num_blocks + 1))
        self.users: Counter[int] = Counter()
        self.blocks_of: dict[Key, list[int]] = {}  # usually one; a key without blocks has no entry
        self.key_of: dict[int, Key] = {}

    def lookup(self, token_ids: list[int]) -> list[int]:
        hits = []
        for key in self._keys(token_ids[:-1]):
            if key not in self.blocks_of:
                break
            hits.append(self.blocks_of[key][0])
        return hits

    def run(self, token_ids: list[int]) -> list[int] | None:
        hits = self.lookup(token_ids)
        num_new = -(-len(token_ids) // self.block_size) - len(hits)
        num_revived = sum(self.users[block] == 0 for block in hits)
        if num_new + num_revived > len(self.free_queue):
            return None
        for block in hits:
            if self.users[block] == 0:
                self.free_queue.remove(block)
        table = hits + [self._take() for _ in range(num_new)]
        self.users.update(table)
        for key, block in zip(self._keys(token_ids), table, strict=False):
            if block not in self.key_of:
                self.blocks_of.setdefault(key, []).append(block)
                self.key_of[block] = key
        return table

    def free(self, table: list[int]) -> None:
        for block in reversed(table):
            self.users[block] -= 1
            if self.users[block] > 0:
                continue
            if self.blocks_of.get(self.key_of.get(block, ())) == [block]:
                self.free_queue.append(block)
            else:
                self._forget(block)
                self.free_queue.appendleft(block)

    def _take(self) -> int:
        block = self.free_queue.popleft()
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        if block in self.key_of:
            key = self.key_of.pop(block)
            self.blocks_of[key].remove(block)
            if not self.blocks_of[key]:
                del self.blocks_of[key]

    def _keys(self, token_ids: list[int]) -> list[Key]:
        """Return each full block's tokens from the first on: quadratic; a chain hash is linear."""
        size = self.block_size
        ends = range(size, len(token_ids) + 1, size)
        return [tuple(token_ids[:end]) for end in ends]
