"""What changes a row's logits before a token is chosen from it, greedily or not.

In vLLM's order, each on what the one before has left:

1. `allowed_token_ids`: everything else becomes -inf;
2. `bad_words`: the token that would complete one becomes -inf;
3. `min_tokens`: EOS and stop tokens become -inf until there are enough tokens;
4. `logit_bias`: is added;
5. penalties: repetition over prompt and output, then frequency and presence over the output;
6. the request's own `logits_processors`, then those of the engine;
7. `structured_outputs`: what its grammar does not allow becomes -inf.

Rows that ask for none of it never come here. Each function below works on all rows of a step at
once, by (row, token) pairs: a row's cost is the tokens it names, not the vocabulary.

Two seams for your own. `SamplingParams(logits_processors=[f])` calls f(output_token_ids, logits)
with one row [vocab_size] and takes what it returns, which has the same shape; it runs once per row.
An engine-wide one, `LLM(..., logits_processors=[g])`, sees all rows of a step at once and changes
them in place:

    class NoRepeats:  # the token that came last may not come again
        def __call__(self, logits: torch.Tensor, states: list[SlotState]) -> None:
            for row, state in enumerate(states):
                if state.output_token_ids:
                    logits[row, state.output_token_ids[-1]] = -torch.inf
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from nanoserve.engine.executor import TokenMask, SlotUpdate


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated; O(1) per new token."""

    def __init__(self, prompt_token_ids: list[int], output_token_ids: list[int]) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.empty(256, dtype=np.int64)
        self._counts = np.zeros(256, dtype=np.float32)
        for token_id in prompt_token_ids:
            self._add(token_id, generated=0)
        for token_id in output_token_ids:
            self._add(token_id, generated=1)

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of `ids` was generated; 0 for those that only the prompt has."""
        return self._counts[: len(self._index)]

    def append(self, token_id: int) -> None:
        self._add(token_id, generated=1)

    def copy(self) -> "TokenCounts":
        other = copy.copy(self)
        other._index = dict(self._index)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def _add(self, token_id: int, generated: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += generated


class SlotState:
    """What the transforms know of the sequence in a slot.

    It is made on admission, from the prompt and from what was generated before a preemption.
    """

    def __init__(self, change: SlotUpdate) -> None:
        self.params = params = change.params
        self.prompt_token_ids = change.prompt_token_ids
        self.output_token_ids = list(change.output_token_ids)
        self.allowed = _ids(params.allowed_token_ids)
        self.stops = _ids(change.stop_token_ids)
        self.bad_words = change.bad_words_token_ids
        self.bias_ids = _ids(params.logit_bias)
        self.bias = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            self.counts = TokenCounts(change.prompt_token_ids, change.output_token_ids)
        self.limit: TokenMask | None = None  # what a grammar allows in the step under way
        self._draft_tokens: list[int] = []  # of that step

    def prepare(self, draft_tokens: list[int], mask: TokenMask | None) -> None:
        """Set what the step at hand has for this sequence: draft tokens, and a token mask."""
        self._draft_tokens, self.limit = draft_tokens, mask

    def after(self, num_drafts: int) -> "SlotState":
        """Return the state as it will be if so many draft tokens are accepted."""
        if not num_drafts:
            return self
        state = copy.copy(self)
        state.output_token_ids = list(self.output_token_ids)
        state.counts = self.counts and self.counts.copy()
        state.extend(self._draft_tokens[:num_drafts])
        return state

    def extend(self, token_ids: list[int]) -> None:
        """Take the tokens that the sequence has got."""
        self.output_token_ids += token_ids
        if self.counts is not None:
            for token_id in token_ids:
                self.counts.append(token_id)

    def forbidden(self) -> np.ndarray:
        """The tokens that would complete a bad word now."""
        output = self.output_token_ids
        return _ids(
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]
        )


BatchProcessor = Callable[[torch.Tensor, list[SlotState]], None]


def apply_processors(
    logits: torch.Tensor, states: list[SlotState], of_engine: Sequence[BatchProcessor] = ()
) -> dict[int, Exception]:
    """Change float32 `logits` [num_rows, vocab_size] in place; `states` has one entry per row.

    Rows of one state, which guesses, are those of its last token and of each guess.

    Returns what requests' own processors raised, by row: no other request need suffer from that.
    """
    given = states
    if len(set(states)) < len(states):
        seen: Counter[SlotState] = Counter()
        states = []  # the caller's own stay as they are
        for state in given:
            states.append(state.after(seen[state]))
            seen[state] += 1
    for transform in (keep_allowed, forbid_bad_words, hold_back_stops, add_bias, penalise):
        transform(logits, states)
    errors: dict[int, Exception] = {}
    for row, state in enumerate(states):
        try:
            for processor in state.params.logits_processors or ():
                changed = processor(state.output_token_ids, logits[row])
                logits[row] = _checked(changed, logits.shape[1])
        except Exception as error:
            errors[row] = error
    for batch_processor in of_engine:
        batch_processor(logits, states)
    limits = [state.limit for state in given]
    if any(limits):
        from nanoserve.sampling.masks import apply_limits

        errors |= apply_limits(logits, limits)
    return errors


def _checked(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """What a request's own processor has returned; torch would broadcast or convert anything."""
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"a logits processor returned {type(logits).__name__}, and must return a tensor: the "
            f"logits of shape [{vocab_size}]"
        )
    if logits.shape != (vocab_size,) or not logits.is_floating_point():
        raise ValueError(
            f"a logits processor returned {logits.dtype} of shape {list(logits.shape)}, and must "
            f"return floating-point logits of shape [{vocab_size}]"
        )
    return logits


def keep_allowed(logits: torch.Tensor, states: list[SlotState]) -> None:
    limited = [row for row, state in enumerate(states) if len(state.allowed)]
    if limited:
        pairs = _pairs(logits, states, lambda state: state.allowed)
        kept = logits[pairs]
        logits[torch.tensor(limited, device=logits.device)] = -torch.inf
        logits[pairs] = kept


def forbid_bad_words(logits: torch.Tensor, states: list[SlotState]) -> None:
    if any(state.bad_words for state in states):
        logits[_pairs(logits, states, SlotState.forbidden)] = -torch.inf


def hold_back_stops(logits: torch.Tensor, states: list[SlotState]) -> None:
    vocab_size = logits.shape[1]  # some checkpoints name an EOS beyond it

    def held_back(state: SlotState) -> np.ndarray:
        is_short = len(state.output_token_ids) < state.params.min_tokens
        return state.stops[state.stops < vocab_size] if is_short else _ids(())

    if any(len(held_back(state)) for state in states):
        logits[_pairs(logits, states, held_back)] = -torch.inf


def add_bias(logits: torch.Tensor, states: list[SlotState]) -> None:
    if any(len(state.bias) for state in states):
        pairs = _pairs(logits, states, lambda state: state.bias_ids)
        logits[pairs] += _tensor(logits, [state.bias for state in states])


def penalise(logits: torch.Tensor, states: list[SlotState]) -> None:
    """Repetition (Keskar et al. 2019, CTRL) divides positive logits and multiplies negative ones.

    With 1.2: 2.5 -> 2.0833 and -0.5 -> -0.6. Frequency 0.5 takes 1.5 from what was said three
    times, presence 0.5 takes 0.5 from it.
    """
    rows = [(row, state) for row, state in enumerate(states) if state.counts is not None]
    if not rows:
        return

    def settings(name: str) -> torch.Tensor:
        per_row = [
            np.full(len(s.counts.ids), getattr(s.params, name), dtype=np.float32) for _, s in rows
        ]
        return _tensor(logits, per_row)

    pairs = _pairs(logits, states, lambda state: state.counts.ids if state.counts else _ids(()))
    counts = _tensor(logits, [state.counts.counts for _, state in rows])
    repetition = settings("repetition_penalty")
    values = logits[pairs]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= settings("frequency_penalty") * counts
    values -= settings("presence_penalty") * (counts > 0)
    logits[pairs] = values


def _pairs(
    logits: torch.Tensor, states: list[SlotState], ids_of: Callable[[SlotState], np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of `logits`: each row with each of its token ids."""
    ids = [ids_of(state) for state in states]
    rows = np.repeat(np.arange(len(states)), [len(row_ids) for row_ids in ids])
    return torch.from_numpy(rows).to(logits.device), _tensor(logits, ids)


def _tensor(logits: torch.Tensor, arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(logits.device)


def _ids(token_ids: Iterable[int] | None) -> np.ndarray:
    return np.array(list(token_ids or ()), dtype=np.int64)
