"""Attention whose V is the first numbers of K, as in multi-head latent attention, against float64.

Slots that no token was written to hold NaN, and unused columns of block tables point to any block.
"""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache, KVCacheSpec
from nanoserve.worker.build_executor import _backend

BACKENDS = [name for name in ("torch", "numba", "triton") if name == "torch" or find_spec(name)]
BLOCK_SIZE, HEAD_DIM, VALUE_DIM = 4, 28, 20
# (new tokens, context): decode rows, a whole prompt, chunks, and one longer than a piece of numba.
ROWS = [(1, 1), (1, 19), (1, 4), (1, 33), (2, 2), (17, 17), (5, 21), (40, 44)]


def stored(
    kind: str, num_heads: int, rows: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[torch.Tensor, KVCache, AttentionMetadata, torch.Tensor]:
    """Queries, a cache that has their keys, the batch, and the keys of each row as they are read.

    The keys are [sum of contexts, HEAD_DIM], float64.
    """
    torch.manual_seed(0)
    num_new, contexts = zip(*rows, strict=True)
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    spec = KVCacheSpec.of_format(BLOCK_SIZE, 1, HEAD_DIM, dtype, kind)
    spec = replace(spec, num_stored=1)
    (cache,) = spec.allocate(1, sum(blocks) + 1)
    assert cache.values.nbytes <= (sum(blocks) + 1) * spec.block_bytes
    (cache.values if cache.scales is None else cache.scales).fill_(torch.nan)
    tables = torch.randint(sum(blocks) + 1, (len(rows), max(blocks) + 1), dtype=torch.int32)
    free = iter((torch.randperm(sum(blocks)) + 1).tolist())
    keys = torch.randn(sum(contexts), 1, HEAD_DIM).to(dtype)
    slots = []
    for row, context in enumerate(contexts):
        for column in range(blocks[row]):
            tables[row, column] = next(free)
        at = torch.arange(context)
        slots.append(tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    cache.store(keys, None, torch.cat(slots))
    read = cache.read(torch.cat(slots) // BLOCK_SIZE, dtype)[0]
    read = read[torch.arange(len(keys)), 0, torch.cat(slots) % BLOCK_SIZE]
    metadata = AttentionMetadata(
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        num_decode_rows=num_new.count(1),
        max_query_len=max(num_new),
        max_context_len=max(contexts),
    )
    q = torch.randn(sum(num_new), num_heads, HEAD_DIM).to(dtype)
    return q, cache, metadata, read.double()


def expected(q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Attention of ROWS, [num_tokens, num_heads, VALUE_DIM], in float64."""
    found, first, first_key = [], 0, 0
    for num_new, context in ROWS:
        k = keys[first_key : first_key + context]
        scores = q[first : first + num_new].double().transpose(0, 1) @ k.T * layer.scale
        hidden = torch.arange(context - num_new, context)[:, None] < torch.arange(context)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        found.append((weights @ k[:, :VALUE_DIM]).transpose(0, 1))
        first, first_key = first + num_new, first_key + context
    return torch.cat(found)


# Numba compiles each pair of types for seconds.
@pytest.mark.small(
    case=[("torch", "auto"), ("torch", "fp8"), ("numba", "auto")],
    dtype=["float32"],
    num_heads=[6],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [(name, kind) for name in BACKENDS for kind in ("auto", "int8", "fp8")], ids=str
)
@pytest.mark.parametrize("num_heads", [1, 6, 16, 40])
def test_values_are_a_part_of_keys(case: tuple[str, str], dtype: str, num_heads: int) -> None:
    name, kind = case
    layer = AttentionLayer(num_heads, 1, HEAD_DIM, 0.2, value_dim=VALUE_DIM)
    q, cache, metadata, keys = stored(kind, num_heads, ROWS, getattr(torch, dtype))
    attended = _backend(name)[0].attend(layer, q, cache, metadata)
    assert attended.shape == (len(q), num_heads, VALUE_DIM) and attended.dtype == q.dtype
    tolerance = {"float32": 3e-6, "bfloat16": 2e-2}[dtype]
    found, wanted = attended.double(), expected(q, keys, layer)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs the package: pip install triton")
@pytest.mark.small(num_shares=[2], kind=["auto"], num_heads=[6])
@pytest.mark.parametrize("num_heads", [6, 20])
@pytest.mark.parametrize("kind", ["auto", "int8"])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 9])
def test_keys_in_shares_and_rows_counted_on_the_device(
    num_shares: int, kind: str, num_heads: int
) -> None:
    """As in a graph of mixed steps: tensors are longer than the step, and have anything there."""
    from nanoserve.kernels.triton.latent_attention import latent_attention

    q, cache, metadata, keys = stored(kind, num_heads, ROWS, torch.float32)
    tokens, rows, anything = len(q), len(ROWS), torch.full((3,), 2**30, dtype=torch.int32)
    tables, layer = metadata.block_tables, AttentionLayer(num_heads, 1, HEAD_DIM, 0.2)
    attended = latent_attention(
        torch.cat((q, torch.full((5, num_heads, HEAD_DIM), torch.nan))),
        cache.values,
        torch.cat((metadata.cu_seqlens_q, anything)),
        torch.cat((metadata.context_lens, anything)),
        torch.cat((tables, anything[:, None].expand(-1, tables.shape[1]))),
        scale=layer.scale,
        value_dim=VALUE_DIM,
        max_context_len=99,
        num_shares=num_shares,
        k_scales=cache.scales,
        row_counts=torch.tensor([rows, 4], dtype=torch.int32),
    )
    wanted = expected(q, keys, layer)
    torch.testing.assert_close(attended[:tokens].double(), wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("name", BACKENDS[1:])
def test_a_cache_of_another_layout_is_rejected(name: str) -> None:
    q, cache, metadata, _ = stored("auto", 6, ROWS, torch.float32)
    attention = _backend(name)[0]
    with pytest.raises(ValueError, match=r"\[2, (blocks|\.\.\.)"):
        attention.attend(AttentionLayer(6, 1, HEAD_DIM, 0.2), q, cache, metadata)
    layer = AttentionLayer(6, 1, HEAD_DIM, 0.2, value_dim=HEAD_DIM + 1)
    with pytest.raises(ValueError, match=r"value_dim=29 must be"):
        attention.attend(layer, q, cache, metadata)
