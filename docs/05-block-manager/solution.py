"""A solution of `exercise.py`."""

from collections import Counter, deque

Key = tuple[int, ...]


class PrefixCache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_queue = deque(range(1, num_blocks + 1))
        self.users: Counter[int] = Counter()
        self.block_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}

    def lookup(self, token_ids: list[int]) -> list[int]:
        hits = []
        for key in self._keys(token_ids[:-1]):
            if key not in self.block_of:
                break
            hits.append(self.block_of[key])
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
            if key not in self.block_of:
                self.block_of[key] = block
                self.key_of[block] = key
        return table

    def free(self, table: list[int]) -> None:
        for block in reversed(table):
            self.users[block] -= 1
            if self.users[block] == 0 and block in self.key_of:
                self.free_queue.append(block)
            elif self.users[block] == 0:
                self.free_queue.appendleft(block)

    def _take(self) -> int:
        block = self.free_queue.popleft()
        if block in self.key_of:
            del self.block_of[self.key_of.pop(block)]
        return block

    def _keys(self, token_ids: list[int]) -> list[Key]:
        """Of each full block: all tokens up to its end. Quadratic, where a chain hash is linear."""
        size = self.block_size
        ends = range(size, len(token_ids) + 1, size)
        return [tuple(token_ids[:end]) for end in ends]
