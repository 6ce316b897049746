"""One step as a value: which sequences run, from where, how many tokens of each, and what for.

Nothing about a step is read from a sequence after it was planned. So a plan means the same before,
during and after it runs, and two of them can be under way.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from nanoserve.engine.sequence import Sequence


class Row(NamedTuple):
    """One sequence in one step, by positions in its tokens:

        0 ...... start ...................... start + n
        | cached | computed in this step ...... |
                          | the last num_outputs: their hidden states go to heads
                                    | the last num_sampled of those: to the sampler

    num_outputs is 0 inside a prompt, 1 at its end and for every token of output, and n where
    something is wanted of every token of the prompt, such as its log-probability. num_sampled is 1
    if the row catches up: if it computes the last of its tokens, so that the next one can be drawn.
    Behind that token there may be guesses, see `Plan`: each of them counts in all three.
    """

    seq: Sequence
    start: int
    n: int
    num_outputs: int
    num_sampled: int


@dataclass
class Plan:
    """One step. `rows` are in batch order: those with a single token come first.

    A row may end with tokens that are guessed, and known to be right or wrong when the step is over
    (`nanoserve.speculative`).
    """

    budget: int  # tokens that may still be added
    rows: list[Row] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    registered_blocks: list[int] = field(default_factory=list)  # published for what it computes
    guesses: dict[Sequence, list[int]] = field(default_factory=dict)
    num_right: dict[Sequence, int] = field(default_factory=dict)  # of those, when it is over

    @property
    def num_tokens(self) -> int:
        return sum(row.n for row in self.rows)

    @cached_property
    def sampled(self) -> list[Row]:
        """The rows that catch up, in batch order: those that get tokens from this step."""
        return [row for row in self.rows if row.num_sampled]

    def drop(self, seq: Sequence) -> None:
        """Take the row of `seq` back, if it has one, and its tokens with it."""
        for row in self.rows:
            if row.seq is seq:
                self.rows.remove(row)
                self.budget += row.n
                return

    def put_single_tokens_first(self) -> None:
        """A backend may treat rows of one token as one dense batch, if they lie together."""
        if self.num_tokens > len(self.rows):
            self.rows.sort(key=lambda row: row.n != 1)
