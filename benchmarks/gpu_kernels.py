"""Stages of gpu_day.py that time kernels: `kernels`, and `fa3` for FlashAttention 3."""

import lzma
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention import (
    SIZES,
    TABLES,
    Peaks,
    Row,
    byte_rate,
    decode_bytes,
    decode_rate,
    in_turns,
    measure_peaks,
    measure_table,
    num_turns,
    seconds,
)
from gpu_job import Job, Measurements
from paged_rows import DTYPE, Rows, Shape, decode_cases, make_rows, randn
from torch.nn.functional import linear

from nanoserve.kernels.triton.choose_tokens import choose_tokens, pack_settings
from nanoserve.kernels.triton.filter_logits import filter_borders

_POOL = 40e9  # bytes: about the pool of an engine on such a GPU
_POOL_LAYERS = 8
_FILTERS: dict[str, dict[str, Any]] = {
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
}


def kernels(job: Job) -> Measurements:
    """Measure attention.py's tables, and cases of an engine's steps that they lack."""
    sizes = SIZES[job.device]
    peaks, shape = measure_peaks(sizes, job.device), sizes.shapes[0]
    cases = decode_cases(job.is_tiny)
    for name, contexts in cases.items():
        yield f"decode {name}", partial(decode_rate, shape, contexts, sizes, peaks)
    first = next(iter(cases.values()))
    pool = 1e6 if job.is_tiny else min(_POOL, torch.cuda.mem_get_info()[0] / 2)
    cache = {"num_layers": _POOL_LAYERS, "num_blocks": _blocks_in(pool, shape)}
    yield "decode in a pool of 40 GB", partial(decode_rate, shape, first, sizes, peaks, **cache)
    for size in (16, 32, 64, 256):
        measure = partial(decode_rate, shape, first, sizes, peaks, block_size=size)
        yield f"decode, blocks of {size}", measure
    for title in TABLES:
        yield title, lambda title=title: list(measure_table(title, sizes, peaks))
    for num_rows in sizes.num_rows:
        for name, filters in _FILTERS.items():
            measure = partial(_filters, shape, num_rows, filters, peaks)
            yield f"filter_borders {num_rows} rows, {name}", measure
        for temperature in (0.0, 0.6):
            measure = partial(_sampler, shape, num_rows, temperature, peaks)
            yield f"choose_tokens {num_rows} rows, T={temperature}", measure
    for name, k, n in _products(shape):
        yield f"product {name}", partial(_product_rates, job, k, n)


def _blocks_in(num_bytes: float, shape: Shape) -> int:
    """Return the number of blocks of one layer of the pool."""
    per_block = 2 * shape.num_kv_heads * 16 * shape.head_dim * DTYPE.itemsize
    return int(num_bytes / _POOL_LAYERS / per_block)


def _logits(
    shape: Shape, num_rows: int, device: str, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, slots, and the settings of the slots."""
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    packed = torch.from_numpy(pack_settings(seed=1, stream=0, **settings)).to(device)
    logits = 3 * randn(num_rows, shape.vocab_size, device=device)
    return logits, slots, packed.repeat(num_rows, 1)


def _filters(shape: Shape, num_rows: int, filters: dict[str, Any], peaks: Peaks) -> Row:
    inputs = _logits(shape, num_rows, peaks.device, temperature=0.6, **filters)
    s = seconds(lambda: filter_borders(*inputs), peaks.device)
    return byte_rate(s, inputs[0].nbytes, peaks)


def _sampler(shape: Shape, num_rows: int, temperature: float, peaks: Peaks) -> Row:
    logits, slots, settings = _logits(shape, num_rows, peaks.device, temperature=temperature)
    s = seconds(lambda: choose_tokens(logits, slots, slots, settings), peaks.device)
    return byte_rate(s, logits.nbytes, peaks)


def _products(shape: Shape) -> list[tuple[str, int, int]]:
    """Return (name, inputs, outputs) of a layer's four products, and of the head."""
    hidden, size = shape.hidden_size, shape.intermediate_size
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    layer = [("qkv", hidden, q + 2 * kv), ("o", q, hidden), ("gate_up", hidden, 2 * size)]
    return [*layer, ("down", size, hidden), ("head", hidden, shape.vocab_size)]


def _product_rates(job: Job, k: int, n: int) -> dict[str, Row]:
    rates: dict[str, Row] = {}
    for m in (1, 2) if job.is_tiny else (1, 16, 64, 128, 256, 2048, 8192):
        if n > 100_000 and m > 256:  # of the head, no step has more
            continue
        weights = [randn(n, k, device=job.device) for _ in range(1 if n > 100_000 else 8)]
        x = randn(m, k, device=job.device)
        s = in_turns(lambda i, w=weights, x=x: linear(x, w[i]), len(weights), job.device)
        rate = {"us": s * 1e6, "GB/s": n * k * DTYPE.itemsize / s / 1e9}
        rates[str(m)] = rate | {"TFLOP/s": 2 * m * n * k / s / 1e12}
    return rates


# ---------------------------------------------------------------- fa3


def fa3(job: Job) -> Measurements:
    """Time FlashAttention 3, as vLLM builds and calls it, on the same rows and caches.

    Its scheduler metadata, which vLLM computes once a step, is computed in each timed call. That
    adds some microseconds, which matter where rows are few.
    """
    if job.device != "cuda":
        raise ValueError("FlashAttention 3 runs on NVIDIA GPUs only: --device cuda")
    _load_library(job)
    sizes = SIZES[job.device]
    peaks, shape = measure_peaks(sizes, job.device), sizes.shapes[0]
    cases = decode_cases(job.is_tiny)
    for name in ("256x1000", "ragged 600", "64x8000", "1x8000"):
        for size in (16, 256):
            measure = partial(_decode_beside_ours, shape, cases[name], size, peaks)
            yield f"decode {name}, blocks of {size}", measure
    for batch, n in ((8, 1024), (1, 8192)):
        yield f"prefill {batch}x{n}", partial(_prefill_beside_ours, shape, batch, n, peaks)


def _load_library(job: Job) -> None:
    library = job.fa3 / "_vllm_fa3_C.abi3.so"
    packed = job.fa3 / f"{library.name}.xz"
    if not library.is_file():
        if not packed.is_file():
            raise ValueError(f"--fa3 {job.fa3}: there is neither {library.name} nor {packed.name}")
        library = job.scratch / library.name
        with lzma.open(packed) as source, library.open("wb") as target:
            shutil.copyfileobj(source, target, 2**24)
    torch.ops.load_library(str(library))


def _decode_beside_ours(
    shape: Shape, contexts: list[int], block_size: int, peaks: Peaks
) -> dict[str, Any]:
    kv, num_bytes = decode_bytes(shape, contexts)
    layers = num_turns(kv, SIZES[peaks.device])
    rows = make_rows(shape, contexts, 1, layers, peaks.device, block_size=block_size)
    return _beside_ours(rows, layers, peaks, lambda s: num_bytes / s / peaks.bandwidth)


def _prefill_beside_ours(shape: Shape, batch: int, n: int, peaks: Peaks) -> dict[str, Any]:
    flop = 4 * shape.num_heads * shape.head_dim * batch * n * (n + 1) // 2
    rows = make_rows(shape, [n] * batch, n, 1, peaks.device)
    return _beside_ours(rows, 1, peaks, lambda s: flop / s / peaks.matmul)


def _beside_ours(
    rows: Rows, layers: int, peaks: Peaks, share: Callable[[float], float]
) -> dict[str, Any]:
    ours, theirs = rows.attend(0), flash_attention(rows, 0)
    difference = (ours.float() - theirs.float()).abs()
    is_same = bool((difference <= 2e-2 * (1 + ours.float().abs())).all())
    result: dict[str, Any] = {"largest difference": float(difference.max()), "same": is_same}
    result["bad"] = not is_same
    attends = {"ours": rows.attend, "theirs": partial(flash_attention, rows)}
    for name, attend in attends.items():
        s = in_turns(attend, layers, peaks.device)
        result |= {f"{name} us": s * 1e6, f"{name} of peak": share(s)}
    return result | {"theirs over ours": result["theirs us"] / result["ours us"]}


def flash_attention(rows: Rows, layer: int) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim]; the cache is seen as [block, token, head, head_dim]."""
    keys, values = (cache.transpose(1, 2) for cache in rows.kv_caches[layer])
    nothing = None
    found = torch.ops._vllm_fa3_C.fwd(
        rows.q,
        keys,
        values,
        *(nothing, nothing, nothing),  # new keys, new values, q_v
        nothing,  # out: one is made
        rows.cu_seqlens_q,
        *(nothing, nothing, nothing),  # cu_seqlens_k, cu_seqlens_k_new, seqused_q
        rows.context_lens,
        rows.query_len,
        rows.max_context_len,
        rows.block_tables,
        *(nothing, nothing),  # kv_batch_idx, leftpad_k
        *(nothing, nothing, nothing),  # cosines, sines and lengths of a rotation
        *(nothing, nothing, nothing),  # scales of 8-bit q, k and v
        rows.q.shape[2] ** -0.5,
        True,  # causal
        *(-1, -1),  # no window
        0.0,  # no soft cap
        True,  # rotation in pairs
        nothing,  # its own schedule
        0,  # splits: automatic
        nothing,  # packing of the heads of a group: automatic
        0,  # multiprocessors left free
        nothing,  # sinks
        *(1, 0, nothing),  # ranks that share a context, this one, their lengths
    )
    return found[0]
