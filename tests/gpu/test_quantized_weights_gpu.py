"""Quantized weights on an NVIDIA GPU: products against float64, answers against a CPU's.

pytest -m gpu tests/gpu/test_quantized_weights_gpu.py
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.kernels.triton import quantized_linear
from nanoserve.kernels.triton.grouped_linear import grouped_product, pack_groups
from nanoserve.kernels.triton.quantized_linear import scaled_product
from nanoserve.kernels.triton.quantized_rows import GROUP_SIZES, quantize_rows
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import RowParallelLinear
from nanoserve.models.quantization.gpu_method import QuantizedLinearMethod
from nanoserve.models.quantization.online import quantize_fp8
from nanoserve.models.quantization.schemes import Scheme
from nanoserve.worker.cuda import Cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HAS_E4M3 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_e4m3 = pytest.mark.skipif(not HAS_E4M3, reason="needs compute capability 8.9")
ROWS = [1, 16, 17, 100, 128, 129, 1000]
KINDS = ["int8", "int4", pytest.param("fp8", marks=needs_e4m3)]


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (1032, 333)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "code_dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_e4m3)], ids=str
)
def test_products_of_codes(
    code_dtype: torch.dtype, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    """Sums of int8 are exact, so what differs is rounded once; those of e4m3 lose a few bits."""
    torch.manual_seed(0)
    weight, scale = quantize_rows(torch.randn(outputs, inputs, device="cuda"), code_dtype)
    for num_rows in ROWS:
        x, x_scale = quantize_rows(torch.randn(num_rows, inputs, device="cuda"), code_dtype)
        found = scaled_product(x, x_scale, weight, scale, dtype).double()
        wanted = (x.double() @ weight.double().T) * x_scale.double()[:, None] * scale.double()
        tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        if code_dtype != torch.int8:
            tolerance = max(tolerance, 1e-3)
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert (error <= tolerance).all(), (num_rows, error.max())


@needs_e4m3
@pytest.mark.parametrize("has_scaled_mm", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(9216, 3072), (12288, 4096), (1024, 3072)])
def test_layers_of_e4m3_in_a_graph(
    inputs: int, outputs: int, has_scaled_mm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model's sizes, of which cuBLAS refuses some: whatever it takes, all are right."""
    torch.manual_seed(0)

    def refuses(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(quantized_linear, "_least_rows", {})
    device = torch.device("cuda", torch.cuda.current_device())
    if not has_scaled_mm:
        monkeypatch.setattr(torch, "_scaled_mm", refuses)
    method = QuantizedLinearMethod(Scheme(8, is_fp8=True), device, torch.bfloat16)
    context = LayerContext(dtype=torch.bfloat16, device=device, linear_method=method)
    layer = RowParallelLinear(inputs, outputs, context)
    method.fill(layer, "weight", quantize_fp8(torch.randn(outputs, inputs, device=device)))
    layer.process_after_loading()
    form = layer.form
    if not has_scaled_mm:
        assert form.scaled_mm_from == quantized_linear.NEVER
    print(f"torch._scaled_mm of {inputs} inputs: from {form.scaled_mm_from} rows on")
    cuda = Cuda(device)
    for num_rows in (1, 16, 17, 127, 128, 256, 257, 300, 513, 2048):
        x = torch.randn(num_rows, inputs, device=device).bfloat16()
        replay, found = cuda.capture(lambda x=x: layer(x), cuda.graph_pool())
        x.copy_(torch.randn_like(x))
        replay()
        codes, scale = quantize_rows(x, torch.float8_e4m3fn)
        wanted = (codes.double() @ form.codes.double().T) * scale.double()[:, None]
        wanted *= form.scale.double()
        error = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert (error <= 8e-3).all(), (num_rows, error.max())
    cuda.close()


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (1032, 333)])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_products_of_codes_in_groups(group_size: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    weight, scale = quantize_rows(torch.randn(outputs, inputs, device="cuda"), torch.int8)
    for num_rows in ROWS:
        x = torch.randn(num_rows, inputs, device="cuda")
        codes, scales = quantize_rows(x, torch.int8, group_size=group_size)
        each = scales.double().repeat_interleave(group_size, dim=1)[:, :inputs]
        assert torch.equal(codes, (x / each.float()).round().to(torch.int8))
        found = scaled_product(codes, scales, weight, scale, torch.float32, group_size)
        wanted = (codes.double() * each) @ (weight.double() * scale.double()[:, None]).T
        assert ((found - wanted).norm(dim=1) <= 1e-6 * wanted.norm(dim=1)).all(), num_rows


@pytest.mark.parametrize("group_size", [None, *GROUP_SIZES])
def test_rows_of_int8_do_not_depend_on_their_number(group_size: int | None) -> None:
    torch.manual_seed(0)
    weight, scale = quantize_rows(torch.randn(640, 1024, device="cuda"), torch.int8)
    x = torch.randn(300, 1024, device="cuda")
    x, x_scale = quantize_rows(x, torch.int8, group_size=group_size)

    def product(num_rows: int) -> torch.Tensor:
        some, scales = x[:num_rows], x_scale[:num_rows]
        return scaled_product(some, scales, weight, scale, torch.bfloat16, group_size)

    together = product(300)
    for num_rows in ROWS[:-1]:
        assert torch.equal(product(num_rows), together[:num_rows])


@pytest.mark.parametrize("num_rows", [1, 200])
def test_products_wait_for_the_kernel_before_them(num_rows: int) -> None:
    """A chain in which each needs what the one before has written; 100 times, with new values."""
    torch.manual_seed(0)
    weight, scale = quantize_rows(torch.randn(1024, 1024, device="cuda"), torch.int8)
    packed = pack_groups(
        torch.randint(-8, 8, (1024, 1024), dtype=torch.int8, device="cuda"),
        torch.rand(1024, 32, device="cuda") / 100,
        bits=4,
    )

    def chain(x: torch.Tensor, **options: bool) -> torch.Tensor:
        for group_size in (None, 32, 64):
            codes, scales = quantize_rows(x, torch.int8, group_size=group_size, **options)
            x = scaled_product(codes, scales, weight, scale, x.dtype, group_size, **options)
            x = grouped_product(x, packed, **options)
        return x

    for _ in range(100):
        x = torch.randn(num_rows, 1024, device="cuda").bfloat16()
        assert torch.equal(chain(x, is_dependent=True), chain(x))


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    "quantized",
    [
        {"quantization": "int8", "quantization_activations": "int8"},
        pytest.param({"quantization": "fp8"}, marks=needs_e4m3),
    ],
    ids=str,
)
def test_codes_of_norms_and_activations_change_no_token(
    quantized: dict[str, str], enforce_eager: bool
) -> None:
    questions = ["What is a KV cache?", "What is a block table?", "12 + 30 ="]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=1)
    options: dict[str, Any] = {"device": "cuda", "num_kv_blocks": 200, **quantized}
    answers = []
    for kernels in (
        {},
        {"fused_quantization": True},
        {"fused_quantization": True, "dependent_launch": True},
    ):
        common = options | {"enforce_eager": enforce_eager, "kernel_config": kernels}
        with LLM("tiny-qwen3", dtype="bfloat16", **common) as llm:
            outputs = llm.chat(messages, params, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_of_e4m3_weights_and_floats(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = quantize_fp8(torch.randn(333, 1152, device="cuda"))
    packed = pack_groups(*matrix.operands())
    for num_rows in ROWS:
        x = torch.randn(num_rows, 1152, device="cuda").to(dtype)
        wanted = x.double() @ matrix.dequantize().double().T
        tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        error = (grouped_product(x, packed).double() - wanted).norm(dim=1)
        assert (error <= tolerance * wanted.norm(dim=1)).all(), num_rows


@pytest.mark.parametrize("code_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_are_the_nearest(code_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 4100).bfloat16()
    x[3, 4099], x[4, 0], x[5] = torch.nan, torch.inf, 0
    codes, scales = (t.cpu() for t in quantize_rows(x.cuda(), code_dtype))
    rest = [row for row in range(500) if row not in (3, 4)]
    assert scales[[3, 4]].isnan().all()
    quotients = x[rest].float() / scales[rest, None]
    if code_dtype == torch.int8:
        quotients = quotients.round()
    assert torch.equal(codes[rest].float(), quotients.to(code_dtype).float())


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (4, 16)])
def test_products_of_groups(bits: int, group: int, dtype: torch.dtype, has_offset: bool) -> None:
    torch.manual_seed(0)
    for inputs, outputs in ((4096, 6144), (1152, 333)):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        codes = torch.randint(low, high, (outputs, inputs), dtype=torch.int8, device="cuda")
        scale = torch.randn(outputs, inputs // group, device="cuda") / 50
        matrix = QuantizedMatrix(codes, scale, scale * 2 if has_offset else None, bits=bits)
        packed = pack_groups(*matrix.operands())
        for num_rows in ROWS:
            x = torch.randn(num_rows, inputs, device="cuda").to(dtype)
            wanted = x.double() @ matrix.dequantize().double().T
            tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
            error = (grouped_product(x, packed).double() - wanted).norm(dim=1)
            assert (error <= tolerance * wanted.norm(dim=1)).all(), num_rows


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_near_those_of_a_cpu(kind: str, enforce_eager: bool) -> None:
    """Activations of int8 are a CPU's integers, and so are the tokens; others' are not."""
    questions = ["What is a KV cache?", "What is a block table?", "What is a prefix cache?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = []
    options = {"num_kv_blocks": 200, "enforce_eager": enforce_eager, "dtype": "float32"}
    integers = {"quantization": "int8", "quantization_activations": "int8"}
    kinds = (integers, integers) if kind == "int8" else ({}, {"quantization": kind})
    for device, chosen in zip(("cpu", "cuda"), kinds, strict=True):
        with LLM("tiny-qwen3", device=device, **chosen, **options) as llm:
            outputs = llm.chat(messages, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    same = sum(a[:8] == b[:8] for a, b in zip(*answers, strict=True))
    assert same == 3 if kind == "int8" else same >= 1, answers
    if kind == "int8":
        assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_and_the_step_ahead_change_nothing(kind: str) -> None:
    messages = [[{"role": "user", "content": f"{n} + 30 ="}] for n in range(20)]
    params = SamplingParams(temperature=0, max_tokens=20)
    answers = []
    for options in ({}, {"enforce_eager": True, "async_scheduling": False}):
        common = {"dtype": "float32", "num_kv_blocks": 400, "quantization": kind}
        with LLM("tiny-qwen3", device="cuda", **common | options) as llm:
            outputs = llm.chat(messages, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same == 20 if kind == "int8" else same >= 17
