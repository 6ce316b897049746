"""Exercise: a batching engine in virtual time, checked by queueing theory, and a fit of its steps.

Complete the functions; plain Python is enough.

1. `waits` is the queue of one server that takes `service` seconds for each request, first come,
   first served. Each wait follows from the one before (Lindley 1952).
2. `in_system` counts requests: how many were there on average, from the first arrival to the last
   end? Sum up over time, not over requests. Little's law then says what the test compares it with.
3. `serve` is an engine. A step begins when the last one has ended; if nothing runs and nothing
   waits, the clock moves to the next arrival. At its beginning, a step admits the requests that
   have arrived by then, in order, while fewer than `num_slots` run. It computes the whole prompts
   of those that it admits and one token of each other, so it takes `seconds(num_tokens)`. At its
   end each of them has one more token of its output; one that has all of them leaves its slot. A
   first token comes at the end of the step that admitted the request. Call `seconds` only where
   something changes: a request of 100,000 tokens alone must not take 100,000 calls.
4. `fit` finds `(fixed, per_token)`, both >= 0, for which the sum of ((fixed + per_token x tokens) /
   measured - 1) squared is least. No size can make a step faster, so neither may be negative.

Test it with `pytest -x docs/28-simulation/test_exercise.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


def waits(arrivals: Sequence[float], service: float) -> list[float]:
    """Return the seconds that each request waits; `arrivals` are sorted."""
    raise NotImplementedError


def in_system(arrivals: Sequence[float], ends: Sequence[float]) -> float:
    """Return the average number of requests in the system. Ends are in no order of their own."""
    raise NotImplementedError


class Request(NamedTuple):
    """Lengths are in tokens, and 1 or more."""

    arrival: float
    prompt: int
    output: int


class Served(NamedTuple):
    """Seconds on the engine's clock."""

    first_token: float
    end: float


def serve(
    requests: Sequence[Request], num_slots: int, seconds: Callable[[int], float]
) -> list[Served]:
    """Return the times of each request; `requests` are sorted by arrival."""
    raise NotImplementedError


def fit(tokens: Sequence[int], measured: Sequence[float]) -> tuple[float, float]:
    """Tokens of steps (not all equal), and the seconds that they took -> (fixed, per_token)."""
    raise NotImplementedError
