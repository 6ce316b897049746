"""Test of the exercise of chapter 1, against our block manager and against exhaustive search."""

import random

import pytest

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

from .exercise import Machine, smallest_batch, tokens_per_second, users_that_fit

A100 = Machine(weight_bytes=14e9, parameters=7_000_000_000, bandwidth=2e12, matmul_rate=312e12)
HALF_MIB, GIB = 2**19, 2**30


@pytest.mark.parametrize(
    ("pool", "tokens", "block_size", "users"),
    [
        (64 * GIB, 300, 16, 431),
        (64 * GIB, 300, 1, 436),
        (64 * GIB, 4096, 4096, 32),
        (64 * GIB, 100, 4096, 32),  # a block the size of the longest sequence is a reservation
        (16 * HALF_MIB - 1, 1, 16, 0),
        (16 * HALF_MIB, 16, 16, 1),
        (31 * HALF_MIB, 17, 16, 0),
    ],
)
def test_users_take_whole_blocks(pool: int, tokens: int, block_size: int, users: int) -> None:
    found = users_that_fit(pool, HALF_MIB, tokens, block_size)
    assert found == users, f"users_that_fit({pool}, {HALF_MIB}, {tokens}, {block_size})"


def test_as_many_fit_as_our_block_manager_takes() -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_blocks, block_size = rng.randint(1, 60), rng.randint(1, 20)
        tokens, per_token = rng.randint(1, 100), rng.randint(1, 1000)
        pool = num_blocks * block_size * per_token + rng.randrange(block_size * per_token)
        manager, taken = BlockManager(num_blocks, block_size), 0
        while manager.allocate(Sequence(str(taken), [7], SamplingParams(), 1000), tokens):
            taken += 1
        case = f"users_that_fit({pool}, {per_token}, {tokens}, {block_size})"
        assert users_that_fit(pool, per_token, tokens, block_size) == taken, case


def test_a_batch_shares_the_weights_but_not_the_caches() -> None:
    one, many = (tokens_per_second(A100, users, 0.5e9) for users in (1, 32))
    assert one == pytest.approx(1 / 7.25e-3), "tokens_per_second(A100, 1, 0.5e9)"
    assert many == pytest.approx(32 / 15e-3), "tokens_per_second(A100, 32, 0.5e9)"
    assert many / one == pytest.approx(15.467, abs=1e-3), "32 users of 0.5e9 bytes against one"


def test_without_caches_the_products_are_the_limit_in_the_end() -> None:
    few, many = (tokens_per_second(A100, users, 0.0) for users in (100, 100_000))
    assert few == pytest.approx(100 / 7e-3), "tokens_per_second(A100, 100, 0.0)"
    assert many == pytest.approx(312e12 / 14e9), "tokens_per_second(A100, 100_000, 0.0)"


def test_the_smallest_batch_is_the_smallest() -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(300):
        machine = Machine(rng.uniform(1, 50), rng.randint(1, 20), rng.uniform(1, 9), 40.0)
        kv, most, rate = rng.uniform(0, 3), rng.randint(0, 40), rng.uniform(0.01, 2)
        enough = [n for n in range(1, most + 1) if tokens_per_second(machine, n, kv) >= rate]
        expected, case = enough[0] if enough else None, f"{machine}, {rate}, {kv}, {most}"
        assert smallest_batch(machine, rate, kv, most) == expected, f"smallest_batch({case})"
        found += bool(enough)
    assert 50 < found < 250, f"{found} of the 300 random cases have an answer"


def test_some_rates_no_batch_reaches() -> None:
    """4,000 caches of 0.5 GB a second is all that 2 TB/s can read."""
    assert smallest_batch(A100, 3_998.5, 0.5e9, max_users=10**9) == 74_639
    assert smallest_batch(A100, 4_000.0, 0.5e9, max_users=10**9) is None
    assert smallest_batch(A100, 3_998.5, 0.5e9, max_users=74_638) is None
