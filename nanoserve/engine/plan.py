"""One step as a value: which sequences run, from where, how many tokens of each, and what for.

Nothing about a step is read from a sequence after it was planned, and nothing is written into a
plan after it was launched. So a plan means the same before, during and after it runs, and two of
them can be under way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from nanoserve.engine.sequence import Sequence

DraftFilter = Callable[[list[int]], list[int]]


class Row(NamedTuple):
    """One sequence in one step, by positions in its tokens:

        0 ...... start ...................... start + n
        | cached | computed in this step ...... |
                          | the last num_outputs: their hidden states go to heads
                                    | the last num_sampled of those: to the sampler

    num_outputs is 0 inside a prompt, 1 at its end and for every token of output, and n where
    something is wanted of every token of the prompt, such as its log-probability. num_sampled is 1
    if the row catches up: if it computes the last of its tokens, so that the next one can be
    sampled. Draft tokens behind that token count in all three, each of them once.
    """

    seq: Sequence
    start: int
    n: int
    num_outputs: int
    num_sampled: int


@dataclass
class Plan:
    """One step. `rows` are in batch order: those with a single token come first.

    draft_tokens: by sequence, the tokens that an extension expects after its last token. They are
        computed in this step, and accepted if they turn out to be what is sampled there.
    draft_filters: by sequence, a function that cuts draft tokens where they cannot be accepted.
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

    def accepted_of_drafts(self, token_ids: list[list[int]]) -> list[tuple[int, int]]:
        """Return, for each row with draft tokens, how many were accepted and how many there were.

        token_ids: what the rows of `sampled` have got.
        """
        rows = zip(self.sampled, token_ids, strict=True)
        return [(max(0, len(i) - 1), row.num_sampled - 1) for row, i in rows if row.num_sampled > 1]

    @property
    def only_decodes(self) -> bool:
        """True if sequences that run already compute a token each, and nothing else happens."""
        if self.admitted or self.preempted or not self.rows:
            return False
        return self.num_tokens == len(self.rows) + self.num_draft_tokens

    @cached_property
    def sampled(self) -> list[Row]:
        """The rows that catch up, in batch order: those that get tokens from this step."""
        return [row for row in self.rows if row.num_sampled]

    def set_draft_tokens(self, index: int, token_ids: list[int]) -> None:
        """Give row `index` draft tokens, for which there is room."""
        if token_ids:
            row, count = self.rows[index], len(token_ids)
            self.rows[index] = row._replace(
                n=row.n + count,
                num_outputs=row.num_outputs + count,
                num_sampled=row.num_sampled + count,
            )
            self.draft_tokens[row.seq] = token_ids

    def drop(self, seq: Sequence) -> None:
        """Take the row of `seq` back, if it has one, and its tokens with it."""
        for row in self.rows:
            if row.seq is seq:
                self.rows.remove(row)
                self.budget += row.n
                return

    def put_single_tokens_first(self) -> None:
        """Sort the rows: a backend may treat rows of one token as one dense batch."""
        if self.num_tokens > len(self.rows):
            self.rows.sort(key=lambda row: row.n != 1)
