"""Chapter 5's numbers against those computed by hand. W10 to W13 are worked examples."""

import math

import pytest

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_w10_a_shared_prefix_is_counted_twice_and_freed_last() -> None:
    rows = cells(worked.reference_counts(prefix_len=48, own_len=10, block_size=16))
    assert [row[1:] for row in rows] == [
        *[["the prefix", "2", "1", "0"]] * 3,
        ["the rest of A", "1", "0", "0"],
        ["the rest of B", "1", "1", "0"],
    ]


def test_w11_a_freed_block_stays_found_until_it_is_needed() -> None:
    rows = cells(worked.life_of_a_block(block_size=4))
    assert [row[1:] for row in rows] == [
        ["1", "no", "yes"],
        ["0", "yes", "yes"],
        ["1", "no", "yes"],
        ["0", "yes", "yes"],
        ["1", "no", "no"],
    ]


def test_w12_freed_tail_first_a_chain_loses_its_end() -> None:
    assert worked.free_queue(prompt_blocks=4) == "4, 3, 2, 1"
    assert worked.blocks_left(prompt_blocks=4, taken=1, tail_first=True) == 3
    assert worked.blocks_left(prompt_blocks=4, taken=2, tail_first=True) == 2
    assert worked.blocks_left(prompt_blocks=4, taken=1, tail_first=False) == 0


@pytest.mark.parametrize(
    ("prompt_len", "cached_len", "reused"),
    [(5, 5, 0), (64, 64, 48), (65, 65, 64), (100, 64, 64), (100, 100, 96)],
)
def test_w13_the_last_token_is_always_computed(prompt_len, cached_len, reused) -> None:
    assert worked.reused_tokens(prompt_len, cached_len, block_size=16) == reused


def test_hits_in_the_free_queue_count_as_taken() -> None:
    rows = cells(worked.shortage(num_blocks=4, cached_blocks=3, prompt_len=80, block_size=16))
    assert [row[1] for row in rows] == ["4", "3", "2", "yes", "False", "4"]


def test_a_window_bounds_what_a_sequence_holds() -> None:
    keeps_all, gives_back = (
        [worked.blocks_of_a_sequence(n, window, block_size=4) for n in (8, 220, 2000)]
        for window in (None, 9)
    )
    assert keeps_all == [2, 55, 500]
    assert gives_back == [2, 3, 3]  # 9 tokens in a row lie in three blocks of 4 at most


def test_groups_agree_on_a_hit() -> None:
    # A window of 5 shows the next token four tokens: two blocks of 2.
    assert [row[1:] for row in cells(worked.hits_of_two_groups(12, window=5, block_size=2))] == [
        ["1, 2, 3, 4, 5, 6", "5, 6", "12"],
        ["1, 2, 3, 4, 5", "4, 5", "10"],
        ["1, 2", "1, 2", "4"],
        ["none", "none", "0"],
    ]


def test_requests_of_one_step_share_what_it_computes() -> None:
    assert worked.same_step_tokens(prompt_len=40, num_requests=2, block_size=16) == "40 + 8"
    assert worked.same_step_tokens(prompt_len=40, num_requests=3, block_size=8) == "40 + 8 + 8"


@pytest.mark.parametrize(
    ("n", "prompt_len", "computed", "blocks"),
    # 62 full blocks are shared, and each completion has a block of its own behind them.
    [
        (1, 1000, 1000, 63),
        (4, 1000, 1000 + 3 * 8, 62 + 4),
        # The last block of 64 tokens is full, but each sibling computes it again.
        (2, 64, 64 + 16, 5 + 1),
    ],
)
def test_completions_share_the_full_blocks_of_their_prompt(n, prompt_len, computed, blocks) -> None:
    assert worked.prompt_tokens_computed(n, prompt_len, block_size=16) == computed
    assert worked.blocks_held(n, prompt_len, block_size=16) == blocks


def test_the_birthday_bound() -> None:
    assert worked.collision_probability(23, bits=64) == pytest.approx(23 * 22 / 2**65)
    # 2^32 hashes of 64 bits: 1 - e^(-1/2). Of 128 bits: 2^64 / 2^129 = 2^-65.
    assert worked.collision_probability(2**32, bits=64) == pytest.approx(0.393469, abs=1e-6)
    assert worked.collision_probability(2**32, bits=128) == pytest.approx(2.7105e-20, rel=1e-4)
    assert worked.collision_probability(2**64, bits=128) == pytest.approx(1 - math.exp(-0.5))


def test_false_hits_grow_with_the_pool_not_with_its_square() -> None:
    assert worked.false_hits(2**40, published=2**13, bits=64) == 2**-11
    assert worked.false_hits(2**40, published=2**14, bits=64) == 2**-10


def test_rates_are_divided() -> None:
    assert worked.hashing_seconds(2**32, 50e6) == pytest.approx(85.899, abs=1e-3)
    # 2 x 7e9 x 1000 = 1.4e13 operations at 312e12 a second.
    assert worked.prefill_seconds(1000, 7e9, 312e12) == pytest.approx(0.04487, abs=1e-5)


def test_chats_with_one_system_prompt() -> None:
    chats = {"num_chats": 10, "system_len": 1000, "own_len": 50, "block_size": 16}
    assert worked.chat_tokens(**chats, cached=False) == 10 * 1050
    assert worked.chat_blocks(**chats, cached=False) == 10 * 66
    # 62 full blocks of the system prompt are shared; its last 8 tokens fall into a mixed block.
    assert worked.chat_tokens(**chats, cached=True) == 1050 + 9 * 58
    assert worked.chat_blocks(**chats, cached=True) == 62 + 10 * 4
