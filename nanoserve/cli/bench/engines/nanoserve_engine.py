"""Run nanoserve, offline through `LLM` and online through its engine, request by request."""

from argparse import Namespace
from typing import Any

import torch

import nanoserve
from nanoserve import RequestOutputKind, SamplingParams
from nanoserve.cli.bench.hardware import set_threads
from nanoserve.cli.bench.step_timer import PARTS, StepTimer

from . import Engine, Tokens

_COMMON = (
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "attention_backend",
    "enforce_eager",
    "enable_prefix_caching",
)


class NanoserveEngine(Engine):
    is_online = True

    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        set_threads(spec.threads)
        chosen = {name: getattr(spec, name) for name in _COMMON}
        self.options = {name: value for name, value in chosen.items() if value is not None}
        self.options |= options
        common = {"dtype": spec.dtype, "device": spec.device, "skip_tokenizer_init": True}
        self.llm = nanoserve.LLM(spec.model, **common | self.options)
        set_threads(spec.threads)
        self.versions = {"nanoserve": nanoserve.__version__, "torch": torch.__version__}
        self.temperature, self.timer = spec.temperature, None
        if spec.plot and not self.llm.engine.config.async_scheduling:  # else steps overlap
            self.timer = StepTimer(self.llm.engine)
        self.begin()

    def begin(self) -> None:
        self._before = self.llm.stats
        if self.timer is not None:
            self.timer.steps.clear()

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        params = [self._params(n) for n in output_lens]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        params = self._params(output_len)
        params.output_kind = RequestOutputKind.DELTA
        self.llm.engine.add_request(str(index), prompt, params)

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        outputs = self.llm.engine.step()
        return [(int(output.request_id), output.outputs[0].token_ids) for output in outputs]

    def facts(self) -> dict[str, Any]:
        now, before = self.llm.stats, self._before
        queries = now.prefix_cache_queries - before.prefix_cache_queries
        hits = now.prefix_cache_hits - before.prefix_cache_hits
        return {
            "KV blocks": self.llm.engine.executor.num_kv_blocks,
            "steps": now.num_steps - before.num_steps,
            "preemptions": now.num_preemptions - before.num_preemptions,
            "prefix-cache hit rate": f"{hits / queries:.1%}" if queries else "none",
            **self.options,
        }

    def step_times(self) -> dict[str, float] | None:
        if self.timer is None or not self.timer.steps:
            return None
        steps = self.timer.steps
        return {part: sum(getattr(step, part) for step in steps) / len(steps) for part in PARTS}

    def _params(self, output_len: int) -> SamplingParams:
        return SamplingParams(max_tokens=output_len, temperature=self.temperature, ignore_eos=True)
