"""One request: its prompt, its sequences, and what has been collected for each of them."""

from dataclasses import dataclass, field

from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import CompletionOutput, Logprob
from nanoserve.sampling_params import SamplingParams


@dataclass(eq=False)
class Completion:
    """What has been collected for one sequence, besides its tokens."""

    seq: Sequence
    latest: CompletionOutput | None = None
    num_sent: int = 0  # tokens handed out as deltas
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(eq=False)
class Request:
    """The sequences of one prompt, and what has been collected for the prompt itself."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    extensions: tuple[str, ...] = ()  # names of extensions that the engine needs for it
    error: Exception | None = None  # what ended it: see `RequestOutput.error`
    completions: list[Completion] = field(init=False)

    def __post_init__(self) -> None:
        self.completions = [Completion(seq) for seq in self.sequences]

    @property
    def finished(self) -> bool:
        return all(seq.finished for seq in self.sequences)
