"""The interface between the engine loop, which imports no torch, and the model's executor.

In addition to its packed batch, a step has two inputs: `ForwardInputs` for the model and
`SampleInputs` for the sampler. All their fields may be empty, and usually are.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanoserve.engine.adapter_rows import AdapterRows
from nanoserve.engine.batch import Batch
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.prompt_embeds import StepEmbeds
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class SlotUpdate:
    """A sequence that was just assigned to `slot`, with its sampling parameters.

    Only updates are sent to the workers, not the whole slot table. `prompt_token_ids` has no
    placeholders of embeddings, which penalties must not count. After a preemption,
    `output_token_ids` includes what the sequence had generated before it.
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
        prompt, embeds = seq.prompt_token_ids, seq.prompt_embeds
        return cls(
            slot=seq.slot,
            params=seq.params,
            seed=seq.seed,
            completion=seq.index,
            prompt_token_ids=embeds.without_placeholders(prompt) if embeds else prompt,
            output_token_ids=seq.output_token_ids,
            stop_token_ids=seq.stop_token_ids,
            bad_words_token_ids=seq.bad_words_token_ids,
            prompt_head=seq.prompt_head,
        )


class TokenMask(Protocol):
    """The token masks of a sequence in a step, after its last token and after each draft token.

    It is called when the tokens of the previous step are known. Raises `ValueError` if a mask
    cannot be computed, which ends the request.
    """

    def first_illegal(self, token_ids: list[int]) -> int | None:
        """Return the index of the first sampled token that is not allowed; None if all are allowed.

        token_ids: the tokens sampled after the last token and after each draft token, in order.
        Tokens after one that differs from its draft token are ignored.
        """

    def fill(self, index: int, mask: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 for each token t that may be sampled at `index`.

        mask: int32 [ceil(vocab_size / 32)]; all other bits are cleared.
        """


@dataclass
class ForwardInputs:
    """The model's inputs in addition to the batch.

    slot_updates: sequences that are new in their slots.
    draft_tokens: by slot, the draft tokens that are packed after the last token of its row.
    kv_transfers: KV blocks to copy before the model runs.
    embeds: embeddings that take the place of those of some tokens.
    adapters: the adapters of the rows; None if no row has one.
    """

    slot_updates: list[SlotUpdate] = field(default_factory=list)
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)
    kv_transfers: KVTransfers | None = None
    embeds: StepEmbeds | None = None
    adapters: AdapterRows | None = None


@dataclass
class SampleInputs:
    """The sampler's inputs in addition to the logits.

    token_masks: by slot, the masks of the tokens that its sequence may sample.
    """

    token_masks: dict[int, TokenMask] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """The result of a step, by row; row i is `Plan.sampled[i]`, in batch order.

    token_ids: zero or more new tokens of each row. With k draft tokens a row gets up to k + 1: the
        accepted draft tokens and the token sampled after them.
    logprobs: an entry for each token whose log-probabilities were requested; `logprob_places` has
        its place: (row, index among the row's tokens).
    errors: by row, why it has no token; the request ends with this error.
    of_heads: by head name, the head's result for its outputs.
    hidden: hidden states on rank 0's device, [num_outputs, hidden_size]; `hidden_rows` has, by row,
        the index of the state from which its last token was sampled.
    """

    token_ids: list[list[int]]
    logprobs: TokenLogprobs | None = None
    logprob_places: list[tuple[int, int]] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    of_heads: dict[str, Any] = field(default_factory=dict)
    hidden: Any = None
    hidden_rows: list[int] = field(default_factory=list)


class SecondModelMemory(NamedTuple):
    """The bytes that a second model, such as a draft model, takes on the same GPU.

    block_bytes: of a block of its KV cache, which has as many blocks as the first model's.
    """

    weights: int = 0
    block_bytes: int = 0


class ExecutorDeadError(RuntimeError):
    """The executor has failed permanently: no later step can succeed."""


class Executor(Protocol):
    """Runs the model. Steps run in the order in which they are launched.

    An executor that can fail between two steps, such as one with worker processes, also has an
    attribute `failure`: the reason why every later call raises `ExecutorDeadError`, or None.
    """

    num_kv_blocks: int
    max_model_len: int

    def next_batch(self) -> Batch:
        """Return a batch to pack that no device and no rank reads any more."""

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Any:
        """Launch the model and return the step's handle. Does not wait."""

    def sample(self, handle: Any, inputs: SampleInputs) -> None:
        """Launch the sampler. The previous step has been collected by now."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step's tokens and return its result."""

    def cancel(self, handles: list[Any]) -> None:
        """Discard launched steps, oldest first: none of them will be collected.

        A step whose `forward` has raised has no handle and is discarded, too. Does not raise: an
        executor that fails here raises at the next call.
        """

    def close(self) -> None: ...
