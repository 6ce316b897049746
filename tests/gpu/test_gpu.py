"""What only an NVIDIA GPU can show: kernels at full size, CUDA graphs, memory, no waiting.

    pytest -m gpu

Kernels are compared with float64 on fresh random inputs; the seed is in the message of a failure.
Engines run in float32, in which their tokens must be the same whatever computes them.
"""

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from count_replays import choices, count_replays, decode_graphs

pytest.importorskip("triton")

from no_waiting import no_waiting
from noise_kernel import KEYS, assert_noise_is_exact
from tiny_checkpoints import make_checkpoint, make_qwen3
from transformers import MixtralForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.attention.flash import FlashAttention, FlashAttention3
from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs, SampleInputs
from nanoserve.kernels.triton.act_and_mul import ACTIVATIONS, act_and_mul
from nanoserve.kernels.triton.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.triton.choose_tokens import choose_tokens, pack_settings
from nanoserve.kernels.triton.experts import fused_experts
from nanoserve.kernels.triton.paged_attention import paged_attention
from nanoserve.kernels.triton.split_work import most_arrivals
from nanoserve.kernels.triton.store_kv import store_kv
from nanoserve.models.layers.ops import TorchOps
from nanoserve.sampling.gumbel_noise import row_keys
from nanoserve.worker.kv_cache import kv_block_bytes
from nanoserve.worker.model_runner import Handle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
LONGEST = 5000  # tokens of a context
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
MIB = 2**20


@pytest.fixture
def seed() -> int:
    """A new one every time; also for torch's generators."""
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    return seed


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, torch.empty gives NaN and the largest integers: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_close(out: torch.Tensor, expected: torch.Tensor, seed: int, what: str = "") -> None:
    """The relative Frobenius error of `out` is small; `expected` is float64."""
    assert out.shape == expected.shape
    error = ((out.double() - expected).norm() / expected.norm()).item()
    # False for NaN, too.
    assert error < TOLERANCE[out.dtype], f"error {error} {what}, {out.dtype}, seed {seed}"


# --- attention ---


@dataclass
class AttentionBatch:
    q: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    sliding_window: int | None = None
    soft_cap: float | None = None

    def attend(self, arrivals: torch.Tensor | None = None) -> torch.Tensor:
        with poisoned_memory():
            return paged_attention(
                self.q,
                self.kv_cache,
                self.metadata.cu_seqlens_q,
                self.metadata.context_lens,
                self.metadata.block_tables,
                scale=self.q.shape[-1] ** -0.5,
                num_decode_rows=self.metadata.num_decode_rows,
                max_context_len=self.metadata.max_context_len,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                arrivals=arrivals,
            )

    def assert_right(self, out: torch.Tensor, seed: int) -> None:
        """Row by row: in a norm over all rows, those of long contexts would hardly count."""
        starts = self.metadata.cu_seqlens_q.tolist()
        for row, context in enumerate(self.metadata.context_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            expected = self.expected(row, tokens, context)
            what = f"in row {row}: {tokens.stop - tokens.start} tokens, context {context}"
            assert_close(out[tokens], expected, seed, what)

    def expected(self, row: int, tokens: slice, context: int) -> torch.Tensor:
        q, (k_cache, v_cache) = self.q[tokens].double(), self.kv_cache
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = k_cache.shape[1:3]
        query_positions = torch.arange(context - num_tokens, context, device=DEVICE)[:, None]
        window = self.sliding_window or context
        positions = torch.arange(_first_seen(num_tokens, context, window), context, device=DEVICE)
        blocks = self.metadata.block_tables[row][positions // block_size].long()
        k, v = (cache[blocks, :, positions % block_size] for cache in (k_cache, v_cache))
        hidden = (positions > query_positions) | (positions <= query_positions - window)
        out = torch.empty_like(q)
        group = num_heads // num_kv_heads
        for head in range(num_heads):
            keys, values = k[:, head // group].double(), v[:, head // group].double()
            scores = q[:, head] @ keys.T * head_dim**-0.5
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            out[:, head] = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values
        return out


def _first_seen(num_tokens: int, context: int, sliding_window: int | None) -> int:
    """The first position that a window of the row reaches."""
    return max(0, context - num_tokens + 1 - (sliding_window or context))


def make_batch(
    rows: list[tuple[int, int]],  # (query tokens, context), decode rows first
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    num_blocks: int | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionBatch:
    """NaN is in every slot that holds no token or is before all windows, and in block 0.

    Columns of block tables that are not used, or before all windows, name block 0.
    """
    blocks_of_row = [-(-context // block_size) for _, context in rows]
    num_blocks = num_blocks or sum(blocks_of_row) + 1
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    # The last blocks are taken first: in a large cache they are far out.
    free = (num_blocks - 1 - torch.randperm(sum(blocks_of_row))).int().to(DEVICE)
    block_tables = torch.zeros(len(rows), max(blocks_of_row) + 3, dtype=torch.int32, device=DEVICE)
    for row, (query_len, context) in enumerate(rows):
        blocks, free = free[: blocks_of_row[row]], free[blocks_of_row[row] :]
        first = _first_seen(query_len, context, sliding_window)
        used = slice(first // block_size, len(blocks))
        block_tables[row, used] = blocks[used]
        positions = torch.arange(first, context, device=DEVICE)
        index = (blocks[positions // block_size].long(), slice(None), positions % block_size)
        kv_cache[0][index] = randn(context - first, num_kv_heads, head_dim, dtype=dtype)
        kv_cache[1][index] = randn(context - first, num_kv_heads, head_dim, dtype=dtype)
    query_lens, context_lens = zip(*rows, strict=True)
    metadata = AttentionMetadata(
        positions=torch.empty(0, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.empty(0, dtype=torch.int32, device=DEVICE),  # all is stored already
        cu_seqlens_q=torch.tensor(
            [0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=DEVICE
        ),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        block_tables=block_tables,
        num_decode_rows=query_lens.count(1),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    q = randn(sum(query_lens), num_heads, head_dim, dtype=dtype)
    return AttentionBatch(q, kv_cache, metadata, sliding_window, soft_cap)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def randint(low: int, high: int) -> int:
    """low and high may both come."""
    return int(torch.randint(low, high + 1, ()))


def ragged_rows() -> list[tuple[int, int]]:
    """Decode rows, whole prompts, and chunks behind a prefix; contexts up to the longest."""
    decodes = [(1, randint(1, LONGEST)) for _ in range(12)]
    prompts = [(n, n) for n in (randint(2, LONGEST // 4) for _ in range(3))]
    chunks = [(n, n + randint(1, LONGEST - n)) for n in (randint(2, LONGEST // 8) for _ in "123")]
    return [(1, 1), (1, LONGEST), *decodes, *prompts, (2, LONGEST), *chunks]


HEAD_DIMS, GROUPS, BLOCK_SIZES = [64, 80, 96, 128, 256], [1, 2, 4, 8, 5], [16, 32, 256]
# Every head_dim in every dtype; groups and block sizes alternate, so that each meets each.
SHAPES = [
    (dtype, head_dim, GROUPS[(i + i // 5) % 5], BLOCK_SIZES[i % 3])
    for i, (dtype, head_dim) in enumerate(itertools.product(DTYPES, HEAD_DIMS))
]


@pytest.mark.parametrize("dtype, head_dim, group, block_size", SHAPES, ids=str)
def test_attention_of_ragged_mixed_batches(dtype, head_dim, group, block_size, seed: int) -> None:
    batch = make_batch(ragged_rows(), 2 * group, 2, head_dim, block_size, dtype)
    batch.assert_right(batch.attend(), seed)


@pytest.mark.parametrize("has_window, has_cap", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype, head_dim, group, block_size", SHAPES[::2], ids=str)
def test_attention_with_windows_and_soft_caps(
    dtype, head_dim, group, block_size, has_window: bool, has_cap: bool, seed: int
) -> None:
    sees = {"sliding_window": randint(1, LONGEST // 2) if has_window else None}
    sees["soft_cap"] = 3.0 if has_cap else None
    batch = make_batch(ragged_rows(), 2 * group, 2, head_dim, block_size, dtype, **sees)
    batch.assert_right(batch.attend(), seed)


@pytest.mark.parametrize("sliding_window", [1, 2, 16, 64, 65, 4096])
def test_attention_with_windows_of_special_sizes(sliding_window: int, seed: int) -> None:
    batch = make_batch(ragged_rows(), 16, 8, 128, 16, torch.bfloat16, sliding_window=sliding_window)
    batch.assert_right(batch.attend(), seed)


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1e30])
def test_soft_caps_hold_scores_of_any_size(factor: float, seed: int) -> None:
    batch = make_batch(ragged_rows(), 4, 2, 128, 16, torch.bfloat16, soft_cap=3.0)
    batch.q *= factor
    batch.assert_right(batch.attend(), seed)


@pytest.mark.parametrize("max_context_len", [LONGEST, 8 * LONGEST], ids=["exact", "as in a graph"])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 300])
@pytest.mark.parametrize("sliding_window", [None, 1000], ids=["all", "window"])
def test_attention_of_decode_rows(
    num_rows: int, max_context_len: int, sliding_window: int | None, seed: int
) -> None:
    """A graph is captured for the longest context that there may ever be."""
    rows = [(1, LONGEST)] + [(1, randint(1, LONGEST)) for _ in range(num_rows - 1)]
    batch = make_batch(rows, 16, 8, 128, 16, torch.bfloat16, sliding_window=sliding_window)
    batch.metadata.max_context_len = max_context_len
    batch.assert_right(batch.attend(), seed)


@pytest.mark.parametrize("num_rows", [1, 3, 64, 300])
def test_the_share_that_arrives_last_merges(num_rows: int, seed: int) -> None:
    """Whichever that is: many launches give the same bits, and leave the counters at zero."""
    rows = [(1, LONGEST)] + [(1, randint(1, LONGEST)) for _ in range(num_rows - 1)]
    batch = make_batch(rows, 16, 8, 128, 16, torch.bfloat16)
    arrivals = torch.zeros(most_arrivals(batch.q.device), dtype=torch.int32, device=DEVICE)
    out = batch.attend(arrivals)
    batch.assert_right(out, seed)
    for _ in range(100):
        assert torch.equal(batch.attend(arrivals), out)
    assert not arrivals.any()


@pytest.mark.parametrize("num_tokens", [1, 257])
def test_small_kernels_wait_for_the_kernel_before_them(num_tokens: int, seed: int) -> None:
    """A chain in which each needs what the one before has written; 100 times, with new values."""
    options = {"is_dependent": True}
    weight = randn(1024, dtype=torch.bfloat16)

    def chain(x: torch.Tensor, **options: bool) -> torch.Tensor:
        for _ in range(8):
            normed, total = add_rms_norm(x, x, weight, 1e-3, **options)
            gated = act_and_mul(torch.cat([normed, total], dim=1), "silu", **options)
            x = rms_norm(gated, weight, 1e-3, **options)
        return x

    for _ in range(100):
        x = randn(num_tokens, 1024, dtype=torch.bfloat16)
        assert torch.equal(chain(x, **options), chain(x))


def test_attention_of_a_long_prompt(seed: int) -> None:
    batch = make_batch([(LONGEST, LONGEST)], 16, 8, 128, 16, torch.bfloat16)
    batch.assert_right(batch.attend(), seed)


def test_attention_in_a_cache_of_more_than_2_31_elements(seed: int) -> None:
    num_blocks = 2**31 // (8 * 16 * 128) + 5000  # K alone has more
    needed = 2 * num_blocks * 8 * 16 * 128 * 2
    if torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    rows = [(1, 500), (1, 77), (40, 300)]
    batch = make_batch(rows, 16, 8, 128, 16, torch.bfloat16, num_blocks=num_blocks)
    batch.assert_right(batch.attend(), seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ["mixed", "decode", "chunks"])
@pytest.mark.parametrize("sliding_window, soft_cap", [(None, None), (1, None), (1000, 2.0)])
@pytest.mark.parametrize("version, block_size", [(2, 256), (3, 16), (3, 256)])
def test_flash_attn_agrees(
    version: int,
    block_size: int,
    rows: str,
    dtype: torch.dtype,
    sliding_window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    package = {2: "flash_attn", 3: "flash_attn_interface"}[version]
    pytest.importorskip(package, reason=f"flash-attn {version} is not installed")
    if version == 3 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    backend = {2: FlashAttention, 3: FlashAttention3}[version]()
    ragged = ragged_rows()
    chosen = {"mixed": ragged, "decode": ragged[:14], "chunks": ragged[14:]}[rows]
    sees = {"sliding_window": sliding_window, "soft_cap": soft_cap}
    batch = make_batch(chosen, 16, 8, 128, block_size, dtype, **sees)
    # Its tiles of K and V go past a context's end; the engine's cache begins with zeros.
    batch.kv_cache.nan_to_num_(0.0)
    layer = AttentionLayer(16, 8, 128, scale=128**-0.5, **sees)
    attended = backend.attend(layer, batch.q, KVCache(batch.kv_cache), batch.metadata)
    batch.assert_right(attended, seed)
    batch.assert_right(batch.attend(), seed)


# --- the small kernels ---


@pytest.mark.parametrize("is_wide", [False, True], ids=["weight alike", "float32 weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, size", [(1, 1024), (257, 1024), (33, 5120), (4099, 4096)])
def test_add_rms_norm(
    num_tokens: int, size: int, dtype: torch.dtype, is_wide: bool, seed: int
) -> None:
    x, residual = (randn(num_tokens, size, dtype=dtype) for _ in range(2))
    weight, eps = randn(size, dtype=torch.float32 if is_wide else dtype), 1e-3
    with poisoned_memory():
        normed, total = add_rms_norm(x, residual, weight, eps)
        alone = rms_norm(x, weight, eps)
    expected = x.double() + residual.double()
    assert_close(total, expected, seed)
    for actual, summed in ((normed, expected), (alone, x.double())):
        mean_square = summed.square().mean(dim=-1, keepdim=True)
        assert_close(actual, summed * (mean_square + eps).rsqrt() * weight.double(), seed)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, size", [(1, 3072), (257, 3072), (33, 80), (4099, 14336)])
def test_act_and_mul(
    num_tokens: int, size: int, dtype: torch.dtype, activation: str, seed: int
) -> None:
    gate_up = randn(num_tokens, 2 * size, dtype=dtype) * 3
    gate_up[:, 0] = -5e4  # exp(5e4) overflows
    with poisoned_memory():
        out = act_and_mul(gate_up, activation)
    assert_close(out, TorchOps().act_and_mul(gate_up.double(), activation), seed)


@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 3000])
@pytest.mark.parametrize("dtype, head_dim, group, block_size", SHAPES[::2], ids=str)
def test_store_kv(dtype, head_dim, group, block_size, num_tokens, has_norm, seed: int) -> None:
    num_kv_heads, max_positions = 3, 6000
    num_heads = group * num_kv_heads
    heads = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    # Gemma's weights are float32.
    norms = [randn(head_dim, dtype=d) if has_norm else None for d in (dtype, torch.float32)]
    angles = torch.rand(max_positions, head_dim // 2, device=DEVICE) * 2 * torch.pi
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.randint(max_positions, (num_tokens,), dtype=torch.int32, device=DEVICE)
    num_blocks = 2 * num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:num_tokens].int()
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    with poisoned_memory():
        q = store_kv(heads, positions, cos, sin, *norms, 1e-3, kv_cache, slots)

    expected = [*heads.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)]
    for i, weight in enumerate(norms):
        if weight is not None:
            mean_square = expected[i].square().mean(dim=-1, keepdim=True)
            expected[i] = expected[i] * (mean_square + 1e-3).rsqrt() * weight.double()
        c, s = (table[positions.long()].double().unsqueeze(1) for table in (cos, sin))
        first, second = expected[i].chunk(2, dim=-1)
        expected[i] = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    assert_close(q, expected[0], seed, "of q")
    index = (slots.long() // block_size, slice(None), slots.long() % block_size)
    assert_close(kv_cache[0][index], expected[1], seed, "of k")
    assert torch.equal(kv_cache[1][index], heads[:, -num_kv_heads:]), f"v, seed {seed}"
    num_written = kv_cache.isfinite().sum().item()
    assert num_written == 2 * num_tokens * num_kv_heads * head_dim, f"slots of others, seed {seed}"


@pytest.mark.parametrize("key", KEYS)
def test_noise_is_exact_to_a_millionth(key: int) -> None:
    """By the hardware's logarithm, which no interpreter has."""
    assert_noise_is_exact(key, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows, vocab_size", [(1, 151_936), (64, 151_936), (300, 2048), (5, 7)])
def test_choose_tokens(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int) -> None:
    """Every third row is greedy; of 16-bit logits many are equal, and the lowest id wins."""
    logits = randn(num_rows, vocab_size, dtype=dtype) * 4
    rng = np.random.default_rng(seed)
    num_slots = num_rows + 9
    slots = rng.permutation(num_slots)[:num_rows].astype(np.int32)
    positions = rng.integers(0, 40_000, num_rows).astype(np.int32)
    temperatures = np.where(slots % 3, rng.uniform(0.3, 1.5, num_slots)[slots], 0)
    temperatures = temperatures.astype(np.float32)
    seeds, streams = rng.integers(0, 2**64, num_rows, dtype=np.uint64), slots.astype(np.uint32) % 4
    settings = np.zeros((num_slots, 8), dtype=np.int32)
    for i, slot in enumerate(slots):
        settings[slot] = pack_settings(float(temperatures[i]), int(seeds[i]), int(streams[i]))
    on_device = (torch.from_numpy(x).to(DEVICE) for x in (slots, positions, settings))
    with poisoned_memory():
        token_ids = choose_tokens(logits, *on_device).cpu()
    assert token_ids.dtype == torch.int64 and token_ids.shape == (num_rows,)

    keys = row_keys(seeds, positions, streams).view(np.uint32)
    for row, token_id in enumerate(token_ids.tolist()):
        scores = logits[row].double().cpu().numpy()
        assert 0 <= token_id < vocab_size, f"row {row}, seed {seed}"
        if temperatures[row] == 0:
            assert token_id == scores.argmax(), f"greedy row {row}, seed {seed}"
        else:
            scores = scores / temperatures[row] - np.log(exponentials(keys[row], vocab_size))
            # Only a race that float32 cannot decide may have another winner.
            assert scores[token_id] > scores.max() - 1e-4, f"row {row}, seed {seed}"


def exponentials(key: np.uint32, vocab_size: int) -> np.ndarray:
    """The noise of `nanoserve.sampling.gumbel_noise` in float64, hashed by numpy's own integers."""
    x = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ key
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    u = np.minimum((x.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    return -np.log1p(-u)


# --- experts ---


def route(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Some experts have many tokens, and some have none."""
    popularity = torch.randn(num_experts, device=DEVICE) * 2
    return (popularity + torch.randn(num_tokens, num_experts, device=DEVICE)).topk(top_k).indices


def assert_sum_of_experts(
    out: torch.Tensor, arguments: dict[str, torch.Tensor], seed: int, first_expert: int = 0
) -> None:
    hidden, ids = arguments["hidden"].double(), arguments["expert_ids"]
    expected = torch.zeros_like(hidden)
    for here, (gate_up, down) in enumerate(
        zip(arguments["gate_up"], arguments["down"], strict=True)
    ):
        tokens, choices = (ids == first_expert + here).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = (hidden[tokens] @ gate_up.double().T).chunk(2, dim=-1)
            product = (gate * gate.sigmoid() * up) @ down.double().T
            weights = arguments["expert_weights"][tokens, choices, None].double()
            expected.index_add_(0, tokens, weights * product)
    assert_close(out, expected, seed, "of experts")


@pytest.mark.parametrize("first_expert, num_here", [(0, 16), (5, 3)], ids=["all", "a rank's"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 33, 64, 700, 3000])
@pytest.mark.parametrize("hidden_size, size", [(512, 192), (500, 72)], ids=str)
def test_experts(hidden_size, size, num_tokens, dtype, first_expert, num_here, seed: int) -> None:
    """Experts that no token chose have weights of NaN."""
    ids = route(num_tokens, top_k=3, num_experts=16)
    ids[0] = torch.tensor([1, 5, 6], device=DEVICE)  # or there might be nothing to do
    arguments = {
        "hidden": randn(num_tokens, hidden_size, dtype=dtype),
        "expert_ids": ids,
        "expert_weights": torch.rand(num_tokens, 3, device=DEVICE),
        "gate_up": randn(num_here, 2 * size, hidden_size, dtype=dtype) * hidden_size**-0.5,
        "down": randn(num_here, hidden_size, size, dtype=dtype),
    }
    here = torch.arange(first_expert, first_expert + num_here, device=DEVICE)
    for name in ("gate_up", "down"):
        arguments[name][~torch.isin(here, ids)] = torch.nan
    arguments["hidden"][~torch.isin(ids, here).any(dim=1)] = torch.nan  # tokens of other ranks
    with poisoned_memory():
        out = fused_experts(**arguments, first_expert=first_expert, num_experts=16)
    arguments["hidden"].nan_to_num_()
    assert_sum_of_experts(out, arguments, seed, first_expert)


@pytest.mark.parametrize("num_tokens", [4, 4000])
def test_experts_with_more_than_2_31_weights(num_tokens: int, seed: int) -> None:
    num_experts, hidden_size, size = 600, 2048, 1024
    needed = 3 * num_experts * hidden_size * size * 2
    if torch.cuda.mem_get_info()[0] < needed + 4 * 2**30:
        pytest.skip(f"needs {needed / 2**30 + 4:.0f} GiB of GPU memory")
    shape = (num_experts, 2 * size, hidden_size)
    gate_up = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02)
    shape = (num_experts, hidden_size, size)
    arguments = {
        "hidden": randn(num_tokens, hidden_size, dtype=torch.bfloat16),
        "expert_ids": num_experts - 1 - route(num_tokens, top_k=8, num_experts=80),
        "expert_weights": torch.rand(num_tokens, 8, device=DEVICE),
        "gate_up": gate_up,
        "down": torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(),
    }
    assert_sum_of_experts(fused_experts(**arguments), arguments, seed)


@pytest.mark.parametrize("num_tokens", [2, 100, 1000])
def test_experts_in_a_graph_follow_the_router(num_tokens: int, seed: int) -> None:
    arguments = {
        "hidden": randn(num_tokens, 256, dtype=torch.bfloat16),
        "expert_ids": route(num_tokens, top_k=2, num_experts=8),
        "expert_weights": torch.rand(num_tokens, 2, device=DEVICE),
        "gate_up": randn(8, 2 * 128, 256, dtype=torch.bfloat16) / 16,
        "down": randn(8, 256, 128, dtype=torch.bfloat16),
    }
    fused_experts(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # fails if anything waits for the GPU
        out = fused_experts(**arguments)
    for only in (None, 0, 7):
        ids = route(num_tokens, top_k=2, num_experts=8)
        if only is not None:  # and some other
            ids = torch.full_like(ids, only)
            ids[:, 1] = 3
        arguments["expert_ids"].copy_(ids)
        graph.replay()
        assert_sum_of_experts(out, arguments, seed)


# --- the engine ---

MAX_NUM_SEQS = 40  # graphs of 1, 2, 4, 8, 16, 32 and 40 rows
BATCH_SIZES = [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 39, 40, 41]
QUESTIONS = ["What is a KV cache?", "What is a block table?", "12 + 30 =", "什么是分块预填充？"]

open_float32 = partial(LLM, dtype="float32", max_num_seqs=MAX_NUM_SEQS, skip_tokenizer_init=True)
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def windowed_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose second layer has a window."""
    path = tmp_path_factory.mktemp("windowed")
    make_qwen3(path, use_sliding_window=True, sliding_window=50, max_window_layers=1)
    return path


@pytest.fixture(scope="module", params=["random", "windowed", "tiny-qwen3"])
def model(
    request: pytest.FixtureRequest, checkpoint: Path, windowed_checkpoint: Path
) -> tuple[str | Path, Prompts]:
    """A checkpoint and prompts for it; some prompts share their beginnings."""
    if request.param == "tiny-qwen3":
        with LLM("tiny-qwen3", device="cpu", num_kv_blocks=8) as llm:
            tokenizer = llm.engine.tokenizer
        asked = ([{"role": "user", "content": question}] for question in QUESTIONS)
        texts = [tokenizer.apply_chat_template(messages, True) for messages in asked]
        token_ids = [tokenizer.encode(text, False) for text in texts]
        return "tiny-qwen3", [token_ids[i % 4] + token_ids[i % 3][:i] for i in range(51)]
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 200, (51,), generator=generator).tolist()
    prompts = [torch.randint(300, (n,), generator=generator).tolist() for n in lengths]
    prompts = [prompts[0][: i % 3 * 50] + prompt for i, prompt in enumerate(prompts)]
    return {"random": checkpoint, "windowed": windowed_checkpoint}[request.param], prompts


def settings(num_requests: int, max_tokens: int = 24) -> list[SamplingParams]:
    """Greedy, seeded, and seeded with filters, in turns, of different lengths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95},
        {"temperature": 0, "repetition_penalty": 1.1, "logprobs": 2},
    ]
    return [
        SamplingParams(max_tokens=max_tokens - i % 7, ignore_eos=True, seed=i, **kinds[i % 4])
        for i in range(num_requests)
    ]


def tokens(llm: LLM, prompts: Prompts, params: list[SamplingParams] | None = None) -> Prompts:
    params = (params or settings(len(prompts)))[: len(prompts)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def cpu_tokens(model: tuple[str | Path, Prompts]) -> Prompts:
    path, prompts = model
    with open_float32(path, device="cpu", num_kv_blocks=2000) as llm:
        return tokens(llm, prompts)


OTHER_KERNELS = dict.fromkeys(("dependent_launch", "merge_in_attention", "split_products"), True)
OPTIONS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "mixed steps launched": {"capture_mixed_steps": False},
    "torch attention": {"attention_backend": "torch"},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "blocks of 256": {"block_size": 256},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool for few": {"num_kv_blocks": 40, "max_model_len": 400},
    "in turn": {"async_scheduling": False},
    "other kernels": {"kernel_config": OTHER_KERNELS},
    "other kernels, eager, in turn": {
        "kernel_config": OTHER_KERNELS,
        "enforce_eager": True,
        "async_scheduling": False,
    },
    "other kernels, sampling in graphs, in a pool for few": {
        "kernel_config": OTHER_KERNELS,
        "capture_sampling": True,
        "num_kv_blocks": 40,
        "max_model_len": 400,
    },
    "sampling in graphs": {"capture_sampling": True},
    "sampling in graphs, in turn": {"capture_sampling": True, "async_scheduling": False},
    "sampling in graphs in a pool for few": {
        "capture_sampling": True,
        "num_kv_blocks": 40,
        "max_model_len": 400,
    },
    "in turn, eager, chunks of 16": {
        "async_scheduling": False,
        "enforce_eager": True,
        "long_prefill_token_threshold": 16,
    },
    "in turn in a pool for few": {
        "async_scheduling": False,
        "num_kv_blocks": 40,
        "max_model_len": 400,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_a_cpu(name: str, model, cpu_tokens: Prompts) -> None:
    path, prompts = model
    options = {"num_kv_blocks": 2000} | OPTIONS[name]
    with open_float32(path, device="cuda", **options) as llm:
        pending: list[int] = []
        llm.engine.observers.append(
            lambda plan, batch, result, times: pending.append(batch.header.num_pending)
        )
        assert tokens(llm, prompts) == cpu_tokens
        assert (llm.stats.num_preemptions > 0) == (options["num_kv_blocks"] == 40)
        assert any(pending) is options.get("async_scheduling", True)


@pytest.mark.parametrize("capture_sampling", [False, True], ids=["", "sampling too"])
def test_graphs_give_the_tokens_of_eager_steps(capture_sampling: bool, model) -> None:
    """With batches around the borders between captured sizes."""
    path, prompts = model
    common = {"device": "cuda", "num_kv_blocks": 2000}
    params = settings(len(prompts))
    if capture_sampling:  # what asks for more than a graph can choose would keep the others out
        params = [kind for kind in settings(len(prompts) * 2) if kind.seed % 4 < 2]
    with (
        open_float32(path, enforce_eager=True, **common) as eager,
        open_float32(path, capture_sampling=capture_sampling, **common) as captured,
    ):
        device = captured.engine.executor.device
        assert not eager.engine.executor.device.programs
        sizes = count_replays(choices(device) if capture_sampling else decode_graphs(device))
        for num_requests in BATCH_SIZES:
            expected = tokens(eager, prompts[:num_requests], params)
            assert tokens(captured, prompts[:num_requests], params) == expected, num_requests
    assert set(sizes) == {1, 2, 4, 8, 16, 32, 40}


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        (
            Qwen3MoeForCausalLM,
            {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
        ),
        (MixtralForCausalLM, {"num_local_experts": 5, "sliding_window": None}),
    ],
)
def test_tokens_of_a_mixture_of_experts_are_those_of_a_cpu(
    architecture: type[PreTrainedModel], settings: dict[str, Any], enforce_eager, tmp_path: Path
) -> None:
    make_checkpoint(architecture, tmp_path, **settings)
    prompts = [[(i * i + 7 * j) % 300 for j in range(1 + 13 * i % 90)] for i in range(45)]
    with open_float32(tmp_path, device="cpu", num_kv_blocks=2000) as llm:
        expected = tokens(llm, prompts)
    options = {"enforce_eager": enforce_eager, "num_kv_blocks": 2000}
    with open_float32(tmp_path, device="cuda", **options) as llm:
        assert tokens(llm, prompts) == expected


def test_two_engines_take_turns(checkpoint: Path, tmp_path: Path) -> None:
    """Each has graphs, buffers and a pool of its own, and steps between the other's steps."""
    make_qwen3(tmp_path, seed=1)
    prompts = [[i + 1] * (5 * i + 1) for i in range(6)]
    paths = [checkpoint, tmp_path]
    expected = []
    for path in paths:
        with open_float32(path, device="cuda", num_kv_blocks=500) as llm:
            expected.append(tokens(llm, prompts))
    assert expected[0] != expected[1]

    engines = [open_float32(path, device="cuda", num_kv_blocks=500) for path in paths]
    for llm in engines:
        for i, (prompt, params) in enumerate(zip(prompts, settings(6), strict=True)):
            llm.engine.add_request(str(i), prompt, params)
    finished: list[dict[str, list[int]]] = [{}, {}]
    while any(llm.engine.has_unfinished_requests() for llm in engines):
        for llm, done in zip(engines, finished, strict=True):
            for output in llm.engine.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0].token_ids
    for llm in engines:
        llm.close()
    assert [[done[str(i)] for i in range(6)] for done in finished] == expected


@pytest.mark.parametrize("is_first", [True, False], ids=["the older", "the younger"])
def test_an_engine_outlives_another(checkpoint: Path, is_first: bool) -> None:
    """With explicit pools nothing is measured in between, and graphs are recorded back to back.

    What the engine that goes gives back is overwritten, so that whoever still reads it is seen.
    """
    prompts = [[i + 1] * (5 * i + 1) for i in range(MAX_NUM_SEQS)]
    with open_float32(checkpoint, device="cuda", num_kv_blocks=500) as llm:
        expected = tokens(llm, prompts)
    engines = [open_float32(checkpoint, device="cuda", num_kv_blocks=500) for _ in range(2)]
    goes, stays = engines if is_first else reversed(engines)
    assert [tokens(llm, prompts) for llm in engines] == [expected, expected]
    goes.close()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.full((free // 2,), 0xFF, dtype=torch.uint8, device=DEVICE)
    sizes = count_replays(decode_graphs(stays.engine.executor.device))
    assert tokens(stays, prompts) == expected and len(sizes) > 10
    del taken
    stays.close()


def test_flash_attn_generates() -> None:
    """In 16 bits, later tokens may differ by rounding; the first ones of a trained model do not."""
    if not any(map(find_spec, ("flash_attn", "flash_attn_interface"))):
        pytest.skip("flash-attn is not installed")
    first = {}
    for backend in ("triton", "flash_attn"):
        options = {"block_size": 256, "num_kv_blocks": 100, "attention_backend": backend}
        with LLM("tiny-qwen3", device="cuda", dtype="bfloat16", **options) as llm:
            asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
            greedy = SamplingParams(temperature=0, max_tokens=40)
            answers = llm.chat(asked, greedy, use_tqdm=False)
            first[backend] = [answer.outputs[0].token_ids[:3] for answer in answers]
    assert first["flash_attn"] == first["triton"]


# --- memory ---


@pytest.fixture
def allocated(checkpoint: Path) -> Callable[[], tuple[int, int]]:
    """Bytes of tensors and bytes reserved, after what is set up once in a process has been."""
    with LLM(checkpoint, device="cuda", num_kv_blocks=100, skip_tokenizer_init=True) as llm:
        tokens(llm, [[1, 2, 3]] * 4)
    del llm

    def measure() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    return measure


@pytest.mark.parametrize(
    "options",
    [{}, {"capture_mixed_steps": False}, {"enforce_eager": True}, {"capture_sampling": True}],
    ids=str,
)
def test_the_pool_fits_and_close_returns_the_memory(options, checkpoint, allocated) -> None:
    tensors, reserved = allocated()
    torch.cuda.reset_peak_memory_stats()
    _, total = torch.cuda.mem_get_info()
    share = 0.05
    llm = LLM(
        checkpoint,
        device="cuda",
        skip_tokenizer_init=True,
        gpu_memory_utilization=share,
        **options,
    )
    num_blocks = llm.engine.executor.num_kv_blocks
    pool = num_blocks * kv_block_bytes(llm.engine.config, llm.engine.model_config)
    assert pool > 0.5 * share * total or num_blocks == 2**20
    tokens(llm, [[7] * n for n in range(1, 200)])
    assert pool < torch.cuda.max_memory_allocated() - tensors < share * total
    llm.close()
    tensors_after, reserved_after = allocated()  # although `llm` is still there
    assert tensors_after <= tensors
    assert reserved_after - reserved <= 4 * MIB


def test_too_little_memory_is_told_and_leaves_nothing(checkpoint: Path, allocated) -> None:
    tensors, reserved = allocated()
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=1e-06 of .* GiB") as caught:
        LLM(checkpoint, device="cuda", skip_tokenizer_init=True, gpu_memory_utilization=1e-6)
    assert "no memory is left for KV blocks" in str(caught.value)
    del caught  # it holds the frames, and they hold the runner
    tensors_after, reserved_after = allocated()
    assert tensors_after <= tensors
    assert reserved_after - reserved <= 4 * MIB


# --- waiting ---


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["", "one step ahead"])
@pytest.mark.parametrize(
    "graphs", [{}, {"enforce_eager": True}, {"capture_sampling": True}], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decode_step_is_launched_without_waiting(
    temperature: float,
    graphs: dict[str, bool],
    async_scheduling: bool,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the model nor the sampler, nor the copies in and out.

    Rows of all kinds, and steps with prompts: tests/gpu/test_waiting_gpu.py.
    """
    options = {"async_scheduling": async_scheduling, "num_kv_blocks": 500}
    with open_float32(checkpoint, device="cuda", **options, **graphs) as llm:
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=1, ignore_eos=True)
        for i in range(5):
            llm.engine.add_request(str(i), [i + 1] * 20, params)
        for _ in range(3):  # prompts, and what is set up on first use
            llm.engine.step()
        executor = llm.engine.executor
        forward, sample, num_launched = executor.forward, executor.sample, []

        def watched_forward(batch: Batch, inputs: ForwardInputs) -> Handle:
            num_launched.append((batch.header.num_decode_rows, batch.header.num_pending))
            with no_waiting():
                return forward(batch, inputs)

        def watched_sample(handle: Handle, inputs: SampleInputs) -> None:
            with no_waiting():
                sample(handle, inputs)

        monkeypatch.setattr(executor, "forward", watched_forward)
        monkeypatch.setattr(executor, "sample", watched_sample)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
    assert num_launched == [(5, 5 if async_scheduling else 0)] * 9
