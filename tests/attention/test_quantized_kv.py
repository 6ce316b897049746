"""K and V in 8 bits: codes and scales against what their definition says, and all backends' against
each other; attention against float64.

Slots that no token was written to have a scale of NaN, and the block tables of decode rows point
far outside behind their context.
"""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache, KVCacheSpec
from nanoserve.attention.quantized_kv import SMALLEST_SCALE, dequantize, quantize
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.norm import RMSNorm
from nanoserve.models.layers.ops import rotate
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.worker.build_executor import _backend

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
KINDS = list(CODE_DTYPES)
CODE_OF_ONE = {"int8": 1, "fp8": 7 << 3}
BACKENDS = [name for name in ("torch", "numba", "triton") if name == "torch" or find_spec(name)]
# At the small size, numba's float32 with int8 only: each pair is compiled for seconds.
BACKENDS_AND_KINDS = [
    pytest.param(
        backend, kind, marks=[pytest.mark.size("full")] * (backend == "numba" and kind == "fp8")
    )
    for backend in BACKENDS
    for kind in KINDS
]
# Every finite number of 8 bits, from its definition: 0 to 7 have no exponent of their own.
E4M3 = np.array(
    [
        (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    ]
)


def heads_of_all_sizes(num_heads: int = 400, head_dim: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_heads, head_dim, generator=generator)
    x *= torch.logspace(-30, 30, num_heads)[:, None]
    return x * torch.logspace(0, -6, head_dim)  # all exponents of e4m3, and less


def test_no_value_is_wrong_by_more_than_half_a_step() -> None:
    x = heads_of_all_sizes()
    codes, scales = quantize(x, torch.int8)
    wanted = x.double().abs().amax(-1) / 127
    torch.testing.assert_close(scales.double(), wanted, rtol=1e-7, atol=0)
    error = (codes.double() * scales.double()[:, None] - x.double()).abs()
    assert (error <= scales.double()[:, None] * (0.5 + 1e-5)).all()
    assert codes.abs().amax(-1).eq(127).all()
    assert dequantize(codes, scales).dtype == torch.float32


def test_e4m3_takes_the_nearest_there_is() -> None:
    x = heads_of_all_sizes()
    codes, scales = quantize(x, torch.uint8)
    wanted = x.double().abs().amax(-1) / 448
    torch.testing.assert_close(scales.double(), wanted, rtol=1e-7, atol=0)
    asked = (x.double() / scales.double()[:, None]).numpy()
    found = (dequantize(codes, scales).double() / scales.double()[:, None]).numpy()
    nearest = np.abs(np.abs(asked)[..., None] - E4M3).min(axis=-1)
    np.testing.assert_allclose(np.abs(found - asked), nearest, rtol=1e-4, atol=1e-4)
    as_they_are = dequantize(codes, torch.ones(len(codes))).double().abs().numpy()
    assert np.isin(as_they_are, E4M3).all() and as_they_are.max() == 448


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(kind: str) -> None:
    x = torch.randn(6, 8)
    x[1] = 0.0
    x[2, 3], x[3, 4], x[4, 5] = torch.nan, torch.inf, -torch.inf
    x[5] = 1e-45  # the smallest there is, of which a 127th is 0
    values = dequantize(*quantize(x, CODE_DTYPES[kind]))
    assert values[0].isfinite().all() and values[2:5].isnan().all()
    assert values[1].eq(0).all() and values[5].abs().max() < 1e-37


@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_a_cache_is_laid_out_and_read_in_blocks(kind: str) -> None:
    spec = KVCacheSpec.of_format(4, 2, 6, torch.bfloat16, kind)
    assert spec.has_scales == (kind != "auto")
    assert spec.cache_key == {"auto": "bfloat16", "fp8": "fp8_e4m3"}.get(kind, kind)
    layers = spec.allocate(3, 5)
    tensors = [x for one in layers for x in (one.values, one.scales) if x is not None]
    assert sum(x.nbytes for x in tensors) == 3 * 5 * spec.block_bytes
    assert spec.block_bytes == 2 * 2 * 4 * (6 * 2 if kind == "auto" else 6 + 4)
    layers[1].fill_(0.25)
    some = layers[1].read(torch.tensor([4, 1, 1]), torch.bfloat16)
    assert some.shape == (2, 3, 2, 4, 6) and some.dtype == torch.bfloat16
    assert some.eq(0.25).all()
    assert layers[2].read(torch.arange(5), torch.bfloat16).eq(0).all()


@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_what_is_stored_is_read(kind: str) -> None:
    """Whole numbers, which each format has: block by block, of rows of tables as well."""
    (cache,) = KVCacheSpec.of_format(4, 2, 6, torch.float32, kind).allocate(1, 5)
    k, v = torch.randint(-7, 8, (2, 9, 2, 6)).float()
    k[..., 0] = v[..., 0] = {"auto": 8, "int8": 127, "fp8": 448}[kind]  # so the scale is 1
    slots = torch.randperm(20)[:9].int()
    cache.store(k, v, slots)
    wanted = torch.zeros(2, 5, 2, 4, 6)
    for token, slot in enumerate(slots.tolist()):
        wanted[:, slot // 4, :, slot % 4] = torch.stack((k[token], v[token]))
    assert torch.equal(cache.read(torch.arange(5), torch.float32), wanted)
    tables = torch.tensor([[3, 0, 1], [4, 4, 2]], dtype=torch.int32)
    assert torch.equal(cache.read(tables, torch.float32), wanted[:, tables.long()])


# ---------------------------------------------------------------- storing


def stored(backend: str, kind: str, step: Any) -> tuple[torch.Tensor, KVCache]:
    """q, and a cache of two blocks of 16."""
    _, ops = _backend(backend)
    head_dim = step.heads.shape[-1]
    codes = torch.zeros(2, 2, 2, 16, head_dim, dtype=CODE_DTYPES[kind])
    cache = KVCache(codes, torch.full(codes.shape[:-1], torch.nan))
    with torch.inference_mode():
        if ops.norm_rotate_store is not None:
            q = ops.norm_rotate_store(step.heads, step.rotary, step.norms, cache, step)
            return q, cache
        q, k, v = step.heads.split([3, 2, 2], dim=1)  # as the model's forward does it
        if step.norms[0] is not None:
            q, k = step.norms[0](q), step.norms[1](k)
        cos, sin = step.rotary.cos[step.positions], step.rotary.sin[step.positions]
        cache.store(rotate(k, cos, sin), v, step.slot_mapping)
        return rotate(q, cos, sin), cache


def random_step(dtype: torch.dtype, num_tokens: int, is_plain: bool, head_dim: int = 24) -> Any:
    """Three query heads and two KV heads; a plain step has neither norms nor rotation."""
    torch.manual_seed(num_tokens)
    heads = torch.randn(num_tokens, 3 + 2 + 2, head_dim)
    heads *= torch.logspace(-3, 3, num_tokens)[:, None, None]
    rotary = RotaryEmbedding(RopeConfig(), head_dim, 99, LayerContext(dtype))
    norms = [RMSNorm(head_dim, 1e-2, LayerContext(dtype)) for _ in "qk"]
    for norm in norms:
        norm.weight.data.copy_(torch.randn(head_dim))
    positions = torch.randint(99, (num_tokens,), dtype=torch.int32)
    return SimpleNamespace(
        heads=heads.to(dtype),
        rotary=rotary,
        norms=(None, None) if is_plain else tuple(norms),
        positions=torch.zeros_like(positions) if is_plain else positions,
        slot_mapping=torch.randperm(32)[:num_tokens].int(),
    )


@pytest.mark.small(dtype=[torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "kind"), BACKENDS_AND_KINDS)
def test_codes_are_the_same_bit_for_bit(backend: str, kind: str, dtype: torch.dtype) -> None:
    """Of heads that nothing is done to before they are stored; NaN and infinities as well."""
    step = random_step(dtype, 9, is_plain=True)
    step.heads[3, 4, 5], step.heads[5, 6, 7], step.heads[6, 5] = torch.nan, -torch.inf, 0
    q, cache = stored(backend, kind, step)
    assert torch.equal(q, step.heads[:, :3])
    blocks, offsets = step.slot_mapping // 16, step.slot_mapping % 16
    for which, x in enumerate(step.heads[:, 3:].split(2, dim=1)):
        codes, scales = quantize(x, CODE_DTYPES[kind])
        assert torch.equal(cache.values[which][blocks, :, offsets], codes)
        found = cache.scales[which][blocks, :, offsets]
        torch.testing.assert_close(found, scales, rtol=0, atol=0, equal_nan=True)
        assert found.isnan().sum() == 1
    assert (~cache.scales.isnan()).sum() == 9 * 2 * 2 - 2  # and no other slot was written to


@pytest.mark.parametrize(("backend", "kind"), BACKENDS_AND_KINDS)
def test_what_lies_between_two_codes_goes_to_the_even_one(backend: str, kind: str) -> None:
    numbers = torch.arange(128.0) if kind == "int8" else torch.from_numpy(E4M3).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    step = random_step(torch.float32, 2, is_plain=True, head_dim=256)
    # The largest number is a code, too: the scale is 1.
    step.heads[0] = torch.cat([halves, -halves, numbers[-1:].expand(256 - 2 * len(halves))])
    step.heads[1] = torch.cat([numbers, -numbers, numbers[-1:].expand(256 - 2 * len(numbers))])
    _, cache = stored(backend, kind, step)
    blocks, offsets = step.slot_mapping // 16, step.slot_mapping % 16
    assert cache.scales[:, blocks, :, offsets].eq(1).all()
    codes = torch.arange(len(numbers)) % 128
    evens = torch.where(codes[1:] % 2 == 0, codes[1:], codes[:-1])
    for found, wanted in zip(cache.values[0][blocks, 0, offsets], (evens, codes), strict=True):
        found, negative = found[: len(wanted)].long(), found[len(wanted) : 2 * len(wanted)].long()
        assert torch.equal(found, wanted)
        assert torch.equal(negative, -wanted if kind == "int8" else wanted + 128)


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_numba_knows_every_number_of_e4m3() -> None:
    from numba import njit

    from nanoserve.kernels.cpu.attention_tiles import add_values

    @njit
    def add_token(codes: np.ndarray, one: np.ndarray, sums: np.ndarray) -> None:
        """Of weight and scale one."""
        at = codes.ctypes.data
        given = at, one.ctypes.data, 1, len(codes), at
        add_values(1, (one[0], codes[0]), (sums.ctypes.data, 0), (one.ctypes.data, 0), given)

    for sign in (0, 128):
        out = np.zeros(127, dtype=np.float32)
        add_token(np.arange(127, dtype=np.uint8) + np.uint8(sign), np.ones(1, np.float32), out)
        np.testing.assert_array_equal(out, -E4M3 if sign else E4M3)


@pytest.mark.small(num_tokens=[9])
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize(("backend", "kind"), BACKENDS_AND_KINDS)
def test_keys_are_stored_normalised_and_rotated(backend: str, kind: str, num_tokens: int) -> None:
    """Float sums differ in their last bits, so here and there a code is the next one."""
    step = random_step(torch.float32, num_tokens, is_plain=False)
    q, cache = stored(backend, kind, step)
    cos, sin = step.rotary.cos[step.positions], step.rotary.sin[step.positions]
    wanted_q, k, v = step.heads.split([3, 2, 2], dim=1)
    wanted_q, k = (
        rotate(norm(x), cos, sin) for norm, x in zip(step.norms, (wanted_q, k), strict=True)
    )
    torch.testing.assert_close(q, wanted_q, rtol=1e-5, atol=1e-5)
    blocks, offsets = step.slot_mapping // 16, step.slot_mapping % 16
    for found, x in zip(cache.read(torch.arange(2), torch.float32), (k, v), strict=True):
        largest = x.abs().amax(-1, keepdim=True)
        most = largest / 254 if kind == "int8" else x.abs() / 16 + largest / 448 / 1024
        assert ((found[blocks, :, offsets] - x).abs() <= 1.001 * most).all()


# ---------------------------------------------------------------- attention


def metadata_of(rows: list[tuple[int, int]], tables: torch.Tensor) -> AttentionMetadata:
    """`rows` are (new tokens, context), those of one token first."""
    num_new, contexts = zip(*rows, strict=True)
    return AttentionMetadata(
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        num_decode_rows=num_new.count(1),
        max_query_len=max(num_new),
        max_context_len=max(contexts),
    )


def attend_in_float64(
    layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """q [n, num_heads, head_dim], the last of the tokens of k and v [num_kv_heads, length, ...]."""
    group, n, length = layer.num_heads // layer.num_kv_heads, len(q), k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.mT * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
    distance = torch.arange(length - n, length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (layer.sliding_window or length))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def random_batch(
    layer: AttentionLayer, kind: str, rows: list[tuple[int, int]], block_size: int
) -> tuple[torch.Tensor, KVCache, AttentionMetadata, Callable[..., torch.Tensor]]:
    """q, the cache, the metadata, and a function that attends to what the cache was made from,
    or with `is_coded` to what its codes and scales say, in float64."""
    blocks = [-(-context // block_size) for _, context in rows]
    free = iter((torch.randperm(sum(blocks)) + 1).tolist())
    shape = (2, sum(blocks) + 1, layer.num_kv_heads, block_size, layer.head_dim)
    codes = torch.randint(100, shape).to(CODE_DTYPES[kind])
    cache = KVCache(codes, torch.full(shape[:-1], torch.nan))
    is_decode = [n == 1 for n, _ in rows]
    tables = torch.zeros(len(rows), max(blocks) + 1, dtype=torch.int32)
    tables[is_decode] = 2**30
    q = torch.randn(sum(n for n, _ in rows), layer.num_heads, layer.head_dim)
    contexts = []
    for row, (_, context) in enumerate(rows):
        x = torch.randn(2, layer.num_kv_heads, context, layer.head_dim)
        x *= torch.logspace(-1, 1, context)[:, None]  # a scale of another token would be seen
        row_codes, row_scales = quantize(x, CODE_DTYPES[kind])
        for column, start in enumerate(range(0, context, block_size)):
            tables[row, column] = block = next(free)
            length = min(block_size, context - start)
            filled = slice(start, start + length)
            cache.values[:, block, :, :length] = row_codes[:, :, filled]
            cache.scales[:, block, :, :length] = row_scales[:, :, filled]
        contexts.append((x, dequantize(row_codes, row_scales)))

    def expected(is_coded: bool) -> torch.Tensor:
        ends = np.cumsum([0, *(n for n, _ in rows)])
        return torch.cat(
            [
                attend_in_float64(layer, q[ends[row] : ends[row + 1]], *context[is_coded])
                for row, context in enumerate(contexts)
            ]
        )

    return q, cache, metadata_of(rows, tables), expected


@pytest.mark.small(case=[1])  # with a window, a soft cap, and heads that share a KV head
@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize(("backend", "kind"), BACKENDS_AND_KINDS)
def test_attention(backend: str, kind: str, case: int) -> None:
    rng = np.random.default_rng(case)
    torch.manual_seed(case)
    num_kv_heads, group = int(rng.integers(1, 4)), case % 4 + 1
    head_dim, block_size = int(rng.choice([8, 24, 64])), int(rng.choice([1, 4, 16, 32]))
    window = [None, int(rng.integers(1, 40))][case % 3 == 1]
    soft_cap = [None, 1.5][case % 4 == 1]
    layer = AttentionLayer(
        num_kv_heads * group, num_kv_heads, head_dim, 0.5 * head_dim**-0.5, window, soft_cap
    )
    rows = [(1, int(n)) for n in rng.integers(1, 70, rng.integers(1, 5))] + [(5, 5), (3, 40)]
    if backend == "torch":
        rows = [*rows[-2:], (2, 2)]
    q, cache, metadata, expected = random_batch(layer, kind, rows, block_size)
    with torch.inference_mode():
        actual = _backend(backend)[0].attend(layer, q, cache, metadata)
    torch.testing.assert_close(actual.double(), expected(is_coded=True), rtol=1e-5, atol=2e-5)
    # And near to what there would be without codes; V grows to 10 times a normal distribution.
    error = (actual.double() - expected(is_coded=False)).abs().max()
    assert error < {"int8": 0.8, "fp8": 4.0}[kind]


@pytest.mark.small(kind=["int8"], factor=[1e-30, 1e30])
@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_the_scales_of_v_may_be_of_any_size(kind: str, factor: float) -> None:
    """The Triton kernels add their logarithms to scores, and sum up reciprocals."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = AttentionLayer(4, 2, 16, 0.25)
    rows = [(1, 300), (1, 70), (5, 40)]  # the first in several parts
    q, cache, metadata, expected = random_batch(layer, kind, rows, 16)
    wanted = expected(is_coded=True) * factor
    cache.scales[1] *= factor
    actual = _backend("triton")[0].attend(layer, q, cache, metadata).double()
    # No scale is taken for less than 2^-64.
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=2e-5 * factor + 448 * 2.0**-64)


@pytest.mark.parametrize("kind", KINDS)
def test_v_may_be_zero_and_one_token_much_larger_than_others(kind: str) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = AttentionLayer(4, 2, 16, 0.25)
    rows = [(1, 300), (1, 70), (5, 40)]
    q, cache, metadata, expected = random_batch(layer, kind, rows, 16)
    wanted = expected(is_coded=True)
    cache.values[1, metadata.block_tables[1:2, :5].long()] = 0
    cache.scales[1, metadata.block_tables[1:2, :5].long()] = SMALLEST_SCALE
    (first,) = metadata.block_tables[2:, 0].tolist()  # token 0, which the last row's all see
    cache.values[1, first, :, 0] = 0
    cache.values[1, first, :, 0, 3] = CODE_OF_ONE[kind]
    cache.scales[1, first, :, 0] = 1e20
    actual = _backend("triton")[0].attend(layer, q, cache, metadata).double()
    torch.testing.assert_close(actual[:1], wanted[:1], rtol=1e-5, atol=2e-5)
    assert actual[1].eq(0).all()
    assert actual[2:, :, 3].ge(1e10).all()
    others = [d for d in range(16) if d != 3]
    assert actual[2:, :, others].abs().max() < 100  # as there would be without it


@pytest.mark.small(backend=["torch", "triton"], kind=["int8"], head_dim=[64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 80])  # 80: tiles of 128 keys
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_in_16_bits(backend: str, kind: str, head_dim: int, dtype: torch.dtype) -> None:
    if backend == "numba" and dtype == torch.float16:
        pytest.skip("numba's kernels have no float16")
    torch.manual_seed(0)
    layer = AttentionLayer(6, 2, head_dim, 0.8 * head_dim**-0.5)
    rows = [(1, 37), (1, 64), (1, 5), (1, 300), (3, 21)]
    q, cache, metadata, expected = random_batch(layer, kind, rows, 16)
    if backend == "torch":
        metadata.block_tables[metadata.block_tables == 2**30] = 1
    q.copy_(q.to(dtype))
    with torch.inference_mode():
        actual = _backend(backend)[0].attend(layer, q.to(dtype), cache, metadata)
    assert actual.dtype == dtype
    wanted = expected(is_coded=True)
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)
    if backend != "torch":  # which rounds its scores, numbers up to 10, to 16 bits
        # Of values up to 30.
        torch.testing.assert_close(actual.double(), wanted, rtol=3e-2, atol=0.15)
    if backend == "numba":  # rows of one token are as near as their dtype is
        torch.testing.assert_close(actual[:3].double(), wanted[:3], rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("slots_at_once", [1, 60, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_takes_rows_of_one_token_together(
    kind: str, slots_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.attention.torch._SLOTS_AT_ONCE", slots_at_once)
    torch.manual_seed(0)
    layer = AttentionLayer(4, 2, 8, 0.3)
    rows = [(1, 1), (1, 19), (1, 4), (1, 13), (2, 2), (5, 17)]
    q, cache, metadata, expected = random_batch(layer, kind, rows, 4)
    metadata.block_tables[metadata.block_tables == 2**30] = 1  # whatever an owner before it had
    actual = _backend("torch")[0].attend(layer, q, cache, metadata)
    torch.testing.assert_close(actual.double(), expected(is_coded=True), rtol=1e-5, atol=2e-5)


@pytest.mark.small(num_new=[2], dtype=[torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_new", [1, 2])
@pytest.mark.parametrize("which", ["K", "V", "query"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_sequence_comes_out_and_stays_there(
    backend: str, which: str, num_new: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(4, 2, 32, 0.3)
    rows = [(num_new, 43), (num_new, 39)]
    q, cache, metadata, expected = random_batch(layer, "int8", rows, 16)
    others = expected(is_coded=True)[num_new:]
    if which == "query":
        q[:num_new, :, 5] = torch.nan
    else:
        cache.scales["KV".index(which), metadata.block_tables[0, 1], :, 2] = torch.nan
    q = q.to(dtype)
    actual = _backend(backend)[0].attend(layer, q, cache, metadata)
    assert actual[:num_new].isnan().all()
    near = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 0.5}
    torch.testing.assert_close(actual[num_new:].double(), others, **near)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("room", ["kernels", "kernels_cpu"])
def test_what_kernels_refuse(room: str) -> None:
    pytest.importorskip({"kernels": "triton", "kernels_cpu": "numba"}[room])
    if room == "kernels":
        from nanoserve.kernels.triton.quantized_kv import check_cache
    else:
        from nanoserve.kernels.cpu.checks import check_cache
    codes, scales = torch.zeros(2, 3, 2, 4, 8, dtype=torch.int8), torch.zeros(2, 3, 2, 4)
    check_cache(codes, scales, torch.float32)
    floats = codes.float()
    check_cache(floats, None, torch.float32)
    for cache, message in (
        ((floats, None), "float32.*bfloat16|bfloat16.*float32"),
        ((codes, None), "int8"),
        ((codes, scales[..., :3]), r"\[2, 3, 2, 3\]"),
        ((codes.short(), scales), "int16"),
        ((codes, scales.double()), "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            check_cache(*cache, torch.bfloat16)
    if room == "kernels":  # the other one's are refused where their addresses are taken
        with pytest.raises(ValueError, match="contiguous"):
            check_cache(codes.transpose(1, 2), scales.transpose(1, 2), torch.bfloat16)


def test_flash_attn_is_refused_by_name() -> None:
    from nanoserve.attention.flash import FlashAttention, FlashAttention3

    kinds = [FlashAttention, FlashAttention3] if find_spec("triton") else [FlashAttention]
    for backend in (kind() for kind in kinds):
        with pytest.raises(ValueError, match=r"kv_cache_dtype='int8'.*'flash_attn'.*'triton'"):
            backend.kv_cache_spec(256, 2, 64, torch.bfloat16, "int8")
        spec = backend.kv_cache_spec(256, 2, 64, torch.bfloat16, "auto")
        assert spec == KVCacheSpec(256, 2, 64, torch.bfloat16)
