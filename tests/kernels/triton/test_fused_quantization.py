"""Codes that norms and activations compute, against those of a kernel of its own, bit by bit."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_qwen3

pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor

from nanoserve import LLM, SamplingParams
from nanoserve.kernels.triton.act_and_mul import ACTIVATIONS, act_and_mul
from nanoserve.kernels.triton.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.triton.quantized_rows import (
    MAX_INPUTS,
    CodeFormat,
    attached_codes,
    quantize_rows,
)
from nanoserve.models.layers.triton_ops import TritonOps

E4M3, INT8 = CodeFormat(torch.float8_e4m3fn), CodeFormat(torch.int8, 32)
FORMATS = [E4M3, INT8, CodeFormat(torch.int8), CodeFormat(torch.int8, 128)]
DTYPES = [torch.bfloat16, torch.float32]


def assert_codes_are_those_of_their_own_kernel(x: torch.Tensor, code_format: CodeFormat) -> None:
    codes = attached_codes(x, code_format)
    assert codes is not None
    expected = quantize_rows(x, code_format.dtype, group_size=code_format.group_size)
    for ours, theirs in zip(codes, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours.float().nan_to_num(1e9), theirs.float().nan_to_num(1e9))


def hostile(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with NaN, with infinity, of zeros, tiny, huge, with one large value, and plain ones."""
    torch.manual_seed(size)
    x = torch.randn(num_rows, size)
    x[0, 0], x[1, -1], x[2], x[3] = torch.nan, torch.inf, 0, x[3] * 1e-30
    x[4], x[5, size // 2] = x[4] * 1e15, 2e4
    return x.to(dtype)


@pytest.mark.small(code_format=[E4M3, INT8], size=[192, 200])
@pytest.mark.parametrize("code_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [7, 192, 200, 1024])
def test_norms(code_format: CodeFormat, dtype: torch.dtype, size: int) -> None:
    x, weight = hostile(8, size, dtype), torch.randn(size).to(dtype)
    residual = torch.randn(8, size).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, code_format=code_format)
    plain = add_rms_norm(x, residual, weight, 1e-5)
    for ours, theirs in ((normed, plain[0]), (total, plain[1])):
        assert torch.equal(ours.nan_to_num(1e9), theirs.nan_to_num(1e9))
    assert_codes_are_those_of_their_own_kernel(normed, code_format)
    assert_codes_are_those_of_their_own_kernel(
        rms_norm(x, weight, 1e-5, code_format=code_format), code_format
    )


@pytest.mark.small(code_format=[E4M3, INT8], size=[448], activation=["silu"])
@pytest.mark.parametrize("code_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [7, 448, 1500])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(
    code_format: CodeFormat, dtype: torch.dtype, size: int, activation: str
) -> None:
    gate_up = hostile(8, 2 * size, dtype)
    result = act_and_mul(gate_up, activation, code_format=code_format)
    plain = act_and_mul(gate_up, activation)
    assert torch.equal(result.nan_to_num(1e9), plain.nan_to_num(1e9))
    assert_codes_are_those_of_their_own_kernel(result, code_format)


def test_rows_that_no_program_can_hold_get_no_codes() -> None:
    gate_up = torch.randn(1, 2 * (MAX_INPUTS + 2))
    result = act_and_mul(gate_up, "silu", code_format=INT8)
    assert attached_codes(result, INT8) is None
    assert torch.equal(result, act_and_mul(gate_up, "silu"))


def test_codes_belong_to_the_very_result_and_have_one_format() -> None:
    normed = rms_norm(torch.randn(2, 64), torch.ones(64), 1e-5, code_format=INT8)
    assert attached_codes(normed, INT8) is not None
    for other in (normed[:1], normed.view(2, 64), normed + 1, normed.clone()):
        assert attached_codes(other, INT8) is None
    assert attached_codes(normed, E4M3) is attached_codes(normed, CodeFormat(torch.int8)) is None


def test_only_what_is_asked_for_is_computed() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    for fuses_quantization in (False, True):
        ops = TritonOps(fuses_quantization=fuses_quantization)
        ops.expect_codes("norm", INT8)
        of_norm, of_activation = ops.rms_norm(x, weight, 1e-5), ops.act_and_mul(x, "silu")
        assert (attached_codes(of_norm, INT8) is not None) is fuses_quantization
        assert attached_codes(of_activation, INT8) is None


QUANTIZED = [
    {"quantization": "int8", "quantization_activations": "int8"},
    {"quantization": "fp8"},
]


@pytest.mark.small(quantized=QUANTIZED[:1])
@pytest.mark.parametrize("quantized", QUANTIZED, ids=str)
def test_an_engine_has_the_same_tokens_with_a_quarter_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: dict[str, Any]
) -> None:
    """Left is what quantizes the output of attention, and what an LM head is given."""
    make_qwen3(tmp_path, num_hidden_layers=2)
    launched = Counter[str]()
    call = GridExecutor.__call__

    def count(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launched[self.fn.__name__] += 1
        call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 20, "device": "cpu"}
    options |= {"dtype": "bfloat16", "attention_backend": "triton", **quantized}
    found, counts = [], []
    for fused in (False, True):
        kernels = {"fused_quantization": fused}
        with LLM(tmp_path, **options, kernel_config=kernels) as llm:
            launched.clear()
            outputs = llm.generate([[1, 2, 3], [7] * 20], params, use_tqdm=False)
            counts.append(launched["_quantize_rows"] + launched["_quantize_groups"])
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]
    num_steps = launched["_store_kv"] // 2
    head = counts[0] // num_steps - 4 * 2
    assert counts == [num_steps * (4 * 2 + head), num_steps * (2 + head)] and head in (0, 1)
