"""A solution of `exercise.py`."""

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
    """Round three times: blocks of the pool down, blocks of a user up, users down."""
    blocks = pool_bytes // (block_size * bytes_per_token)
    blocks_per_user = -(-tokens_per_user // block_size)
    return blocks // blocks_per_user


def tokens_per_second(machine: Machine, users: int, kv_bytes_per_user: float) -> float:
    """Compute one token per user and step; the slower of memory and products bounds the step."""
    memory = (machine.weight_bytes + users * kv_bytes_per_user) / machine.bandwidth
    products = 2 * machine.parameters * users / machine.matmul_rate
    return users / max(memory, products)


def smallest_batch(
    machine: Machine, rate: float, kv_bytes_per_user: float, max_users: int
) -> int | None:
    """The rate never falls as users are added, so a binary search finds where it is reached.

    n / max(a + b n, c n) is min(n / (a + b n), 1 / c), and n / (a + b n) rises towards 1 / b.
    """
    if max_users < 1 or tokens_per_second(machine, max_users, kv_bytes_per_user) < rate:
        return None
    low, high = 1, max_users  # the answer is in this range
    while low < high:
        middle = (low + high) // 2
        if tokens_per_second(machine, middle, kv_bytes_per_user) >= rate:
            high = middle
        else:
            low = middle + 1
    return low
