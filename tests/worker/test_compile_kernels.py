"""Nothing is compiled while an engine serves: every variant of a kernel has run when it starts.

Kernels are not run here. What is launched is noted, and what Triton would compile anew is told by
its own rules: see `launched_kernels`. On a GPU: tests/gpu/test_compiled_kernels_gpu.py.
"""

import random
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

pytest.importorskip("triton")

from launched_kernels import LaunchedKernels, of_kernel, told
from proposers import Mixed, Wrong
from whole_life import live

import nanoserve.worker.compile_kernels as compile_kernels
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.speculative.extension import Speculation, prepare_speculation
from nanoserve.kernels.triton import dependent_launch, paged_attention, store_kv
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.quantization.linear_methods import choose_linear_method
from nanoserve.text.tokenizer import Tokenizer
from nanoserve.worker.build_executor import _backend
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

HAS_GRAMMARS = find_spec("llguidance") is not None
MOST_ROWS = 140  # more than any border between tiles
POOL = {"max_num_seqs": MOST_ROWS, "num_kv_blocks": 4000, "max_model_len": 400}
POOL |= {"max_num_batched_tokens": 700, "attention_backend": "triton", "dtype": "bfloat16"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}
NGRAM_EAGER = NGRAM | {"enforce_eager": True}
OTHER_KERNELS = dict.fromkeys(("dependent_launch", "merge_in_attention", "split_products"), True)
HEAD = NGRAM | {"method": "hidden_head", "model": "tiny-qwen3"}


def make_engine(tokenizer: Tokenizer | None, **options: Any) -> GuardedEngine:
    path = bundled_checkpoint("tiny-qwen3")
    config = EngineConfig(str(path), **POOL | options).for_device("cuda")
    model_config = replace(ModelConfig.from_checkpoint(path), dtype=config.dtype)
    method = None
    if config.quantization is not None:
        method = choose_linear_method(config, model_config, torch.device("cpu"), 0)
    attention, ops = _backend("triton", config)
    dtype = getattr(torch, config.dtype)
    context = LayerContext(dtype, attention=attention, ops=ops, linear_method=method)
    device = CudaDevice(config, FakeCuda(), True, attention.captures_mixed_steps)
    runner = ModelRunner.load(config, model_config, path, context, device)
    engine = GuardedEngine(config, model_config, runner, tokenizer)
    if config.speculative_config is not None:
        prepare_speculation(config, model_config).add_to(engine)
    return engine


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_checkpoint("tiny-qwen3"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> LaunchedKernels:
    (token_id,) = tokenizer.encode("a")
    return LaunchedKernels(monkeypatch, token_id)


LAUNCHED = {"capture_mixed_steps": False}  # mixed steps are, kernel by kernel
MIXED = {"capture_mixed_steps": True}
BESIDE_MIXED = {"capture_sampling", "kv_cache_dtype"}  # with which they are by themselves
DRAFTS_IN_GRAPHS = {"speculative_config": NGRAM | {"enforce_eager": False}}


@pytest.mark.small(options=[{"quantization": "int4"} | MIXED, DRAFTS_IN_GRAPHS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        LAUNCHED,
        {"dtype": "float32", "enforce_eager": True},
        {"capture_sampling": True, "kv_cache_dtype": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4"} | MIXED,
        {"quantization": "int8", "quantization_activations": "int8", "enforce_eager": True},
        {"quantization": "fp8", "dtype": "float16", "enforce_eager": True},
        DRAFTS_IN_GRAPHS,
        DRAFTS_IN_GRAPHS | MIXED,
        {"speculative_config": NGRAM, "quantization": "int8"},
        {"speculative_config": HEAD},
        {"kernel_config": OTHER_KERNELS, "enforce_eager": True},
        {"kernel_config": OTHER_KERNELS, "enforce_eager": True, "quantization": "int4"},
        {
            "kernel_config": OTHER_KERNELS | {"fused_quantization": True},
            "enforce_eager": True,
            "quantization": "int8",
            "quantization_activations": "int8",
        },
    ],
    ids=str,
)
def test_a_whole_life_launches_nothing_that_was_not_compiled(
    options: dict[str, Any],
    tokenizer: Tokenizer,
    launched: LaunchedKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "kernel_config" in options:
        for module in (dependent_launch, paged_attention, store_kv):
            monkeypatch.setattr(module, "has_dependent_launch", lambda: True)
    with launched.noted() as compiled:
        engine = make_engine(tokenizer, **options)
    has_few = DRAFTS_IN_GRAPHS.items() <= options.items()
    if has_few:  # of any number
        (speculation,) = (e for e in engine.extensions if isinstance(e, Speculation))
        vocab_size = engine.model_config.vocab_size
        speculation.proposer = Mixed(random.Random(0), vocab_size, [Wrong(vocab_size)])
    with launched.noted() as life:
        live(engine, MOST_ROWS, HAS_GRAMMARS)
    assert life <= compiled, told(life - compiled, compiled)
    # It was a whole one: each way to draw, and each tile.
    in_float32 = options.get("dtype") == "float32"
    if HAS_GRAMMARS:
        assert len(of_kernel(life, "_best_of_parts")) == (4 if in_float32 else 6)
    assert len(of_kernel(life, "_filter_borders")) == (1 if in_float32 else 2)
    assert len(of_kernel(life, "_store_kv")) == 2
    if "quantization" in options:  # of five sizes, three tiles each
        products = of_kernel(life, "_grouped_product") | of_kernel(life, "_scaled_product")
        assert len(products) >= 15
    if "kernel_config" in options:
        num_split = len(of_kernel(life, "_split_linear"))
        assert num_split == 0 if "quantization" in options else num_split >= 6
        assert of_kernel(life, "_act_and_mul")
        assert all("IS_DEPENDENT=True" in variant for variant in life if "chunk" not in variant[0])
    if "speculative_config" in options:
        assert engine.stats.num_draft_tokens > 100
    # Every step with a prompt was replayed, or none was.
    has_mixed = bool(engine.executor.device.mixed_sizes)
    assert has_mixed is options.get("capture_mixed_steps", options.keys() <= BESIDE_MIXED)
    of_chunks = of_kernel(life, "chunk_attention_kernel")
    assert {"row_counts_ptr=None" not in variant for variant in of_chunks} == {has_mixed}
    if has_few:  # also such as no graph of draft rows covers
        assert queries(life) == ({1, 8} if has_mixed else {1, 2, 4, 8})
    engine.close()


@pytest.mark.parametrize("left_out", range(2, 4))
def test_what_is_left_out_would_be_compiled_while_serving(
    left_out: int, tokenizer: Tokenizer, launched: LaunchedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = compile_kernels._KINDS
    monkeypatch.setattr(compile_kernels, "_KINDS", kinds[:left_out] + kinds[left_out + 1 :])
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, executor: None)
    with launched.noted() as compiled:
        engine = make_engine(tokenizer, enforce_eager=True)
    with launched.noted() as life:
        live(engine, 1, has_grammars=False)
    new = of_kernel(life - compiled, "_best_of_parts")
    assert len(new) == 1 and "logits=torch.float32 aligned" in new.pop()


def test_rows_of_draft_tokens_have_a_kernel_for_each_power_of_two(
    tokenizer: Tokenizer, launched: LaunchedKernels
) -> None:
    """Of steps that no graph covers, too: drafts may be few, and contexts short."""
    with launched.noted() as compiled:
        make_engine(tokenizer, **DRAFTS_IN_GRAPHS)
    assert queries(compiled) == {1, 2, 4, 8}
    with launched.noted() as compiled:
        make_engine(tokenizer, speculative_config=NGRAM_EAGER)  # those are chunks
    assert queries(compiled) == {1}


def queries(variants: set[tuple[str, ...]]) -> set[int]:
    of_decode = of_kernel(variants, "decode_attention_kernel")
    return {int(part[8:]) for variant in of_decode for part in variant if "QUERIES=" in part}


def test_masks_are_compiled_where_there_may_be_grammars(
    tokenizer: Tokenizer, launched: LaunchedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_masks(**options: Any) -> bool:
        with launched.noted() as compiled:
            make_engine(tokenizer, enforce_eager=True, **options)
        draws = of_kernel(compiled, "_best_of_parts")
        assert len(draws) in (4, 6)
        return len(draws) == 6

    monkeypatch.setattr(compile_kernels, "find_spec", lambda name: None)
    assert not has_masks()
    assert has_masks(structured_outputs_config={"lenient": True})
    monkeypatch.setattr(compile_kernels, "find_spec", lambda name: "found")
    assert has_masks()
    assert not has_masks(skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("options", "longest", "wanted"),
    [
        # A chunk, a decode row, and as many rows as there can be.
        ({}, 400, [[2], [1], [1] * 140]),
        ({"max_num_seqs": 1}, 400, [[2], [1]]),
        ({"max_num_batched_tokens": 140}, 1, [[1], [1], [1] * 140]),
        # More tokens than rows.
        (
            {"max_num_seqs": 2, "max_num_batched_tokens": 128, "quantization": "int8"},
            400,
            [[2], [1], [1, 1], [8, 9], [64, 64], [64, 64], [64, 64]],
        ),
        (
            {"max_num_seqs": 2, "speculative_config": NGRAM | {"enforce_eager": False}},
            400,
            [[9], [2], [4], [8], [1], [1, 1]],
        ),
        ({"max_num_seqs": 2, "speculative_config": NGRAM_EAGER}, 400, [[2], [1], [1, 1]]),
    ],
    ids=["plain", "one row", "one token", "few rows", "graphs of drafts", "eager drafts"],
)
def test_steps(options: dict[str, Any], longest: int, wanted: list[list[int]]) -> None:
    """None is larger than a step may be, or has rows out of order."""
    config = EngineConfig("tiny-qwen3", **POOL | options).for_device("cuda")
    steps = [step.tolist() for step in compile_kernels.dummy_steps(config, longest)]
    assert steps == wanted
