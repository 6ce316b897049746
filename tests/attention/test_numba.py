"""The numba kernels against float64, in float32 and bfloat16, on random shapes.

Slots that no token was written to hold NaN, and unused columns of block tables point far outside.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_qwen3

pytest.importorskip("numba")

from nanoserve import LLM, SamplingParams
from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.numba import NumbaAttention
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.norm import RMSNorm
from nanoserve.models.layers.numba_ops import NumbaOps
from nanoserve.models.layers.ops import TorchOps, rotate
from nanoserve.models.layers.rotary import RotaryEmbedding

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Where no model of the small suite runs what is compiled then: float32 weights, many threads.
FULL_IN_16_BITS = pytest.mark.small(dtype=[torch.float32])


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


@pytest.mark.small(seed=range(0, 60, 7))
@pytest.mark.parametrize("seed", range(60))
def test_attention(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype, group = DTYPES[seed % 2], seed % 5 + 1
    num_kv_heads, head_dim = int(rng.integers(1, 5)), int(rng.choice([8, 16, 24, 64, 80]))
    block_size = int(rng.choice([1, 3, 4, 16, 32]))
    window = [None, int(rng.integers(1, 70))][seed % 3 == 1]
    soft_cap = [None, 1.5][seed % 4 == 1]
    layer = AttentionLayer(
        num_kv_heads * group, num_kv_heads, head_dim, 0.7 * head_dim**-0.5, window, soft_cap
    )
    rows = [(1, int(n)) for n in rng.integers(1, 90, rng.integers(1, 8))]
    if seed % 3 == 2:
        rows += [(5, 5), (3, 40)]
    blocks = [-(-context // block_size) for _, context in rows]
    tables = torch.full((len(rows), max(blocks) + 1), 2**30, dtype=torch.int32)
    free = iter((rng.permutation(sum(blocks)) + 1).tolist())
    shape = (2, sum(blocks) + 1, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(shape, torch.nan, dtype=dtype)
    q = torch.randn(sum(n for n, _ in rows), layer.num_heads, head_dim).to(dtype) * 3
    expected, first = torch.empty(q.shape, dtype=torch.float64), 0
    for row, (num_new, context) in enumerate(rows):
        k, v = torch.randn(2, num_kv_heads, context, head_dim).to(dtype)
        for column, start in enumerate(range(0, context, block_size)):
            tables[row, column] = block = next(free)
            filled = slice(start, start + block_size)
            for cache, x in zip(kv_cache, (k, v), strict=True):
                cache[block, :, : x[:, filled].shape[1]] = x[:, filled]
        k, v = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
        queries = q[first : first + num_new].double().transpose(0, 1)
        scores = queries @ k.mT * layer.scale
        scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(context - num_new, context)[:, None] - torch.arange(context)
        hidden = (distance < 0) | (distance >= (window or context))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        expected[first : first + num_new] = (weights @ v).transpose(0, 1)
        first += num_new
    with torch.inference_mode():
        actual = NumbaAttention().attend(layer, q, KVCache(kv_cache), metadata_of(rows, tables))
    decodes = slice(0, sum(num_new == 1 for num_new, _ in rows))
    assert actual.dtype == dtype
    error = (actual[decodes].double() - expected[decodes]).abs().max()
    assert error < TOLERANCE[dtype]  # false for NaN
    if dtype == torch.float32:
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5)


def norm(size: int, dtype: torch.dtype) -> RMSNorm:
    layer = RMSNorm(size, 1e-2, LayerContext(dtype))
    layer.weight.data.copy_(torch.randn(size))
    return layer


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "size"),
    [
        pytest.param(1, 7, marks=FULL_IN_16_BITS),
        (3, 64),
        (32, 1024),
        pytest.param(40, 1100, marks=FULL_IN_16_BITS),
    ],
)
def test_norms_and_gate(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    """In float32 against torch; in bfloat16 against float32, rounded once."""
    torch.manual_seed(size)
    x, residual = torch.randn(2, num_tokens, size).to(dtype)
    gate_up = (torch.randn(num_tokens, 2 * size) * 20).to(dtype)
    weight = norm(size, [dtype, torch.float32][size % 2]).weight.data
    ours, theirs = NumbaOps(), TorchOps()
    with torch.inference_mode():
        normed, added = ours.add_rms_norm(x.clone(), residual.clone(), weight, 1e-2)
        assert torch.equal(added, x + residual)
        wanted = theirs.rms_norm(added.float(), weight.float(), 1e-2).to(dtype)
        assert_close(normed, wanted)
        assert_close(ours.rms_norm(added, weight, 1e-2), wanted)
        for activation in ("silu", "gelu_pytorch_tanh"):
            wanted = theirs.act_and_mul(gate_up.float(), activation).to(dtype)
            actual = ours.act_and_mul(gate_up, activation)
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
            torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, though many rows are computed by other code, which shares them between threads.

    tests/kernels/cpu/test_same_bits.py shows it of all operations, compiled and loaded.
    """
    torch.manual_seed(0)
    x, weight, found = torch.randn(300, 192), torch.randn(192), []
    for few in (2**30, 0):
        monkeypatch.setattr("nanoserve.kernels.cpu.ops.FEW", few)
        found.append(NumbaOps().rms_norm(x, weight, 1e-6))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_store_kv(num_tokens: int, has_norms: bool, dtype: torch.dtype) -> None:
    """In one pass against one operation after the other in float32, as the layer does them."""
    torch.manual_seed(num_tokens)
    head_dim = 24
    rotary = RotaryEmbedding(RopeConfig(), head_dim, 99, LayerContext(dtype))
    norms = [norm(head_dim, dtype) if has_norms else None for _ in "qk"]
    heads = torch.randn(num_tokens, 4 + 2 + 2, head_dim).to(dtype)
    step = SimpleNamespace(
        positions=torch.randint(99, (num_tokens,), dtype=torch.int32),
        slot_mapping=torch.randperm(32, dtype=torch.int32)[:num_tokens],
    )
    cache = torch.zeros(2, 2, 2, 16, head_dim, dtype=dtype)
    wanted_cache = torch.zeros(2, 2, 2, 16, head_dim)
    with torch.inference_mode():
        q = NumbaOps().norm_rotate_store(heads, rotary, norms, KVCache(cache), step)
        wanted_q, k, v = heads.float().split([4, 2, 2], dim=1)
        if has_norms:
            for layer in norms:
                layer.weight.data = layer.weight.data.float()
            wanted_q, k = norms[0](wanted_q), norms[1](k)
        angles = (rotary.cos[step.positions].float(), rotary.sin[step.positions].float())
        wanted_q = rotate(wanted_q, *angles)
        KVCache(wanted_cache).store(rotate(k, *angles), v, step.slot_mapping)
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 2**-6}[dtype]
    for ours, theirs in ((q, wanted_q), (cache, wanted_cache)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


def test_every_bfloat16_comes_back_and_halves_round_to_even() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    ops, one = NumbaOps(), torch.zeros(1, len(finite), dtype=torch.bfloat16)
    weight = torch.ones(len(finite), dtype=torch.bfloat16)
    with torch.inference_mode():
        same = ops.add_rms_norm(finite[None].clone(), one, weight, 1.0)[1][0]
        assert torch.equal(same, finite + 0)
        # 256 + 1 lies between two numbers of 8 bits, 258 + 1 as well: both go to the even one.
        halves = torch.tensor([[256.0, 258.0, 1.0, 1.0]], dtype=torch.bfloat16)
        ones = torch.tensor([[1.0, 1.0, 1e-9, -1e-9]], dtype=torch.bfloat16)
        added = ops.add_rms_norm(halves, ones, weight[:4], 1.0)[1]
    assert added[0].tolist() == [256.0, 260.0, 1.0, 1.0]


@pytest.mark.small(dtype=["float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_what_a_cpu_runs_by_default(tmp_path, dtype: str) -> None:
    make_qwen3(tmp_path, dtype=dtype)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    prompts = [[5, 7, 11], list(range(60)), list(range(20))]
    answers = []
    for backend in ("auto", "torch"):
        with LLM(
            tmp_path, skip_tokenizer_init=True, device="cpu", attention_backend=backend
        ) as llm:
            layer = llm.engine.executor.model.model.layers[0]
            assert isinstance(layer.self_attn.backend, NumbaAttention) is (backend == "auto")
            assert isinstance(layer.mlp.ops, NumbaOps) is (backend == "auto")
            outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0] for output in outputs])
    if dtype == "float32":
        assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    for ours, theirs in zip(*answers, strict=True):
        first = (answer.logprobs[0][answer.token_ids[0]].logprob for answer in (ours, theirs))
        assert abs(next(first) - next(first)) < (1e-4 if dtype == "float32" else 0.2)


def test_16_bit_floats_run_on_torch(tmp_path) -> None:
    make_qwen3(tmp_path, dtype="float16")
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu") as llm:
        assert not isinstance(llm.engine.executor.context.attention, NumbaAttention)
    with pytest.raises(ValueError, match=r"numba.*float16"):
        LLM(tmp_path, skip_tokenizer_init=True, device="cpu", attention_backend="numba")


@pytest.mark.size("full")
def test_torch_keeps_its_number_of_threads() -> None:
    """Several processes share a machine only if each has the threads that it was given."""
    code = """
import torch
from nanoserve.attention.numba import NumbaAttention
NumbaAttention()
print(torch.get_num_threads())"""
    path = os.pathsep.join(filter(None, sys.path))
    settings = {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "3", "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert shown.stdout == "2\n", shown.stderr


FORK = """
import multiprocessing, sys
from nanoserve import LLM, SamplingParams

def answer():
    with LLM("tiny-qwen3", num_kv_blocks=64) as llm:
        llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)

answer()
child = multiprocessing.get_context("fork").Process(target=answer)
child.start()
child.join(60)
sys.exit(child.exitcode)
"""


@pytest.mark.size("full")  # two engines, in processes of their own
def test_a_fork_of_a_process_that_has_computed_is_told_so() -> None:
    """Else OpenMP ends it, in its own words."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "instead of fork, use spawn" in done.stderr, done.stderr[-500:]
