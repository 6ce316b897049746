"""How many guesses pay: by goodput, the tokens that a step yields over the time that it takes.

How often guesses are right does not tell. With one sequence, a step for five tokens takes little
longer than a step for one, and a guess in six pays; with sixty-four, a processor computes as long
as it reads, and hardly any guess does. So both are measured while the engine runs: what steps take,
by rows and guesses, and how far guesses are right, sequence by sequence.

Zero is an answer, and the most common one. A sequence that does not guess is a plain one, and its
proposer is asked now and then what it would have guessed: that costs no step.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

from nanoserve.speculative.proposer import num_right

_FEWEST_TIMES = 3  # of a kind of step, before what it takes is believed
_MOST_TIMES = 15  # of which the median counts: neighbours and page faults disturb single steps
# What guesses are hoped to cost, of a step's time: low, so that they are tried, and seen.
_PRIOR_JUMP, _PRIOR_SLOPE = 0.1, 0.05  # for the first one, and for each further one
_MOST_NEW = 16  # steps after which costs are found anew
_FEWEST_GAIN = 1.03  # over a plain step: what is less may be noise
_PLAIN_EVERY = 50  # steps: contexts grow, and plain steps with them
_PATIENCE, _LONG = 24, 4000  # steps
_FEWEST_HOPE = 0.1  # of a guess to be right, that a model is asked for
_PRIOR = 0.5  # of a guess to be right, before anything is known
_RECENT = 0.8  # what earlier guesses of a sequence count for, with each row of new ones
_FADING = 0.98  # a step
_MODEL_BELIEF = 2.0  # guesses that others' count for, in what is expected of a sequence
_BELIEF = 10.0  # guesses that a likelihood is believed for, before any was judged
_MEMORY = 0.95  # a row
_MOST_WAIT = 32  # steps
_REFUSED_WAIT = 8  # steps, where guesses were good and did not pay


@dataclass
class Record:
    """How far guesses for one sequence were right. A guess counts if all before it were right."""

    # The likelihood of a guess to be right, before any was judged, and how many it counts for.
    prior: float = _PRIOR
    belief: float = 1.0
    num_right: float = 0.0
    num_tried: float = 0.0
    num_misses: int = 0  # since the last time that a first guess was right
    ask_at: int = 0  # the step in which the proposer is asked again
    unverified: list[int] = field(default_factory=list)  # guesses that were not computed,
    num_tokens: int = 0  # and how many tokens were before them

    def likelihood(self) -> float:
        """Of a guess to be right, if those before it are, by this sequence alone."""
        known = self.num_right + self.belief * self.prior
        return known / (self.num_tried + self.belief)

    def note(self, num_judged: int, num_right: int) -> None:
        """So many were judged, and all of these were right, or all but the last."""
        self.num_right = _RECENT * self.num_right + num_right
        self.num_tried = _RECENT * self.num_tried + num_judged
        if num_right:
            self.num_misses = self.ask_at = 0

    def miss(self, step: int) -> None:
        """Nothing was guessed: ask less often."""
        self.num_misses += 1
        self.wait(step, min(2 ** (self.num_misses + 1), _MOST_WAIT))

    def wait(self, step: int, count: int) -> None:
        """Up to so many steps. Those of several sequences end together: most steps ask nobody."""
        self.ask_at = count * (step // count + 1)

    def fade(self) -> None:
        """What was seen counts less: so what was bad is tried again, some day."""
        self.num_right *= _FADING
        self.num_tried *= _FADING

    def keep(self, guesses: list[int], num_tokens: int, step: int) -> None:
        """They are not computed; the tokens to come will tell, in time."""
        self.unverified, self.num_tokens = guesses, num_tokens
        self.wait(step, _REFUSED_WAIT)


class StepCosts:
    """What steps take that only decode, for about so many rows, by how many guesses there are."""

    def __init__(self, num_rows: int, most_guesses: int, is_model: bool) -> None:
        self._num_rows, self._most_guesses = num_rows, most_guesses
        self._is_model = is_model
        # Seconds per row. Numbers that are alike share a place, four to an octave from 8 on.
        self._times: dict[int, deque[float]] = {}
        self.plain: float | None = None  # without guesses; None before that is known
        self.relative: list[float] = []  # over that, of 0 ... `most_guesses` guesses
        self.can_pay = False  # whether guesses would, were they all right
        self._num_noted = self._num_new = 0  # and since these were found
        # What was seen once or twice was perhaps somebody else's fault: when it is forgotten, and
        # how long it then lasts. Twice as long each time.
        self._forget_at: dict[int, int] = {}
        self._patience: dict[int, int] = {}

    def note(self, num_guesses: int, seconds_per_row: float) -> None:
        place = _place(num_guesses)
        self._num_noted += 1
        if place not in self._times:  # the first time is slow for other reasons, too
            self._times[place] = deque(maxlen=_MOST_TIMES)
            self._patience[place] = 2 * self._patience.get(place, _PATIENCE)
            self._forget_at[place] = self._num_noted + self._patience[place]
            return
        self._times[place].append(seconds_per_row)
        # What is little known is looked at once more after each time.
        self._num_new += 1 if len(self._times[place]) > _FEWEST_TIMES else _MOST_NEW
        if self._num_new >= _MOST_NEW and len(self._times.get(0, ())) >= _FEWEST_TIMES:
            self._find(self._times[0])

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
        first = self._most_guesses // 2 if self._is_model else self._num_rows // 4
        first = max(2, first)
        most = min(self._most_guesses, 2 * points[-1][0] if points else first)
        # A model computes each guess, the first one too; looking one up costs nothing, but a row
        # of several tokens goes another way than a row of one.
        points = [(0, 1.0), *points] if self._is_model and points else points
        self.relative = _on_lines(points, self._num_rows, most)
        gains = [(1 + n / self._num_rows) / cost for n, cost in enumerate(self.relative)]
        self.can_pay = max(gains) >= _FEWEST_GAIN

    def _is_to_forget(self, place: int) -> bool:
        since = self._num_noted - self._forget_at[place]
        return since >= (0 if len(self._times[place]) < _FEWEST_TIMES else _LONG)


def _on_lines(points: list[tuple[int, float]], num_rows: int, most: int) -> list[float]:
    """Of 0 ... `most` guesses, from what is known of some numbers of them.

    The first guess of a step may cost more than a further one; nothing else is taken for granted.
    Between two points costs lie on a line, beyond the last two on the same one, and otherwise on
    the line that is hoped for.
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


class Goodput:
    """Chooses how many of the guesses that were proposed are computed in a step."""

    def __init__(self, most_guesses: int, is_model: bool = False) -> None:
        """most_guesses: of a row. is_model: whether they are computed."""
        self._most_guesses, self._is_model = most_guesses, is_model
        # By how likely they seemed, in tenths: how many were right, and judged. Whoever goes by
        # recent luck expects too much.
        self._right = [_BELIEF * (tenth + 0.5) / 10 for tenth in range(10)]
        self._judged = [_BELIEF] * 10
        self._recent_right = self._recent_judged = 0.0  # of all
        self._costs: dict[int, StepCosts] = {}  # by rows, those that are alike together
        self._num_since_plain = 0
        self._num_tokens = self._num_plain_tokens = 0.0

    @property
    def gain(self) -> float:
        """Tokens of the steps that guessed, over those of plain steps in the same time."""
        return self._num_tokens / self._num_plain_tokens if self._num_plain_tokens else 1.0

    @property
    def is_plain_due(self) -> bool:
        """Whether a step without guesses is wanted, to see what it takes."""
        return self._num_since_plain >= _PLAIN_EVERY

    def costs(self, num_rows: int) -> StepCosts:
        place = _place(num_rows)
        if place not in self._costs:
            self._costs[place] = StepCosts(num_rows, num_rows * self._most_guesses, self._is_model)
        return self._costs[place]

    def new_record(self) -> Record:
        """Of a sequence of which nothing is known. A model is as good for it as for others."""
        if not self._is_model:
            return Record()
        share = (self._recent_right + 2 * _PRIOR) / (self._recent_judged + 2)
        return Record(prior=share, belief=_MODEL_BELIEF)

    def fade(self, records: list[Record]) -> None:
        """Nobody was chosen, so nothing was learned: what is known of them counts less."""
        self._recent_right *= _FADING
        self._recent_judged *= _FADING
        for record in records:
            record.fade()

    def note_step(self, num_rows: int, num_guesses: int, num_right: int, seconds: float) -> None:
        """What a step has taken that only decoded."""
        costs = self.costs(num_rows)
        costs.note(num_guesses, seconds / num_rows)
        if num_guesses and costs.plain is not None:
            self._num_tokens += num_rows + num_right
            self._num_plain_tokens += seconds / costs.plain
        self._num_since_plain = self._num_since_plain + 1 if num_guesses else 0

    def probability(self, record: Record) -> float:
        """Of a guess to be right, as it was with others that seemed as likely."""
        tenth = _tenth(record.likelihood())
        return self._right[tenth] / self._judged[tenth]

    def note_guesses(self, record: Record, num_guesses: int, num_right: int) -> None:
        """The first `num_right` of so many were right; behind a wrong one, none is judged."""
        tenth = _tenth(record.likelihood())
        num_judged = min(num_right + 1, num_guesses)
        self._right[tenth] = _MEMORY * self._right[tenth] + num_right
        self._judged[tenth] = _MEMORY * self._judged[tenth] + num_judged
        self._recent_right = _MEMORY * self._recent_right + num_right
        self._recent_judged = _MEMORY * self._recent_judged + num_judged
        record.note(num_judged, num_right)

    def compare(self, record: Record, token_ids: list[int]) -> None:
        """Guesses that were not computed, with the tokens that have come there since."""
        came = token_ids[record.num_tokens : record.num_tokens + len(record.unverified)]
        if record.unverified and came:
            self.note_guesses(record, len(came), num_right(record.unverified, came))
        record.unverified = []

    def may_pay(self, num_rows: int) -> bool:
        """Whether anybody need be asked for guesses."""
        return self.costs(num_rows).can_pay

    def choose(self, num_rows: int, proposed: list[tuple[Record, int]]) -> list[int]:
        """How many of its guesses each one gets to compute, in a step of `num_rows` sequences.

        proposed: how many there are, or could be.
        """
        relative = self.costs(num_rows).relative
        if self._is_model:
            return self._choose_passes(num_rows, proposed, relative)
        # Each further guess is worth its probability. The most valuable ones first.
        worth: list[tuple[float, int]] = []
        for index, (record, num_guesses) in enumerate(proposed):
            probability, value = self.probability(record), 1.0
            for _ in range(num_guesses):
                value *= probability
                worth.append((value, index))
        worth.sort(reverse=True)
        total, best, num_best = float(num_rows), _FEWEST_GAIN * num_rows, 0
        for number, ((value, _), cost) in enumerate(zip(worth, relative[1:], strict=False), 1):
            total += value
            if total > best * cost:
                best, num_best = total / cost, number
        counts = [0] * len(proposed)
        for _, index in worth[:num_best]:
            counts[index] += 1
        return counts

    def _choose_passes(
        self, num_rows: int, proposed: list[tuple[Record, int]], relative: list[float]
    ) -> list[int]:
        """Where a pass of a model makes the next guess of all, alone or together.

        So it is passes that cost, and all that guess take part in them, while there is hope.
        """
        probabilities = [self.probability(record) for record, _ in proposed]
        counts, best_counts = [0] * len(proposed), [0] * len(proposed)
        total, best = float(num_rows), _FEWEST_GAIN * num_rows
        for number in range(1, self._most_guesses + 1):
            for index, (_, most) in enumerate(proposed):
                value = probabilities[index] ** number
                if number <= most and value >= _FEWEST_HOPE:
                    counts[index] += 1
                    total += value
            num_guesses = sum(counts)
            if num_guesses >= len(relative):
                break
            if total > best * relative[num_guesses]:
                best, best_counts = total / relative[num_guesses], counts.copy()
        return best_counts


def _tenth(likelihood: float) -> int:
    return int(9.999 * likelihood)


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
