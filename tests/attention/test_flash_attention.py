"""The flash_attn backend against stand-ins with the signatures of flash-attn 2.8 and 3.

A stand-in holds its caller to what flash-attn asks for, and computes with plain torch.
"""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import LLM
from nanoserve.attention.flash import FlashAttention, FlashAttention3, check_flash_attention
from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.features.speculative.config import SpeculativeConfig
from nanoserve.worker import build_executor
from nanoserve.worker.build_executor import choose_attention_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PAGE = 256
Calls = list[tuple[str, dict[str, Any]]]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Causal, aligned at the end: q [n, heads, dim], k and v [context, kv_heads, dim].

    A query at p sees [p - window_size[0], p + window_size[1]], and all on a side where it is -1.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    n, context = len(q), len(k)
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(context - n, context)[:, None] - torch.arange(context)
    left, right = (context if size < 0 else size for size in window_size)
    hidden = (distance < 0) | (distance < -right) | (distance > left)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[length, kv_heads, dim] of one sequence."""
    assert cache.stride(-1) == 1
    return cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]


def check_table(table: torch.Tensor, num_rows: int) -> None:
    assert table.dtype == torch.int32 and table.shape[0] == num_rows and table.stride(-1) == 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """flash_attn's two functions; what they are called with is listed here."""
    made: Calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        made.append(("varlen", locals().copy()))
        ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        num_rows = len(ends_q) - 1
        check_table(block_table, num_rows)
        assert k.shape[1] % PAGE == 0
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and causal
        assert ends_q[0] == ends_k[0] == 0 and ends_q[-1] == len(q)
        out = []
        for row in range(num_rows):
            context = ends_k[row + 1] - ends_k[row]
            rows_q = q[ends_q[row] : ends_q[row + 1]]
            assert len(rows_q) <= max_seqlen_q and context <= max_seqlen_k
            keys, values = (pages(cache, block_table[row], context) for cache in (k, v))
            out.append(attend(rows_q, keys, values, softmax_scale, window_size, softcap))
        return torch.cat(out)

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
        alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        made.append(("kvcache", locals().copy()))
        assert q.dim() == 4 and cache_seqlens.dtype == torch.int32 and k is None and v is None
        assert len(cache_seqlens) == len(q) and k_cache.shape[1] % PAGE == 0
        check_table(block_table, len(q))
        out = []
        for row, length in enumerate(cache_seqlens.tolist()):
            keys, values = (pages(c, block_table[row], length) for c in (k_cache, v_cache))
            out.append(attend(q[row], keys, values, softmax_scale, window_size, softcap))
        return torch.stack(out)

    stand_in = install("flash_attn", monkeypatch)
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func
    stand_in.flash_attn_with_kvcache = flash_attn_with_kvcache
    return made


@pytest.fixture
def calls3(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The same for version 3, of which one function takes pages. Its decode rows are Triton's."""
    pytest.importorskip("triton")
    made: Calls = []

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
        cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        made.append(("kvcache", locals().copy()))
        ends = cu_seqlens_q.tolist()
        num_rows = len(ends) - 1
        check_table(page_table, num_rows)
        assert q.dim() == 3 and causal and k is None and v is None
        assert cu_seqlens_q.dtype == cache_seqlens.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous() and cache_seqlens.is_contiguous()
        assert ends[0] == 0 and ends[-1] == len(q) and len(cache_seqlens) == num_rows
        out = []
        for row, length in enumerate(cache_seqlens.tolist()):
            rows_q = q[ends[row] : ends[row + 1]]
            assert len(rows_q) <= max_seqlen_q
            keys, values = (pages(c, page_table[row], length) for c in (k_cache, v_cache))
            out.append(attend(rows_q, keys, values, softmax_scale, window_size, softcap))
        return torch.cat(out)

    stand_in = install("flash_attn_interface", monkeypatch)
    stand_in.flash_attn_with_kvcache = flash_attn_with_kvcache
    return made


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty package of that name."""
    stand_in = ModuleType(name)
    stand_in.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, stand_in)
    return stand_in


def random_batch(
    rng: np.random.Generator, rows: list[tuple[int, int]], page: int = PAGE
) -> tuple[AttentionMetadata, int]:
    """Rows of (new tokens, context); their blocks lie anywhere. Also returns how many there are."""
    num_new, contexts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    blocks = -(-contexts // page)
    tables = np.full((len(rows), blocks.max() + 1), 9999, dtype=np.int32)  # not to be followed
    order = rng.permutation(blocks.sum()) + 1
    for row, end in enumerate(np.cumsum(blocks)):
        tables[row, : blocks[row]] = order[end - blocks[row] : end]
    return AttentionMetadata(
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32),
        context_lens=torch.from_numpy(contexts),
        block_tables=torch.from_numpy(tables),
        num_decode_rows=int((num_new == 1).sum()),
        max_query_len=int(num_new.max()),
        max_context_len=int(contexts.max()),
    ), int(blocks.sum()) + 1


DECODES = [(1, 1), (1, 256), (1, 257), (1, 700)]
CHUNKS = [(5, 5), (256, 256), (3, 515)]
MIXED = [(1, 300), (1, 2), (7, 7), (40, 600), (2, 256)]
KINDS_OF_LAYERS = pytest.mark.parametrize(
    ("num_kv_heads", "window", "soft_cap"),
    [
        (1, None, None),
        pytest.param(2, None, None, marks=pytest.mark.size("full")),
        (4, None, None),
        (2, 1, None),
        (2, 2, None),
        pytest.param(4, 257, None, marks=pytest.mark.size("full")),
        (2, 300, 1.5),
        (1, None, 1.5),
        pytest.param(2, 800, None, marks=pytest.mark.size("full")),
    ],
)


@pytest.mark.parametrize(
    ("rows", "functions"),
    [
        pytest.param(DECODES, ["kvcache"], marks=pytest.mark.small(num_kv_heads=[4])),
        pytest.param(CHUNKS, ["varlen"], marks=pytest.mark.small(num_kv_heads=[4])),
        (MIXED, ["kvcache", "varlen"]),
    ],
)
@KINDS_OF_LAYERS
def test_the_batch_is_shared_between_the_two_functions(
    calls: Calls,
    rows: list[tuple[int, int]],
    functions: list[str],
    num_kv_heads: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    rng = np.random.default_rng(0)
    metadata, num_blocks = random_batch(rng, rows)
    layer = AttentionLayer(4, num_kv_heads, 8, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    backend = FlashAttention()
    shape = (2, num_blocks, num_kv_heads, PAGE, 8)
    kv_cache = KVCache(torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)))
    q = torch.from_numpy(
        rng.standard_normal((int(metadata.cu_seqlens_q[-1]), 4, 8), dtype=np.float32)
    )
    attended = backend.attend(layer, q, kv_cache, metadata)
    assert [name for name, _ in calls] == functions
    assert all(arguments["softmax_scale"] == 0.3 for _, arguments in calls)
    metadata.block_tables[metadata.block_tables == 9999] = 0
    expected = TorchAttention().attend(layer, q, kv_cache, metadata)
    assert attended.shape == q.shape and torch.allclose(attended, expected, atol=2e-6)


@pytest.mark.small(rows=[MIXED], page=[3])
@pytest.mark.parametrize("rows", [DECODES, CHUNKS, MIXED])
@pytest.mark.parametrize("page", [1, 3, 16, 256])
@KINDS_OF_LAYERS
def test_version_3_computes_chunks_and_triton_decode_rows(
    calls3: Calls,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[tuple[int, int]],
    page: int,
    num_kv_heads: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """In pages of any size; neither sees the other's rows, and the parts are in the batch's order.

    The interpreter would take minutes: Triton's backend is replaced by torch's, in part.
    """
    by_triton = torch_instead_of_triton(monkeypatch)
    rng = np.random.default_rng(0)
    metadata, num_blocks = random_batch(rng, rows, page)
    layer = AttentionLayer(4, num_kv_heads, 8, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    backend = FlashAttention3()
    shape = (2, num_blocks, num_kv_heads, page, 8)
    kv_cache = KVCache(torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)))
    num_tokens = int(metadata.cu_seqlens_q[-1])
    q = torch.from_numpy(rng.standard_normal((num_tokens, 4, 8), dtype=np.float32))
    attended = backend.attend(layer, q, kv_cache, metadata)
    num_decode_rows, num_rows = metadata.num_decode_rows, len(rows)
    assert [given.num_rows for given in by_triton] == [num_decode_rows] * (num_decode_rows > 0)
    assert all(given.max_query_len == 1 for given in by_triton)
    assert len(calls3) == (num_decode_rows < num_rows)
    for _, arguments in calls3:
        assert len(arguments["cache_seqlens"]) == num_rows - num_decode_rows
        assert arguments["k_cache"].shape == (num_blocks, page, num_kv_heads, 8)
        assert arguments["k_cache"].data_ptr() == kv_cache.values.data_ptr()  # a view, not a copy
    metadata.block_tables[metadata.block_tables == 9999] = 0
    expected = TorchAttention().attend(layer, q, kv_cache, metadata)
    assert attended.shape == q.shape and torch.allclose(attended, expected, atol=2e-6)


def torch_instead_of_triton(monkeypatch: pytest.MonkeyPatch) -> list[AttentionMetadata]:
    """Compute with torch what the backend gives to Triton's; returns what it was given."""
    from nanoserve.attention.triton import TritonAttention

    given: list[AttentionMetadata] = []

    def attend(self, layer, q, kv_cache, metadata):
        given.append(metadata)
        tables = metadata.block_tables.masked_fill(metadata.block_tables == 9999, 0)
        metadata = replace(metadata, block_tables=tables, scratch={})
        return TorchAttention().attend(layer, q, kv_cache, metadata)

    monkeypatch.setattr(TritonAttention, "attend", attend)
    return given


def test_version_3_and_triton_s_own_kernels_share_a_batch(calls3: Calls) -> None:
    """Interpreted: windows, a soft cap, a table for each group of layers, the merge in a kernel."""
    rng = np.random.default_rng(1)
    metadata, num_blocks = random_batch(rng, [(1, 30), (1, 2), (7, 7), (9, 40)], 16)
    other = torch.where(metadata.block_tables == 9999, 9999, num_blocks - metadata.block_tables).to(
        torch.int32
    )
    metadata.add_group(metadata.slot_mapping, other)
    kv_cache = KVCache(torch.from_numpy(rng.standard_normal((2, num_blocks, 2, 16, 16), "f4")))
    q = torch.from_numpy(rng.standard_normal((18, 4, 16), dtype=np.float32))
    for merges_in_kernel in (False, True):
        backend = FlashAttention3(merges_in_kernel=merges_in_kernel)
        for group, window, soft_cap in ((0, None, None), (1, 5, 1.5)):
            layer = AttentionLayer(4, 2, 16, 0.25, window, soft_cap)
            of_group = metadata.of_group(group)
            attended = backend.attend(layer, q, kv_cache, of_group)
            tables = of_group.block_tables.masked_fill(of_group.block_tables == 9999, 0)
            plain = replace(of_group, block_tables=tables, scratch={})
            expected = TorchAttention().attend(layer, q, kv_cache, plain)
            assert torch.allclose(attended, expected, atol=1e-5)


def test_rows_with_draft_tokens_are_triton_s(
    calls3: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to as many tokens as are verified at once, whose steps are captured in graphs, too."""
    by_triton = torch_instead_of_triton(monkeypatch)
    drafts = SpeculativeConfig("ngram", num_speculative_tokens=3, enforce_eager=False)
    config = EngineConfig("m", attention_backend="flash_attn", speculative_config=drafts)
    attention, _ = build_executor._backend("flash_attn3", config)
    layer = AttentionLayer(2, 1, 8, scale=0.3)
    for rows, is_triton_s in (([(1, 9), (4, 6), (2, 7)], True), ([(1, 9), (5, 6)], False)):
        metadata, num_blocks = random_batch(np.random.default_rng(0), rows, 16)
        kv_cache = KVCache(torch.randn(2, num_blocks, 1, 16, 8))
        attention.attend(
            layer, torch.randn(len(rows) * 7, 2, 8)[: metadata.cu_seqlens_q[-1]], kv_cache, metadata
        )
        assert by_triton.pop().num_rows == (len(rows) if is_triton_s else 1)
        assert bool(calls3) is not is_triton_s


def test_where_chunks_end_is_computed_once_for_all_layers(calls: Calls) -> None:
    metadata, num_blocks = random_batch(np.random.default_rng(0), [(1, 11), (2, 3), (3, 7)])
    backend, layer = FlashAttention(), AttentionLayer(2, 1, 8, scale=0.3)
    q, kv_cache = torch.randn(6, 2, 8), KVCache(torch.randn(2, num_blocks, 1, PAGE, 8))
    for _ in range(2):
        backend.attend(layer, q, kv_cache, metadata)
    first, second = (arguments for name, arguments in calls if name == "varlen")
    assert first["cu_seqlens_q"].tolist() == [0, 2, 5]
    assert first["cu_seqlens_k"].tolist() == [0, 3, 10]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert first[name] is second[name]


GOOD: dict[str, Any] = {"head_dim": 128, "dtype": torch.bfloat16, "device": CUDA}


@pytest.mark.parametrize(
    ("installed", "capability", "chosen"),
    [
        (["flash_attn", "flash_attn_interface"], (9, 0), "flash_attn3"),
        (["flash_attn_interface"], (9, 0), "flash_attn3"),
        (["flash_attn"], (9, 0), "flash_attn"),
        (["flash_attn", "flash_attn_interface"], (8, 0), "flash_attn"),
        (["flash_attn", "flash_attn_interface"], (10, 0), "flash_attn"),
        (["flash_attn_interface"], (8, 0), None),
    ],
)
def test_version_3_is_for_hopper_where_it_is_installed(
    installed: list[str],
    capability: tuple[int, int],
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "nanoserve.attention.flash.find_spec", lambda name: name in installed or None
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if chosen is None:
        with pytest.raises(ValueError, match=r"pip install 'nanoserve\[flash\]'"):
            check_flash_attention(256, **GOOD)
        return
    assert check_flash_attention(256, **GOOD) == chosen
    if chosen == "flash_attn":
        with pytest.raises(ValueError, match=r"256, not 16.*FlashAttention-3"):
            check_flash_attention(16, **GOOD)
    else:
        assert check_flash_attention(16, **GOOD) == check_flash_attention(7, **GOOD) == chosen
        for change in ({"head_dim": 264}, {"head_dim": 100}, {"dtype": torch.float32}):
            with pytest.raises(ValueError, match=r"head_dim|16-bit"):
                check_flash_attention(16, **GOOD | change)


def test_the_choice_is_the_backend_that_is_made(
    checkpoint: Path, calls3: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model_config = replace(ModelConfig.from_checkpoint(checkpoint), dtype="bfloat16")
    config = EngineConfig("m", attention_backend="flash_attn")
    name = choose_attention_backend(config, model_config, CUDA)
    attention, ops = build_executor._backend(name)
    assert type(attention) is FlashAttention3 and type(ops).__name__ == "TritonOps"
    assert attention.capturable


def test_what_flash_attn_cannot_do_is_refused_with_the_number(calls: Calls) -> None:
    good: dict[str, Any] = {"block_size": 512, "head_dim": 128, "dtype": torch.bfloat16}
    check_flash_attention(**good, device=CUDA)
    for change, message in (
        (
            {"block_size": 16},
            "multiple of 256, not 16; 'triton' and FlashAttention-3 support any block_size",
        ),
        ({"block_size": 384}, "384"),
        ({"head_dim": 264}, "264"),
        ({"head_dim": 100}, "100"),
        ({"dtype": torch.float32}, "float32"),
    ):
        with pytest.raises(ValueError, match=message):
            check_flash_attention(**good | change, device=CUDA)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, not device cpu"):
        check_flash_attention(**good, device=CPU)


@pytest.mark.skipif("flash_attn" in sys.modules, reason="flash-attn is installed")
def test_without_flash_attn_its_backend_says_what_to_install(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"pip install 'nanoserve\[flash\]'"):
        LLM(checkpoint, attention_backend="flash_attn", skip_tokenizer_init=True)
