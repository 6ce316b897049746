"""The seam between the brain and its muscle."""

from dataclasses import dataclass
from typing import Any, Protocol

from nanoserve.engine.batch import Batch
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling_params import SlotParams


@dataclass(frozen=True)
class StepResult:
    """One sampled token id for each caught-up sequence, in batch order.

    `logprobs` has a row for each of those that asked for them, `prompt_logprobs` one for each
    prompt row of the batch.
    """

    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class Executor(Protocol):
    """The muscle. `submit` starts a step and `collect` waits for it."""

    num_kv_blocks: int
    max_model_len: int
    batches: tuple[Batch, Batch]  # they alternate: one may still be read while the next is packed

    def submit(self, batch: Batch, sampling: list[SlotParams]) -> Any: ...

    def collect(self, handle: Any) -> StepResult: ...

    def close(self) -> None: ...
