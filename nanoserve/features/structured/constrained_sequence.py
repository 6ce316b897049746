"""A sequence under a grammar: what may come next, given the tokens that it has."""

import numpy as np

from nanoserve.engine.sequence import Sequence
from nanoserve.features.structured.grammar import Grammar, count_legal

_MOST_WRONG = 2  # jumps that a model may write in another way


class Guided:
    """The grammar of one sequence, which follows its tokens whenever it is used.

    So it need not hear of what happens to a sequence: what was preempted keeps its tokens, and from
    what was undone after an error the grammar goes back. It may also be ahead: a token that was
    found legal is taken at once, before it has joined.
    """

    def __init__(self, seq: Sequence, grammar: Grammar) -> None:
        self.seq = seq
        self._grammar = grammar
        self._num_accepted = 0
        self._num_wrong = 0
        self.error: ValueError | None = None  # why it cannot go on

    @property
    def grammar(self) -> Grammar:
        """The grammar at the end of the sequence. Raises `ValueError` if it cannot be followed."""
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
                raise self._fail(error) from None
            self._num_accepted += num_new
        return self._grammar

    def first_illegal(self, draft_tokens: list[int], token_ids: list[int]) -> int | None:
        """Return the index of the first token that may not come; see `TokenMask`.

        draft_tokens: tokens that were computed, all of them legal. token_ids: what was sampled
        after the last token of the sequence and after each of them.
        """
        index = count_equal(draft_tokens, token_ids)
        token_id = token_ids[index]
        if token_id < 0:
            return None  # what the model computed there is no number
        grammar = self.grammar
        try:
            if index:  # these have been sampled
                grammar.accept(draft_tokens[:index])
                self._num_accepted += index
            if token_id in self.seq.stop_token_ids and grammar.may_end:
                return None
            if not grammar.advance(token_id):
                return index
        except ValueError as error:
            raise self._fail(error) from None
        self._num_accepted += 1
        return None

    def fill(self, before: list[int], mask: np.ndarray) -> None:
        """Set the bits of what may come after these tokens, which are legal."""
        grammar = self.grammar
        try:
            grammar.accept(before)
            grammar.fill(mask)
            may_end = grammar.may_end
            grammar.rollback(len(before))  # they may turn out to be rejected
        except ValueError as error:
            raise self._fail(error) from None
        if may_end:
            bits = mask.view(np.uint32)
            for token_id in self.seq.stop_token_ids:
                if token_id < 32 * len(bits):
                    bits[token_id // 32] |= np.uint32(1 << token_id % 32)

    def is_terminated(self) -> bool:
        """Return whether nothing can come any more. An error is raised when the next token is
        sampled."""
        try:
            return self.grammar.is_terminated
        except ValueError:
            return False

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that must come next, or would if the model wrote them as
        usual: *jump-forward* tokens."""
        if self._num_wrong == _MOST_WRONG:
            return []
        try:
            return self.grammar.forced(most)
        except ValueError as error:
            self._fail(error)
            return []

    def legal(self, draft_tokens: list[int]) -> list[int]:
        """Return the draft tokens before the first one that may not come."""
        try:
            return draft_tokens[: count_legal(self.grammar, draft_tokens)]
        except ValueError as error:
            self._fail(error)
            return []

    def count_jump(self, is_accepted: bool) -> None:
        """Learn whether jump-forward tokens were accepted as they were."""
        self._num_wrong += not is_accepted

    def _fail(self, error: ValueError) -> ValueError:
        """Keep why the grammar cannot be followed; returns that."""
        if error is not self.error:
            self.error = ValueError(f"structured_outputs: its grammar cannot go on: {error}")
        return self.error


class GrammarMask:
    """The tokens that a grammar allows in one step: a `TokenMask`.

    draft_tokens: those of the step before the first illegal one. What follows that one is never
    accepted, so there nothing is forbidden.
    """

    def __init__(self, guided: Guided, draft_tokens: list[int]) -> None:
        self._guided, self._draft_tokens = guided, draft_tokens

    # With a step ahead a sequence may have ended; then what is sampled for it is thrown away.

    def first_illegal(self, token_ids: list[int]) -> int | None:
        if self._guided.seq.finished:
            return None
        return self._guided.first_illegal(self._draft_tokens, token_ids)

    def fill(self, index: int, mask: np.ndarray) -> None:
        if self._guided.seq.finished or index > len(self._draft_tokens):
            mask[:] = -1
        else:
            self._guided.fill(self._draft_tokens[:index], mask)


def count_equal(draft_tokens: list[int], token_ids: list[int]) -> int:
    """Return how many of the draft tokens were sampled, from the first one on."""
    count = 0
    for draft, sampled in zip(draft_tokens, token_ids, strict=False):
        if draft != sampled:
            break
        count += 1
    return count
