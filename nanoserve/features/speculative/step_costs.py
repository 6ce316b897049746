"""What steps take that only decode, with draft tokens and without: measured, and how it paid."""

import math
from collections import deque
from itertools import pairwise
from statistics import median_low

FEWEST_GAIN = 1.03  # over a plain step: what is less may be noise
_FEWEST_TIMES = 3  # of a kind of step, before what it takes is believed
_MOST_TIMES = 15  # of which the median counts: neighbours and page faults disturb single steps
# What draft tokens are hoped to cost, of a step's time: low, so that they are tried, and seen.
_PRIOR_JUMP, _PRIOR_SLOPE = 0.1, 0.05  # for the first one, and for each further one
_MOST_NEW = 16  # steps after which costs are found anew
_PATIENCE, _LONG = 24, 4000  # steps
# Steps with draft tokens that a balance is of. How many of one row are accepted is luck.
_FEWEST_BALANCED, _ROWS_BALANCED = 8, 40
_MOST_SURPRISE = 2.0
_GOOD_GAIN = 1.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = (
    8,
    64,
)  # recorded steps: of plain ones, one in four


class StepCosts:
    """What steps take that only decode, for about so many rows, by the number of draft tokens."""

    def __init__(self, num_rows: int, max_draft_tokens: int, is_model: bool) -> None:
        self._num_rows, self._max_draft_tokens = num_rows, max_draft_tokens
        self._is_model = is_model
        # Seconds per row. Numbers that are alike share a place, four to an octave from 8 on.
        self._times: dict[int, deque[float]] = {}
        self.plain: float | None = None  # without draft tokens; None before that is known
        self.relative: list[float] = []  # over that, for 0 ... `max_draft_tokens` of them
        self._would_pay = False  # draft tokens, were they all accepted
        self._num_steps = self._num_new = 0  # and since these were found
        # What was seen once or twice was perhaps another process's fault: when it is forgotten, and
        # how long it then lasts. Twice as long each time.
        self._forget_at: dict[int, int] = {}
        self._patience: dict[int, int] = {}
        # Of the latest steps with draft tokens, in plain steps: what they have taken, and yielded.
        self._took = self._yielded = 0.0
        self._num_balances = 0
        self._num_balanced = max(_FEWEST_BALANCED, _ROWS_BALANCED // num_rows)
        self._pause, self._paused_until = _SHORTEST_PAUSE, 0

    @property
    def can_pay(self) -> bool:
        """True if draft tokens might pay: if all were accepted, and lately they have not lost."""
        return self._would_pay and self._num_steps >= self._paused_until

    def add(self, num_drafts: int, seconds_per_row: float) -> None:
        """Record what a step with so many draft tokens has taken."""
        place = place_of(num_drafts)
        self._num_steps += 1
        if place not in self._times:  # the first time is slow for other reasons, too
            self._times[place] = deque(maxlen=_MOST_TIMES)
            self._patience[place] = 2 * self._patience.get(place, _PATIENCE)
            self._forget_at[place] = self._num_steps + self._patience[place]
            return
        self._times[place].append(seconds_per_row)
        # What is little known is looked at once more after each time.
        self._num_new += 1 if len(self._times[place]) > _FEWEST_TIMES else _MOST_NEW
        if self._num_new >= _MOST_NEW and len(self._times.get(0, ())) >= _FEWEST_TIMES:
            self._find(self._times[0])

    def judge(self, num_drafts: int, num_accepted: int, seconds_per_row: float) -> None:
        """Decide whether a step was worth it, whatever had been expected.

        The best of several estimates is most often too good an estimate, and single steps take
        longer than others like them: a draft model computes the prompt of a new sequence. Steps
        that were only tried, to see what they take, say nothing, nor do those that would have had
        more draft tokens, were it known what these take.
        """
        is_known = len(self._times.get(place_of(num_drafts), ())) >= _FEWEST_TIMES
        if not is_known or num_drafts >= len(self.relative) - 1 < self._max_draft_tokens:
            return
        # A step that another process has disturbed is not all of the balance.
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
                # More work does not take less time: what says so is noise.
                found = min(times) if len(times) < _FEWEST_TIMES else median_low(times)
                lowest = min(max(1.0, found / self.plain), lowest)
                points.insert(0, (_smallest(place), lowest))
        # Twice of what is known at most: so a large number is come to by small ones.
        # One pass of a model tells little: what it takes to begin is spread over all of them.
        first = self._max_draft_tokens // 2 if self._is_model else self._num_rows // 4
        first = max(2, first)
        most = min(self._max_draft_tokens, 2 * points[-1][0] if points else first)
        # A model computes each draft token, the first too; looking one up costs nothing, but a row
        # of several tokens goes another way than a row of one.
        points = [(0, 1.0), *points] if self._is_model and points else points
        self.relative = _on_lines(points, self._num_rows, most)
        gains = [(1 + n / self._num_rows) / cost for n, cost in enumerate(self.relative)]
        self._would_pay = max(gains) >= FEWEST_GAIN

    def _is_to_forget(self, place: int) -> bool:
        since = self._num_steps - self._forget_at[place]
        return since >= (0 if len(self._times[place]) < _FEWEST_TIMES else _LONG)


def _on_lines(points: list[tuple[int, float]], num_rows: int, most: int) -> list[float]:
    """Return the costs of 0 ... `most` draft tokens, from what is known of some numbers of them.

    The first draft token of a step may cost more than a further one; nothing else is taken for
    granted. Between two points costs lie on a line, beyond the last two on the same one, and
    otherwise on the line that is hoped for.
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
    """Return the place of a number: 0 ... 7 have their own; then 8 and 9 share one, four to an
    octave."""
    shift = max(0, number.bit_length() - 3)
    return number if not shift else (shift + 1) * 4 + (number >> shift)


def _smallest(place: int) -> int:
    """Return the smallest number in a place."""
    if place < 8:
        return place
    shift = place // 4 - 2
    return (4 + place % 4) << shift
