"""A stage of a pipeline: some of the model's layers, and what passes from it to the next.

Huang et al. 2018 ("GPipe"): a model is cut between layers, and each part has devices of its own.
Unlike tensor parallelism, which communicates twice in each layer, a stage sends one tensor a step,
[num_tokens, hidden_size]; so stages may be far apart, and one of them is busy only while a step is
in it. They are all busy when as many steps are under way (`nanoserve.features.parallel.pipeline_schedule`).
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class PipelineParallel:
    """This process's stage. By default there is one stage, the whole model, which sends nothing.

    `layers` are those computed here, None for all. `before` joins this rank to one of the stage
    before, `behind` to one of the next: each is a `nanoserve.features.parallel.process_group.Group` of two.
    """

    index: int = 0
    num_stages: int = 1
    layers: range | None = None
    before: Any = None
    behind: Any = None
    # When the last step came from the stage before and went to the next, by `time.perf_counter`.
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
        """Return the indices of the layers computed here, of a model that has `num_layers`."""
        return range(num_layers) if self.layers is None else self.layers

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden`, [num_tokens, hidden_size], with what the stage before has sent."""
        self.before.broadcast(hidden.view(torch.uint8))
        self.received_at = time.perf_counter()
        return hidden

    def send(self, hidden: Tensor) -> Tensor:
        """Start to send `hidden`, [num_tokens, hidden_size], to the next stage; returns it.

        The next stage may be busy: this one goes on with its next step meanwhile. Nobody may write
        into `hidden` any more.
        """
        self.sent_at = time.perf_counter()
        while len(self._sent) >= self.num_stages:  # so many steps are under way at most
            work, _ = self._sent.popleft()
            self.behind.wait(work)
        work = self.behind.start_broadcast(hidden.view(torch.uint8))
        self._sent.append((work, hidden))
        return hidden
