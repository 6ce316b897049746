"""Schemas and grammars at random: each is refused or compiled, and no process ends."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from nanoserve import LLM, StructuredOutputsParams
from nanoserve.features.structured import checker
from nanoserve.features.structured.config import StructuredOutputsConfig

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
from odd_grammars import OddSchemas, odd_grammar

from nanoserve.features.structured.guidance import Guidance


def test_odd_grammars_are_refused_or_compiled(
    by_size: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    end = checker._Process._end
    monkeypatch.setattr(
        checker._Process, "_end", lambda self, seconds: ends.append(end(self, seconds)) or ends[-1]
    )
    config, outcomes = StructuredOutputsConfig(), Counter[str]()
    with LLM("tiny-qwen3", max_model_len=64, num_kv_blocks=16) as llm:
        tokenizer = llm.engine.tokenizer
        guidance = Guidance(tokenizer.backend, llm.engine.model_config.vocab_size)
        for seed in range(by_size(200, 1000, 10_000)):
            rng = random.Random(seed)
            for kind in ("json", "grammar"):
                value = OddSchemas(rng).schema() if kind == "json" else odd_grammar(rng)
                try:
                    params = StructuredOutputsParams(**{kind: value})
                    params.check(config, tokenizer)
                    guidance.compile(params.source(config))  # what is good is so in this process
                except ValueError as error:
                    assert "crashed" not in str(error), (seed, kind)
                    outcomes[f"{kind} refused"] += 1
                else:
                    outcomes[f"{kind} compiled"] += 1
    print(outcomes, ends)
    assert set(ends) <= {-24, -9}, "only the limits of time may end a process"
    assert min(outcomes.values()) > sum(outcomes.values()) / 20
