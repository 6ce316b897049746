"""What lies behind a layer's window is given back: it may hold anything, and no backend reads it.

Blocks that no query of a row sees, and the dummy block, which stands for them in block tables, are
filled with NaN, as are the slots before the window in the block in which it begins. That changes no
bit of any answer.
"""

import pytest
import torch
from attention_step import BACKENDS, DECODES, FEW, Step, make_backend

from nanoserve.attention.interface import AttentionLayer
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.torch import TorchAttention

STEPS = {
    "rows of few tokens": DECODES + FEW,
    "chunks as well": [*DECODES, *FEW, (36, 100), (34, 34)],
}


@pytest.mark.small(kind=["auto", "int8"], window=[7], step=["chunks as well"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [1, 4, 7, 16])
@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_given_back_changes_no_bit(
    backend: str, kind: str, window: int, step: str, full_size: bool
) -> None:
    attention, cases = make_backend(backend), [(4, None), (16, 1.5)]
    # A kernel is compiled for each of them, for seconds.
    for block_size, soft_cap in cases if full_size else cases[kind == "int8" :][:1]:
        layer = AttentionLayer(4, 2, 16, 0.3, window, soft_cap)
        batch = Step(STEPS[step], layer, kind, block_size)
        clean = batch.attend(attention)
        assert clean.isfinite().all()
        batch.spoil()
        assert torch.equal(batch.attend(attention), clean)
        batch.give_back()
        assert torch.equal(batch.attend(attention), clean)


# A window of 8 lies in up to 3 blocks of 4; with 6 queries, 13 tokens in up to 4 or 5.
@pytest.mark.parametrize(("num_new", "most"), [(1, 3), (6, 5)])
def test_torch_reads_no_more_blocks_than_a_window_has(
    num_new: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the contexts are: 3 rows, whose windows begin in different blocks."""
    read, num_blocks = KVCache.read, []

    def counted(self: KVCache, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        num_blocks.append(block_ids.shape[-1])
        return read(self, block_ids, dtype)

    layer = AttentionLayer(4, 2, 16, 0.3, 8)
    batch = Step([(num_new, 400), (num_new, 33), (num_new, 1001)], layer, "auto", 4)
    monkeypatch.setattr(KVCache, "read", counted)
    batch.attend(TorchAttention())
    assert num_blocks and max(num_blocks) <= most
    assert len(num_blocks) == (1 if num_new == 1 else 3)  # rows of one token go together
