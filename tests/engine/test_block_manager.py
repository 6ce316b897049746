"""Blocks, reference counts and the prefix cache. W6, W10-W13 are the course's worked examples."""

import secrets

import numpy as np
import pytest

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.prefix_cache import chain_hash
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams


def make_sequence(token_ids, cache_key: tuple[str, ...] = ()) -> Sequence:
    return Sequence("r", list(token_ids), SamplingParams(), 4096, cache_key=cache_key)


def lookup(manager: BlockManager, seq: Sequence) -> list[int]:
    """The blocks of a hit in the first group of layers; here there is no other."""
    return [block for (block,) in manager.lookup(seq)]


def newly_cached(manager: BlockManager, seq: Sequence, num_tokens: int) -> list[int]:
    """Cache the blocks that `num_tokens` tokens fill; returns those that were not cached before."""
    before = [manager.prefix_cache.has(block) for block in seq.block_table]
    manager.cache(seq, num_tokens)
    after = [manager.prefix_cache.has(block) for block in seq.block_table]
    return [
        block for block, was, is_ in zip(seq.block_table, before, after, strict=True) if is_ > was
    ]


def run(manager: BlockManager, seq: Sequence) -> Sequence:
    """Allocate and compute the whole of `seq`, with whatever the cache has."""
    hits = manager.lookup(seq)
    assert manager.allocate(seq, seq.num_tokens, hits)
    manager.cache(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    return seq


def test_w10_shared_prefix_reference_counts() -> None:
    manager = BlockManager(8, block_size=16)
    prefix = list(range(48))
    a = run(manager, make_sequence([*prefix, *range(100, 110)]))
    b = run(manager, make_sequence([*prefix, *range(200, 210)]))
    shared, own_a, own_b = a.block_table[:3], a.block_table[3], b.block_table[3]
    assert b.block_table[:3] == shared and own_a != own_b
    assert [manager._ref_counts[block] for block in [*shared, own_a, own_b]] == [2, 2, 2, 1, 1]
    manager.free(a)
    assert [manager._ref_counts[block] for block in [*shared, own_a, own_b]] == [1, 1, 1, 0, 1]
    assert manager.num_free_blocks == 8 - 4
    manager.free(b)
    assert manager.num_free_blocks == 8


def test_w11_a_freed_block_is_found_again_and_cannot_be_evicted() -> None:
    manager = BlockManager(4, block_size=4)
    a = run(manager, make_sequence(range(4)))
    (block,) = a.block_table
    manager.free(a)
    assert manager._ref_counts[block] == 0
    assert next(reversed(manager._free)) == block and manager.prefix_cache.has(block)
    b = make_sequence(range(8))
    assert lookup(manager, b) == [block]
    assert manager.allocate(b, 8, [(block,)])
    assert manager._ref_counts[block] == 1 and block not in manager._free
    others = make_sequence(range(50, 62))
    assert not manager.allocate(others, 12)  # three blocks, and only two are left
    assert manager.allocate(others, 8)
    assert block not in others.block_table


def test_w12_the_tail_is_evicted_before_the_prefix() -> None:
    manager = BlockManager(4, block_size=2)
    a = run(manager, make_sequence(range(8)))
    assert a.block_table == [1, 2, 3, 4]
    manager.free(a)
    assert list(manager._free) == [4, 3, 2, 1]
    run(manager, make_sequence(range(50, 53)))  # two blocks: evicts 4 and 3
    assert lookup(manager, make_sequence(range(8))) == [1, 2]


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "reused"),
    [(5, 5, 0), (64, 64, 48), (100, 64, 64), (100, 100, 96)],
)
def test_w13_the_last_token_is_always_computed(num_tokens, num_cached, reused) -> None:
    manager = BlockManager(32, block_size=16)
    tokens = list(range(101, 101 + num_tokens))
    run(manager, make_sequence(tokens[:num_cached]))
    assert len(lookup(manager, make_sequence(tokens))) * 16 == reused


def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    manager = BlockManager(8, block_size=2)
    a = run(manager, make_sequence([1, 1, 7, 7, 9]))
    b = run(manager, make_sequence([2, 2, 9]))
    assert lookup(manager, make_sequence([2, 2, 7, 7, 9])) == b.block_table[:1]
    assert lookup(manager, make_sequence([1, 1, 7, 7, 9])) == a.block_table[:2]


# XXH3 mixes the parent in last, apart from the first twelve ids: a pair that collides behind one
# parent does so behind all, and no secret root helps. Found in 15 seconds on one core.
COLLIDING = (
    [0, 0, 0, 0, 5, 6, 7, 8, 128188, 70554, 23747, 81381, 102777, 99039, 49158, 52896],
    [0, 0, 0, 0, 5, 6, 7, 8, 150804, 120677, 1131, 31258, 137420, 90535, 14515, 61400],
)


def test_blocks_that_collide_under_every_root_are_not_mistaken() -> None:
    one, other = COLLIDING
    for _ in range(100):
        parent = secrets.token_bytes(16)
        assert chain_hash(parent, np.array(one)) == chain_hash(parent, np.array(other))
    for prefix in ([], list(range(48))):
        manager = BlockManager(64, block_size=16)
        known = len(prefix) // 16
        a = run(manager, make_sequence([*prefix, *one, *range(20)]))
        assert lookup(manager, make_sequence([*prefix, *one, 1])) == a.block_table[: known + 1]
        assert lookup(manager, make_sequence([*prefix, *other, 1])) == a.block_table[:known]
        b = run(manager, make_sequence([*prefix, *other, *range(20)]))
        # One hash finds one block, the older one. What follows the other is not found behind it.
        assert (
            lookup(manager, make_sequence([*prefix, *other, *range(20)])) == b.block_table[:known]
        )
        assert lookup(manager, make_sequence([*prefix, *one, *range(20)])) == a.block_table[:-1]
        manager.check([a, b])


def test_a_parent_is_known_by_its_content_and_not_by_its_hash() -> None:
    """What collides with the parent of a child finds neither, and is not cached beside them."""
    one, other = COLLIDING
    manager = BlockManager(4, block_size=16)
    first, twin = make_sequence(one), make_sequence([*one, *range(16)])
    for seq in (first, twin):  # side by side, so each has a block of its own for `one`
        assert manager.allocate(seq, seq.num_tokens)
        manager.cache(seq, seq.num_tokens)
    parent, child = first.block_table[0], twin.block_table[1]
    assert lookup(manager, make_sequence([*one, *range(16), 1])) == [parent, child]
    manager.prefix_cache.remove(parent)
    usurper = run(manager, make_sequence(other))
    assert not manager.prefix_cache.has(usurper.block_table[0])
    assert lookup(manager, make_sequence([*other, *range(16), 1])) == []
    assert lookup(manager, make_sequence([*one, *range(16), 1])) == twin.block_table
    manager.check([first, twin, usurper])


def test_hash_covers_ids_at_full_width() -> None:
    hashes = {chain_hash(b"", np.array([token])) for token in (1, 257, 65537, 16777217)}
    assert len(hashes) == 4 and all(len(h) == 16 for h in hashes)


def test_prefix_cache_seed_decides_the_hashes() -> None:
    roots = [
        BlockManager(1, 1, prefix_cache_seed=seed).prefix_cache._root
        for seed in (7, 7, 8, None, None)
    ]
    assert roots[0] == roots[1]
    assert len(set(roots)) == 4


def test_failed_allocation_changes_nothing() -> None:
    manager = BlockManager(3, block_size=2)
    first = run(manager, make_sequence(range(4)))
    manager.free(first)
    before = (list(manager._free), manager.snapshot(), list(manager._ref_counts))
    seq = make_sequence(range(9))  # two hits and three more: five of three blocks
    assert not manager.allocate(seq, 9, manager.lookup(seq))
    assert (list(manager._free), manager.snapshot(), list(manager._ref_counts)) == before
    assert seq.block_table == []


def test_check_sees_a_leak() -> None:
    manager = BlockManager(3, block_size=2)
    run(manager, make_sequence(range(4)))
    with pytest.raises(RuntimeError, match="reference counts"):
        manager.check([])


def test_two_sequences_may_fill_the_same_block_at_once() -> None:
    manager = BlockManager(4, block_size=2)
    a, b = make_sequence([5, 5, 5]), make_sequence([5, 5, 5])
    for seq in (a, b):
        assert manager.allocate(seq, 3)
    for seq in (a, b):
        assert newly_cached(manager, seq, 3) == [seq.block_table[0]]
    assert lookup(manager, make_sequence([5, 5, 5])) == [a.block_table[0]]
    manager.check([a, b])
    copy = b.block_table[0]
    manager.free(b)  # nothing is lost with the copy, so it is reused first
    assert not manager.prefix_cache.has(copy) and copy in list(manager._free)[:2]
    assert lookup(manager, make_sequence([5, 5, 5])) == [a.block_table[0]]


def test_the_copy_of_an_evicted_block_is_found() -> None:
    """`[1, 2]` and `[1, 2, 3]` side by side: when the blocks of the first are taken for something
    else, those of the other still have their prefix."""
    manager = BlockManager(7, block_size=1)
    a, b = make_sequence([1, 2]), make_sequence([1, 2, 3])
    for seq in (a, b):
        assert manager.allocate(seq, seq.num_tokens)
        manager.cache(seq, seq.num_tokens)
    manager.free(a)
    other = run(manager, make_sequence([9, 9, 8, 7]))
    manager.check([b, other])
    assert lookup(manager, make_sequence([1, 2, 3, 4])) == b.block_table


def test_a_block_outlives_the_one_before_it_until_that_is_computed_again() -> None:
    manager = BlockManager(8, block_size=1)
    seq = run(manager, make_sequence([1, 2, 3]))
    first, second, third = seq.block_table
    manager.free(seq)
    manager.prefix_cache.remove(first)
    assert lookup(manager, make_sequence([1, 2, 3, 4])) == []
    again = run(manager, make_sequence([1, 5]))
    assert lookup(manager, make_sequence([1, 2, 3, 4])) == [again.block_table[0], second, third]
    manager.free(again)
    manager.check([])
    for block in (second, third, *range(1, 9)):
        manager.prefix_cache.remove(block)
    assert not manager.prefix_cache._prefixes  # nothing is kept that proves nothing


def test_no_prefix_cache_no_hits() -> None:
    manager = BlockManager(4, block_size=2, enable_prefix_caching=False)
    manager.free(run(manager, make_sequence([5, 5, 5])))
    assert lookup(manager, make_sequence([5, 5, 5])) == []


# ---------------------------------------------------------------- what has been cached


def test_each_full_block_is_cached_once_as_the_sequence_grows() -> None:
    manager = BlockManager(8, block_size=2)
    seq = make_sequence(range(7))
    assert manager.allocate(seq, 7)
    table = seq.block_table
    assert newly_cached(manager, seq, 1) == []
    assert (
        newly_cached(manager, seq, 5) == table[:2]
    )  # all tokens so far, not only those of this step
    assert newly_cached(manager, seq, 5) == []
    seq.token_ids.append(7)
    assert newly_cached(manager, seq, 7) == [table[2]]
    assert newly_cached(manager, seq, 8) == [table[3]]
    assert seq.num_cached_blocks == 4
    manager.check([seq])


def test_what_was_found_in_the_cache_is_not_cached_again() -> None:
    manager = BlockManager(8, block_size=2)
    run(manager, make_sequence(range(5)))
    seq = make_sequence(range(8))
    hits = manager.lookup(seq)
    assert manager.allocate(seq, 8, hits) and len(hits) == 2
    assert seq.num_cached_blocks == 2
    assert newly_cached(manager, seq, 8) == seq.block_table[2:]


def test_a_block_whose_last_token_is_pending_is_cached_when_that_is_known() -> None:
    """A step may fill a block before anybody here knows with what."""
    manager = BlockManager(8, block_size=2)
    seq = make_sequence(range(3))
    assert manager.allocate(seq, 4)
    seq.num_pending = 1
    assert newly_cached(manager, seq, 4) == [seq.block_table[0]]
    seq.token_ids.append(9)
    seq.num_pending = 0
    assert newly_cached(manager, seq, 4) == [seq.block_table[1]]
    assert lookup(manager, make_sequence([0, 1, 2, 9, 5])) == seq.block_table


def test_a_sequence_that_begins_again_caches_again() -> None:
    """What it had cached may have been taken for something else in the meantime."""
    manager = BlockManager(2, block_size=2)
    seq = run(manager, make_sequence(range(4)))
    manager.free(seq)
    assert seq.num_cached_blocks == 0
    manager.free(run(manager, make_sequence(range(50, 54))))
    assert lookup(manager, seq) == []
    run(manager, seq)
    assert lookup(manager, make_sequence(range(5))) == seq.block_table
    manager.check([seq])


# ---------------------------------------------------------------- who shares with whom


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        ((), (), True),
        (("cache_salt", "a"), ("cache_salt", "a"), True),
        (("cache_salt", "a"), ("cache_salt", "b"), False),
        (("cache_salt", "a"), (), False),
        ((), ("cache_salt", "a"), False),
        (("cache_salt", "a"), ("adapter", "a"), False),
        (("a", "b"), ("ab",), False),
    ],
)
def test_sequences_share_blocks_with_those_of_the_same_key(first, second, is_shared) -> None:
    manager = BlockManager(8, block_size=2)
    a = run(manager, make_sequence(range(5), first))
    expected = a.block_table[:2] if is_shared else []
    assert lookup(manager, make_sequence(range(5), second)) == expected


def test_another_key_is_another_block_even_if_all_hashes_collide(monkeypatch) -> None:
    monkeypatch.setattr("nanoserve.engine.prefix_cache.chain_hash", lambda parent, ids: b"same")
    manager = BlockManager(8, block_size=2)
    a = run(manager, make_sequence(range(3), ("cache_salt", "a")))
    assert lookup(manager, make_sequence(range(3), ("cache_salt", "b"))) == []
    assert lookup(manager, make_sequence(range(3), ("cache_salt", "a"))) == a.block_table[:1]


# ---------------------------------------------------------------- layers with a sliding window


def test_blocks_behind_the_window_are_given_back() -> None:
    """Window 9, 220 tokens, blocks of 4: of 55 blocks, 4 are needed."""
    manager = BlockManager(64, block_size=4, windows=(9,), max_step_tokens=64)
    seq = make_sequence(range(16))
    most = 0
    for num_tokens in range(16, 221):
        assert manager.allocate(seq, num_tokens)
        manager.cache(seq, num_tokens)
        seq.num_computed_tokens = num_tokens
        seq.token_ids.append(7)
        most = max(most, 64 - manager.num_free_blocks)
        manager.check([seq])
        first_seen = (num_tokens - 1) - 9 + 1
        assert all(seq.block_table[max(0, first_seen) // 4 :])
    assert len(seq.block_table) == 55 and most <= 5
    assert 64 - manager.num_free_blocks <= 4
    manager.free(seq)
    assert manager.num_free_blocks == 64


@pytest.mark.parametrize("num_computed", [8, 9, 10, 11])
def test_draft_tokens_free_nothing(num_computed: int) -> None:
    """They are not computed for good, so the window lies behind the tokens before them."""
    manager = BlockManager(16, 2, enable_prefix_caching=False, windows=(4,), max_step_tokens=8)
    seq = make_sequence(range(num_computed + 1))
    assert manager.allocate(seq, num_computed)
    seq.num_computed_tokens = num_computed
    assert manager.allocate(seq, num_computed + 1 + 5)
    assert seq.block_table.count(0) == (num_computed - 3) // 2


def test_groups_agree_on_a_hit() -> None:
    """A group with full attention and one with a window of 5 tokens, in blocks of 2."""
    manager = BlockManager(32, 2, windows=(None, 5), max_step_tokens=64)
    first = make_sequence(range(12))
    assert manager.allocate(first, 12)
    manager.cache(first, 12)
    full, windowed = (list(table) for table in first.block_tables)
    assert not set(full) & set(windowed)
    longer = make_sequence(range(13))
    expected = list(zip(full, [0, 0, 0, 0, *windowed[4:]], strict=True))
    assert manager.lookup(longer) == expected
    # Without the last block of one group, all groups begin before it.
    manager.prefix_cache.remove(windowed[5])
    assert manager.lookup(longer) == list(zip(full[:5], [0, 0, 0, *windowed[3:5]], strict=True))
    manager.prefix_cache.remove(full[2])
    assert manager.lookup(longer) == list(zip(full[:2], windowed[:2], strict=True))
    manager.prefix_cache.remove(windowed[0])
    assert manager.lookup(longer) == []
    manager.check([first])


def test_a_hit_holds_only_what_its_groups_need() -> None:
    manager = BlockManager(32, 2, windows=(None, 5), max_step_tokens=64)
    manager.free(run(manager, make_sequence(range(12))))
    manager.max_step_tokens = 4
    seq = make_sequence(range(20))
    assert manager.allocate(seq, 20, manager.lookup(seq))
    full, windowed = seq.block_tables
    assert len(full) == 10 and all(full)
    # Two blocks before token 12, and those of the four tokens of a step.
    assert [bool(block) for block in windowed] == [False] * 4 + [True] * 4
    assert (windowed.num_released, seq.num_allocated_tokens) == (4, 16)
    manager.check([seq])
    manager.free(seq)
    manager.check([])
    assert manager.num_free_blocks == 32


def test_a_long_prompt_needs_the_window_and_a_step() -> None:
    """Ten blocks hold a prompt of 60 tokens in blocks of 2, if a window of 5 and steps of 8."""
    manager = BlockManager(10, 2, windows=(5,), max_step_tokens=8)
    seq = make_sequence(range(60))
    assert manager.allocate(seq, 60)
    for start in range(0, 60, 8):
        end = min(60, start + 8)
        assert manager.allocate(seq, end)
        manager.cache(seq, end)
        seq.num_computed_tokens = end
        manager.check([seq])
