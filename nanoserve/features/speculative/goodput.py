"""How many draft tokens pay: by goodput, the tokens that a step yields over the time it takes.

The acceptance rate alone does not say it. With one sequence, a step for five tokens takes little
longer than a step for one, and one accepted draft token in six pays; with sixty-four, a processor
computes as long as it reads, and hardly any does. So both are measured while the engine runs: what
steps take, by rows and draft tokens, and how many are accepted, sequence by sequence.

Zero is an answer, and the most common one. A sequence without draft tokens is a plain one, and now
and then its proposer says what it would have drafted: that costs no step.
"""

from dataclasses import dataclass, field

from nanoserve.features.speculative.proposer import count_accepted
from nanoserve.features.speculative.step_costs import FEWEST_GAIN, StepCosts, place_of

_PLAIN_EVERY = 50  # steps: contexts grow, and plain steps with them
_FEWEST_HOPE = 0.1  # probability of a draft token to be accepted, for which a model runs
_PRIOR = 0.5  # the same, before anything is known
_RECENT = 0.8  # what earlier drafts of a sequence count for, with each new one
_FADING = 0.98  # a step
_MODEL_BELIEF = 2.0  # draft tokens that others' count for, in what is expected of a sequence
_BELIEF = 10.0  # draft tokens that a likelihood is believed for, before any was verified
_MEMORY = 0.95  # a row
_PATIENT_MISSES = 3
_MOST_WAIT = 32  # steps
_REFUSED_WAIT = 8  # steps, where draft tokens were good and did not pay


@dataclass
class Record:
    """Counts, for one sequence, how many draft tokens were accepted.

    A draft token is verified if all before it were accepted; what is behind a rejected one is not.
    """

    # The likelihood of a draft token to be accepted, before any was verified, and how many it
    # counts for.
    prior: float = _PRIOR
    belief: float = 1.0
    num_accepted: float = 0.0
    num_verified: float = 0.0
    num_misses: int = 0  # since the last time that a first draft token was accepted
    propose_at: int = 0  # the step in which the proposer is called again
    uncomputed: list[int] = field(default_factory=list)  # draft tokens that did not pay,
    num_tokens: int = 0  # and how many tokens were before them

    def likelihood(self) -> float:
        """Return the probability that a draft token is accepted if those before it are, by this
        sequence alone."""
        known = self.num_accepted + self.belief * self.prior
        return known / (self.num_verified + self.belief)

    def add(self, num_verified: int, num_accepted: int) -> None:
        """Count so many verified draft tokens: all of them were accepted, or all but the last."""
        self.num_accepted = _RECENT * self.num_accepted + num_accepted
        self.num_verified = _RECENT * self.num_verified + num_verified
        if num_accepted:
            self.num_misses = self.propose_at = 0

    def miss(self, step: int) -> None:
        """Record that nothing was proposed: the proposer is called less often.

        Not at once: behind a word that is another one than in what is copied, some tokens must
        agree before the place is found again.
        """
        self.num_misses += 1
        self.wait(step, min(2 ** max(0, self.num_misses - _PATIENT_MISSES), _MOST_WAIT))

    def wait(self, step: int, count: int) -> None:
        """Wait for up to so many steps. Waits of several sequences end in the same step, so that
        most steps call no proposer."""
        self.propose_at = count * (step // count + 1)

    def fade(self) -> None:
        """Let what was seen count less, so that what was bad is tried again some day."""
        self.num_accepted *= _FADING
        self.num_verified *= _FADING

    def keep(self, draft_tokens: list[int], num_tokens: int, step: int) -> None:
        """Keep draft tokens that are not computed, to compare them with the tokens to come."""
        self.uncomputed, self.num_tokens = draft_tokens, num_tokens
        self.wait(step, _REFUSED_WAIT)


class Goodput:
    """Chooses how many of the draft tokens that were proposed are computed in a step."""

    def __init__(self, max_draft_tokens: int, is_model: bool = False) -> None:
        """max_draft_tokens: of a row. is_model: whether they are computed."""
        self._max_draft_tokens, self._is_model = max_draft_tokens, is_model
        # By how likely they seemed, in tenths: how many were accepted, and verified. What goes by
        # recent luck alone expects too much.
        self._accepted = [_BELIEF * (tenth + 0.5) / 10 for tenth in range(10)]
        self._verified = [_BELIEF] * 10
        self._recent_accepted = self._recent_verified = 0.0  # of all
        self._costs: dict[int, StepCosts] = {}  # by rows, those that are alike together
        self._num_since_plain = 0
        self._num_tokens = self._num_plain_tokens = 0.0

    @property
    def gain(self) -> float:
        """Tokens of the steps with draft tokens, over those of plain steps in the same time."""
        return self._num_tokens / self._num_plain_tokens if self._num_plain_tokens else 1.0

    @property
    def is_plain_due(self) -> bool:
        """True if a step without draft tokens is wanted, to see what it takes."""
        return self._num_since_plain >= _PLAIN_EVERY

    def costs(self, num_rows: int) -> StepCosts:
        """Return what steps take for about so many rows."""
        place = place_of(num_rows)
        if place not in self._costs:
            most = num_rows * self._max_draft_tokens
            self._costs[place] = StepCosts(num_rows, most, self._is_model)
        return self._costs[place]

    def new_record(self) -> Record:
        """Return the record of a sequence of which nothing is known yet.

        A model is as good for it as for others.
        """
        if not self._is_model:
            return Record()
        share = (self._recent_accepted + 2 * _PRIOR) / (self._recent_verified + 2)
        return Record(prior=share, belief=_MODEL_BELIEF)

    def fade(self, records: list[Record]) -> None:
        """Let what is known of them count less: none was chosen, so nothing was learned."""
        self._recent_accepted *= _FADING
        self._recent_verified *= _FADING
        for record in records:
            record.fade()

    def record_step(
        self, num_rows: int, num_drafts: int, num_accepted: int, seconds: float
    ) -> None:
        """Record what a step has taken that only decoded."""
        costs = self.costs(num_rows)
        if num_drafts and costs.plain is not None:
            costs.judge(num_drafts, num_accepted, seconds / num_rows)
            self._num_tokens += num_rows + num_accepted
            self._num_plain_tokens += seconds / costs.plain
        costs.add(num_drafts, seconds / num_rows)
        self._num_since_plain = self._num_since_plain + 1 if num_drafts else 0

    def probability(self, record: Record) -> float:
        """Return the acceptance rate of draft tokens that seemed as likely as this one."""
        tenth = _tenth(record.likelihood())
        return self._accepted[tenth] / self._verified[tenth]

    def record_accepted(self, record: Record, num_drafts: int, num_accepted: int) -> None:
        """Record how many of so many draft tokens were accepted; behind a rejected one, none is
        verified."""
        tenth = _tenth(record.likelihood())
        num_verified = min(num_accepted + 1, num_drafts)
        self._accepted[tenth] = _MEMORY * self._accepted[tenth] + num_accepted
        self._verified[tenth] = _MEMORY * self._verified[tenth] + num_verified
        self._recent_accepted = _MEMORY * self._recent_accepted + num_accepted
        self._recent_verified = _MEMORY * self._recent_verified + num_verified
        record.add(num_verified, num_accepted)

    def compare(self, record: Record, token_ids: list[int]) -> None:
        """Compare draft tokens that were not computed with the tokens that have come since."""
        came = token_ids[record.num_tokens : record.num_tokens + len(record.uncomputed)]
        if record.uncomputed and came:
            self.record_accepted(record, len(came), count_accepted(record.uncomputed, came))
        record.uncomputed = []

    def may_pay(self, num_rows: int) -> bool:
        """Return whether any draft token might pay, so that the proposer is worth a call."""
        return self.costs(num_rows).can_pay

    def choose(self, num_rows: int, proposed: list[tuple[Record, int]]) -> list[int]:
        """Return how many draft tokens each one gets to compute, in a step of `num_rows` sequences.

        proposed: how many there are, or could be.
        """
        relative = self.costs(num_rows).relative
        if self._is_model:
            return self._choose_passes(num_rows, proposed, relative)
        # Each further draft token is worth its probability. The most valuable ones first.
        worth: list[tuple[float, int]] = []
        for index, (record, num_drafts) in enumerate(proposed):
            probability, value = self.probability(record), 1.0
            for _ in range(num_drafts):
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
        """Choose where one pass of a model makes the next draft token of all sequences.

        So it is passes that cost, and all take part in them, while there is hope.
        """
        probabilities = [self.probability(record) for record, _ in proposed]
        counts, best_counts = [0] * len(proposed), [0] * len(proposed)
        total, best = float(num_rows), FEWEST_GAIN * num_rows
        for number in range(1, self._max_draft_tokens + 1):
            for index, (_, most) in enumerate(proposed):
                value = probabilities[index] ** number
                if number <= most and value >= _FEWEST_HOPE:
                    counts[index] += 1
                    total += value
            num_drafts = sum(counts)
            if num_drafts >= len(relative):
                break
            if total > best * relative[num_drafts]:
                best, best_counts = total / relative[num_drafts], counts.copy()
        return best_counts


def _tenth(likelihood: float) -> int:
    return int(9.999 * likelihood)
