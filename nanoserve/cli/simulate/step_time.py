"""The time of a step, predicted from its sizes.

A step reads the weights once, computes matrix products for each of its tokens, reads the K and V
that its rows attend to, and samples. So its time is close to a linear function of a few sizes. All
functions here also take arrays, one entry per step, and then return the same values as step by
step, to the bit: a leap over many steps depends on it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.engine.batch import Batch

Number = Any  # a float, or an array of floats with an entry per step
_NO_WINDOW = 2**31 - 1


class StepSize(NamedTuple):
    """The sizes of a step that its time depends on.

    num_admitted: rows of sequences that are new in their slots; they are looked up and hashed.
    context: tokens whose K and V are read, summed over the rows; a mean over the layers.
    pairs: query-key pairs of rows with several tokens; a mean over the layers.
    """

    num_tokens: Number
    num_rows: Number
    num_sampled: Number
    num_admitted: Number
    context: Number
    pairs: Number


class StepTime(Protocol):
    """Predicts the seconds of a step. `description` says where the prediction comes from."""

    @property
    def description(self) -> str: ...

    def seconds(self, size: StepSize) -> Number: ...


@dataclass(frozen=True)
class LinearTime:
    """A step time that is linear in the sizes; the coefficients are seconds per unit."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_row: float = 0.0
    per_sampled: float = 0.0
    per_admitted: float = 0.0
    per_context: float = 0.0
    per_pair: float = 0.0
    description: str = "constant coefficients"

    def seconds(self, size: StepSize) -> Number:
        return (
            self.fixed
            + self.per_token * size.num_tokens
            + self.per_row * size.num_rows
            + self.per_sampled * size.num_sampled
            + self.per_admitted * size.num_admitted
            + self.per_context * size.context
            + self.per_pair * size.pairs
        )


class RecordedTimes:
    """The times of recorded steps, in their order.

    Raises `ValueError` if a run has more steps than were recorded.
    """

    description = "recorded times"

    def __init__(self, seconds: Iterable[float]) -> None:
        self._left = iter(seconds)

    def seconds(self, size: StepSize) -> float:
        seconds = next(self._left, None)
        if seconds is None:
            raise ValueError(
                "this run has more steps than were recorded: their times are not known"
            )
        return seconds


class WindowShares:
    """The mean over the layers of what rows attend to, given the layers' sliding windows."""

    def __init__(self, model_config: ModelConfig) -> None:
        """Count the windows of the layers that have K and V."""
        windows = [
            window or _NO_WINDOW
            for layer, window in enumerate(model_config.sliding_windows)
            if layer not in model_config.recurrent_layers
        ]
        self._shares = {w: windows.count(w) / len(windows) for w in sorted({*windows})}
        self.is_full = windows.count(_NO_WINDOW) == len(windows)

    def context(self, query_lens: Any, context_lens: Any) -> float:
        """Return the tokens that the rows read; arrays are [num_rows]."""
        if self.is_full:
            return float(context_lens.sum())
        return sum(
            share * float(np.minimum(context_lens, window - 1 + query_lens).sum())
            for window, share in self._shares.items()
        )

    def decode_contexts(self, context_lens: Any, num_steps: int) -> Any:
        """Return `context` of each of `num_steps` decode steps, the first with `context_lens`."""
        steps = np.arange(num_steps)
        if self.is_full:
            return float(context_lens.sum()) + len(context_lens) * steps
        grown = context_lens[None, :] + steps[:, None]
        return sum(
            share * np.minimum(grown, window).sum(axis=1).astype(np.float64)
            for window, share in self._shares.items()
        )

    def pairs(self, query_lens: Any, context_lens: Any) -> float:
        """Return the query-key pairs of the rows that have several tokens."""
        several = query_lens > 1
        if not several.any():
            return 0.0
        n, end = query_lens[several].astype(np.int64), context_lens[several].astype(np.int64)
        return sum(
            share * float((_keys(end, window) - _keys(end - n, window)).sum())
            for window, share in self._shares.items()
        )

    def size_of(self, batch: Batch, num_admitted: int) -> StepSize:
        """Return the sizes of a packed step."""
        header = batch.header
        rows = header.num_rows
        contexts = batch.context_lens[:rows]
        queries = np.diff(batch.cu_seqlens_q[: rows + 1])
        pairs = 0.0 if header.max_query_len == 1 else self.pairs(queries, contexts)
        return StepSize(
            header.num_tokens,
            rows,
            header.num_sampled,
            num_admitted,
            self.context(queries, contexts),
            pairs,
        )


def _keys(num_tokens: Any, window: int) -> Any:
    """Return how many keys all queries of a sequence see, for sequences of these lengths."""
    short = np.minimum(num_tokens, window)
    return short * (short + 1) // 2 + (num_tokens - short) * window
