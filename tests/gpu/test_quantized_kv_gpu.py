"""K and V in 8 bits on an NVIDIA GPU: codes bit for bit, attention and answers near to a CPU's.

pytest -m gpu tests/gpu/test_quantized_kv_gpu.py
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from nanoserve import LLM, SamplingParams
from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.quantized_kv import quantize
from nanoserve.attention.torch import TorchAttention
from nanoserve.attention.triton import TritonAttention
from nanoserve.models.layers.triton_ops import TritonOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
KINDS = list(CODE_DTYPES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("num_tokens", [3, 700])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_torch(
    kind: str, dtype: torch.dtype, head_dim: int, num_tokens: int
) -> None:
    """Of heads that are neither normalised nor turned; no two divisions may round otherwise."""
    torch.manual_seed(0)
    heads = torch.randn(num_tokens, 8, head_dim).to(dtype)
    heads[0, 4, 1], heads[1, 6, 2], heads[2, 5] = torch.nan, torch.inf, 0
    slots = torch.randperm(1024)[:num_tokens].int()
    codes = torch.zeros(2, 64, 2, 16, head_dim, dtype=CODE_DTYPES[kind], device="cuda")
    cache = KVCache(codes, torch.zeros(codes.shape[:-1], device="cuda"))
    rotary = SimpleNamespace(
        cos=torch.ones(1, head_dim // 2, device="cuda"),
        sin=torch.zeros(1, head_dim // 2, device="cuda"),
    )
    metadata = SimpleNamespace(positions=(slots * 0).cuda(), slot_mapping=slots.cuda())
    TritonOps().norm_rotate_store(heads.cuda(), rotary, (None, None), cache, metadata)
    blocks, offsets = slots.long() // 16, slots.long() % 16
    for which, x in enumerate(heads[:, 4:].split(2, dim=1)):
        wanted_codes, wanted_scales = quantize(x, CODE_DTYPES[kind])
        assert torch.equal(cache.values[which].cpu()[blocks, :, offsets], wanted_codes)
        found = cache.scales[which].cpu()[blocks, :, offsets]
        torch.testing.assert_close(found, wanted_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [[(1, 3000), (1, 7), (1, 1500)], [(1, 900), (300, 1000)]])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_torch(
    kind: str, dtype: torch.dtype, head_dim: int, rows: list[tuple[int, int]]
) -> None:
    """In float32 on the CPU, over the same codes."""
    torch.manual_seed(0)
    layer = AttentionLayer(8, 2, head_dim, head_dim**-0.5)
    columns = [-(-context // 16) for _, context in rows]
    tables = torch.zeros(len(rows), max(columns), dtype=torch.int32)
    order = torch.randperm(sum(columns)).int() + 1
    for row, blocks in enumerate(order.split(columns)):
        tables[row, : len(blocks)] = blocks
    cache = KVCache(*quantize(torch.randn(2, sum(columns) + 1, 2, 16, head_dim), CODE_DTYPES[kind]))
    num_new = torch.tensor([0, *(n for n, _ in rows)], dtype=torch.int32)
    q = torch.randn(int(num_new.sum()), 8, head_dim)

    def attend(backend: str, device: str, dtype: torch.dtype) -> torch.Tensor:
        metadata = AttentionMetadata(
            positions=torch.empty(0),
            slot_mapping=torch.empty(0),
            cu_seqlens_q=num_new.cumsum(0, dtype=torch.int32).to(device),
            context_lens=torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            num_decode_rows=sum(n == 1 for n, _ in rows),
            max_query_len=max(n for n, _ in rows),
            max_context_len=max(c for _, c in rows),
        )
        there = KVCache(cache.values.to(device), cache.scales.to(device))
        attention = {"torch": TorchAttention, "triton": TritonAttention}[backend]()
        return attention.attend(layer, q.to(device, dtype), there, metadata)

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    wanted = attend("torch", "cpu", torch.float32)
    for backend in ("triton", "torch"):
        found = attend(backend, "cuda", dtype).cpu().float()
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_new", [1, 2, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_its_number(
    kind: str, dtype: torch.dtype, head_dim: int, num_new: int
) -> None:
    """As V of a token that is all that there is to see: its weight is 1. As K against a query that
    has one number, where the next token's code is another: the score is what it should be."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes != 128] if kind == "int8" else codes[(codes & 127) != 127]
    numbers = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()
    codes, largest = codes.view(CODE_DTYPES[kind]), 448 if kind == "fp8" else 127
    num_rows = -(-len(codes) // head_dim)
    padded = F.pad(codes, (0, num_rows * head_dim - len(codes))).view(num_rows, head_dim)
    wanted = F.pad(numbers, (0, padded.numel() - len(codes))).view(num_rows, head_dim)
    # Each row has num_new tokens, whose V are all the same.
    columns = -(-num_new // 16)
    values = torch.zeros(2, num_rows * columns + 1, 1, 16, head_dim, dtype=codes.dtype)
    values[1, 1:] = padded.repeat_interleave(columns, 0)[:, None, None]
    cache = KVCache(values.cuda(), torch.full(values.shape[:-1], 0.25).cuda())
    ends = torch.arange(num_rows + 1, dtype=torch.int32) * num_new
    metadata = AttentionMetadata(
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        cu_seqlens_q=ends.cuda(),
        context_lens=torch.full((num_rows,), num_new, dtype=torch.int32, device="cuda"),
        block_tables=torch.arange(1, num_rows * columns + 1, dtype=torch.int32, device="cuda").view(
            num_rows, columns
        ),
        num_decode_rows=num_rows if num_new == 1 else 0,
        max_query_len=num_new,
        max_context_len=num_new,
    )
    layer = AttentionLayer(2, 1, head_dim, 1.0)
    attention = TritonAttention(longest_cut=8)
    q = torch.zeros(num_rows * num_new, 2, head_dim, dtype=dtype, device="cuda")
    found = attention.attend(layer, q, cache, metadata).float().cpu()
    found = found.view(num_rows, num_new, 2, head_dim)
    assert wanted.abs().max() == largest and wanted.unique().numel() >= 253 - (kind == "fp8")
    # 16 bits of bfloat16 have 8 of a mantissa: enough for each of them. Sums of 100 may round.
    tolerance = 0 if num_new == 1 else 1e-2
    exact = (wanted / 4)[:, None, None].expand_as(found)
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_new", [1, 2, 100])
def test_every_code_of_k_gives_its_score(kind: str, dtype: torch.dtype, num_new: int) -> None:
    """A query sees all codes as K of as many tokens, and V tells their weights apart: V is one of
    the first half of the numbers, in order, and 0 of the others."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes != 128] if kind == "int8" else codes[(codes & 127) != 127]
    numbers = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()
    one = {"int8": 1, "fp8": 7 << 3}[kind]
    num_tokens = len(codes) + num_new
    values = torch.zeros(2, 1 + -(-num_tokens // 16), 1, 16, 128, dtype=CODE_DTYPES[kind])
    flat = values.view(2, -1, 128)[:, 16:]  # block after block, from the first on
    flat[0, : len(codes), 5] = codes.view(CODE_DTYPES[kind])
    chosen = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))
    for d, tokens in enumerate(chosen.split(2)):  # each dimension of V sees two of the tokens
        flat[1, tokens, d] = one
    cache = KVCache(values.cuda(), torch.ones(values.shape[:-1]).cuda())
    metadata = AttentionMetadata(
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        cu_seqlens_q=torch.tensor([0, num_new], dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device="cuda"),
        block_tables=torch.arange(1, values.shape[1], dtype=torch.int32, device="cuda")[None],
        num_decode_rows=int(num_new == 1),
        max_query_len=num_new,
        max_context_len=num_tokens,
    )
    q = torch.zeros(num_new, 1, 128, dtype=dtype, device="cuda")
    q[:, :, 5] = 1
    layer = AttentionLayer(1, 1, 128, 1 / 64)
    attention = TritonAttention(longest_cut=8)
    found = attention.attend(layer, q, cache, metadata).double().cpu()[:, 0]
    for row in range(num_new):
        scores = F.pad(numbers.double() / 64, (0, row + 1))
        weights = scores.softmax(0)
        wanted = torch.stack([weights[tokens].sum() for tokens in chosen.split(2)])
        torch.testing.assert_close(found[row, : len(wanted)], wanted, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_a_cpu(kind: str, enforce_eager: bool) -> None:
    questions = ["What is a KV cache?", "What is a block table?", "What is a prefix cache?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = []
    for device in ("cpu", "cuda"):
        options = {"kv_cache_dtype": kind, "num_kv_blocks": 200, "enforce_eager": enforce_eager}
        with LLM("tiny-qwen3", dtype="float32", device=device, **options) as llm:
            outputs = llm.chat(messages, params, use_tqdm=False)
        answers.append([output.outputs[0].text for output in outputs])
    assert answers[0] == answers[1]
