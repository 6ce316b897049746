"""Stage 4: a block manager that allocates exactly the blocks that nanoserve's allocates."""

import random

import pytest

from nanoserve import SamplingParams
from nanoserve.engine.block_manager import BlockManager as OurBlockManager
from nanoserve.engine.sequence import Sequence as OurSequence

from .stages import stage
from .your_engine import BlockManager, Sequence, chain_hash


@stage(4)
def test_a_hash_depends_on_all_tokens_before() -> None:
    first, other = chain_hash(b"", [1, 2]), chain_hash(b"", [1, 3])
    assert first == chain_hash(b"", [1, 2]), 'chain_hash(b"", [1, 2]), twice'
    assert first != other, 'chain_hash(b"", [1, 2]) and chain_hash(b"", [1, 3])'
    assert chain_hash(first, [7, 8]) != chain_hash(other, [7, 8]), (
        "[7, 8] after [1, 2] and [7, 8] after [1, 3] have the same chain hash"
    )
    assert chain_hash(b"", [1, 23]) != chain_hash(b"", [12, 3]), (
        "[1, 23] and [12, 3] have the same chain hash"
    )


def started(blocks: BlockManager, token_ids: list[int]) -> Sequence:
    """A sequence whose prompt has been computed."""
    seq = Sequence(list(token_ids))
    assert blocks.allocate(seq, len(token_ids), blocks.lookup(seq)), f"no room for {token_ids}"
    blocks.cache(seq, len(token_ids))
    return seq


@stage(4)
def test_blocks_come_in_the_order_of_the_free_queue() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    found = started(blocks, [1, 2, 3, 4, 5]).block_table
    case = "in four blocks of 4, [1, 2, 3, 4, 5] came first"
    assert found == [1, 2], f"block table {found}: {case}"
    found = started(blocks, [9]).block_table
    assert found == [3], f"block table {found}: {case}, [9] second"


@stage(4)
def test_a_hit_never_covers_the_last_token() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    started(blocks, [5, 6, 7, 8])
    for prompt, hits in (([5, 6, 7, 8], [1]), ([5, 6, 7, 8, 9], [1, 2]), ([5], [])):
        found = blocks.lookup(Sequence(prompt))
        assert found == hits, f"lookup of {prompt}, after [5, 6, 7, 8] was computed"


@stage(4)
def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    started(blocks, [1, 1, 7, 7, 9])
    assert blocks.lookup(Sequence([2, 2, 7, 7, 9])) == [], "after [1, 1, 7, 7, 9] was computed"


@stage(4)
def test_a_chain_loses_its_end_first() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    blocks.free(started(blocks, [0, 1, 2, 3, 4, 5, 6, 7]))
    started(blocks, [50, 51, 52])
    found = blocks.lookup(Sequence([0, 1, 2, 3, 4, 5, 6, 7]))
    assert found == [1, 2], "eight tokens computed and freed; then [50, 51, 52] took two blocks"


@stage(4)
def test_a_copy_is_found_when_the_first_is_gone() -> None:
    """The last block of two equal prompts is computed by both, because of its last token."""
    blocks = BlockManager(num_blocks=5, block_size=2)
    a, b = started(blocks, [1, 2, 3, 4]), started(blocks, [1, 2, 3, 4])
    case = "[1, 2, 3, 4] was computed twice"
    assert (a.block_table, b.block_table) == ([1, 2], [1, 3]), case
    assert blocks.lookup(Sequence([1, 2, 3, 4, 5])) == [1, 2], case
    blocks.free(a)
    assert blocks.lookup(Sequence([1, 2, 3, 4, 5])) == [1, 3], f"{case}, and the first was freed"
    assert started(blocks, [9]).block_table == [2], f"{case}; block 2 is a copy: it is taken first"


@stage(4)
def test_what_does_not_fit_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=3, block_size=2)
    blocks.free(started(blocks, [1, 2, 3, 4]))
    seq = Sequence([1, 2, 3, 4, 5, 6, 7])
    hits = blocks.lookup(seq)
    assert not blocks.allocate(seq, 7, hits), "four blocks out of three"
    assert seq.block_table == [] and blocks.lookup(seq) == hits, "after it did not fit"
    assert blocks.allocate(seq, 6, hits), "three blocks out of three, two of them hits"


@stage(4)
def test_a_freed_sequence_is_allocated_again() -> None:
    """As after a preemption: caching then starts at its first block again."""
    blocks = BlockManager(num_blocks=4, block_size=2)
    seq = started(blocks, [1, 2, 3, 4, 5])
    blocks.free(seq)
    case = "[1, 2, 3, 4, 5] was computed and freed"
    assert (seq.block_table, seq.num_cached) == ([], 0), case
    blocks.free(started(blocks, [50, 51, 52, 53, 54, 55, 56, 57]))  # takes all four blocks
    hits = blocks.lookup(seq)
    assert hits == [], f"{case}; then eight others took all four blocks"
    assert blocks.allocate(seq, 5, hits), f"{case}, and again: three blocks out of four"
    blocks.cache(seq, 5)
    found = blocks.lookup(Sequence([1, 2, 3, 4, 5]))
    assert found == seq.block_table[:2], f"{case}; and allocated again after others"


class Pair:
    """A sequence of your engine and one of nanoserve, with the same tokens."""

    def __init__(self, token_ids: list[int]) -> None:
        self.yours = Sequence(list(token_ids))
        self.ours = OurSequence("r", list(token_ids), SamplingParams(), max_model_len=10**6)
        self.computed = 0


@pytest.mark.parametrize("seed", range(40))
@stage(4)
def test_it_allocates_the_blocks_that_the_engine_allocates(seed: int) -> None:
    """Few kinds of tokens, so that wrong hits look right, and small pools, so that they run out.

    Some freed sequences are allocated again, as preempted ones are.
    """
    rng = random.Random(seed)
    vocab, block_size, num_blocks = rng.randint(1, 3), rng.randint(1, 4), rng.randint(3, 12)
    yours, ours = BlockManager(num_blocks, block_size), OurBlockManager(num_blocks, block_size)
    calls, running, freed = [f"blocks = BlockManager({num_blocks}, {block_size})"], [], []
    for i in range(80):
        choice = rng.random()
        if choice < 0.5 or not running:
            if freed and choice < 0.2:
                pair = freed.pop(rng.randrange(len(freed)))
            else:
                pair = Pair([rng.randrange(vocab) for _ in range(rng.randint(1, 16))])
                pair.name = f"seq_{i}"
                calls.append(f"{pair.name} = Sequence({pair.yours.token_ids})")
            our_hits = ours.lookup(pair.ours)
            hits = [block for (block,) in our_hits]  # all layers are one group
            calls.append(f"hits = blocks.lookup({pair.name})  # {hits}")
            assert yours.lookup(pair.yours) == hits, "\n".join(calls)
            wanted, pair.computed = len(pair.ours.token_ids), len(hits) * block_size
        else:
            pair, hits, our_hits = rng.choice(running), [], []
            wanted = min(pair.computed + rng.randint(0, 5), len(pair.ours.token_ids))
        if pair in running and choice > 0.8:
            running.remove(pair)
            freed.append(pair)
            calls.append(f"blocks.free({pair.name})")
            yours.free(pair.yours)
            ours.free(pair.ours)
            assert pair.yours.block_table == [], "\n".join(calls)
            continue
        fits = ours.allocate(pair.ours, wanted, our_hits)
        calls.append(f"blocks.allocate({pair.name}, {wanted}, {hits})  # {fits}")
        assert yours.allocate(pair.yours, wanted, hits) == fits, "\n".join(calls)
        calls.append(f"{pair.name}.block_table  # {pair.ours.block_table}")
        assert pair.yours.block_table == pair.ours.block_table, "\n".join(calls)
        if not fits:
            continue
        pair.computed = max(pair.computed, rng.randint(pair.computed, wanted))
        calls.append(f"blocks.cache({pair.name}, {pair.computed})")
        ours.cache(pair.ours, pair.computed)
        yours.cache(pair.yours, pair.computed)
        if pair not in running:
            running.append(pair)
        if pair.computed == len(pair.ours.token_ids):
            token = rng.randrange(vocab)
            calls.append(f"{pair.name}.token_ids.append({token})")
            pair.yours.token_ids.append(token)
            pair.ours.token_ids.append(token)
