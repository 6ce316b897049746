"""Sinks, a score of each head that is in the softmax's sum only, in every backend.

The reference is a softmax in float64 over a row's scores and the sink, whose column is dropped.
"""

from dataclasses import replace

import pytest
import torch
from attention_step import BACKENDS, Step, make_backend

from nanoserve.attention.flash import FlashAttention, _scores
from nanoserve.attention.interface import AttentionBackend, AttentionLayer
from nanoserve.attention.torch import TorchAttention

# (new tokens, context)
DECODES, FEW = [(1, 37), (1, 2)], [(2, 2), (5, 44)]
ROWS = [*DECODES, *FEW, (20, 41)]
# Far below all scores, among them, and far above.
SINKS = torch.tensor([-60.0, 0.5, 2.0, 60.0])


def step(
    kind: str = "auto",
    window: int | None = None,
    soft_cap: float | None = None,
    rows: list[tuple[int, int]] = ROWS,
    block_size: int = 4,
) -> Step:
    layer = AttentionLayer(4, 2, 16, 0.3, window, soft_cap, sinks=SINKS.clone())
    return Step(rows, layer, kind, block_size)


def reference(batch: Step) -> torch.Tensor:
    layer, out, starts = batch.layer, [], batch.starts.tolist()
    for row, (num_new, context) in enumerate(batch.rows):
        kv = batch.cache.read(batch.tables[row], torch.float32).double()
        kv = kv.transpose(1, 2).flatten(2, 3)[:, :, :context].repeat_interleave(2, dim=1)
        q = batch.q[starts[row] : starts[row + 1]].double().transpose(0, 1)
        scores = q @ kv[0].mT * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        distance = torch.arange(context - num_new, context)[:, None] - torch.arange(context)
        hidden = (distance < 0) | (distance >= (layer.sliding_window or context))
        sinks = layer.sinks.double()[:, None, None].expand(-1, num_new, 1)
        scores = torch.cat([scores.masked_fill(hidden, -torch.inf), sinks], dim=-1)
        out.append((scores.softmax(dim=-1)[..., :-1] @ kv[1]).transpose(0, 1))
    return torch.cat(out)


def assert_right(batch: Step, backend: AttentionBackend) -> torch.Tensor:
    found = batch.attend(backend)
    torch.testing.assert_close(found.double(), reference(batch), rtol=0, atol=2e-5)
    return found


@pytest.mark.small(kind=["int8"], window=[7], soft_cap=[None])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_are_in_the_sum_only(
    backend: str, kind: str, window: int | None, soft_cap: float | None
) -> None:
    """In decode rows, rows of few tokens that are cut into shares, and chunks."""
    attention = make_backend(backend)
    assert attention.supports_sinks
    for rows in (ROWS, DECODES + FEW):
        found = assert_right(step(kind, window, soft_cap, rows), attention)
        assert found[:, 3].abs().max() < 1e-9  # nearly all of the weight is the sink's


@pytest.mark.small(num_shares=[3], window=[20], merges_in_kernel=[False])
@pytest.mark.parametrize("merges_in_kernel", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_shares", [2, 3, 8])
def test_a_sink_counts_once_in_rows_cut_into_shares(
    num_shares: int,
    window: int | None,
    merges_in_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a query sees no key of the share that has the first tile of its row."""
    pytest.importorskip("triton")
    from nanoserve.attention.triton import TritonAttention
    from nanoserve.kernels.triton import paged_attention

    monkeypatch.setattr(paged_attention, "_num_shares", lambda *args: num_shares)
    attention = TritonAttention(longest_cut=64, merges_in_kernel=merges_in_kernel)
    for rows in ([(1, 130), (1, 3), (1, 100)], [(1, 50), (7, 90), (11, 100)]):
        batch = step(window=window, rows=rows, block_size=16)
        assert_right(batch, attention)


@pytest.mark.small(kind=["auto"])
@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_a_sink_counts_once_in_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program for all shares of a row, and with one for each, to the bit."""
    pytest.importorskip("triton")
    from nanoserve.attention.triton import TritonAttention
    from nanoserve.kernels.triton import paged_attention

    monkeypatch.setattr(paged_attention, "_SHARE_KEYS", 32)
    attention, results = TritonAttention(batch_invariant=True), []
    for num_multiprocessors in (0, 1 << 20):
        monkeypatch.setattr(
            paged_attention, "_num_multiprocessors", lambda _, n=num_multiprocessors: n
        )
        results.append(assert_right(step(kind), attention))
    assert torch.equal(*results)


@pytest.mark.small(backend=["numba"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_without_weight_change_nothing(backend: str) -> None:
    attention, batch = make_backend(backend), step(window=7, rows=DECODES + FEW)
    batch.layer = replace(batch.layer, sinks=None)
    without = batch.attend(attention)
    batch.layer = replace(batch.layer, sinks=torch.full((4,), -torch.inf))
    torch.testing.assert_close(batch.attend(attention), without, rtol=0, atol=1e-6)
    if backend != "torch":  # which computes layers with sinks in other operations
        assert torch.equal(batch.attend(attention), without)


@pytest.mark.small(backend=["torch", "numba"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_that_is_no_number_is_not_hidden(backend: str) -> None:
    batch = step(rows=DECODES)
    batch.layer.sinks[1] = torch.nan
    out = batch.attend(make_backend(backend))
    assert out[:, 1].isnan().all() and out[:, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(4, dtype=torch.bfloat16)])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_sinks_of_another_form_are_rejected(backend: str, sinks: torch.Tensor) -> None:
    batch = step(rows=DECODES)
    batch.layer = replace(batch.layer, sinks=sinks)
    with pytest.raises(ValueError, match=r"sinks must be .*4"):
        batch.attend(make_backend(backend))


def test_flash_attention_rejects_sinks() -> None:
    assert TorchAttention.supports_sinks and not FlashAttention.supports_sinks
    batch = step(rows=[(2, 5)])
    with pytest.raises(ValueError, match=r"flash_attn.*sinks"):
        _scores(batch.layer)
