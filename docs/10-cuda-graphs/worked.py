"""Worked numbers of CUDA graphs: time of launches, captured sizes, and padding."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

# Launches of one decode step of Qwen3 on one GPU, up to the hidden states.
PER_LAYER = {
    "norm, with the residual addition": 2,
    "matrix product: qkv, o, gate and up, down": 4,
    "norm, rotate and store K and V": 1,
    "attention": 1,
    "activation and gate": 1,
}
ONCE = {"embedding": 1, "zeros, where the residual stream begins": 1, "last norm": 1}


class Shape(NamedTuple):
    """A dense Qwen3."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int


QWEN3 = {
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151_936),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12_288, 151_936),
}


def num_kernels(layers: int, has_merge: bool = False) -> int:
    """Return the launches of a decode step; a merge, if any, follows each layer's attention."""
    return sum(ONCE.values()) + layers * (sum(PER_LAYER.values()) + has_merge)


def piecewise_calls(layers: int, has_merge: bool = False) -> int:
    """Return the calls of a step with vLLM's piecewise graphs.

    They are a replay before, between and after attentions, and the launches of attention. The store
    of K and V is counted as part of a piece.
    """
    return layers + 1 + layers * (1 + has_merge)


def kernels_table(layers: int) -> str:
    """Return `num_kernels` by kernel, as Markdown."""
    lines = ["| kernel | in each layer | in a step |", "|---|---:|---:|"]
    lines += [f"| {name} | {n} | {n * layers} |" for name, n in PER_LAYER.items()]
    lines += [f"| {name} | | {n} |" for name, n in ONCE.items()]
    return "\n".join([*lines, f"| **all** | | **{num_kernels(layers)}** |"])


def weights_read(shape: Shape) -> int:
    """Return the weights that a decode step reads: all layers, the last norm, the LM head."""
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab_size = shape
    attention = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    norms = 2 * hidden + 2 * head_dim
    per_layer = attention + 3 * hidden * intermediate + norms
    return layers * per_layer + hidden + vocab_size * hidden


def launch_ms(kernels: int, microseconds: float) -> float:
    """Return the milliseconds to launch the kernels one by one."""
    return kernels * microseconds / 1000


def reading_ms(shape: Shape, dtype_bytes: int, bytes_per_second: float) -> float:
    """Return the milliseconds to read the weights of a step."""
    return weights_read(shape) * dtype_bytes / bytes_per_second * 1000


def launches_table(microseconds: float, dtype_bytes: int, bytes_per_second: float) -> str:
    """Return launch and read times as Markdown, and the fraction that an ideal GPU is busy."""
    lines = [
        "| model | kernels | launches, ms | weights, ms | ideal GPU busy |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, shape in QWEN3.items():
        kernels = num_kernels(shape.layers)
        launches = launch_ms(kernels, microseconds)
        reading = reading_ms(shape, dtype_bytes, bytes_per_second)
        busy = min(1.0, reading / launches)
        lines.append(f"| {name} | {kernels} | {launches:.2f} | {reading:.2f} | {busy:.0%} |")
    return "\n".join(lines)


def sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4, 8, then every 16 up to 256, then every 64, and the largest batch itself."""
    steps = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 64)]
    return [*(size for size in steps if size < max_num_seqs), max_num_seqs]


def size_for(num_rows: int, max_num_seqs: int) -> int:
    """Return the smallest captured size for `num_rows` rows."""
    captured = sizes(max_num_seqs)
    return captured[bisect_left(captured, num_rows)]


def mean_dummies(max_num_seqs: int) -> float:
    """Return the mean dummy rows of a step, if all numbers of rows are equally likely."""
    steps = range(1, max_num_seqs + 1)
    return sum(size_for(rows, max_num_seqs) - rows for rows in steps) / max_num_seqs


def sizes_table(steps: Sequence[int], max_num_seqs: int) -> str:
    """Return the graph that each step replays, given its number of rows, as Markdown."""
    lines = ["| decode rows | graph | dummy rows |", "|---:|---:|---:|"]
    for rows in steps:
        size = size_for(rows, max_num_seqs)
        lines.append(f"| {rows} | {size} | {size - rows} |")
    return "\n".join(lines)


def rows_of_steps(output_lengths: Sequence[int]) -> list[int]:
    """Return the rows of each step; the first one computes all prompts and yields a token."""
    return [sum(n > step for n in output_lengths) for step in range(max(output_lengths))]


def replays_table(output_lengths: Sequence[int], max_num_seqs: int) -> str:
    """Return what a GPU would run in each step, as Markdown; equal steps are one line."""
    rows = rows_of_steps(output_lengths)
    lines = [
        "| steps | rows | what runs | dummy rows |",
        "|---|---:|---|---:|",
        f"| 0 | {rows[0]} | prefill, eager | |",
    ]
    first = 1
    while first < len(rows):
        last = max(i for i in range(first, len(rows)) if rows[i] == rows[first])
        size = size_for(rows[first], max_num_seqs)
        steps = f"{first} to {last}" if last > first else f"{first}"
        num_dummies = size - rows[first]
        lines.append(f"| {steps} | {rows[first]} | graph of {size} | {num_dummies} |")
        first = last + 1
    return "\n".join(lines)
