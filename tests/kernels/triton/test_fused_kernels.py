"""The small kernels against plain torch in float64.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), which does not round to
bfloat16 but truncates.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.kernels.triton.act_and_mul import ACTIVATIONS, act_and_mul
from nanoserve.kernels.triton.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.triton.store_kv import store_kv
from nanoserve.models.layers import ops as layer_ops
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.norm import RMSNorm
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.layers.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One unit in the last place of the 16-bit types, for a value that is rounded or truncated once.
RTOL = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
EPS = 1e-2  # large enough to be seen


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 2e-6) -> None:
    """`expected` is float64; `atol` is for sums that nearly cancel."""
    rtol = RTOL[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """In float64; None leaves x as it is."""
    x = x.double()
    if weight is None:
        return x
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [num_tokens, num_heads, head_dim] in float64."""
    turned = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1).contiguous())
    turned = turned * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.small(seed=range(2))
@pytest.mark.full(seed=range(16))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(40))
def test_add_rms_norm(seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_tokens, hidden = int(rng.integers(1, 41)), int(rng.integers(1, 2 ** rng.integers(4, 13)))
    x, residual = randn(num_tokens, hidden, dtype=dtype), randn(num_tokens, hidden, dtype=dtype)
    weight = randn(hidden, dtype=[dtype, torch.float32][seed % 2])  # Gemma's is float32
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert normed.dtype == total.dtype == dtype
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert_close(total, residual.double() + x.double())
    assert_close(normed, exact_rms_norm(total, weight))
    alone = rms_norm(x, weight, EPS)
    assert alone.dtype == dtype
    assert_close(alone, exact_rms_norm(x, weight))


@pytest.mark.parametrize("hidden", [1, 5120, 16384])
def test_add_rms_norm_agrees_with_the_layer(hidden: int) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(hidden, EPS, LayerContext(device=DEVICE))
    norm.weight.data.copy_(randn(hidden))
    x, residual = randn(2, hidden), randn(2, hidden)
    with torch.inference_mode():
        expected = norm.add(x, residual)
    for actual, wanted in zip(
        add_rms_norm(x, residual, norm.weight.data, EPS), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=2e-6)


def test_it_is_the_rounded_sum_that_is_normalised() -> None:
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=DEVICE)
    x = torch.zeros_like(residual)
    x[0, 0] = 1  # 257 is no bfloat16
    weight = torch.full((64,), 1.2535, device=DEVICE)  # 257 / 256 of it would be another bfloat16
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert set(total[0].tolist()) == {256.0}
    assert set(normed[0].tolist()) == {1.25}


@pytest.mark.small(seed=range(2))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(15))
def test_act_and_mul(seed: int, dtype: torch.dtype, activation: str) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_tokens, size = int(rng.integers(1, 21)), int(rng.integers(1, 2 ** rng.integers(3, 13)))
    gate_up = 3 * randn(num_tokens, 2 * size, dtype=dtype)
    gate_up[:, 0] = 30 * (-1) ** seed  # far out on either side
    out = act_and_mul(gate_up, activation)
    assert out.dtype == dtype and out.shape == (num_tokens, size)
    assert_close(out, TorchOps().act_and_mul(gate_up.double(), activation))


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's, of the x^2
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_out_a_gate_is_open_or_shut(dtype: torch.dtype, activation: str) -> None:
    """Where exp(-x), x^2 and x^3 overflow as well as where they just do not."""
    far = [20.0, 89.0, 1e3, 6e4] + [1e12, 1e20, 3e38] * (dtype != torch.float16)
    gate = torch.tensor([*far, *(-x for x in far), 0.0], dtype=dtype, device=DEVICE)
    out = act_and_mul(torch.cat((gate, torch.ones_like(gate)))[None], activation)[0]
    assert_close(out, gate.double().clamp(min=0))


@dataclass
class Step:
    """The arguments of `store_kv`, drawn at random; the cache is full of NaN."""

    heads: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and the cache in float64, by plain torch. Of equal slots the last token wins."""
        num_kv_heads, block_size = self.kv_cache.shape[2:4]
        num_heads = self.heads.shape[1] - 2 * num_kv_heads
        q, k, v = self.heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        k = rotate(exact_rms_norm(k, self.k_weight), cos, sin)
        cache = self.kv_cache.double()
        for token, slot in enumerate(self.slot_mapping.tolist()):
            cache[0, slot // block_size, :, slot % block_size] = k[token]
            cache[1, slot // block_size, :, slot % block_size] = v[token].double()
        return rotate(exact_rms_norm(q, self.q_weight), cos, sin), cache


def random_step(
    rng: np.random.Generator,
    dtype: torch.dtype,
    num_tokens: int | None = None,
    num_padding: int = 0,
) -> Step:
    """`num_padding` rows at the end share slot 0; no other row has it."""
    head_dim, block_size = int(rng.choice([16, 64, 80, 96, 128, 256])), 2 ** rng.integers(4, 9)
    num_kv_heads, group_size = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5]))
    num_tokens = num_tokens or int(rng.choice([1, 2, 3, 5, 8, 40, 65, 90]))
    num_heads = num_kv_heads * (group_size + 2)
    heads = randn(num_tokens, num_heads, head_dim, dtype=dtype)
    if rng.random() < 0.5:  # a slice of something wider
        wide = randn(num_tokens, num_heads + 3, head_dim + 8, dtype=dtype)
        heads = wide[:, 2 : 2 + num_heads, 4 : 4 + head_dim]
    num_blocks = 2 + num_tokens // int(block_size)
    shape = (2, num_blocks, num_kv_heads, int(block_size), head_dim)
    order = rng.choice([(0, 1, 2, 3), (1, 0, 3, 2), (2, 0, 1, 3)]).tolist()  # of the memory
    memory = torch.full([shape[i] for i in order] + [head_dim], torch.nan, device=DEVICE)
    kv_cache = memory.to(dtype).permute(*np.argsort(order).tolist(), 4)
    slots = 1 + rng.permutation(num_blocks * int(block_size) - 1)[:num_tokens]
    slots[num_tokens - num_padding :] = 0
    max_positions = 50
    angles = 6 * torch.rand(max_positions, head_dim // 2, device=DEVICE)
    return Step(
        heads=heads,
        positions=torch.from_numpy(rng.integers(0, max_positions, num_tokens)).int().to(DEVICE),
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        q_weight=randn(head_dim, dtype=dtype) if rng.random() < 0.5 else None,
        k_weight=randn(head_dim) if rng.random() < 0.5 else None,  # float32, as Gemma's are
        eps=EPS,
        kv_cache=kv_cache,
        slot_mapping=torch.from_numpy(slots).int().to(DEVICE),
    )


@pytest.mark.small(seed=range(2), dtype=DTYPES[:2])
@pytest.mark.full(seed=range(16))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(40))
def test_store_kv_writes_these_slots_and_no_other(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    step = random_step(np.random.default_rng(seed), dtype)
    expected_q, expected_cache = step.expected()
    heads = step.heads.clone()
    q = store_kv(**vars(step))
    assert q.is_contiguous() and q.dtype == dtype
    assert torch.equal(step.heads, heads)
    assert_close(q, expected_q)
    assert_close(step.kv_cache, expected_cache)


@pytest.mark.small(num_tokens=[9])
@pytest.mark.parametrize(("num_tokens", "num_padding"), [(2, 2), (9, 5), (70, 20)])
def test_padding_rows_share_slot_0(num_tokens: int, num_padding: int) -> None:
    torch.manual_seed(0)
    step = random_step(np.random.default_rng(num_tokens), torch.float32, num_tokens, num_padding)
    expected_q, expected_cache = step.expected()
    assert_close(store_kv(**vars(step)), expected_q)
    cache = step.kv_cache.clone()
    assert not cache[:, 0, :, 0].isnan().any()
    cache[:, 0, :, 0] = expected_cache[:, 0, :, 0] = torch.nan  # any of them may have won
    assert_close(cache, expected_cache)


@pytest.mark.small(head_dim=[80])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("has_norms", [True, False])
def test_what_the_layers_call_is_what_they_call_on_a_cpu(head_dim: int, has_norms: bool) -> None:
    torch.manual_seed(head_dim)
    context = LayerContext(device=DEVICE)
    rotary = RotaryEmbedding(RopeConfig(theta=1e6), head_dim, 99, context)
    q_norm, k_norm = norms = (RMSNorm(head_dim, EPS, context), RMSNorm(head_dim, EPS, context))
    for norm in norms:
        norm.weight.data.copy_(randn(head_dim))
    heads, positions = randn(6, 4 + 2 + 2, head_dim), torch.arange(93, 99, device=DEVICE).int()
    slots = torch.arange(6, dtype=torch.int32, device=DEVICE) * 5
    step = SimpleNamespace(positions=positions, slot_mapping=slots)

    def one_by_one(cache: torch.Tensor) -> torch.Tensor:
        """As the layer does it without such a kernel."""
        q, k, v = heads.split([4, 2, 2], dim=1)
        if has_norms:
            q, k = q_norm(q), k_norm(k)
        angles = (rotary.cos[positions], rotary.sin[positions])
        KVCache(cache).store(layer_ops.rotate(k, *angles), v, slots)
        return layer_ops.rotate(q, *angles)

    def at_once(cache: torch.Tensor) -> torch.Tensor:
        used = norms if has_norms else (None, None)
        return TritonOps().norm_rotate_store(heads, rotary, used, KVCache(cache), step)

    results = []
    for ops, norm_rotate_store in ((TorchOps(), one_by_one), (TritonOps(), at_once)):
        cache = torch.zeros(2, 2, 2, 16, head_dim, device=DEVICE)
        with torch.inference_mode():
            q = norm_rotate_store(cache)
            gate_up, weight = heads[:, 0], norms[0].weight
            added = ops.add_rms_norm(heads[:, 0].contiguous(), q[:, 0].contiguous(), weight, EPS)
            acted = (ops.act_and_mul(gate_up.contiguous(), name) for name in ACTIVATIONS)
            alone = ops.rms_norm(q[:, 0].contiguous(), weight, EPS)
            results.append((q, cache, *added, alone, *acted))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": torch.zeros(3, 64)}, "3 dimensions"),
        ({"heads": torch.zeros(3, 4, 16)}, "query heads"),
        ({"heads": torch.zeros(3, 6, 18)}, "head_dim"),
        ({"heads": torch.zeros(3, 6, 16, dtype=torch.float16)}, "float16"),
        ({"heads": torch.zeros(3, 16, 6).transpose(1, 2)}, "last dimension"),
        ({"kv_cache": torch.zeros(2, 4, 16, 16)}, "kv_cache"),
        ({"kv_cache": torch.zeros(1, 4, 2, 16, 16)}, "kv_cache"),
        ({"kv_cache": torch.zeros(2, 4, 2, 16, 16).transpose(3, 4)}, "last dimension"),
        ({"heads": torch.zeros(3, 6, 15), "kv_cache": torch.zeros(2, 4, 2, 16, 15)}, "same, even"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions"),
        ({"positions": torch.zeros(6, dtype=torch.int32)[::2]}, "positions"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int32)}, "slot_mapping"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int32)[::2]}, "slot_mapping"),
        ({"cos": torch.zeros(9, 16)}, "cos"),
        ({"cos": torch.zeros(9)}, "cos"),
        ({"cos": torch.zeros(9, 16)[:, ::2]}, "cos"),
        ({"sin": torch.zeros(8, 8)}, "sin"),
        ({"sin": torch.zeros(8, 9).T}, "sin"),
        ({"q_weight": torch.zeros(8)}, "q_weight"),
        ({"q_weight": torch.zeros(32)[::2]}, "q_weight"),
        ({"k_weight": torch.zeros(8)}, "k_weight"),
    ],
)
def test_store_kv_refuses_what_does_not_fit(change: dict, message: str) -> None:
    arguments = {
        "heads": torch.zeros(3, 6, 16),
        "positions": torch.zeros(3, dtype=torch.int32),
        "cos": torch.zeros(9, 8),
        "sin": torch.zeros(9, 8),
        "q_weight": None,
        "k_weight": torch.zeros(16),
        "eps": EPS,
        "kv_cache": torch.zeros(2, 4, 2, 16, 16),
        "slot_mapping": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        store_kv(**(arguments | change))


def test_norm_and_gate_refuse_what_does_not_fit() -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(8)
    for wrong in (
        (x, torch.zeros(4, 8), weight),
        (x, x, torch.zeros(9)),
        (x, x.half(), weight),
        (torch.zeros(8, 3).T, x, weight),
        (torch.zeros(1, 16385), torch.zeros(1, 16385), torch.zeros(16385)),
    ):
        with pytest.raises(ValueError):
            add_rms_norm(*wrong, EPS)
    for wrong in ((x, torch.zeros(9)), (torch.zeros(8, 3).T, torch.zeros(3)), (x[0], weight)):
        with pytest.raises(ValueError):
            rms_norm(*wrong, EPS)
    for wrong in (torch.zeros(3, 7), torch.zeros(8), torch.zeros(8, 3).T):
        with pytest.raises(ValueError):
            act_and_mul(wrong, "silu")
    with pytest.raises(ValueError, match=r"'gelu'.*gelu_pytorch_tanh"):
        act_and_mul(x, "gelu")
