"""`batch_invariant=True` with Triton's kernels: engines in the interpreter and on a stand-in.

Requests of a batch, in chunks, after preemptions, with draft tokens and in graphs, have the tokens
and the log-probabilities that they have alone, bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from fake_cuda import FakeCuda
from lora_models import ALL, request_for, write_adapter
from tiny_checkpoints import GEMMA2, make_checkpoint, make_qwen3
from transformers import Gemma2ForCausalLM, Qwen3MoeForCausalLM

pytest.importorskip("triton")

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.attention.triton import TritonAttention
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.kernels.triton import paged_attention
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.triton_ops import TritonOps
from nanoserve.worker.backend_checks import check_batch_invariant
from nanoserve.worker.build_executor import attention_options
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, max_tokens=5, ignore_eos=True, logprobs=0, seed=3),
]
# Two of them share a beginning.
PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11, 5, 6], [3], [(3 * i) % 50 for i in range(31)]]
REQUESTS = [(prompt, PARAMS[i % 2]) for i, prompt in enumerate(PROMPTS)]
BASE: dict[str, Any] = {
    "attention_backend": "triton",
    "batch_invariant": True,
    "max_model_len": 40,
    "max_num_seqs": 4,
    "num_kv_blocks": 40,
    "block_size": 4,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "chunks": {"long_prefill_token_threshold": 5},
    "preemptions": {"num_kv_blocks": 12},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "adaptive": False,
        }
    },
}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "experts": (Qwen3MoeForCausalLM, EXPERTS | SMALL),
    "windows": (Gemma2ForCausalLM, GEMMA2 | SMALL | {"vocab_size": 60}),
}


@pytest.fixture(autouse=True)
def equal_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A share is a tile of 32 keys; of a few rows, each share has a program of its own.
    monkeypatch.setattr(paged_attention, "_SHARE_KEYS", 32)
    with interpreter.equal_rows():
        yield


def results(outputs: list[Any]) -> list[Any]:
    return [(one.token_ids, one.logprobs) for output in outputs for one in output.outputs]


def assert_invariant(
    path: Path,
    options: dict[str, Any],
    adapters: Sequence[LoRARequest | None] = (None,),
    **same: Any,
) -> None:
    """options: of the engine that gets all requests at once. same: of both engines."""
    base = BASE | {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True} | same
    prompts, params = map(list, zip(*REQUESTS, strict=True))
    own = [adapters[i % len(adapters)] for i in range(len(REQUESTS))]
    alone = []
    with LLM(path, **base, enable_prefix_caching=False) as llm:
        for prompt, one, adapter in zip(prompts, params, own, strict=True):
            alone += llm.generate([prompt], one, use_tqdm=False, lora_request=adapter)
    with LLM(path, **base | options) as llm:
        together = llm.generate(prompts, params, use_tqdm=False, lora_request=own)
        assert results(together) == results(alone)
        if "num_kv_blocks" in options:
            assert llm.stats.num_preemptions
            return
        again = llm.generate(prompts, params, use_tqdm=False, lora_request=own)
        assert results(again) == results(alone)  # hits prefixes


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(n, marks=[pytest.mark.size("full")] * (n != "chunks")) for n in SCHEDULES],
)
def test_bits_do_not_depend_on_the_schedule(tmp_path: Path, schedule: str) -> None:
    make_qwen3(tmp_path, **SMALL)
    assert_invariant(tmp_path, SCHEDULES[schedule])


@pytest.mark.size("full")
def test_of_adapters(tmp_path: Path) -> None:
    model, adapters = make_qwen3(tmp_path, **SMALL), []
    for index, rank in enumerate((8, 3)):
        write_adapter(model, tmp_path / f"adapter{index}", index, ALL, rank, size=0.2)
        adapters.append(request_for(tmp_path / f"adapter{index}"))
    same = {"enable_lora": True, "max_loras": 2, "kernel_config": {"adapter_kernels": True}}
    assert_invariant(tmp_path, SCHEDULES["chunks"], [None, *adapters], **same)


@pytest.mark.size("full")
@pytest.mark.parametrize("kind", MODELS)
def test_of_other_models(tmp_path: Path, kind: str) -> None:
    architecture, settings = MODELS[kind]
    make_checkpoint(architecture, tmp_path, **settings)
    assert_invariant(tmp_path, SCHEDULES["chunks"])


@pytest.mark.size("full")
def test_graphs_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels are interpreted here, and the worst case takes a minute.
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)
    make_qwen3(tmp_path, **SMALL)
    found = []
    for more in ({"enforce_eager": True}, {}):
        config = EngineConfig(str(tmp_path), dtype="float32", **BASE, **more).for_device("cuda")
        attention = TritonAttention(**attention_options("triton", config))
        assert attention.batch_invariant
        context = LayerContext(attention=attention, ops=TritonOps(is_batch_invariant=True))
        cuda = FakeCuda()
        device = CudaDevice(config, cuda, True, attention.captures_mixed_steps)
        model_config = ModelConfig.from_checkpoint(tmp_path)
        runner = ModelRunner.load(config, model_config, tmp_path, context, device)
        engine = GuardedEngine(config, model_config, runner, tokenizer=None)
        for i, (prompt, params) in enumerate(REQUESTS):
            engine.add_request(str(i), prompt, params)
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.close()
        found.append(results([done[str(i)] for i in range(len(REQUESTS))]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantized weights, whose kernels choose tiles"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4: more than two ranks"),
        ({"kernel_config": {"split_products": True}}, "split_products=True"),
        ({"enable_lora": True}, "enable_lora=True without adapter_kernels=True"),
        ({"kernel_config": {"merge_in_attention": True}}, "merge_in_attention=True"),
    ],
    ids=str,
)
def test_what_cannot_be_promised_is_rejected(options: dict[str, Any], message: str) -> None:
    given = {"attention_backend": "triton", "batch_invariant": True, **options}
    config = EngineConfig("tiny-qwen3", **given)
    model_config = ModelConfig.from_checkpoint(bundled_checkpoint("tiny-qwen3"))
    with pytest.raises(ValueError, match=message):
        check_batch_invariant(config, model_config, "triton", torch.device("cpu"))


def test_rows_of_logits_must_be_aligned_alike() -> None:
    config = EngineConfig("tiny-qwen3", attention_backend="triton", batch_invariant=True)
    model_config = ModelConfig.from_checkpoint(bundled_checkpoint("tiny-qwen3"))
    check_batch_invariant(config, model_config, "triton", torch.device("cpu"))
    odd = replace(model_config, vocab_size=50257)
    with pytest.raises(ValueError, match="vocab_size=50257, which is not a multiple of 4"):
        check_batch_invariant(config, odd, "triton", torch.device("cpu"))
