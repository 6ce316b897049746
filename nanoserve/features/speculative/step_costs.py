"""Measure decode steps with and without draft tokens, and whether draft tokens have paid."""

import math
from collections import deque
from itertools import pairwise
from statistics import median_low

FEWEST_GAIN = 1.03  # over a plain step; a smaller gain may be noise
_FEWEST_TIMES = 3  # measurements of a kind of step before its time is relied on
_MOST_TIMES = 15  # their median is used: other processes and page faults disturb single steps
# Initial estimate of the cost of draft tokens, relative to a plain step of one row. It is low, so
# that they are tried and then measured.
_PRIOR_JUMP, _PRIOR_SLOPE = 0.1, 0.05  # for the first one, and for each further one
_MOST_NEW = 16  # recorded steps after which the costs are computed again
# Recorded steps for which measurements are kept: if they are fewer than `_FEWEST_TIMES`, and else.
_PATIENCE, _LONG = 24, 4000
# A balance is over this many steps with draft tokens: at least 8, and 40 rows. How many draft
# tokens of a single row are accepted is mostly chance.
_FEWEST_BALANCED, _ROWS_BALANCED = 8, 40
_MOST_SURPRISE = 2.0  # a step counts for at most this many times its expected time
_GOOD_GAIN = 1.1  # above this, the next pause is a short one again
_SHORTEST_PAUSE, _LONGEST_PAUSE = (
    8,
    64,
)  # recorded steps; of plain steps, one in four is recorded


class StepCosts:
    """The times of decode steps with about `num_rows` rows, by the number of draft tokens."""

    def __init__(self, num_rows: int, max_draft_tokens: int, is_model: bool) -> None:
        self._num_rows, self._max_draft_tokens = num_rows, max_draft_tokens
        self._is_model = is_model
        # Seconds per row, by bucket of the number of draft tokens: from 8 on, four to an octave.
        self._times: dict[int, deque[float]] = {}
        self.plain: float | None = None  # seconds per row without draft tokens; None at first
        self.relative: list[float] = []  # time over `plain`, for 0 ... `max_draft_tokens`
        self._would_pay = False  # True if draft tokens would pay, were they all accepted
        self._num_steps = self._num_new = 0  # recorded steps: all, and since `_find`
        # Only one or two measurements may be due to another process. By bucket: the step at which
        # they are dropped, and how long they are kept, which doubles each time.
        self._forget_at: dict[int, int] = {}
        self._patience: dict[int, int] = {}
        # Balance of the latest steps with draft tokens: time and tokens, in those of plain steps.
        self._took = self._yielded = 0.0
        self._num_balances = 0
        self._num_balanced = max(_FEWEST_BALANCED, _ROWS_BALANCED // num_rows)
        self._pause, self._paused_until = _SHORTEST_PAUSE, 0

    @property
    def can_pay(self) -> bool:
        """True if draft tokens would pay if all were accepted, and there is no pause.

        A pause follows a balance in which draft tokens did not pay.
        """
        return self._would_pay and self._num_steps >= self._paused_until

    def add(self, num_drafts: int, seconds_per_row: float) -> None:
        """Record the time of a step with `num_drafts` draft tokens in all."""
        place = place_of(num_drafts)
        self._num_steps += 1
        if place not in self._times:  # the first step of a kind is slow for other reasons
            self._times[place] = deque(maxlen=_MOST_TIMES)
            self._patience[place] = 2 * self._patience.get(place, _PATIENCE)
            self._forget_at[place] = self._num_steps + self._patience[place]
            return
        self._times[place].append(seconds_per_row)
        # While a kind of step has few measurements, the costs are computed after each of them.
        self._num_new += 1 if len(self._times[place]) > _FEWEST_TIMES else _MOST_NEW
        if self._num_new >= _MOST_NEW and len(self._times.get(0, ())) >= _FEWEST_TIMES:
            self._find(self._times[0])

    def judge(self, num_drafts: int, num_accepted: int, seconds_per_row: float) -> None:
        """Add a step with draft tokens to the balance, and pause if they have not paid.

        The balance is needed in addition to the estimates. The best of several estimates is usually
        too optimistic, and some steps take longer than similar steps, as when a draft model
        computes the prompt of a new sequence. Steps of a kind that is not measured yet do not
        count, nor do steps that were limited because the cost of more draft tokens is not known.
        """
        is_known = len(self._times.get(place_of(num_drafts), ())) >= _FEWEST_TIMES
        is_beyond = num_drafts >= len(self.relative) - 1 < self._max_draft_tokens
        if self.plain is None or not is_known or is_beyond:
            return
        # Limit the weight of a step that another process has disturbed.
        took = min(seconds_per_row / self.plain, _MOST_SURPRISE * self.relative[num_drafts])
        memory = 1 - 1 / self._num_balanced
        self._took = memory * self._took + took
        self._yielded = memory * self._yielded + 1 + num_accepted / self._num_rows
        self._num_balances += 1
        if self._num_balances < self._num_balanced:
            return
        if self._yielded < FEWEST_GAIN * self._took:
            self._paused_until = self._num_steps + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._took = self._yielded = self._num_balances = 0
        elif self._yielded > _GOOD_GAIN * self._took:
            self._pause = _SHORTEST_PAUSE

    def _find(self, plain: deque[float]) -> None:
        self.plain, self._num_new = median_low(plain), 0
        points: list[tuple[int, float]] = []
        lowest = math.inf
        for place in sorted(self._times, reverse=True):
            if place and self._is_to_forget(place):
                del self._times[place]
                continue
            times = self._times[place]
            if place and times:
                # More draft tokens do not take less time: such a measurement is noise.
                found = min(times) if len(times) < _FEWEST_TIMES else median_low(times)
                lowest = min(max(1.0, found / self.plain), lowest)
                points.insert(0, (_smallest(place), lowest))
        # Allow at most twice the largest number measured, so that large numbers are reached step by
        # step. A draft model starts with half of the most: its fixed cost is spread over its
        # passes, so that a single pass says little about several.
        first = self._max_draft_tokens // 2 if self._is_model else self._num_rows // 4
        first = max(2, first)
        most = min(self._max_draft_tokens, 2 * points[-1][0] if points else first)
        # For a draft model, the first draft token costs as much as any other one. A looked-up one
        # costs nothing to propose, but rows of several tokens take other kernels than decode rows.
        points = [(0, 1.0), *points] if self._is_model and points else points
        self.relative = _on_lines(points, self._num_rows, most)
        gains = [(1 + n / self._num_rows) / cost for n, cost in enumerate(self.relative)]
        self._would_pay = max(gains) >= FEWEST_GAIN

    def _is_to_forget(self, place: int) -> bool:
        since = self._num_steps - self._forget_at[place]
        return since >= (0 if len(self._times[place]) < _FEWEST_TIMES else _LONG)


def _on_lines(points: list[tuple[int, float]], num_rows: int, most: int) -> list[float]:
    """Return the relative costs of 0 ... `most` draft tokens, interpolated from `points`.

    points: (number of draft tokens, relative cost). The first draft token of a step may cost more
    than further ones. Costs are linear between two points, go on along the last line beyond them,
    and use the slope of the initial estimate where there are fewer than two points.
    """
    slope = _PRIOR_SLOPE / num_rows
    points = points or [(1, 1 + _PRIOR_JUMP / num_rows)]
    first, first_cost = points[0]
    costs = [1.0, *(max(1.0, first_cost - slope * (first - n)) for n in range(1, first + 1))]
    for (low, low_cost), (high, high_cost) in pairwise(points):
        slope = (high_cost - low_cost) / (high - low)
        costs += [low_cost + slope * n for n in range(1, high - low + 1)]
    costs += [costs[-1] + slope * n for n in range(1, most + 2 - len(costs))]
    return costs[: most + 1]


def place_of(number: int) -> int:
    """Return the bucket of a number.

    0 ... 7 have one bucket each. From 8 on there are four per octave, so 8 and 9 share a bucket.
    """
    shift = max(0, number.bit_length() - 3)
    return number if not shift else (shift + 1) * 4 + (number >> shift)


def _smallest(place: int) -> int:
    """Return the smallest number in a bucket."""
    if place < 8:
        return place
    shift = place // 4 - 2
    return (4 + place % 4) << shift
