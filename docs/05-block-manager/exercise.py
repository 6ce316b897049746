"""Exercise: a block pool that is its own prefix cache.

Complete the class below. It does what `BlockManager` does, for prompts that are computed as a
whole, and it must give out exactly the same blocks. The rules:

1. The pool has blocks 1 to `num_blocks`, all free at first, and a free queue in that order.
2. A *full* block is cached under everything that it depends on: its own tokens and all tokens
   before them. If another block is cached under the same key, both are. The form of the key is up
   to you. A tuple of all tokens up to the end of the block cannot collide; what would it cost for a
   prompt of 100,000 tokens?
3. `lookup` goes from the beginning of the prompt to the first key without a block. Of several
   blocks it takes the one that has been cached longest. It never covers the last token, and it
   changes nothing.
4. `run` takes the blocks of `lookup` and then blocks from the front of the free queue, enough for
   all tokens. If too few are free, it returns None and has changed nothing. A block that leaves the
   free queue for *other* content loses its key.
5. Several tables may list a block. It is free when none does.
6. `free` frees the blocks of a table, the last one first. A free block that is the only one with
   its key goes to the end of the free queue and keeps it. One without a key goes to the front, and
   so does a copy: nothing is lost with it, so it loses its key at once.

Test it with `pytest -x docs/05-block-manager/test_exercise.py`.
"""


class PrefixCache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        raise NotImplementedError

    def lookup(self, token_ids: list[int]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of `token_ids`, in order."""
        raise NotImplementedError

    def run(self, token_ids: list[int]) -> list[int] | None:
        """Allocate blocks for `token_ids`, cache those they fill; return the table, or None."""
        raise NotImplementedError

    def free(self, table: list[int]) -> None:
        """Free a table that `run` returned."""
        raise NotImplementedError
