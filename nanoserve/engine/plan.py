"""The plan of one step: which sequences run, from which position, and how many tokens of each.

Nothing about a step is read from a sequence after the step was planned, and nothing is written into
a plan after its step was launched. So a plan means the same before, during and after the step, and
the plans of two steps can be in flight together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from nanoserve.engine.sequence import Sequence

DraftFilter = Callable[[list[int]], list[int]]


class Row(NamedTuple):
    """One sequence's share of a step, given as positions in its tokens.

        0 ........ start ...................... start + n
        | computed | computed in this step ...... |
                            | the last num_outputs: hidden states that heads read
                                      | the last num_sampled: hidden states that are sampled from

    num_outputs is 0 inside a prompt, 1 at its end and in decode rows, and n if a head reads every
    token of the prompt, for example for prompt log-probabilities. num_sampled is 1 if the row
    catches up, which means that it computes the last token of its sequence, so that the next one
    can be sampled; it is 0 if the sequence may not have a next one, because only a head reads it.
    Draft tokens after the last token count once each in n and in both numbers.
    """

    seq: Sequence
    start: int
    n: int
    num_outputs: int
    num_sampled: int


@dataclass
class Plan:
    """The plan of one step. `rows` are in batch order: rows with a single token come first.

    draft_tokens: by sequence, the tokens that an extension proposes after its last token. They are
        computed in this step, and accepted if the sampler yields the same tokens.
    draft_filters: by sequence, a function that truncates draft tokens that cannot be accepted.
    """

    budget: int  # tokens that may still be added
    rows: list[Row] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    draft_tokens: dict[Sequence, list[int]] = field(default_factory=dict)
    draft_filters: dict[Sequence, DraftFilter] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(row.n for row in self.rows)

    @property
    def num_draft_tokens(self) -> int:
        return sum(map(len, self.draft_tokens.values()))

    @property
    def only_decodes(self) -> bool:
        """True if every row is a decode row of a sequence that ran before, with none preempted."""
        if self.admitted or self.preempted or not self.rows:
            return False
        return self.num_tokens == len(self.rows) + self.num_draft_tokens

    @cached_property
    def sampled(self) -> list[Row]:
        """Rows that catch up and so get tokens from this step, in batch order."""
        return [row for row in self.rows if row.num_sampled]

    def set_draft_tokens(self, index: int, token_ids: list[int]) -> None:
        """Add draft tokens to row `index`; the caller has reserved budget and blocks for them."""
        if token_ids:
            row, count = self.rows[index], len(token_ids)
            self.rows[index] = row._replace(
                n=row.n + count,
                num_outputs=row.num_outputs + count,
                num_sampled=row.num_sampled + count,
            )
            self.draft_tokens[row.seq] = token_ids

    def drop(self, seq: Sequence) -> None:
        """Remove the row of `seq`, if it has one, and return its tokens to the budget."""
        for row in self.rows:
            if row.seq is seq:
                self.rows.remove(row)
                self.budget += row.n
                return

    def put_single_tokens_first(self) -> None:
        """Sort decode rows first: a backend may treat rows of one token as one dense batch."""
        if self.num_tokens > len(self.rows):
            self.rows.sort(key=lambda row: row.n != 1)
