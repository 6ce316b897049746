"""Sequences with a grammar, which allows or forbids each next token."""

import numpy as np

from nanoserve.engine.sequence import Sequence
from nanoserve.features.structured.grammar import Grammar, count_legal

_MOST_WRONG = 2  # rejected jumps after which a sequence has no more jump-forward tokens


class ConstrainedSequence:
    """The grammar of one sequence, brought up to date with its tokens whenever it is used.

    So it needs no notification of other events. A preempted sequence keeps its tokens, and if
    tokens were undone after an error, the grammar is rolled back. The grammar may also be ahead of
    the sequence, because a legal sampled token is accepted before it is appended to the sequence.
    """

    def __init__(self, seq: Sequence, grammar: Grammar) -> None:
        self.seq = seq
        self._grammar = grammar
        self._num_accepted = 0
        self._num_wrong = 0
        self.error: ValueError | None = None  # why the grammar has failed

    @property
    def grammar(self) -> Grammar:
        """The grammar at the end of the sequence. Raises `ValueError` if it has failed."""
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
        """Return the index of the first illegal sampled token, or None; see `TokenMask`.

        draft_tokens: the draft tokens of the step, all of them legal. token_ids: the tokens that
        were sampled after the last token of the sequence, and after each draft token.
        """
        index = count_equal(draft_tokens, token_ids)
        token_id = token_ids[index]
        if token_id < 0:
            return None  # no token was sampled: the logits are not finite
        grammar = self.grammar
        try:
            if index:  # these draft tokens are accepted
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
        """Set the bits of the tokens that may follow the sequence and `before`.

        before: legal tokens after the last token of the sequence.
        """
        grammar = self.grammar
        try:
            grammar.accept(before)
            grammar.fill(mask)
            may_end = grammar.may_end
            grammar.rollback(len(before))  # they are draft tokens, which may be rejected
        except ValueError as error:
            raise self._fail(error) from None
        if may_end:
            bits = mask.view(np.uint32)
            for token_id in self.seq.stop_token_ids:
                if token_id < 32 * len(bits):
                    bits[token_id // 32] |= np.uint32(1 << token_id % 32)

    def is_terminated(self) -> bool:
        """Return True if no further token is allowed.

        An error of the grammar is not raised here, but when the next token is sampled.
        """
        try:
            return self.grammar.is_terminated
        except ValueError:
            return False

    def forced(self, most: int) -> list[int]:
        """Return up to `most` *jump-forward* tokens.

        Their characters must come next, but the model may still choose other tokens for them.
        """
        if self._num_wrong == _MOST_WRONG:
            return []
        try:
            return self.grammar.forced(most)
        except ValueError as error:
            self._fail(error)
            return []

    def legal(self, draft_tokens: list[int]) -> list[int]:
        """Return the draft tokens before the first illegal one."""
        try:
            return draft_tokens[: count_legal(self.grammar, draft_tokens)]
        except ValueError as error:
            self._fail(error)
            return []

    def count_jump(self, is_accepted: bool) -> None:
        """Record whether all jump-forward tokens of a step were accepted."""
        self._num_wrong += not is_accepted

    def _fail(self, error: ValueError) -> ValueError:
        """Keep the error of the grammar, and return it."""
        if error is not self.error:
            self.error = ValueError(f"structured_outputs: the grammar has failed: {error}")
        return self.error


class GrammarMask:
    """A `TokenMask` of the tokens that a grammar allows in one step.

    draft_tokens: the step's draft tokens before the first illegal one. Tokens after it are never
    accepted, so their positions are not masked.
    """

    def __init__(self, guided: ConstrainedSequence, draft_tokens: list[int]) -> None:
        self._guided, self._draft_tokens = guided, draft_tokens

    # With async scheduling a sequence may have ended; its sampled tokens are then discarded.

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
    """Return how many draft tokens agree with the sampled tokens, up to the first mismatch."""
    count = 0
    for draft, sampled in zip(draft_tokens, token_ids, strict=False):
        if draft != sampled:
            break
        count += 1
    return count
