"""Stages that change a row's logits before a token is chosen from it, greedily or not.

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

from collections.abc import Callable, Sequence

import numpy as np
import torch

from nanoserve.sampling.host_copies import to_device
from nanoserve.sampling.rows import Rows, tensor_of
from nanoserve.sampling.slot_state import SlotState

BatchProcessor = Callable[[torch.Tensor, list[SlotState]], None]


def keep_allowed(logits: torch.Tensor, rows: Rows) -> None:
    pairs, _ = _pairs(logits, rows, [state.allowed for state in rows.states])
    kept = logits[pairs]
    logits.index_fill_(0, tensor_of(rows.places, logits), -torch.inf)
    logits[pairs] = kept


def forbid_bad_words(logits: torch.Tensor, rows: Rows) -> None:
    _forbid(logits, rows, [state.forbidden() for state in rows.states])


def hold_back_stops(logits: torch.Tensor, rows: Rows) -> None:
    vocab_size = logits.shape[1]  # some checkpoints name an EOS beyond it
    held_back = [
        state.stops[state.stops < vocab_size]
        if len(state.output_token_ids) < state.params.min_tokens
        else _NO_IDS
        for state in rows.states
    ]
    if any(map(len, held_back)):
        _forbid(logits, rows, held_back)


def add_bias(logits: torch.Tensor, rows: Rows) -> None:
    ids, bias = zip(*((state.bias_ids, state.bias) for state in rows.states), strict=True)
    pairs, (added,) = _pairs(logits, rows, ids, np.concatenate(bias))
    logits[pairs] += added


def penalise(logits: torch.Tensor, rows: Rows) -> None:
    """Repetition (Keskar et al. 2019, CTRL) divides positive logits and multiplies negative ones.

    With 1.2: 2.5 -> 2.0833 and -0.5 -> -0.6. Frequency 0.5 takes 1.5 from what was said three
    times, presence 0.5 takes 0.5 from it.
    """
    params, ids = [state.params for state in rows.states], [s.counts.ids for s in rows.states]
    per_row = np.array([[getattr(p, name) for p in params] for name in _PENALTIES], np.float32)
    pairs, (counts, repetition, frequency, presence) = _pairs(
        logits,
        rows,
        ids,
        np.concatenate([state.counts.counts for state in rows.states]),
        *per_row.repeat([len(row_ids) for row_ids in ids], axis=1),
    )
    values = logits[pairs]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
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
    """Check what a request's own processor has returned: torch would broadcast or convert it."""
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


def _forbid(logits: torch.Tensor, rows: Rows, ids: list[np.ndarray]) -> None:
    pairs, _ = _pairs(logits, rows, ids)
    logits[pairs] = logits.new_full((), -torch.inf)  # a number would be copied from the host


def _pairs(
    logits: torch.Tensor, rows: Rows, ids: Sequence[np.ndarray], *others: np.ndarray
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Return an index of `logits`, each row with each of its token ids; and what goes with it.

    others: [num_pairs] each, brought to the device by the same copy.
    """
    places = np.repeat(rows.places, [len(row_ids) for row_ids in ids])
    place, token_id, *rest = to_device(logits.device, places, np.concatenate(ids), *others)
    return (place, token_id), rest


_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_NO_IDS = np.zeros(0, dtype=np.int64)
