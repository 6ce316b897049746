"""How many guesses pay: by goodput, the tokens that a step yields over the time that it takes.

How often guesses are right does not tell. With one sequence, a step for five tokens takes little
longer than a step for one, and a guess in six pays; with sixty-four, a processor computes as long
as it reads, and hardly any guess does. So both are measured while the engine runs: what steps take,
by rows and guesses, and how far guesses are right, sequence by sequence.

Zero is an answer, and the most common one. A sequence that does not guess is a plain one, and its
proposer is asked now and then what it would have guessed: that costs no step.
"""

from dataclasses import dataclass, field

from nanoserve.speculative.proposer import num_right
from nanoserve.speculative.step_costs import FEWEST_GAIN, StepCosts, place_of

_PLAIN_EVERY = 50  # steps: contexts grow, and plain steps with them
_FEWEST_HOPE = 0.1  # of a guess to be right, that a model is asked for
_PRIOR = 0.5  # of a guess to be right, before anything is known
_RECENT = 0.8  # what earlier guesses of a sequence count for, with each row of new ones
_FADING = 0.98  # a step
_MODEL_BELIEF = 2.0  # guesses that others' count for, in what is expected of a sequence
_BELIEF = 10.0  # guesses that a likelihood is believed for, before any was judged
_MEMORY = 0.95  # a row
_PATIENT_MISSES = 3
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
        """Nothing was guessed: ask less often.

        Not at once: behind a word that is another one than in what is copied, some tokens must
        agree before the place is found again.
        """
        self.num_misses += 1
        self.wait(step, min(2 ** max(0, self.num_misses - _PATIENT_MISSES), _MOST_WAIT))

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
        place = place_of(num_rows)
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
        if num_guesses and costs.plain is not None:
            costs.judge(num_guesses, num_right, seconds / num_rows)
            self._num_tokens += num_rows + num_right
            self._num_plain_tokens += seconds / costs.plain
        costs.note(num_guesses, seconds / num_rows)
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
        total, best, num_best = float(num_rows), FEWEST_GAIN * num_rows, 0
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
        total, best = float(num_rows), FEWEST_GAIN * num_rows
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
