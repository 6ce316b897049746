"""Choose the number of draft tokens with the best goodput, i.e. accepted tokens per second.

The acceptance rate alone is not enough. With one sequence, a step for five tokens takes little
longer than a step for one, and one accepted draft token in six pays; with sixty-four, a processor
computes for as long as it reads weights, and hardly any draft token pays. So both are measured
while the engine runs: the times of steps, by rows and draft tokens, and the acceptance rate of each
sequence.

The most common choice is zero, i.e. a plain decode step. Draft tokens that were proposed but not
verified are compared with the tokens that come later, which measures acceptance at no cost.
"""

from dataclasses import dataclass, field

from nanoserve.features.speculative.proposer import count_accepted
from nanoserve.features.speculative.step_costs import FEWEST_GAIN, StepCosts, place_of

_PLAIN_EVERY = 50  # steps between timed plain steps: these get slower as contexts grow
_FEWEST_HOPE = 0.1  # the lowest probability of acceptance for which a draft model runs
_PRIOR = 0.5  # acceptance rate that is assumed before anything was measured
_RECENT = 0.8  # weight of a sequence's earlier drafts, per new draft
_FADING = 0.98  # weight of earlier measurements, per step without one
_MODEL_BELIEF = 2.0  # weight of other sequences' acceptance rate, in draft tokens
_BELIEF = 10.0  # weight of the initial acceptance rate of a tenth, in draft tokens
_MEMORY = 0.95  # weight of earlier measurements of all sequences, per new one
_PATIENT_MISSES = 3  # misses before the proposer is called less often
_MOST_WAIT = 32  # steps
_REFUSED_WAIT = 8  # steps until the next proposal, if draft tokens did not pay


@dataclass
class Record:
    """The acceptance statistics of one sequence, with newer drafts weighted higher.

    A draft token counts as verified only if all before it were accepted.
    """

    # The acceptance rate that is assumed before any was measured, and its weight in draft tokens.
    prior: float = _PRIOR
    belief: float = 1.0
    num_accepted: float = 0.0
    num_verified: float = 0.0
    num_misses: int = 0  # steps without a draft since a draft token was last accepted
    propose_at: int = 0  # the step in which the proposer is called again
    uncomputed: list[int] = field(default_factory=list)  # draft tokens that were not verified
    num_tokens: int = 0  # number of tokens of the sequence before those in `uncomputed`

    def likelihood(self) -> float:
        """Return the probability that a draft token is accepted if all before it are.

        It is estimated from this sequence and its prior alone.
        """
        known = self.num_accepted + self.belief * self.prior
        return known / (self.num_verified + self.belief)

    def add(self, num_verified: int, num_accepted: int) -> None:
        """Add a draft of `num_verified` tokens, of which all or all but the last were accepted."""
        self.num_accepted = _RECENT * self.num_accepted + num_accepted
        self.num_verified = _RECENT * self.num_verified + num_verified
        if num_accepted:
            self.num_misses = self.propose_at = 0

    def miss(self, step: int) -> None:
        """Record that nothing was proposed; after a few misses the proposer is called less often.

        The first misses change nothing, because after a token that differs from the copied span,
        a few tokens must agree before the n-gram is found again.
        """
        self.num_misses += 1
        self.wait(step, min(2 ** max(0, self.num_misses - _PATIENT_MISSES), _MOST_WAIT))

    def wait(self, step: int, count: int) -> None:
        """Propose nothing for up to `count` steps.

        The waits of several sequences end in the same step, so that most steps call no proposer.
        """
        self.propose_at = count * (step // count + 1)

    def fade(self) -> None:
        """Reduce the weight of earlier drafts, so that after bad ones drafting is tried again."""
        self.num_accepted *= _FADING
        self.num_verified *= _FADING

    def keep(self, draft_tokens: list[int], num_tokens: int, step: int) -> None:
        """Keep draft tokens that are not verified, to compare them with the tokens that follow."""
        self.uncomputed, self.num_tokens = draft_tokens, num_tokens
        self.wait(step, _REFUSED_WAIT)


class Goodput:
    """Chooses how many of the proposed draft tokens a step verifies."""

    def __init__(self, max_draft_tokens: int, is_model: bool = False) -> None:
        """Start without measurements.

        max_draft_tokens: the most draft tokens per row.
        is_model: True if a model computes the draft tokens.
        """
        self._max_draft_tokens, self._is_model = max_draft_tokens, is_model
        # Accepted and verified draft tokens by their estimated likelihood, in tenths. They correct
        # the estimate: the sequences chosen for good recent drafts do worse than these.
        self._accepted = [_BELIEF * (tenth + 0.5) / 10 for tenth in range(10)]
        self._verified = [_BELIEF] * 10
        self._recent_accepted = self._recent_verified = 0.0  # of all sequences
        self._costs: dict[int, StepCosts] = {}  # by bucket of the number of rows
        self._num_since_plain = 0
        self._num_tokens = self._num_plain_tokens = 0.0

    @property
    def gain(self) -> float:
        """The tokens of steps with draft tokens, over the tokens of plain steps in equal time."""
        return self._num_tokens / self._num_plain_tokens if self._num_plain_tokens else 1.0

    @property
    def is_plain_due(self) -> bool:
        """True if the time of a step without draft tokens should be measured again."""
        return self._num_since_plain >= _PLAIN_EVERY

    def costs(self, num_rows: int) -> StepCosts:
        """Return the times of steps with about `num_rows` rows."""
        place = place_of(num_rows)
        if place not in self._costs:
            most = num_rows * self._max_draft_tokens
            self._costs[place] = StepCosts(num_rows, most, self._is_model)
        return self._costs[place]

    def new_record(self) -> Record:
        """Return the record of a new sequence.

        For a draft model, its prior is the recent acceptance rate of all sequences.
        """
        if not self._is_model:
            return Record()
        share = (self._recent_accepted + 2 * _PRIOR) / (self._recent_verified + 2)
        return Record(prior=share, belief=_MODEL_BELIEF)

    def fade(self, records: list[Record]) -> None:
        """Reduce the weight of earlier measurements, after a step that verified no draft token."""
        self._recent_accepted *= _FADING
        self._recent_verified *= _FADING
        for record in records:
            record.fade()

    def record_step(
        self, num_rows: int, num_drafts: int, num_accepted: int, seconds: float
    ) -> None:
        """Record the time of a step of decode rows, with `num_drafts` draft tokens or without."""
        costs = self.costs(num_rows)
        if num_drafts and costs.plain is not None:
            costs.judge(num_drafts, num_accepted, seconds / num_rows)
            self._num_tokens += num_rows + num_accepted
            self._num_plain_tokens += seconds / costs.plain
        costs.add(num_drafts, seconds / num_rows)
        self._num_since_plain = self._num_since_plain + 1 if num_drafts else 0

    def probability(self, record: Record) -> float:
        """Return the measured acceptance rate of draft tokens as likely as those of `record`."""
        tenth = _tenth(record.likelihood())
        return self._accepted[tenth] / self._verified[tenth]

    def record_accepted(self, record: Record, num_drafts: int, num_accepted: int) -> None:
        """Record how many of a sequence's draft tokens were accepted.

        None after the first rejected one counts as verified.
        """
        tenth = _tenth(record.likelihood())
        num_verified = min(num_accepted + 1, num_drafts)
        self._accepted[tenth] = _MEMORY * self._accepted[tenth] + num_accepted
        self._verified[tenth] = _MEMORY * self._verified[tenth] + num_verified
        self._recent_accepted = _MEMORY * self._recent_accepted + num_accepted
        self._recent_verified = _MEMORY * self._recent_verified + num_verified
        record.add(num_verified, num_accepted)

    def compare(self, record: Record, token_ids: list[int]) -> None:
        """Compare draft tokens that were not verified with the tokens generated since then."""
        came = token_ids[record.num_tokens : record.num_tokens + len(record.uncomputed)]
        if record.uncomputed and came:
            self.record_accepted(record, len(came), count_accepted(record.uncomputed, came))
        record.uncomputed = []

    def may_pay(self, num_rows: int) -> bool:
        """Return True if draft tokens might pay, so that calling the proposer is worth its time."""
        return self.costs(num_rows).can_pay

    def choose(self, num_rows: int, proposed: list[tuple[Record, int]]) -> list[int]:
        """Return how many draft tokens of each candidate a step of `num_rows` rows verifies.

        proposed: the record of each candidate, and how many draft tokens it has or may have.
        """
        relative = self.costs(num_rows).relative
        if self._is_model:
            return self._choose_passes(num_rows, proposed, relative)
        # A draft token is worth its probability of being accepted. The most valuable come first.
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
        """Choose for a draft model, where one pass drafts the next token of all sequences.

        The cost depends on the number of passes, so a sequence takes part in each pass while its
        draft token is likely enough to be accepted.
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
