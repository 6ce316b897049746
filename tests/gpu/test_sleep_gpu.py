"""An engine on an NVIDIA GPU sleeps: its memory is free, and its answers are the same afterwards.

pytest -m gpu tests/gpu/test_sleep_gpu.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tiny_checkpoints import make_checkpoint, make_qwen3
from transformers import Qwen3MoeForCausalLM

from nanoserve import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MIB = 2**20
HAS_E4M3 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_e4m3 = pytest.mark.skipif(not HAS_E4M3, reason="needs compute capability 8.9")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, max_tokens=30),
]


def answers(llm: LLM) -> list[Any]:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    return [output.outputs for output in llm.chat([question] * 2, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"capture_mixed_steps": False}, {"enforce_eager": True}, {"capture_sampling": True}],
    ids=str,
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


# Of 8 bits, four layers have 48 MiB; of 4, half as much.
LARGER = {"hidden_size": 1024, "intermediate_size": 3072}
LARGER |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int8", "quantization_activations": "int8"},
        {"quantization": "int4"},
        pytest.param({"quantization": "fp8"}, marks=needs_e4m3),
        {"quantization": "fp8", "quantization_activations": "none"},
        {"quantization": "int8", "hf_overrides": LARGER | EXPERTS},
    ],
    ids=str,
)
def test_weights_in_fewer_bits_are_given_back(options: dict[str, Any], tmp_path: Path) -> None:
    """At level 1, too, which keeps them in the host's memory; and they come back as they were."""
    options = {"hf_overrides": LARGER, "load_format": "dummy", "dtype": "bfloat16"} | options
    if "num_experts" in options["hf_overrides"]:
        make_checkpoint(Qwen3MoeForCausalLM, tmp_path, num_hidden_layers=4, **EXPERTS)
    else:
        make_qwen3(tmp_path, num_hidden_layers=4)
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    common = {"device": "cuda", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 32 * MIB}
    with LLM(tmp_path, **common, **options) as llm:
        expected = llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs
        model = llm.engine.executor.model
        tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values()
        assert sum(t.nbytes for t in tensors if t.itemsize == 1) > 20 * MIB
        num_bytes = sum(t.nbytes for t in tensors)
        del tensors
        for _ in range(2):
            held = torch.cuda.memory_allocated()
            llm.sleep(1)
            given_back = held - torch.cuda.memory_allocated()
            assert given_back > num_bytes + 32 * MIB - 2 * MIB
            assert not [t for t in (*model.parameters(), *model.buffers()) if t.is_cuda]
            llm.wake_up()
            assert abs(torch.cuda.memory_allocated() - held) < 4 * MIB
            assert llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs == expected
