"""Exercise: how many users, how fast, and how many users for a given rate.

Everything is counted in bytes, tokens, operations and seconds. A *user* has a sequence of a fixed
number of tokens, of which each leaves `bytes_per_token` bytes in the KV cache.

Complete the three functions. They need only integers and floats. No function may try batches one
by one, because a batch may have millions of users.

Run the test with: pytest -x docs/01-serving/test_exercise.py
"""

from typing import NamedTuple


class Machine(NamedTuple):
    """A model on a device. A decode step reads `weight_bytes` once, and each user's KV once."""

    weight_bytes: float
    parameters: int  # two operations each for every token
    bandwidth: float  # bytes per second
    matmul_rate: float  # operations per second


def users_that_fit(
    pool_bytes: int, bytes_per_token: int, tokens_per_user: int, block_size: int
) -> int:
    """Return how many users fit into a pool, if each takes whole blocks of `block_size` tokens.

    A block belongs to one user. The pool has whole blocks only; a remainder cannot be used.
    """
    raise NotImplementedError


def tokens_per_second(machine: Machine, users: int, kv_bytes_per_user: float) -> float:
    """Return the tokens per second of decode steps with `users` users, each with one per step.

    A step takes the longer of two times: that of its bytes and that of its operations. Operations
    of attention do not count.
    """
    raise NotImplementedError


def smallest_batch(
    machine: Machine, rate: float, kv_bytes_per_user: float, max_users: int
) -> int | None:
    """Return the fewest users, from one to `max_users`, with which decoding reaches `rate`.

    `rate` is in tokens per second. Return None if no such number of users reaches it: reading the
    caches takes time, and so do the products.
    """
    raise NotImplementedError
