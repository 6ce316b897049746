"""On an NVIDIA GPU, nothing is compiled while an engine serves.

pytest -m gpu tests/gpu/test_compiled_kernels_gpu.py       (compiles some 60 kernels, once)
"""

import random
import sys
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from launched_kernels import LaunchedKernels, of_kernel
from proposers import Mixed, Wrong, speculation_of
from triton.runtime.jit import JITFunction
from whole_life import live

from nanoserve import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HAS_E4M3 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_e4m3 = pytest.mark.skipif(not HAS_E4M3, reason="needs compute capability 8.9")
HAS_GRAMMARS = find_spec("llguidance") is not None
MOST_ROWS = 140  # more than any border between tiles
POOL: dict[str, Any] = {"max_num_seqs": MOST_ROWS, "num_kv_blocks": 4000, "max_model_len": 400}
POOL |= {"max_num_batched_tokens": 700, "dtype": "bfloat16", "device": "cuda"}
DRAFTS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}
LAUNCHED = {"capture_mixed_steps": False}  # mixed steps are, kernel by kernel
DRAFT_MODEL = DRAFTS | {"method": "draft_model", "model": "tiny-qwen3-draft"}


def num_compiled() -> int:
    """Return how many variants of the package's kernels Triton keeps in this process."""
    modules = [m for name, m in sys.modules.items() if name.startswith("nanoserve.kernels.")]
    found = (k for m in modules for k in vars(m).values() if isinstance(k, JITFunction))
    kernels = {id(kernel): kernel for kernel in found}.values()
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param(LAUNCHED, id="mixed steps launched"),
        pytest.param({"quantization": "int4"}, id="int4"),
        pytest.param(
            {"quantization": "int8", "quantization_activations": "int8", "enforce_eager": True},
            id="int8",
        ),
        pytest.param({"quantization": "fp8", "kv_cache_dtype": "fp8"}, id="fp8", marks=needs_e4m3),
        pytest.param(
            {"speculative_config": DRAFTS, "capture_sampling": True, "capture_mixed_steps": True},
            id="drafts and mixed steps in graphs",
        ),
        pytest.param({"speculative_config": DRAFTS}, id="drafts in graphs"),
        pytest.param({"speculative_config": DRAFT_MODEL}, id="draft model"),
        pytest.param(
            {"speculative_config": DRAFTS | {"method": "hidden_head", "model": "tiny-qwen3"}},
            id="hidden head",
        ),
    ],
)
def test_a_whole_life_compiles_nothing(
    options: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = request.node.name
    launched = LaunchedKernels(monkeypatch)
    start, before = time.perf_counter(), num_compiled()
    with launched.noted() as compiled:
        llm = LLM("tiny-qwen3", **POOL | options)
    kept = num_compiled()
    print(f"started in {time.perf_counter() - start:.1f} s, {kept - before} compiled or loaded")
    assert kept >= len(compiled) > 10
    if "drafts" in name:  # of any number, whatever the model says
        vocab_size = llm.engine.model_config.vocab_size
        wrong = Mixed(random.Random(0), vocab_size, [Wrong(vocab_size)])
        speculation_of(llm).proposer = wrong
    with llm, launched.noted() as life:
        live(llm.engine, MOST_ROWS, HAS_GRAMMARS)
        num_drafts = llm.stats.num_draft_tokens
        has_mixed = len(llm.engine.executor.device.mixed_sizes) > 0
    new = sorted(variant[0] for variant in life - compiled)
    assert not new and num_compiled() == kept, (new, num_compiled() - kept)
    # It was a whole one. What a graph draws was launched when it was captured.
    draws = of_kernel(life, "_best_of_parts")
    assert len(draws) >= (6 if HAS_GRAMMARS else 4) - ("capture_sampling" in options)
    assert len(of_kernel(life, "_filter_borders")) == 2
    assert num_drafts > 100 or "speculative_config" not in options
    # Nobody launches attention over chunks, but for a draft model's prompts.
    is_launched = len(of_kernel(life, "chunk_attention_kernel")) > 0
    assert is_launched is ("draft model" in name or not has_mixed)
    if "drafts" in name and not has_mixed:  # for rows that no graph of draft rows covers
        assert len(of_kernel(life, "decode_attention_kernel")) >= 3
