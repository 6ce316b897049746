"""The seam between the brain and its muscle."""

from dataclasses import dataclass
from typing import Any, Protocol

from nanoserve.engine.batch import Batch
from nanoserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class SlotParams:
    """Sampling parameters of a sequence that has just been given `slot`: only changes travel."""

    slot: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class StepResult:
    """One sampled token id for each logits row of the batch."""

    token_ids: list[int]


class Executor(Protocol):
    """The muscle. `submit` starts a step and `collect` waits for it."""

    num_kv_blocks: int
    max_model_len: int
    batches: tuple[Batch, Batch]  # they alternate: one may still be read while the next is packed

    def submit(self, batch: Batch, sampling: list[SlotParams]) -> Any: ...

    def collect(self, handle: Any) -> StepResult: ...

    def close(self) -> None: ...
