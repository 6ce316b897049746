"""Measure how close kernels come to the limits of their GPU, as Markdown for docs/benchmarks.md.

    python benchmarks/attention.py [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/attention.py --device cpu      tiny, to check that it runs

Decode attention and the small kernels are memory-bound: they are compared with the bandwidth of a
large copy. Prefill attention is compute-bound: it is compared with the rate of a large matrix
product. Kernels are timed in a CUDA graph, as a decode step runs them: launching from Python would
be most of a short time.
"""

import itertools
import json
import math
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from paged_rows import BLOCK_SIZE, DTYPE, Shape, make_rows, randn

from nanoserve.cli.bench.hardware import choose_device, copy_bandwidth, describe
from nanoserve.kernels.triton.act_and_mul import act_and_mul
from nanoserve.kernels.triton.add_rms_norm import add_rms_norm
from nanoserve.kernels.triton.choose_tokens import choose_tokens, pack_settings
from nanoserve.kernels.triton.store_kv import store_kv

_ITEM = DTYPE.itemsize
_MAX_ROTATION = 64


@dataclass(frozen=True)
class Sizes:
    copy_bytes: int
    matmul: int
    shapes: tuple[Shape, ...]
    decodes: tuple[tuple[int, int], ...]  # (batch, context)
    prefills: tuple[tuple[int, int], ...]  # (batch, tokens of each)
    num_tokens: tuple[int, ...]  # of the small kernels
    num_rows: tuple[int, ...]  # of the sampler
    rotation_bytes: int  # inputs in turns until they take this much: no cache holds them all


SIZES = {
    "cuda": Sizes(
        copy_bytes=2**30,
        matmul=8192,
        shapes=(
            Shape("Qwen3-0.6B", 16, 8, 128, 1024, 3072, 151_936),
            Shape("Llama-8B", 32, 8, 128, 4096, 14_336, 128_256),
        ),
        decodes=tuple(itertools.product((1, 8, 64, 256), (1000, 8000))),
        prefills=((1, 1024), (1, 8192), (1, 32_768), (8, 1024)),
        num_tokens=(256, 8192),
        num_rows=(8, 256),
        rotation_bytes=2**28,
    ),
    "cpu": Sizes(
        copy_bytes=2**20,
        matmul=64,
        shapes=(Shape("tiny", 4, 2, 16, 32, 48, 100),),
        decodes=((1, 20), (2, 40)),
        prefills=((1, 20), (2, 7)),
        num_tokens=(3,),
        num_rows=(2,),
        rotation_bytes=2000,
    ),
}


@dataclass(frozen=True)
class Peaks:
    """Best rates of the device; in the interpreter, shares of them are meaningless."""

    device: str
    bandwidth: float  # bytes per second
    matmul: float  # FLOP per second

    def share(self, rate: float, peak: float) -> float | None:
        return rate / peak if self.device == "cuda" else None


def seconds(run: Callable[[], object], device: str) -> float:
    """Return the time of `run()`: on a GPU the median over replays of a graph of many calls."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    run()  # compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(1, min(200, int(0.01 / (time.perf_counter() - start))))
    return statistics.median(replays([run] * repeats, 15)[3:]) / repeats


def replays(calls: Iterable[Callable[[], object]], num_replays: int) -> list[float]:
    """Return the seconds of each replay of a CUDA graph of all calls, already compiled."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(num_replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return times


def in_turns(run: Callable[[int], object], num_turns: int, device: str) -> float:
    """Return the time of one of `run(0)`, `run(1)`, ..., each with its own inputs."""
    return seconds(lambda: [run(i) for i in range(num_turns)], device) / num_turns


def num_turns(bytes_each: int, sizes: Sizes) -> int:
    return max(2, min(_MAX_ROTATION, math.ceil(sizes.rotation_bytes / bytes_each)))


def matmul_rate(n: int, device: str) -> float:
    a, b = randn(n, n, device=device), randn(n, n, device=device)
    return 2 * n**3 / seconds(lambda: a @ b, device)


Row = dict[str, Any]


def decode_bytes(shape: Shape, contexts: list[int]) -> tuple[int, int]:
    """Return the bytes of K and V of all contexts, without and with queries and outputs."""
    kv = 2 * sum(contexts) * shape.num_kv_heads * shape.head_dim * _ITEM
    return kv, kv + 2 * len(contexts) * shape.num_heads * shape.head_dim * _ITEM


def decode_rate(shape: Shape, contexts: list[int], sizes: Sizes, peaks: Peaks, **cache: int) -> Row:
    """`cache` is what `make_rows` takes."""
    kv, num_bytes = decode_bytes(shape, contexts)
    layers = cache.pop("num_layers", None) or num_turns(kv, sizes)
    rows = make_rows(shape, contexts, 1, layers, peaks.device, **cache)
    return byte_rate(in_turns(rows.attend, layers, peaks.device), num_bytes, peaks)


def byte_rate(s: float, num_bytes: int, peaks: Peaks) -> Row:
    share = peaks.share(num_bytes / s, peaks.bandwidth)
    return {"us": s * 1e6, "GB/s": num_bytes / s / 1e9, "of a copy": share}


def measure_decode(shape: Shape, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """Bytes: K and V of all contexts once, queries, and outputs."""
    for batch, context in sizes.decodes:
        rate = decode_rate(shape, [context] * batch, sizes, peaks)
        yield {"shape": shape.name, "batch": batch, "context": context} | rate


def measure_prefill(shape: Shape, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """FLOP: 4 x heads x head_dim for each pair of a query and a key that it sees."""
    for batch, n in sizes.prefills:
        flop = 4 * shape.num_heads * shape.head_dim * batch * n * (n + 1) // 2
        rows = make_rows(shape, [n] * batch, n, 1, peaks.device)
        s = in_turns(rows.attend, 1, peaks.device)
        share = peaks.share(flop / s, peaks.matmul)
        rate = {"ms": s * 1e3, "TFLOP/s": flop / s / 1e12, "of a matrix product": share}
        yield {"shape": shape.name, "tokens": f"{batch} x {n}"} | rate


Case = tuple[str, int, int, Callable[[], Callable[[], object]]]


def small_kernels(shape: Shape, sizes: Sizes, device: str) -> Iterator[Case]:
    """(kernel, tokens, bytes read and written, what makes an input and the call on it)."""
    hidden, size, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    num_all_heads = shape.num_heads + 2 * shape.num_kv_heads

    def make_norm(n: int) -> Callable[[], object]:
        x, residual = randn(n, hidden, device=device), randn(n, hidden, device=device)
        weight = randn(hidden, device=device)
        return lambda: add_rms_norm(x, residual, weight, 1e-6)

    def make_act(n: int) -> Callable[[], object]:
        gate_up = randn(n, 2 * size, device=device)
        return lambda: act_and_mul(gate_up, "silu")

    def make_store(n: int) -> Callable[[], object]:
        heads = randn(n, num_all_heads, head_dim, device=device)
        positions = torch.arange(n, dtype=torch.int32, device=device)
        cos, sin = randn(n, head_dim // 2, device=device), randn(n, head_dim // 2, device=device)
        q_weight, k_weight = randn(head_dim, device=device), randn(head_dim, device=device)
        num_blocks = -(-n // BLOCK_SIZE) + 1
        block = (shape.num_kv_heads, BLOCK_SIZE, head_dim)
        cache = torch.zeros(2, num_blocks, *block, dtype=DTYPE, device=device)
        norms, slots = (q_weight, k_weight, 1e-6), positions + BLOCK_SIZE
        return lambda: store_kv(heads, positions, cos, sin, *norms, cache, slots)

    def make_choose(n: int) -> Callable[[], object]:
        logits = randn(n, shape.vocab_size, device=device)
        slots = torch.arange(n, dtype=torch.int32, device=device)
        packed = torch.from_numpy(pack_settings(0.6, 1, 0)).to(device)
        settings = packed.repeat(n, 1)
        return lambda: choose_tokens(logits, slots, slots, settings)

    for n in sizes.num_tokens:
        yield "add_rms_norm", n, 4 * n * hidden * _ITEM, lambda n=n: make_norm(n)
        yield "act_and_mul", n, 3 * n * size * _ITEM, lambda n=n: make_act(n)
        values = 2 * num_all_heads * head_dim + head_dim  # heads in and out; cos and sin
        yield "store_kv", n, n * values * _ITEM, lambda n=n: make_store(n)
    for n in sizes.num_rows:
        yield "choose_tokens", n, n * shape.vocab_size * _ITEM, lambda n=n: make_choose(n)


def measure_small(shape: Shape, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """Bytes: inputs and outputs once. Inputs alternate, so that a cache does not help."""
    for name, n, num_bytes, make in small_kernels(shape, sizes, peaks.device):
        calls = [make() for _ in range(num_turns(num_bytes, sizes))]
        s = in_turns(lambda i, calls=calls: calls[i](), len(calls), peaks.device)
        rate = byte_rate(s, num_bytes, peaks)
        yield {"shape": shape.name, "kernel": name, "tokens": n} | rate


TABLES = {
    "Decode attention": measure_decode,
    "Prefill attention": measure_prefill,
    "Small kernels": measure_small,
}
_FORMATS = {"us": ".1f", "ms": ".3f", "GB/s": ".0f", "TFLOP/s": ".1f"}
_FORMATS |= {"of a copy": ".0%", "of a matrix product": ".0%"}


def measure_peaks(sizes: Sizes, device: str) -> Peaks:
    bandwidth = copy_bandwidth(device, sizes.copy_bytes)
    return Peaks(device, bandwidth, matmul_rate(sizes.matmul, device))


def measure_table(title: str, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    for shape in sizes.shapes:
        for row in TABLES[title](shape, sizes, peaks):
            yield row
            if peaks.device == "cuda":
                torch.cuda.empty_cache()


def print_row(row: Row) -> None:
    cells = ["-" if v is None else format(v, _FORMATS.get(name, "")) for name, v in row.items()]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = ArgumentParser(description="Speed of the kernels, as Markdown tables.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", metavar="FILE", help="every row of every table")
    args = parser.parse_args()
    device = choose_device(args.device)
    sizes = SIZES[device]
    torch.manual_seed(0)
    peaks = measure_peaks(sizes, device)
    print(f"{describe(device)}, torch {torch.__version__}, triton {triton.__version__}.")
    print(f"bfloat16, KV blocks of {BLOCK_SIZE} tokens, each time for one layer.")
    print(
        f"A copy of {sizes.copy_bytes / 2**20:.0f} MiB: {peaks.bandwidth / 1e9:.0f} GB/s. ", end=""
    )
    print(f"A matrix product of {sizes.matmul}^3: {peaks.matmul / 1e12:.1f} TFLOP/s.")
    if device == "cpu":
        print("In the interpreter these numbers say nothing.")
    tables: dict[str, list[Row]] = {}
    for title, measure_shape in TABLES.items():
        print(f"\n{title}. {measure_shape.__doc__}\n")
        tables[title] = []
        for row in measure_table(title, sizes, peaks):
            if not tables[title]:
                print(f"| {' | '.join(row)} |\n{'|---' * len(row)}|")
            print_row(row)
            tables[title].append(row)
    if args.json:
        measured = {"device": describe(device), "bandwidth": peaks.bandwidth}
        measured |= {"matmul_rate": peaks.matmul, "tables": tables}
        Path(args.json).write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
