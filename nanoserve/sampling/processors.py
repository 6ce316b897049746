"""The stages that change a row's logits before a token is sampled, greedily or at random.

The order is fixed. Each stage is applied to the result of the stage before:

1. `allowed_token_ids`: all other tokens become -inf;
2. `bad_words`: tokens that would complete a bad word become -inf;
3. `min_tokens`: EOS and stop tokens become -inf until there are enough tokens;
4. `logit_bias`: the biases are added;
5. penalties: repetition over prompt and output, then frequency and presence over the output;
6. `logits_processors`: the request's processors change the logits, then the engine's;
7. `structured_outputs`: tokens that the grammar does not allow become -inf.

In vLLM, the grammar comes first, and logits processors that can change the argmax come before the
penalties.

Rows that need none of these bypass this module. Each of 1 to 6 is a function below, or in
`nanoserve.sampling.stages`, which lists them in this order, followed by temperature, filters and
the exponential race. A function gets all rows that need it at once and works on (row, token) pairs:
a row's cost is the number of tokens it names, not the vocabulary.

There are two extension points. `SamplingParams(logits_processors=[f])` calls f(output_token_ids,
logits) with one row [vocab_size] and uses the result, which has the same shape; f runs once per
row. An engine-wide processor, `LLM(..., logits_processors=[g])`, gets all rows of a step at once
and changes them in place:

    class NoRepeats:  # forbid repeating the previous token
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
    vocab_size = logits.shape[1]  # some checkpoints have an EOS id beyond it
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
    """Apply repetition, frequency and presence penalties.

    Repetition (Keskar et al. 2019, CTRL) divides positive logits and multiplies negative ones. With
    1.2: 2.5 -> 2.0833 and -0.5 -> -0.6. Frequency 0.5 subtracts 1.5 from the logit of a token that
    was generated three times, presence 0.5 subtracts 0.5.
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
    """Call each request's own processors; an error ends only that request."""
    for row, (place, state) in enumerate(zip(rows.places.tolist(), rows.states, strict=True)):
        try:
            for processor in state.params.logits_processors:
                changed = processor(state.output_token_ids, logits[place])
                logits[place] = _checked(changed, logits.shape[1])
        except Exception as error:
            rows.fail(row, error)


def _checked(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Check the result of a request's own processor, which torch would broadcast or convert."""
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"a logits processor returned {type(logits).__name__}, but must return a tensor: "
            f"logits of shape [{vocab_size}]"
        )
    if logits.shape != (vocab_size,) or not logits.is_floating_point():
        raise ValueError(
            f"a logits processor returned {logits.dtype} of shape {list(logits.shape)}, but must "
            f"return floating-point logits of shape [{vocab_size}]"
        )
    return logits


def _forbid(logits: torch.Tensor, rows: Rows, ids: list[np.ndarray]) -> None:
    pairs, _ = _pairs(logits, rows, ids)
    logits[pairs] = logits.new_full((), -torch.inf)  # a Python number would be copied from the host


def _pairs(
    logits: torch.Tensor, rows: Rows, ids: Sequence[np.ndarray], *others: np.ndarray
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Return an index of `logits`, each row with each of its token ids, and `others` as tensors.

    others: [num_pairs] each; the same copy brings them to the device.
    """
    places = np.repeat(rows.places, [len(row_ids) for row_ids in ids])
    place, token_id, *rest = to_device(logits.device, places, np.concatenate(ids), *others)
    return (place, token_id), rest


_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_NO_IDS = np.zeros(0, dtype=np.int64)
