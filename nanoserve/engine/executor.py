"""The seam between the brain and its muscle."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class SlotChange:
    """A sequence that has just been given `slot`, and how to sample for it: only changes travel.

    What it has generated before a preemption is part of `output_token_ids`. Token ids are given
    only if something of a token's past changes how the next one is chosen.
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
    def of(cls, seq: Sequence, with_tokens: bool) -> "SlotChange":
        return cls(
            slot=seq.slot,
            params=seq.params,
            seed=seq.seed,
            completion=seq.index,
            prompt_token_ids=seq.prompt_token_ids if with_tokens else [],
            output_token_ids=seq.output_token_ids if with_tokens else [],
            stop_token_ids=seq.stop_token_ids,
            bad_words_token_ids=seq.bad_words_token_ids,
            prompt_head=seq.prompt_head,
        )


@dataclass(frozen=True)
class StepResult:
    """What a step has yielded.

    token_ids: for each row that catches up, in batch order, zero or more new tokens. An executor
        gives such a row an entry for each of its outputs: one, and one more for each guess.
    logprobs: a row for each of those entries whose request asked for them.
    errors: by index of such an entry, what its request ends with; it has got no tokens.
    of_heads: by name of a head, what it made of its outputs.
    hidden: a tensor on rank 0's device, the hidden state of each of those entries.
    """

    token_ids: list[list[int]]
    logprobs: TokenLogprobs | None = None
    errors: dict[int, Exception] = field(default_factory=dict)
    of_heads: dict[str, Any] = field(default_factory=dict)
    hidden: Any = None


class Limit(Protocol):
    """What may be chosen in a sequence's rows of one step: behind its last token, and each guess.

    Asked when the tokens of the step before are known. Raises `ValueError` if nobody can tell.
    """

    def first_illegal(self, token_ids: list[int]) -> int | None:
        """Of the tokens chosen in these rows, the index of the first that may not come.

        Behind one that was not guessed none counts.
        """

    def fill(self, index: int, mask: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 for each token t that row `index` may take, and no other.

        mask: int32 [ceil(vocab_size / 32)].
        """


class ExecutorDeadError(RuntimeError):
    """The executor has failed for good: no later step can succeed, so none is worth a try."""


class Executor(Protocol):
    """The muscle. Steps run in the order in which they are launched.

    A step that is given up, because it or another one raised, is simply never collected. An
    executor that can fail between two steps, as one with other processes can, also has `failure`:
    why every later call will raise `ExecutorDeadError`, or None.
    """

    num_kv_blocks: int
    max_model_len: int

    def next_batch(self) -> Batch:
        """A batch to pack, which no device and no rank reads any more."""

    def forward(self, batch: Batch, changes: list[SlotChange]) -> Any:
        """Launch the model; returns the step's handle. Does not wait."""

    def expect(self, guesses: dict[int, list[int]], limits: dict[int, Limit]) -> None:
        """By slot, what the step that was launched last guesses: whatever changes the logits behind
        a guess must take it, and those before it, as chosen. And what may be chosen at all, which
        is asked when that step is sampled."""

    def sample(self, handle: Any) -> None:
        """Launch the sampler. By now the step before has been collected."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step's tokens."""

    def close(self) -> None: ...
