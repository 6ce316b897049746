"""Torch's attention reads nothing of what its neighbours leave behind."""

import pytest
import torch

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.torch import TorchAttention

LAYER = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)


def attend(q: torch.Tensor, kv_cache: torch.Tensor, contexts: list[int]) -> torch.Tensor:
    lens = torch.tensor(contexts, dtype=torch.int32)
    metadata = AttentionMetadata(
        positions=lens - 1,
        slot_mapping=lens,
        cu_seqlens_q=torch.arange(len(contexts) + 1, dtype=torch.int32),
        cu_seqlens_k=lens,
        context_lens=lens,
        # The second row uses its first block only; the other ones are stale: the first row's.
        block_tables=torch.tensor([[1, 2, 3], [4, 2, 3]], dtype=torch.int32)[: len(contexts)],
        num_decode_rows=len(contexts),
        max_query_len=1,
        max_context_len=max(contexts),
    )
    return TorchAttention().attend(LAYER, q, kv_cache, metadata)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_one_sequence_stays_there(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 8).to(dtype)
    kv_cache = torch.randn(2, 5, 2, 4, 8).to(dtype)
    expected = attend(q, kv_cache, [11, 3])
    kv_cache[:, 1:4] = torch.nan  # the first row's, and behind the end of the second one's table
    kv_cache[:, 4, :, 3] = torch.nan  # what an owner before left in the second row's block
    actual = attend(q, kv_cache, [11, 3])
    assert actual[0].isnan().all()
    assert torch.equal(actual[1], expected[1])
