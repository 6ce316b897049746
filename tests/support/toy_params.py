"""A sampling parameter of one's own: `no_echo`, never the same token twice in a row."""

from dataclasses import dataclass

from torch import Tensor

from nanoserve.sampling_params import SamplingParams


@dataclass
class NoEchoParams(SamplingParams):
    no_echo: bool = False

    def __post_init__(self) -> None:
        if self.no_echo:
            self.logits_processors = [forbid_last]
        super().__post_init__()


def forbid_last(output_token_ids: list[int], logits: Tensor) -> Tensor:
    if output_token_ids:
        logits[output_token_ids[-1]] = -float("inf")
    return logits
