"""A sequence under a grammar: what may come next, given the tokens that it has."""

import numpy as np

from nanoserve.engine.sequence import Sequence
from nanoserve.speculative.proposer import num_right
from nanoserve.structured.grammar import Grammar, count_legal

_MOST_WRONG = 2  # forced runs that a model may write in another way


class Guided:
    """The grammar of one sequence, which follows its tokens whenever somebody asks.

    So nothing that happens to a sequence need be told here: what was preempted keeps its tokens,
    and from what was undone after an error the grammar goes back. It may also be ahead: a token
    that was found legal is taken at once, before it has joined.
    """

    def __init__(self, seq: Sequence, grammar: Grammar) -> None:
        self.seq = seq
        self._grammar = grammar
        self._num_accepted = 0
        self._num_wrong = 0
        self.error: ValueError | None = None  # why it cannot go on

    @property
    def grammar(self) -> Grammar:
        """Where the sequence is now. Raises `ValueError` if it cannot be followed."""
        if self.error is not None:
            raise self.error
        num_new = self.seq.num_output_tokens - self._num_accepted
        if num_new:
            try:
                if num_new > 0:
                    self._grammar.accept(self.seq.token_ids[-num_new:])
                else:
                    self._grammar.rollback(-num_new)
            except ValueError as error:
                self.error = _named(error)
                raise self.error from None
            self._num_accepted += num_new
        return self._grammar

    def first_illegal(self, guesses: list[int], token_ids: list[int]) -> int | None:
        """See `Limit`. All guesses are legal."""
        index = num_right(guesses, token_ids)
        token_id = token_ids[index]
        if token_id < 0:
            return None  # what the model computed there is no number
        grammar = self.grammar
        try:
            if index:  # these have been chosen
                grammar.accept(guesses[:index])
                self._num_accepted += index
            if token_id in self.seq.stop_token_ids and grammar.may_end:
                return None
            if not grammar.advance(token_id):
                return index
        except ValueError as error:
            self.error = _named(error)
            raise self.error from None
        self._num_accepted += 1
        return None

    def fill(self, before: list[int], mask: np.ndarray) -> None:
        """What may come behind these, which are legal."""
        grammar = self.grammar
        try:
            grammar.accept(before)
            grammar.fill(mask)
            may_end = grammar.may_end
            grammar.rollback(len(before))  # they may turn out to be wrong
        except ValueError as error:
            self.error = _named(error)
            raise self.error from None
        if may_end:
            bits = mask.view(np.uint32)
            for token_id in self.seq.stop_token_ids:
                if token_id < 32 * len(bits):
                    bits[token_id // 32] |= np.uint32(1 << token_id % 32)

    def is_terminated(self) -> bool:
        """Whether nothing can come any more. An error is told when the next token is sampled."""
        try:
            return self.grammar.is_terminated
        except ValueError:
            return False

    def forced(self, most: int) -> list[int]:
        """At most so many tokens that must come next, or would if the model wrote them as usual."""
        if self._num_wrong == _MOST_WRONG:
            return []
        try:
            return self.grammar.forced(most)
        except ValueError as error:
            self.error = _named(error)
            return []

    def legal(self, guesses: list[int]) -> list[int]:
        """Those of `guesses` before the first one that may not come."""
        try:
            return guesses[: count_legal(self.grammar, guesses)]
        except ValueError as error:
            self.error = _named(error)
            return []

    def note_forced(self, is_right: bool) -> None:
        """Whether a forced run has come as it was."""
        self._num_wrong += not is_right


class StepLimit:
    """What a grammar allows in one step: a `Limit`, see `nanoserve.engine.executor`."""

    def __init__(self, guided: Guided, guesses: list[int]) -> None:
        self._guided, self._guesses = guided, guesses

    # With a step ahead a sequence may have ended, and nobody will get what is sampled for it.

    def first_illegal(self, token_ids: list[int]) -> int | None:
        if self._guided.seq.finished:
            return None
        return self._guided.first_illegal(self._guesses, token_ids)

    def fill(self, index: int, mask: np.ndarray) -> None:
        if self._guided.seq.finished:
            mask[:] = -1
        else:
            self._guided.fill(self._guesses[:index], mask)


def _named(error: ValueError) -> ValueError:
    return ValueError(f"structured_outputs: its grammar cannot go on: {error}")
