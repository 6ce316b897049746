"""An engine on an NVIDIA GPU sleeps: its memory is free, and its answers are the same afterwards.

pytest -m gpu tests/gpu/test_sleep_gpu.py
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nanoserve import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, max_tokens=30),
]


def answers(llm: LLM) -> list[Any]:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    return [output.outputs for output in llm.chat([question] * 2, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"capture_sampling": True}], ids=str
)
def test_memory_is_given_back_and_answers_stay_the_same(
    options: dict[str, Any], level: int
) -> None:
    pool = {"kv_cache_memory_bytes": 2**28}
    with LLM("tiny-qwen3", device="cuda", dtype="float32", **pool, **options) as llm:
        expected, held = answers(llm), torch.cuda.memory_allocated()
        assert held >= 2**28
        llm.sleep(level)
        assert torch.cuda.memory_allocated() < held - 2**28 + 2**22
        llm.wake_up()
        assert answers(llm) == expected
        assert abs(torch.cuda.memory_allocated() - held) < 2**22
