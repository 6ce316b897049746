"""What changes a row's logits before a token is chosen from it, greedily or not.

In vLLM's order, each on what the one before has left:

1. `allowed_token_ids`: everything else becomes -inf;
2. `bad_words`: the token that would complete one becomes -inf;
3. `min_tokens`: EOS and stop tokens become -inf until there are enough tokens;
4. `logit_bias`: is added;
5. penalties: repetition over prompt and output, then frequency and presence over the output;
6. the request's own `logits_processors`, then those of the engine;
7. `structured_outputs`: what its grammar does not allow becomes -inf.

Rows that ask for none of it never come here. Each of 1 to 6 is a function below, or in
`nanoserve.sampling.stages`, which has them in this order; temperature, filters and race follow
there. It gets the rows that ask for it at once and works by (row, token) pairs: a row's cost is the
tokens it names, not the vocabulary.

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
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.rows import Rows, tensor_of


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
    """What the stages know of the sequence in a slot.

    It is made on admission, from the prompt and from what was generated before a preemption.
    own_stages: names of the registered stages that its rows go through.
    """

    def __init__(self, update: SlotUpdate, own_stages: Sequence[str] = ()) -> None:
        self.params = params = update.params
        self.prompt_token_ids = update.prompt_token_ids
        self.output_token_ids = list(update.output_token_ids)
        self.own_stages = own_stages
        self.allowed = _ids(params.allowed_token_ids)
        self.stops = _ids(update.stop_token_ids)
        self.bad_words = update.bad_words_token_ids
        self.bias_ids = _ids(params.logit_bias)
        self.bias = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            self.counts = TokenCounts(update.prompt_token_ids, update.output_token_ids)

    def after(self, token_ids: list[int]) -> "SlotState":
        """Return the state as it will be behind these tokens; this one stays as it is."""
        if not token_ids:
            return self
        state = copy.copy(self)
        state.output_token_ids = list(self.output_token_ids)
        state.counts = self.counts and self.counts.copy()
        state.extend(token_ids)
        return state

    def extend(self, token_ids: list[int]) -> None:
        """Take the tokens that the sequence has got."""
        self.output_token_ids += token_ids
        if self.counts is not None:
            for token_id in token_ids:
                self.counts.append(token_id)

    def forbidden(self) -> np.ndarray:
        """Return the tokens that would complete a bad word now."""
        output = self.output_token_ids
        return _ids(
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]
        )


BatchProcessor = Callable[[torch.Tensor, list[SlotState]], None]


def keep_allowed(logits: torch.Tensor, rows: Rows) -> None:
    pairs = _pairs(logits, rows, [state.allowed for state in rows.states])
    kept = logits[pairs]
    logits[tensor_of(rows.places, logits)] = -torch.inf
    logits[pairs] = kept


def forbid_bad_words(logits: torch.Tensor, rows: Rows) -> None:
    logits[_pairs(logits, rows, [state.forbidden() for state in rows.states])] = -torch.inf


def hold_back_stops(logits: torch.Tensor, rows: Rows) -> None:
    vocab_size = logits.shape[1]  # some checkpoints name an EOS beyond it
    held_back = [
        state.stops[state.stops < vocab_size]
        if len(state.output_token_ids) < state.params.min_tokens
        else _NO_IDS
        for state in rows.states
    ]
    if any(map(len, held_back)):
        logits[_pairs(logits, rows, held_back)] = -torch.inf


def add_bias(logits: torch.Tensor, rows: Rows) -> None:
    pairs = _pairs(logits, rows, [state.bias_ids for state in rows.states])
    logits[pairs] += _tensor(logits, [state.bias for state in rows.states])


def penalise(logits: torch.Tensor, rows: Rows) -> None:
    """Repetition (Keskar et al. 2019, CTRL) divides positive logits and multiplies negative ones.

    With 1.2: 2.5 -> 2.0833 and -0.5 -> -0.6. Frequency 0.5 takes 1.5 from what was said three
    times, presence 0.5 takes 0.5 from it.
    """
    counted = [(state.params, state.counts) for state in rows.states]

    def settings(name: str) -> torch.Tensor:
        per_row = [
            np.full(len(counts.ids), getattr(params, name), dtype=np.float32)
            for params, counts in counted
        ]
        return _tensor(logits, per_row)

    pairs = _pairs(logits, rows, [counts.ids for _, counts in counted])
    counts = _tensor(logits, [counts.counts for _, counts in counted])
    repetition = settings("repetition_penalty")
    values = logits[pairs]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= settings("frequency_penalty") * counts
    values -= settings("presence_penalty") * (counts > 0)
    logits[pairs] = values


def run_own_processors(logits: torch.Tensor, rows: Rows) -> None:
    """Call each request's own; what one raises ends its request, and no other."""
    for row, (place, state) in enumerate(zip(rows.places.tolist(), rows.states, strict=True)):
        try:
            for processor in state.params.logits_processors:
                changed = processor(state.output_token_ids, logits[place])
                logits[place] = _checked(changed, logits.shape[1])
        except Exception as error:
            rows.fail(row, error)


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


def _pairs(
    logits: torch.Tensor, rows: Rows, ids: list[np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an index of `logits`: each row with each of its token ids."""
    places = np.repeat(rows.places, [len(row_ids) for row_ids in ids])
    return torch.from_numpy(places).to(logits.device), _tensor(logits, ids)


def _tensor(logits: torch.Tensor, arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(logits.device)


def _ids(token_ids: Iterable[int] | None) -> np.ndarray:
    return np.array(list(token_ids or ()), dtype=np.int64)


_NO_IDS = _ids(())
