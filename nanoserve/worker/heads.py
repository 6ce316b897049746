"""What is done with the hidden states of a prompt's tokens, apart from sampling: heads by name.

A sequence names its head (`Sequence.prompt_head`), a step hands the head the outputs that are its
own, and what the head returns reaches the collector of the same name in
`nanoserve.engine.output_processor`. A head is loaded when the first sequence names it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from nanoserve.engine.executor import SlotChange

_HEADS = {"prompt_logprobs": "nanoserve.sampling.prompt_logprobs:PromptLogprobs"}


class Head(Protocol):
    """Made as `HeadClass(num_slots)`, on every rank."""

    def set_slot(self, change: SlotChange) -> None:
        """The sequence in a slot is a new one. Only rank 0 is told."""

    def __call__(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        slots: np.ndarray,
        compute_logits: Callable[[Tensor], Tensor | None],
    ) -> Any:
        """hidden: [num_outputs, hidden_size]; next_ids: the token that follows each; slots: whose.

        Every rank must call `compute_logits` for the same rows; it gives None on all but rank 0.
        """

    def collect(self, made: Any) -> Any:
        """What `__call__` has returned, brought to the host: here it may wait."""


def register_head(name: str, location: str) -> None:
    """Add a head of your own, as "module:Class"."""
    _HEADS[name] = location


def registered_heads() -> dict[str, str]:
    """Where each head is, by name. All ranks must have the same, in the same order."""
    return dict(_HEADS)


def make_head(name: str, num_slots: int) -> Head:
    module, _, attribute = _HEADS[name].partition(":")
    return getattr(import_module(module), attribute)(num_slots)
