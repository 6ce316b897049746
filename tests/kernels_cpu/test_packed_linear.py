"""Weights packed for oneDNN give the products of plain ones, and the engine uses them."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.kernels_cpu import packed_linear
from nanoserve.kernels_cpu.packed_linear import packed_linear_method
from nanoserve.layers.context import LayerContext
from nanoserve.layers.linear import ColumnParallelLinear, RowParallelLinear

METHOD = packed_linear_method()
needs_packing = pytest.mark.skipif(METHOD is None, reason="needs a processor that packs bfloat16")


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_products_are_those_of_plain_weights(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    context = LayerContext(torch.bfloat16, linear_method=METHOD)
    x = torch.randn(num_rows, 48, dtype=torch.bfloat16)
    for linear in (
        ColumnParallelLinear(48, {"a": 70, "b": 33}, context, bias=has_bias),
        RowParallelLinear(48, 103, context, bias=has_bias),
    ):
        weight = torch.randn(103, 48, dtype=torch.bfloat16)
        linear.weight.copy_(weight)
        if has_bias:
            linear.bias.copy_(torch.randn(103))
        linear.process_after_loading()
        assert linear.weight.layout == torch._mkldnn
        torch.testing.assert_close(linear(x), F.linear(x, weight, linear.bias), rtol=2e-2, atol=0.1)


@needs_packing
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@torch.inference_mode()
def test_weights_of_more_than_a_large_page_are_put_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    madvise = ctypes.CDLL(None).madvise

    def record(address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
        asked.append((address.value, length.value, advice))
        return madvise(address, length, advice)

    monkeypatch.setattr(packed_linear.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=record))
    context = LayerContext(torch.bfloat16, linear_method=METHOD)
    for outputs in (512, 8192):  # of 1 KiB each
        linear = RowParallelLinear(512, outputs, context)
        linear.weight.copy_(weight := torch.randn(outputs, 512, dtype=torch.bfloat16))
        linear.process_after_loading()
        x = torch.randn(2, 512, dtype=torch.bfloat16)
        torch.testing.assert_close(linear(x), F.linear(x, weight), rtol=2e-2, atol=0.2)
    ((first, length, advice),) = asked
    start = torch.ops.mkldnn.data_ptr(linear.weight)
    assert first % 2**21 == length % 2**21 == 0 and advice == 25
    assert first <= start < first + 2**21
    assert start + 2**23 <= first + length < start + 2**23 + 2**21


@needs_packing
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_engine_packs_and_answers_as_it_did(
    tmp_path: Path, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path, dtype="bfloat16", tie_word_embeddings=is_tied)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    options = {"skip_tokenizer_init": True, "device": "cpu"}
    prompts = [[5, 7, 11], list(range(40))]
    logprobs = []
    for works in (True, False):
        if not works:
            monkeypatch.setattr(packed_linear, "packed_linear_method", lambda: None)
        with LLM(tmp_path, **options) as llm:
            head = llm.engine.executor.model.lm_head.weight
            assert (head.layout == torch._mkldnn) is works
            assert llm.engine.executor.model.model.embed_tokens.weight.layout == torch.strided
            outputs = llm.generate(prompts, params, use_tqdm=False)
        logprobs.append([output.outputs[0].logprobs[0] for output in outputs])
    for packed, plain in zip(*logprobs, strict=True):
        common = packed.keys() & plain.keys()
        assert len(common) >= 4
        assert all(abs(packed[t].logprob - plain[t].logprob) < 0.1 for t in common)


def test_without_the_operators_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (AttributeError, RuntimeError):

        def refuse(weight: torch.Tensor, error: type[Exception] = broken) -> torch.Tensor:
            raise error("no such operator")

        monkeypatch.setattr(packed_linear, "_pack", refuse)
        assert packed_linear_method() is None
