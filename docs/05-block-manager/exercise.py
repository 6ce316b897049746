"""Exercise: a block pool that is its own prefix cache.

Complete the class below. It does what `BlockManager` does, for prompts that are computed as a
whole, and it must give out the very same blocks. The rules:

1. The pool has blocks 1 to `num_blocks`, all free at first, and a free queue in that order.
2. A *full* block is cached under everything that it depends on: its own tokens and all tokens
   before them. If another block is cached under the same key, both are. How you write the key is
   up to you. A tuple of all tokens up to the end of the block cannot collide; what would it cost
   for a prompt of 100,000 tokens?
3. `lookup` walks from the beginning of the prompt to the first key without a block. Of several
   blocks it takes the one that has been cached longest. It never covers the last token, and it
   changes nothing.
4. `run` takes the blocks of `lookup` and then blocks from the front of the free queue, enough for
   all tokens. If they are not all to be had, it returns None and has changed nothing. A block that
   leaves the free queue for *other* content loses its key.
5. A block may stand in several tables. It is free when it stands in none.
6. `free` gives a table back, its last block first. A free block that is the only one with its
   key goes to the end of the free queue and keeps it. One without a key goes to the front, and so
   does a copy: nothing is lost with it, so it loses its key at once.

Test it with `pytest -x docs/05-block-manager/test_exercise.py`.
"""


class PrefixCache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        raise NotImplementedError

    def lookup(self, token_ids: list[int]) -> list[int]:
        """The blocks that hold the longest known beginning of `token_ids`, in order."""
        raise NotImplementedError

    def run(self, token_ids: list[int]) -> list[int] | None:
        """Make room for all of `token_ids`, cache what they fill; the block table, or None."""
        raise NotImplementedError

    def free(self, table: list[int]) -> None:
        """Give back what `run` returned."""
        raise NotImplementedError
