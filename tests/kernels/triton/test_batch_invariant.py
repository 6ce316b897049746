"""Kernels of `batch_invariant=True` on a GPU: each row as if it were alone, bit for bit."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import interpreter
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache, KVCacheSpec
from nanoserve.attention.torch import TorchAttention
from nanoserve.attention.triton import TritonAttention
from nanoserve.kernels.triton import paged_attention
from nanoserve.kernels.triton.experts import fused_experts
from nanoserve.kernels.triton.split_linear import fixed_tile_config, split_linear, tiled_linear
from nanoserve.kernels.triton.split_work import most_arrivals
from nanoserve.models.layers.experts import sum_of_experts
from nanoserve.models.layers.ops import TorchOps

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of a row's norm


@pytest.fixture(autouse=True)
def equal_rows() -> Iterator[None]:
    with interpreter.equal_rows():
        yield


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    errors = (found.double() - expected.double()).norm(dim=1)
    assert (errors <= TOLERANCE[found.dtype] * expected.double().norm(dim=1)).all(), errors


@pytest.mark.small(dtype=DTYPES[:2], inputs=[520])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [520, 1024, 33])
def test_products(inputs: int, dtype: torch.dtype, activation: str | None) -> None:
    outputs, num_rows = 72, fixed_tile_config(dtype).block_m + 5
    x = torch.randn(num_rows, inputs).to(DEVICE, dtype)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(DEVICE, dtype)
    together = tiled_linear(x, weight, activation)
    expected = x.double() @ weight.double().T
    if activation is not None:
        expected = TorchOps().act_and_mul(expected, activation)
    assert_near(together, expected)
    for first, last in ((3, 4), (num_rows - 1, num_rows), (7, num_rows)):
        part = tiled_linear(x[first:last].contiguous(), weight, activation)
        assert torch.equal(part, together[first:last])
    assert tiled_linear(x[:0], weight, activation).shape == (0, together.shape[1])


def test_products_that_are_split_do_depend_on_the_number_of_rows() -> None:
    """The comparison sees last bits."""
    arrivals = torch.zeros(most_arrivals(DEVICE), dtype=torch.int32, device=DEVICE)
    x, weight = (torch.randn(n, 1024, device=DEVICE) for n in (70, 64))
    together = split_linear(x, weight, arrivals)
    assert not torch.equal(split_linear(x[:1], weight, arrivals), together[:1])


@pytest.mark.small(dtype=DTYPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype) -> None:
    num_tokens, num_experts, top_k, hidden, size = 150, 4, 2, 48, 40
    x = torch.randn(num_tokens, hidden).to(DEVICE, dtype)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).to(DEVICE)
    scores = torch.rand(num_tokens, top_k, device=DEVICE)
    gate_up = (torch.randn(num_experts, 2 * size, hidden) * hidden**-0.5).to(DEVICE, dtype)
    down = (torch.randn(num_experts, hidden, size) * size**-0.5).to(DEVICE, dtype)

    def run(first: int, last: int) -> torch.Tensor:
        of_rows = x[first:last], ids[first:last], scores[first:last]
        return fused_experts(*of_rows, gate_up, down, one_tile_shape=True)

    together = run(0, num_tokens)
    assert_near(together, sum_of_experts(x.float(), ids, scores, gate_up.float(), down.float()))
    for first, last in ((9, 10), (149, 150), (1, 40)):
        assert torch.equal(run(first, last), together[first:last])


# (new tokens, context)
ROWS = [(1, 37), (1, 2), (1, 89), (2, 2), (5, 44), (3, 90), (70, 100), (34, 34)]
# (window, soft cap, query heads of a KV head, head_dim, block size)
SHAPES = [(None, None, 2, 16, 4), (7, None, 1, 24, 16), (30, 1.5, 4, 16, 3)]


@pytest.mark.small(dtype=[torch.float32], kind=["auto"], shape=SHAPES[2:])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_attention(
    kind: str, dtype: torch.dtype, shape: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "_SHARE_KEYS", 32)
    monkeypatch.setattr(paged_attention, "_num_multiprocessors", lambda device: 0)
    window, soft_cap, group, head_dim, block_size = shape
    layer = AttentionLayer(2 * group, 2, head_dim, head_dim**-0.5, window, soft_cap)
    blocks = [-(-context // block_size) for _, context in ROWS]
    order = (torch.randperm(sum(blocks)) + 1).int()
    tables = torch.zeros(len(ROWS), max(blocks), dtype=torch.int32)
    for row, own in enumerate(order.split(blocks)):
        tables[row, : len(own)] = own
    spec = KVCacheSpec.of_format(block_size, 2, head_dim, dtype, kind)
    (cache,) = spec.allocate(1, sum(blocks) + 1)
    kv = torch.randn(2, (sum(blocks) + 1) * block_size, 2, head_dim).to(dtype)
    cache.store(*kv, torch.arange(kv.shape[1], dtype=torch.int32))
    q = torch.randn(sum(n for n, _ in ROWS), 2 * group, head_dim).to(dtype)

    def attend(
        rows: list[tuple[int, int]], tables: torch.Tensor, backend: Any, q: torch.Tensor = q
    ) -> torch.Tensor:
        num_new, contexts = zip(*rows, strict=True)
        given = {
            "positions": torch.empty(0),
            "slot_mapping": torch.empty(0),
            "cu_seqlens_q": torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32),
            "context_lens": torch.tensor(contexts, dtype=torch.int32),
            "block_tables": tables,
        }
        metadata = AttentionMetadata(
            **{name: tensor.to(DEVICE) for name, tensor in given.items()},
            num_decode_rows=num_new.count(1),
            max_query_len=max(num_new),
            max_context_len=max(contexts),
        )
        scales = None if cache.scales is None else cache.scales.to(DEVICE)
        own = KVCache(cache.values.to(DEVICE), scales)
        with torch.inference_mode():
            return backend.attend(layer, q.to(DEVICE), own, metadata)

    invariant = TritonAttention(batch_invariant=True)
    together = attend(ROWS, tables, invariant)
    expected = attend(ROWS, tables, TorchAttention())
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(together, expected, rtol=tolerance, atol=tolerance)
    # The first, the last and another token of each row, as rows of their own.
    ends = np.cumsum([n for n, _ in ROWS])
    picked = [
        (row, i) for row, (n, _) in enumerate(ROWS) for i in sorted({0, max(0, n - 3), n - 1})
    ]
    ones = [(1, ROWS[row][1] - ROWS[row][0] + 1 + i) for row, i in picked]
    of_ones = tables[[row for row, _ in picked]]
    tokens = [ends[row] - ROWS[row][0] + i for row, i in picked]
    assert torch.equal(attend(ones, of_ones, invariant, q[tokens]), together[tokens])
    # Now with a program for each share, and partial results that are merged.
    merge = MagicMock(wraps=paged_attention.merge_shares_kernel)
    merge.__getitem__.side_effect = paged_attention.merge_shares_kernel.__getitem__
    monkeypatch.setattr(paged_attention, "merge_shares_kernel", merge)
    monkeypatch.setattr(paged_attention, "_num_multiprocessors", lambda device: 1 << 20)
    assert torch.equal(attend(ROWS, tables, invariant), together)
    assert torch.equal(attend(ones, of_ones, invariant, q[tokens]), together[tokens])
    assert merge.__getitem__.call_count == 2
    if dtype == torch.float32:  # the comparison sees last bits: other shares give others
        monkeypatch.setattr(paged_attention, "_SHARE_KEYS", 1 << 20)
        assert not torch.equal(attend(ROWS, tables, invariant), together)
