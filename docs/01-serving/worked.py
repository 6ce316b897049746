"""How many users fit on a device, and how fast a step can be: the arithmetic of chapter 1.

The roofline is that of Williams, Waterman and Patterson 2009 (doi 10.1145/1498765.1498785); its use
for decoding follows Pope et al. 2022 (arXiv 2211.05102).
"""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from nanoserve.checkpoint.checkpoint import bundled_checkpoint


class Device(NamedTuple):
    bandwidth: float  # bytes per second
    matmul_rate: float  # operations per second, dense, 16 bits


# From NVIDIA's data sheets; the A100's 2,039 GB/s rounded down.
DEVICES = {
    "A100 80 GB": Device(2.0e12, 312e12),
    "H100 SXM": Device(3.35e12, 989e12),
    "H200": Device(4.8e12, 989e12),
}


def pieces(text: str) -> str:
    """The tokens of `text` for the bundled model's tokenizer, as Markdown."""
    tokenizer = Tokenizer.from_file(str(Path(bundled_checkpoint("tiny-qwen3")) / "tokenizer.json"))
    return ", ".join(f"`{text[start:end]}`" for start, end in tokenizer.encode(text).offsets)


def weight_bytes(parameters: int, dtype_bytes: float) -> float:
    return parameters * dtype_bytes


def users_reserved(pool_bytes: int, per_token: int, max_len: int) -> int:
    """Return how many users fit if each reserves memory for the longest sequence."""
    return pool_bytes // (max_len * per_token)


def users_paged(pool_bytes: int, per_token: int, tokens: int, block_size: int) -> int:
    """Return how many users fit if each takes whole blocks."""
    blocks = pool_bytes // (block_size * per_token)
    return blocks // -(-tokens // block_size)


def unused_share(reserved: float, used: float) -> float:
    return 1 - used / reserved


def product_seconds(parameters: int, tokens: int, matmul_rate: float) -> float:
    """Return the time of a step's matrix products: a multiply and an add per weight and token."""
    return 2 * parameters * tokens / matmul_rate


def decode_seconds(users: int, weights: float, kv_per_user: float, bandwidth: float) -> float:
    """Return the time in which a decode step reads all weights once, and every user's KV."""
    return (weights + users * kv_per_user) / bandwidth


def batching_gain(users: int, weights: float, kv_per_user: float) -> float:
    """Return the tokens per second of a batch over those of one user, if it is memory-bound."""
    return users * (weights + kv_per_user) / (weights + users * kv_per_user)


def batching_limit(weights: float, kv_per_user: float) -> float:
    """Return the limit of `batching_gain` as users are added."""
    return (weights + kv_per_user) / kv_per_user


def batching_table(
    batches: list[int],
    weights: float,
    kv_per_user: float,
    parameters: int,
    bandwidth: float,
    matmul_rate: float,
) -> str:
    """Markdown: the time of a decode step over the number of users."""
    lines = ["| users | read | memory ms | products ms | tokens/s | gain |"]
    lines.append("|---:|---:|---:|---:|---:|---:|")
    for users in batches:
        memory = decode_seconds(users, weights, kv_per_user, bandwidth)
        products = product_seconds(parameters, users, matmul_rate)
        lines.append(
            f"| {users} | {(weights + users * kv_per_user) / 1e9:.1f} GB | {memory * 1e3:.2f} | "
            f"{products * 1e3:.2f} | {users / max(memory, products):,.0f} | "
            f"{batching_gain(users, weights, kv_per_user):.1f} x |"
        )
    return "\n".join(lines)


def weight_intensity(tokens: int, dtype_bytes: float) -> float:
    """Return operations per byte of a product with the weights, each read once for all tokens."""
    return 2 * tokens / dtype_bytes


def attention_intensity(queries_per_kv_head: int, dtype_bytes: float) -> float:
    """Return the operations per byte of K and V in a decode step.

    A value of K or V takes part in one multiply and add per query head that reads its KV head.
    """
    return 2 * queries_per_kv_head / dtype_bytes


def ridge_table() -> str:
    """Markdown: operations per byte from which on each device is compute-bound."""
    lines = ["| device | bandwidth | products | ridge |", "|---|---:|---:|---:|"]
    for name, device in DEVICES.items():
        lines.append(
            f"| {name} | {device.bandwidth / 1e12:.2f} TB/s | "
            f"{device.matmul_rate / 1e12:.0f} TFLOP/s | "
            f"{device.matmul_rate / device.bandwidth:.0f} FLOP/byte |"
        )
    return "\n".join(lines)
