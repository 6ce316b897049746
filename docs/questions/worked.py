"""The numbers in the answers to the course's questions."""

import math

LAYERS, HIDDEN, SIZE, VOCAB = 32, 4096, 11_008, 32_000  # LLaMA-2-7B
PARAMETERS_70B = 68_976_648_192  # LLaMA-2-70B, counted in `worked.tensor_parallel`


def parameters_7b() -> dict[str, int]:
    """LLaMA-2-7B: 32 heads of 128 for queries, keys and values alike."""
    return {
        "feed-forward": LAYERS * 3 * HIDDEN * SIZE,
        "attention": LAYERS * 4 * HIDDEN * HIDDEN,
        "embedding and head": 2 * VOCAB * HIDDEN,
        "norms": (2 * LAYERS + 1) * HIDDEN,
    }


def share_7b(part: str) -> float:
    """Share of a part in all parameters, in per cent."""
    counts = parameters_7b()
    return 100 * counts[part] / sum(counts.values())


def weight_bytes_7b(bytes_per_parameter: float = 2) -> float:
    return bytes_per_parameter * sum(parameters_7b().values())


def weight_bytes_70b(bytes_per_parameter: float = 2) -> float:
    return bytes_per_parameter * PARAMETERS_70B


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype_bytes: int = 2) -> int:
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def tokens_that_fit(
    gpu_gb: float, share: float, weight_bytes: float, other_gb: float, kv_bytes: int
) -> int:
    """Tokens of KV that fit into a share of a GPU (10^9 bytes) beside weights and activations."""
    left = gpu_gb * 1e9 * share - weight_bytes - other_gb * 1e9
    return max(0, int(left // kv_bytes))


def read_ms(num_bytes: float, bandwidth: float) -> float:
    return 1000 * num_bytes / bandwidth


def compute_ms(parameters: float, rate: float, tokens: int = 1) -> float:
    """Two operations for each parameter and token."""
    return 1000 * 2 * parameters * tokens / rate


def rows_to_balance(rate: float, bandwidth: float, dtype_bytes: int = 2) -> float:
    """Rows at which a product takes as long to compute as to read its weight.

    Per parameter 2 n operations at `rate`, and `dtype_bytes` at `bandwidth`.
    """
    return dtype_bytes / 2 * rate / bandwidth


def reserved_waste(tokens: int, reserved: int) -> float:
    """Unused share of a contiguous reservation, in per cent."""
    return 100 * (1 - tokens / reserved)


def paged_waste(tokens: int, block_size: int) -> float:
    """Unused share of the blocks of a sequence, in per cent."""
    slots = -(-tokens // block_size) * block_size
    return 100 * (1 - tokens / slots)


def expected_waste(block_size: int) -> float:
    """Unused KV slots per sequence on average, if lengths end uniformly within a block."""
    return (block_size - 1) / 2


def reusable(tokens: int, block_size: int) -> int:
    """Tokens of a fully cached prompt that are not computed: full blocks, never the last token."""
    return (tokens - 1) // block_size * block_size


def block_size_table(tokens: int, context: int) -> str:
    """Costs of block sizes, for a cached prompt of `tokens` and a table of `context` tokens."""
    lines = ["| block size | empty KV slots a sequence | reused | entries in a table |"]
    lines.append("|---|---|---|---|")
    for size in (1, 16, 256):
        cells = (f"{expected_waste(size):.1f}", reusable(tokens, size), -(-context // size))
        lines.append(f"| {size} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def score_spread(head_dim: int) -> float:
    """Standard deviation of a dot product of two vectors of independent values of variance 1."""
    return math.sqrt(head_dim)


def larger_weight(difference: float) -> float:
    """Softmax weight of the larger of two scores."""
    return 1 / (1 + math.exp(-difference))


def saved_by_grouping(heads: int, kv_heads: int) -> float:
    """Saved share of the KV cache, in per cent."""
    return 100 * (1 - kv_heads / heads)


def chunked_steps(prompt: int, chunk: int) -> list[int]:
    """Tokens of a long prompt in each step."""
    full, rest = divmod(prompt, chunk)
    return [chunk] * full + ([rest] if rest else [])
