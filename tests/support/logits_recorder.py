"""Sees the logits of a whole engine, which itself keeps only those that it samples from."""

import torch

from nanoserve import LLM
from nanoserve.engine.batch import Batch
from nanoserve.engine.plan import Plan


class LogitsRecorder:
    """Collects our logits of every token of every request, whatever steps they fell into."""

    def __init__(self, llm: LLM) -> None:
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        self._model = llm.engine.executor.model
        self._hidden = torch.empty(0)
        self._model.register_forward_hook(self._keep)
        llm.engine.observers.append(self._observe)

    def _keep(self, model: torch.nn.Module, args: tuple, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def _observe(self, plan: Plan, batch: Batch, result: object, times: object) -> None:
        logits = self._model.compute_logits(self._hidden)
        token = 0
        for row in plan.rows:
            for position in range(row.start, row.start + row.n):
                self.logits.setdefault(row.seq.request_id, {})[position] = logits[token]
                token += 1
