"""Worked examples for the chapter on the life of a request: its progress and its timestamps."""

from collections.abc import Sequence
from itertools import pairwise

from tables import table

from nanoserve.outputs import RequestMetrics


def progress(
    num_prompt_tokens: int, num_cached: int, budget: int, num_output_tokens: int
) -> list[tuple[int, int, int, bool]]:
    """Steps of a request that runs alone, up to its last token.

    Each is (tokens computed in it, num_computed_tokens and num_tokens after it, whether it yielded
    a token). `num_cached` prompt tokens come from the prefix cache; a step computes at most
    `budget` tokens.
    """
    steps, computed, total = [], num_cached, num_prompt_tokens
    while total < num_prompt_tokens + num_output_tokens:
        n = min(total - computed, budget)
        computed += n
        caught_up = computed == total
        total += caught_up
        steps.append((n, computed, total, caught_up))
    return steps


def progress_table(
    num_prompt_tokens: int, num_cached: int, budget: int, num_output_tokens: int
) -> str:
    """`progress` as a table."""
    steps = progress(num_prompt_tokens, num_cached, budget, num_output_tokens)
    rows = [
        [number, n, computed, total, "yes" if caught_up else ""]
        for number, (n, computed, total, caught_up) in enumerate(steps, start=1)
    ]
    return table(
        ["step", "tokens computed", "`num_computed_tokens`", "`num_tokens`", "new token"], rows
    )


def left_behind(num_new_tokens: int) -> int:
    """Computed tokens that an engine misses if it counts one per step."""
    return num_new_tokens - 1


def clock(
    arrival: float, scheduled: float, token_times: Sequence[float], finished: float
) -> RequestMetrics:
    """The metrics of a request with these timestamps, in seconds."""
    return RequestMetrics(
        arrival_time=arrival,
        first_scheduled_time=scheduled,
        first_token_time=token_times[0],
        last_token_time=token_times[-1],
        finished_time=finished,
        num_output_tokens=len(token_times),
        num_intervals=len(token_times) - 1,
        interval_seconds=token_times[-1] - token_times[0],
    )


def gaps(token_times: Sequence[float]) -> list[float]:
    """Seconds between one token and the next."""
    return [later - earlier for earlier, later in pairwise(token_times)]
