"""The exercise of chapter 5 against the engine's own block manager."""

import random

import pytest

from nanoserve import SamplingParams
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence

from .exercise import PrefixCache


def test_blocks_come_in_the_order_of_the_free_queue() -> None:
    cache = PrefixCache(num_blocks=4, block_size=4)
    assert cache.run([1, 2, 3, 4, 5]) == [1, 2]
    assert cache.run([9]) == [3]


def test_two_prompts_share_the_full_blocks_of_their_common_beginning() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    a = cache.run([1, 2, 3, 4, 5])
    assert a is not None and cache.lookup([1, 2, 3, 4, 6]) == a[:2]
    assert cache.lookup([1, 2, 3, 9]) == a[:1]


def test_equal_tokens_after_another_beginning_are_another_block() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    cache.run([1, 1, 7, 7, 9])
    assert cache.lookup([2, 2, 7, 7, 9]) == []


def test_the_last_token_is_never_found() -> None:
    cache = PrefixCache(num_blocks=8, block_size=2)
    a = cache.run([5, 6, 7, 8])
    assert a is not None
    assert cache.lookup([5, 6, 7, 8]) == a[:1]
    assert cache.lookup([5, 6, 7, 8, 9]) == a
    assert cache.lookup([5]) == []


def test_lookup_changes_nothing() -> None:
    cache = PrefixCache(num_blocks=2, block_size=2)
    table = cache.run([1, 2, 3])
    assert table is not None
    cache.free(table)
    for _ in range(5):
        assert cache.lookup([1, 2, 3]) == table[:1], "after run([1, 2, 3]) and its free"
    assert cache.run([7, 8, 9]) is not None  # both blocks are still free


def test_the_tail_is_evicted_before_the_beginning() -> None:
    cache = PrefixCache(num_blocks=4, block_size=2)
    table = cache.run(list(range(8)))
    assert table is not None
    cache.free(table)
    cache.run([50, 51, 52])
    assert cache.lookup(list(range(8))) == table[:2]


def test_what_does_not_fit_changes_nothing() -> None:
    cache = PrefixCache(num_blocks=3, block_size=2)
    table = cache.run([1, 2, 3, 4])
    assert table is not None
    cache.free(table)
    # The queue holds three blocks, two of them hits. Seven tokens are four blocks.
    assert cache.run([1, 2, 3, 4, 5, 6, 7]) is None
    assert cache.run([1, 2, 3, 4, 5, 6]) is not None


def test_a_copy_is_found_when_the_first_is_gone() -> None:
    """Of two equal prompts, both compute the last block, since the last token is never a hit."""
    cache = PrefixCache(num_blocks=5, block_size=2)
    a, b = cache.run([1, 2, 3, 4]), cache.run([1, 2, 3, 4])
    assert a == [1, 2] and b == [1, 3]
    assert cache.lookup([1, 2, 3, 4, 5]) == a
    cache.free(a)  # block 2 is a copy of block 3, so it is the next one to be used
    assert cache.lookup([1, 2, 3, 4, 5]) == b
    assert cache.run([9]) == [2]


def test_a_shared_block_is_free_when_its_last_owner_ends() -> None:
    cache = PrefixCache(num_blocks=3, block_size=2)
    a, b = cache.run([1, 2, 3]), cache.run([1, 2, 4])
    assert a is not None and b is not None and a[0] == b[0]
    cache.free(a)
    assert cache.run([7, 8, 9]) is None
    cache.free(b)
    assert cache.run([7, 8, 9]) is not None


class Reference:
    """`BlockManager`, with a prompt computed as a whole."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.sequences: dict[int, Sequence] = {}

    def sequence(self, token_ids: list[int]) -> Sequence:
        return Sequence("r", token_ids, SamplingParams(), max_model_len=10**6)

    def lookup(self, token_ids: list[int]) -> list[int]:
        hits = self.manager.lookup(self.sequence(token_ids))
        return [block for (block,) in hits]  # all layers are one group

    def run(self, key: int, token_ids: list[int]) -> list[int] | None:
        seq = self.sequence(token_ids)
        hits = self.manager.lookup(seq)
        if not self.manager.allocate(seq, len(token_ids), hits):
            return None
        self.manager.cache(seq, len(token_ids))
        self.sequences[key] = seq
        return list(seq.block_table)

    def free(self, key: int) -> None:
        self.manager.free(self.sequences.pop(key))


@pytest.mark.parametrize("seed", range(100))
def test_it_gives_out_the_blocks_that_the_engine_gives_out(seed: int) -> None:
    """Few kinds of tokens, so that wrong hits look right, and small pools, so that they run out."""
    rng = random.Random(seed)
    vocab, block_size, num_blocks = rng.randint(1, 3), rng.randint(1, 4), rng.randint(3, 12)
    cache, reference = PrefixCache(num_blocks, block_size), Reference(num_blocks, block_size)
    tables: dict[int, list[int]] = {}
    # What a failure shows can be pasted: all calls so far that changed anything.
    calls = [f"cache = PrefixCache({num_blocks}, {block_size})"]
    for i in range(100):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 20))]
        found = reference.lookup(prompt)
        assert cache.lookup(list(prompt)) == found, "\n".join([*calls, f"cache.lookup({prompt})"])
        expected = reference.run(i, prompt)
        table = cache.run(list(prompt))
        calls.append(f"table_{i} = cache.run({prompt})")
        assert table == expected, "\n".join(calls)
        if table is not None:
            tables[i] = table
        while tables and (table is None or rng.random() < 0.4):
            key = rng.choice(list(tables))
            cache.free(tables.pop(key))
            calls.append(f"cache.free(table_{key})")
            reference.free(key)
            table = []
