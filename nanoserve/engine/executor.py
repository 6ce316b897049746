"""Interface between the engine loop, which imports no torch, and what runs the model.

What a step needs beside its packed batch travels as values: `ForwardInputs` when the model is
launched, `SampleInputs` when the sampler is. Every field may be empty, and mostly is.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class SlotUpdate:
    """A sequence that has just been given `slot`, and how to sample for it: only updates travel.

    What it has generated before a preemption is part of `output_token_ids`.
    """

    slot: int
    params: SamplingParams
    seed: int
    completion: int = 0  # separates the draws of the completions of one prompt
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    prompt_head: str | None = None

    @classmethod
    def of(cls, seq: Sequence) -> "SlotUpdate":
        return cls(
            slot=seq.slot,
            params=seq.params,
            seed=seq.seed,
            completion=seq.index,
            prompt_token_ids=seq.prompt_token_ids,
            output_token_ids=seq.output_token_ids,
            stop_token_ids=seq.stop_token_ids,
            bad_words_token_ids=seq.bad_words_token_ids,
            prompt_head=seq.prompt_head,
        )


class TokenMask(Protocol):
    """The tokens that one sequence may take in a step: after its last token and each draft token.

    It is called when the tokens of the step before are known. Raises `ValueError` if it cannot be
    computed, which ends the request.
    """

    def first_illegal(self, token_ids: list[int]) -> int | None:
        """Return the index of the first sampled token that is not allowed; None if all are.

        token_ids: what was sampled after the last token and after each draft token, in order.
        Whatever follows a token that differs from its draft token is not looked at.
        """

    def fill(self, index: int, mask: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 for each token t that may be sampled at `index`.

        mask: int32 [ceil(vocab_size / 32)], all other bits are cleared.
        """


@dataclass
class ForwardInputs:
    """Inputs of the model beside the batch.

    slot_updates: sequences that are new in their slots.
    draft_tokens: by slot, the draft tokens that are packed behind the last token of its row.
    """

    slot_updates: list[SlotUpdate] = field(default_factory=list)
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class SampleInputs:
    """Inputs of the sampler beside the logits.

    token_masks: by slot, the tokens that its sequence may take.
    """

    token_masks: dict[int, TokenMask] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, by row: a row is one of `Plan.sampled`, in batch order.

    token_ids: zero or more new tokens of each row. With k draft tokens a row gets up to k + 1:
        the accepted ones and the token after them.
    logprobs: for each token of a row that wants them, an entry; `logprob_places` says which:
        (row, index among its tokens).
    errors: by row, why it has no token; its request ends with that.
    of_heads: by name of a head, what it made of its outputs.
    hidden: hidden states on rank 0's device, [num_outputs, hidden_size]; `hidden_rows` says, by
        row, which of them its last token was sampled from.
    """

    token_ids: list[list[int]]
    logprobs: TokenLogprobs | None = None
    logprob_places: list[tuple[int, int]] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    of_heads: dict[str, Any] = field(default_factory=dict)
    hidden: Any = None
    hidden_rows: list[int] = field(default_factory=list)


class ExecutorDeadError(RuntimeError):
    """The executor has failed for good: no later step can succeed."""


class Executor(Protocol):
    """Runs the model. Steps run in the order in which they are launched.

    An executor that can fail between two steps, as one with other processes can, also has
    `failure`: why every later call will raise `ExecutorDeadError`, or None.
    """

    num_kv_blocks: int
    max_model_len: int

    def next_batch(self) -> Batch:
        """Return a batch to pack, which no device and no rank reads any more."""

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Any:
        """Launch the model and return the step's handle. Does not wait."""

    def sample(self, handle: Any, inputs: SampleInputs) -> None:
        """Launch the sampler. By now the step before has been collected."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step's tokens."""

    def cancel(self, handles: list[Any]) -> None:
        """Discard steps that were launched, oldest first: none of them will be collected.

        So is one whose `forward` has raised, which has no handle.
        Does not raise: an executor that this breaks says so at the next call.
        """

    def close(self) -> None: ...
