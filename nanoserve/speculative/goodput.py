"""How many guesses pay: by goodput, the tokens that a step yields over the time that it takes.

How often guesses are right does not tell. With one sequence, a step for five tokens takes little
longer than a step for one, and a guess in six pays; with sixty-four, a processor computes as long
as it reads, and hardly any guess does. So both are measured while the engine runs: what steps take,
by rows and guesses, and how far guesses are right, sequence by sequence.

Zero is an answer, and the most common one. A sequence that does not guess is a plain one, and its
proposer is asked now and then what it would have guessed: that costs no step.
"""

from collections import deque
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

_FEWEST_TIMES = 3  # of a kind of step, before what it takes is believed
_MOST_TIMES = 15  # of which the median counts: neighbours and page faults disturb single steps
_PRIOR_SLOPE = 0.05  # of a step's time for each further token: low, so that it is tried and seen
_MOST_CONSIDERED = 4  # guesses of a row, all of them right: whether any can pay
_FEWEST_GAIN = 1.03  # over a plain step: what is less may be noise
_PLAIN_EVERY = 50  # steps: contexts grow, and plain steps with them
_RETRY_AFTER = 2000  # steps that were refused: what was slow may have been a neighbour
_MOST_WAIT = 16  # steps between two questions


@dataclass
class Record:
    """How far guesses for one sequence were right. A guess counts if all before it were right."""

    num_right: float = 0.0
    num_tried: float = 0.0
    num_misses: int = 0  # since the last time that a first guess was right
    wait: int = 0  # steps before the proposer is asked again
    unverified: list[int] = field(default_factory=list)  # guesses that were not computed,
    num_tokens: int = 0  # and the tokens before them

    def probability(self, prior: float) -> float:
        """Of a guess to be right, if those before it are."""
        return (self.num_right + prior) / (self.num_tried + 1)

    def note(self, guesses: AbstractSequence[int], right: int) -> None:
        """The first `right` of `guesses` were right."""
        tried = right + (right < len(guesses))
        self.num_right = 0.8 * self.num_right + right
        self.num_tried = 0.8 * self.num_tried + tried
        if right:
            self.num_misses = self.wait = 0
        else:
            self.miss()

    def miss(self) -> None:
        """Nothing was guessed, or nothing right: ask less often."""
        self.num_misses += 1
        self.wait = min(2 ** (self.num_misses // 2) - 1, _MOST_WAIT)

    def keep(self, guesses: list[int], num_tokens: int) -> None:
        """They are not computed; the tokens to come will tell."""
        self.unverified, self.num_tokens = guesses[:1], num_tokens

    def compare(self, token_ids: list[int]) -> None:
        """With the tokens that have come since."""
        if self.unverified and len(token_ids) > self.num_tokens:
            self.note(self.unverified, int(token_ids[self.num_tokens] == self.unverified[0]))
        self.unverified = []


class StepCosts:
    """Seconds per row of steps that only decode, by how many rows and how many guesses.

    Numbers that are alike share a place, four to an octave from 8 on.
    """

    def __init__(self) -> None:
        self._times: dict[int, dict[int, deque[float]]] = {}  # by rows, and by guesses

    def note(self, num_rows: int, num_guesses: int, seconds: float) -> None:
        times = self._times.setdefault(_place(num_rows), {})
        place = times.setdefault(_place(num_guesses), deque(maxlen=_MOST_TIMES))
        place.append(seconds / num_rows)

    def retry(self, num_rows: int) -> None:
        """Forget what guesses cost, not what plain steps do."""
        times = self._times.get(_place(num_rows), {})
        for place in [place for place in times if place]:
            del times[place]

    def plain(self, num_rows: int) -> float | None:
        """Seconds per row without guesses; None before that is known."""
        times = self._times.get(_place(num_rows), {}).get(0, ())
        return median_low(times) if len(times) >= _FEWEST_TIMES else None

    def curve(self, num_rows: int) -> list[tuple[int, float]] | None:
        """(guesses, time over that of a plain step), ascending; None before that is known."""
        plain, times = self.plain(num_rows), self._times.get(_place(num_rows), {})
        if plain is None:
            return None
        points = [(0, 1.0)]
        for place in sorted(times):
            if place and len(times[place]) >= _FEWEST_TIMES:
                # More work does not take less time: what says so is noise.
                ratio = max(median_low(times[place]) / plain, points[-1][1])
                points.append((_smallest(place), ratio))
        return points


def costs_of(curve: list[tuple[int, float]], most: int) -> list[float]:
    """Of 0 ... `most` guesses: on straight lines between what is known; beyond it, on the line
    that is hoped for."""
    costs = [1.0]
    for (low, low_cost), (high, high_cost) in pairwise(curve):
        slope = (high_cost - low_cost) / (high - low)
        costs += [low_cost + slope * n for n in range(1, min(high, most) - low + 1)]
    last, last_cost = curve[-1]
    costs += [last_cost + _PRIOR_SLOPE * n for n in range(1, most - last + 1)]
    return costs


class Goodput:
    """Chooses how many of the guesses that were proposed are computed in a step."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.share_right = 0.5  # of all guesses that were computed lately
        self._num_tokens = self._num_plain_tokens = 0.0
        self._num_refused: dict[int, int] = {}  # by rows, lately
        self._num_since_plain = 0

    @property
    def gain(self) -> float:
        """Tokens of the steps that decoded, over those of plain steps in the same time."""
        return self._num_tokens / self._num_plain_tokens if self._num_plain_tokens else 1.0

    def note_step(self, num_rows: int, num_guesses: int, num_right: int, seconds: float) -> None:
        """What a step has taken that only decoded."""
        self.costs.note(num_rows, num_guesses, seconds)
        plain = self.costs.plain(num_rows)
        if plain is not None:
            self._num_tokens += num_rows + num_right
            self._num_plain_tokens += seconds / plain
        self._num_since_plain = self._num_since_plain + 1 if num_guesses else 0

    def note_guesses(self, record: Record, guesses: list[int], right: int) -> None:
        record.note(guesses, right)
        tried = right + (right < len(guesses))
        self.share_right += 0.02 * (right - self.share_right * tried)

    def may_pay(self, num_rows: int) -> bool:
        """Whether guesses would, were they all right; if not, nobody need be asked for any."""
        curve = self.costs.curve(num_rows)
        if curve is None or self._num_since_plain >= _PLAIN_EVERY:
            return False
        costs = costs_of(curve, _MOST_CONSIDERED * num_rows)
        if any((num_rows + n) >= _FEWEST_GAIN * num_rows * c for n, c in enumerate(costs) if n):
            return True
        self._refuse(num_rows)
        return False

    def choose(self, num_rows: int, proposed: list[tuple[Record, int]]) -> list[int]:
        """How many of its guesses each one gets to compute, in a step of `num_rows` sequences.

        proposed: how many there are, or could be.
        """
        counts = [0] * len(proposed)
        curve = self.costs.curve(num_rows)
        if curve is None:
            return counts
        # Each further guess is worth its probability. The most valuable ones first.
        worth: list[tuple[float, int]] = []
        for index, (record, num_guesses) in enumerate(proposed):
            probability, value = record.probability(self.share_right), 1.0
            for _ in range(num_guesses):
                value *= probability
                worth.append((value, index))
        worth.sort(reverse=True)
        costs = costs_of(curve, len(worth))
        total, best, num_best = float(num_rows), _FEWEST_GAIN * num_rows, 0
        for number, (value, _) in enumerate(worth, 1):
            total += value
            goodput = total / costs[number]
            if goodput > best:
                best, num_best = goodput, number
        for _, index in worth[:num_best]:
            counts[index] += 1
        if not num_best:
            self._refuse(num_rows)
        return counts

    def _refuse(self, num_rows: int) -> None:
        self.share_right += 0.001 * (0.5 - self.share_right)  # a model is asked again, some day
        place = _place(num_rows)
        self._num_refused[place] = self._num_refused.get(place, 0) + 1
        if self._num_refused[place] >= _RETRY_AFTER:
            self._num_refused[place] = 0
            self.costs.retry(num_rows)


def _place(number: int) -> int:
    """0 ... 7 are their own; then 8 and 9 share one, and so on, four to an octave."""
    shift = max(0, number.bit_length() - 3)
    return number if not shift else (shift + 1) * 4 + (number >> shift)


def _smallest(place: int) -> int:
    """The smallest number in a place."""
    if place < 8:
        return place
    shift = place // 4 - 2
    return (4 + place % 4) << shift
