"""Heads are computations, other than sampling, on the hidden states of prompt tokens.

A sequence names its head (`Sequence.prompt_head`), a step passes the head its outputs, and the
result of the head is delivered to the collector of the same name in `OutputProcessor.collectors`. A
head is loaded when the first sequence names it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.engine.executor import SlotUpdate
from nanoserve.models.layers.routed_experts import RoutedExperts
from nanoserve.sampling.host_copies import to_host
from nanoserve.utils.registry import Registry
from nanoserve.worker.batch_tensors import BatchTensors


class Head(Protocol):
    """The interface of a head, constructed as `HeadClass(num_slots)`, on every rank."""

    def set_slot(self, change: SlotUpdate) -> None:
        """Prepare for a new sequence in a slot; called on rank 0 only."""

    def __call__(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        slots: np.ndarray,
        compute_logits: Callable[[Tensor], Tensor | None],
    ) -> Any:
        """Compute the head's result for some tokens of a step.

        hidden: [num_outputs, hidden_size]; next_ids: the token that follows each; slots: the slot
        of each. Every rank must call `compute_logits` for the same rows; it returns None on all but
        rank 0. Copies to the host start here (`nanoserve.sampling.host_copies.to_host`), before the
        next step is launched.
        """

    def collect(self, made: Any) -> Any:
        """Return on the host what `__call__` returned; the copies that it started have finished."""


# All ranks must have the same entries in the same order.
HEADS: Registry[Callable[[int], Head]] = Registry(
    "head",
    {
        "prompt_logprobs": "nanoserve.sampling.prompt_logprobs:PromptLogprobs",
        "pool_last": "nanoserve.features.pooling.heads:AllRows",
        "pool_first": "nanoserve.features.pooling.heads:FirstRows",
        "pool_mean": "nanoserve.features.pooling.heads:SummedRows",
        "pool_all": "nanoserve.features.pooling.heads:AllRows",
    },
)


def register_head(name: str, location: str) -> None:
    """Add a custom head, given as "module:Class"; other ranks import it from there."""
    HEADS.register(name, location)


ROUTED_EXPERTS = "routed_experts"  # the name of the result of `StepRouteReader`


class StepRoutes(NamedTuple):
    """The experts of all tokens of a step.

    slots: int32 [num_tokens], the KV slot of each token in the first layer group. expert_ids:
    integers [num_tokens, num_layers, top_k], see `nanoserve.models.layers.routed_experts`.
    """

    slots: np.ndarray
    expert_ids: np.ndarray


class StepRouteReader:
    """Reads the experts of all tokens of a step; a `Head` gets tokens of prompts only."""

    def __init__(self, routes: RoutedExperts) -> None:
        self._routes = routes

    def __call__(self, batch: Batch, header: BatchHeader) -> tuple[np.ndarray, Tensor]:
        """Start to copy the experts of a step, which is in flight, to the host."""
        # Copies: the next step overwrites the batch and the routes, perhaps before `collect`.
        expert_ids = self._routes.first(header.num_tokens)
        expert_ids = to_host(expert_ids) if expert_ids.is_cuda else expert_ids.clone()
        return batch.slot_mapping[0, : header.num_tokens].copy(), expert_ids

    def collect(self, made: tuple[np.ndarray, Tensor]) -> StepRoutes:
        """Return what `__call__` returned; the copies that it started have finished."""
        slots, expert_ids = made
        return StepRoutes(slots, expert_ids.numpy())


class Heads:
    """The heads that a runner has loaded so far.

    routes: the memory in which the model's layers record their experts, to be read in each step.
    """

    def __init__(self, num_slots: int, routes: RoutedExperts | None = None) -> None:
        self._num_slots = num_slots
        self._heads: dict[str, Head] = {}
        self._routes = None if routes is None else StepRouteReader(routes)

    @property
    def reads_all_tokens(self) -> bool:
        """True if `run` must be called in every step, also in those without prompt outputs."""
        return self._routes is not None

    def __getitem__(self, name: str) -> Head:
        if name not in self._heads:
            self._heads[name] = HEADS.get(name)(self._num_slots)
        return self._heads[name]

    def run(
        self,
        batch: Batch,
        header: BatchHeader,
        tensors: BatchTensors,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor | None],
    ) -> dict[str, Any]:
        """Run the heads on a step; return their results by name. hidden: of all its tokens."""
        made = {
            name: self[name](
                hidden[tensors.output_rows[outputs]],
                tensors.next_ids[outputs],
                batch.output_slots[outputs],
                compute_logits,
            )
            for name, outputs in batch.prompt_outputs(header).items()
        }
        if self._routes is not None:
            made[ROUTED_EXPERTS] = self._routes(batch, header)
        return made

    def collect(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return on the host what `run` returned; the copies that it started have finished."""
        return {name: self._maker(name).collect(one) for name, one in made.items()}

    def _maker(self, name: str) -> Head | StepRouteReader:
        if name == ROUTED_EXPERTS and self._routes is not None:
            return self._routes
        return self[name]
