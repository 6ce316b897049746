"""Solution of the exercise of chapter 28."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple


def waits(arrivals: Sequence[float], service: float) -> list[float]:
    found = [0.0] * len(arrivals)
    for index in range(1, len(arrivals)):
        free_at = arrivals[index - 1] + found[index - 1] + service
        found[index] = max(0.0, free_at - arrivals[index])
    return found


def in_system(arrivals: Sequence[float], ends: Sequence[float]) -> float:
    changes = sorted([*((time, 1) for time in arrivals), *((time, -1) for time in ends)])
    area, number = 0.0, 0
    for (time, change), (following, _) in pairwise(changes):
        number += change
        area += number * (following - time)
    return area / (changes[-1][0] - changes[0][0])


class Request(NamedTuple):
    arrival: float
    prompt: int
    output: int


class Served(NamedTuple):
    first_token: float
    end: float


def serve(
    requests: Sequence[Request], num_slots: int, seconds: Callable[[int], float]
) -> list[Served]:
    first, end = [0.0] * len(requests), [0.0] * len(requests)
    clock, arrived = 0.0, 0
    left: dict[int, int] = {}  # tokens that running requests still get
    while left or arrived < len(requests):
        if not left:
            clock = max(clock, requests[arrived].arrival)
        admitted: list[int] = []
        while (
            arrived < len(requests)
            and requests[arrived].arrival <= clock
            and len(left) + len(admitted) < num_slots
        ):
            admitted.append(arrived)
            arrived += 1
        num_tokens = len(left) + sum(requests[index].prompt for index in admitted)
        step, num_steps = seconds(num_tokens), 1
        if not admitted:
            num_steps = min(left.values())
            if arrived < len(requests) and len(left) < num_slots:
                until = requests[arrived].arrival - clock
                num_steps = min(num_steps, math.ceil(until / step))
        clock += num_steps * step
        left = {index: number - num_steps for index, number in left.items()}
        for index in admitted:
            first[index] = clock
            left[index] = requests[index].output - 1
        for index in [index for index, number in left.items() if not number]:
            end[index] = clock
            del left[index]
    return [Served(*times) for times in zip(first, end, strict=True)]


def fit(tokens: Sequence[int], measured: Sequence[float]) -> tuple[float, float]:
    # Relative to what was measured: columns a = 1 / measured and b = tokens / measured, target 1.
    a = [1 / seconds for seconds in measured]
    b = [number / seconds for number, seconds in zip(tokens, measured, strict=True)]
    aa, bb = sum(x * x for x in a), sum(x * x for x in b)
    ab = sum(x * y for x, y in zip(a, b, strict=True))
    a1, b1 = sum(a), sum(b)
    determinant = aa * bb - ab * ab
    fixed, per_token = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if fixed < 0:
        return 0.0, b1 / bb
    if per_token < 0:
        return a1 / aa, 0.0
    return fixed, per_token
