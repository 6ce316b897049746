"""Logits of every prompt token as one array: an additional head.

`prompt_logprobs=vocab_size` would create an object for each token of the vocabulary, a hundred
million for 2,000 positions; an array of float32 takes 400 MB.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.worker.heads import register_head

_NAME = "prompt_logits"
register_head(
    _NAME, f"{__name__}:PromptLogits"
)  # before an LLM is created, which allocates its batches


class PromptLogits:
    """Head that stores logits: see `nanoserve.worker.heads.Head`."""

    def __init__(self, num_slots: int) -> None:
        self._rows_at_once = num_slots

    def set_slot(self, change: object) -> None:
        pass

    def __call__(
        self,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        slots: np.ndarray,
        compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> list[torch.Tensor]:
        # At most as many rows as in decoding: logits of a whole step would be copied once more.
        parts = [compute_logits(rows) for rows in hidden.split(self._rows_at_once)]
        return [part.float() for part in parts if part is not None]

    def collect(self, made: list[torch.Tensor]) -> np.ndarray:
        return torch.cat(made).cpu().numpy()


def prompt_logits(llm: LLM, prompts: list[list[int]], file: Path | None = None) -> np.ndarray:
    """Compute float32 [sum(len(prompt) - 1), vocab_size]: logits of all tokens except the last.

    With `file`, the array is on a disk, in numpy's format. Raises `RuntimeError` if a prompt was
    not computed completely.
    """
    first_rows = np.cumsum([0, *(len(prompt) - 1 for prompt in prompts)])
    shape = (int(first_rows[-1]), llm.engine.model_config.vocab_size)
    logits = new_array(shape, file)
    logits[:] = np.nan

    def keep(request: Any, row: Any, values: np.ndarray, first: int) -> None:
        count = row.num_outputs - row.num_sampled
        start = first_rows[int(request.request_id)] + row.start
        logits[start : start + count] = values[first : first + count]

    engine = llm.engine
    engine.output_processor.collectors[_NAME] = keep
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        request = engine.input_processor.process(str(index), prompt, params)
        request.sequences[0].prompt_head = _NAME
        engine.add(request)
    while engine.has_unfinished_requests():
        engine.step()
    if np.isnan(logits).any():
        raise RuntimeError("some tokens have no logits, or logits that are not numbers")
    return logits


def new_array(shape: tuple[int, ...], file: Path | None) -> np.ndarray:
    """Make a float32 array in memory, or in a file of numpy's format."""
    if file is None:
        return np.empty(shape, dtype=np.float32)
    return np.lib.format.open_memmap(file, "w+", np.float32, shape)
