"""Pipeline stages: each computes some of the model's layers and passes a tensor to the next.

Huang et al. 2018 ("GPipe"): a model is cut between layers, and each part has its own devices.
Unlike tensor parallelism, which communicates twice in each layer, a stage sends one tensor a step,
[num_tokens, hidden_size]; so the links between stages may be slow, and a stage is busy only while a
step is in it. All stages are busy when as many steps are in flight
(`nanoserve.features.parallel.pipeline_schedule`).
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class PipelineParallel:
    """The pipeline stage of this process. By default, one stage computes the whole model.

    `layers` are those computed here, None for all. `before` connects this rank to a rank of the
    previous stage, `behind` to a rank of the next stage. Each is a
    `nanoserve.features.parallel.process_group.Group` of two.
    """

    index: int = 0
    num_stages: int = 1
    layers: range | None = None
    before: Any = None
    behind: Any = None
    # Times when the last step was received and sent, by `time.perf_counter`.
    received_at: float | None = None
    sent_at: float | None = None
    _sent: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def layers_of(self, num_layers: int) -> range:
        """Return the indices of the layers computed here, for a model that has `num_layers`."""
        return range(num_layers) if self.layers is None else self.layers

    def receive(self, hidden: Tensor) -> Tensor:
        """Receive `hidden`, [num_tokens, hidden_size], from the stage before, and return it."""
        self.before.broadcast(hidden.view(torch.uint8))
        self.received_at = time.perf_counter()
        return hidden

    def send(self, hidden: Tensor) -> Tensor:
        """Start to send `hidden`, [num_tokens, hidden_size], to the next stage, and return it.

        The next stage may be busy: this one goes on with its next step meanwhile. `hidden` must not
        be modified afterwards.
        """
        self.sent_at = time.perf_counter()
        while len(self._sent) >= self.num_stages:  # at most this many steps are in flight
            work, _ = self._sent.popleft()
            self.behind.wait(work)
        work = self.behind.start_broadcast(hidden.view(torch.uint8))
        self._sent.append((work, hidden))
        return hidden
