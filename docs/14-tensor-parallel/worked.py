"""Worked examples for tensor parallelism: a product on two ranks, bytes, heads, vocabulary, time.

The splits are those of Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053), the volume of a ring
all-reduce is that of Patarasuk and Yuan 2009 (bandwidth optimal all-reduce algorithms).
"""

from nanoserve.config import EngineConfig

Vector = list[int]
Matrix = list[Vector]

# The worked product: y = W2 relu(W1 x), two inputs, four hidden values, two outputs.
X: Vector = [1, 2]
W1: Matrix = [[1, 0], [0, 1], [1, 1], [1, -1]]
W2: Matrix = [[1, 2, 0, 1], [0, 1, 1, 3]]


def product(weight: Matrix, x: Vector) -> Vector:
    """W x, where each row of W yields one output."""
    return [sum(w * value for w, value in zip(row, x, strict=True)) for row in weight]


def relu(x: Vector) -> Vector:
    """The activation of the worked product, applied to each value separately."""
    return [max(0, value) for value in x]


def two_layers(x: Vector) -> Vector:
    """The worked product on one rank."""
    return product(W2, relu(product(W1, x)))


def rank_product(rank: int, x: Vector) -> dict[str, Vector]:
    """What one of two ranks computes: its half of the rows of W1, then of the columns of W2."""
    half = len(W1) // 2
    mine = slice(rank * half, (rank + 1) * half)
    hidden = product(W1[mine], x)
    return {
        "hidden": hidden,
        "relu": relu(hidden),
        "partial": product([row[mine] for row in W2], relu(hidden)),
    }


def product_table() -> str:
    """The worked product on two ranks, and their sum."""
    ranks = [rank_product(rank, X) for rank in range(2)]
    lines = ["| rank | W1 x | relu | summand of W2 relu(W1 x) |", "|---|---|---|---|"]
    for i, r in enumerate(ranks):
        lines.append(f"| {i} | {r['hidden']} | {r['relu']} | {r['partial']} |")
    total = [a + b for a, b in zip(*(r["partial"] for r in ranks), strict=True)]
    hidden = product(W1, X)
    lines.append(f"| sum | | | **{total}** |")
    lines.append(f"| one rank | {hidden} | {relu(hidden)} | **{two_layers(X)}** |")
    return "\n".join(lines)


def relu_of_sum(a: int, b: int) -> int:
    """The result that a row-parallel first layer needs: the sum before the activation."""
    return max(0, a + b)


def sum_of_relus(a: int, b: int) -> int:
    """The result without an all-reduce between the two."""
    return max(0, a) + max(0, b)


def parameters(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, dim: int
) -> int:
    """Parameters of a Llama with an LM head of its own: matrices, norms, two vocabulary tables."""
    attention = 2 * hidden * dim * (heads + kv_heads)
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    return layers * layer + 2 * vocab * hidden + hidden


def llama_2_70b() -> int:
    """80 layers, hidden size 8192, 64 query heads and 8 KV heads of 128."""
    return parameters(32_000, 8192, 28_672, 80, 64, 8, 128)


def kv_heads_per_rank(kv_heads: int, ranks: int) -> int:
    """At least one: with fewer KV heads than ranks, several ranks keep a copy."""
    return max(1, kv_heads // ranks)


def kv_bytes(
    tokens: int, layers: int, kv_heads: int, dim: int, ranks: int = 1, dtype_bytes: int = 2
) -> int:
    """Bytes of K and V that one rank stores for `tokens` tokens."""
    return tokens * 2 * layers * kv_heads_per_rank(kv_heads, ranks) * dim * dtype_bytes


def memory_table(users: int, context: int, gpu_gb: float = 80.0) -> str:
    """LLaMA-2-70B in 16 bits: gigabytes (10^9) of weights and KV on each rank."""
    lines = ["| ranks | weights GB | KV GB | together | fits a GPU |", "|---|---|---|---|---|"]
    for ranks in (1, 2, 4, 8):
        weights = 2 * llama_2_70b() / ranks / 1e9
        kv = kv_bytes(users * context, 80, 8, 128, ranks) / 1e9
        fits = "yes" if weights + kv <= gpu_gb else "no"
        lines.append(f"| {ranks} | {weights:.1f} | {kv:.1f} | {weights + kv:.1f} | {fits} |")
    return "\n".join(lines)


def all_reduces(layers: int) -> int:
    """Per step: one after attention, one after the feed-forward, and one for the embedding."""
    return 2 * layers + 1


def message_bytes(hidden: int, tokens: int = 1, dtype_bytes: int = 2) -> int:
    """Size of one all-reduce: the hidden states of the step's tokens."""
    return tokens * hidden * dtype_bytes


def ring_bytes(message: int, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce: 2 (p - 1) / p of the message."""
    return 2 * (ranks - 1) / ranks * message


def step_bytes(hidden: int, layers: int, tokens: int, ranks: int, dtype_bytes: int = 2) -> float:
    """Bytes that each rank sends for the all-reduces of one step."""
    return all_reduces(layers) * ring_bytes(message_bytes(hidden, tokens, dtype_bytes), ranks)


def gather_bytes(rows: int, vocab: int, ranks: int, dtype_bytes: int = 2) -> int:
    """Bytes of logits that rank 0 receives from all other ranks, for `rows` sampled rows."""
    return rows * -(-vocab // ranks) * (ranks - 1) * dtype_bytes


def heads_of(rank: int, ranks: int, heads: int, kv_heads: int) -> tuple[range, range]:
    """Query heads and KV heads of one rank; query heads h share KV head h * kv_heads // heads."""
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    return mine, range(mine[0] * kv_heads // heads, mine[-1] * kv_heads // heads + 1)


def heads_table(ranks: int, heads: int, kv_heads: int) -> str:
    lines = ["| rank | query heads | KV heads |", "|---|---|---|"]
    for rank in range(ranks):
        query, kv = (", ".join(map(str, part)) for part in heads_of(rank, ranks, heads, kv_heads))
        lines.append(f"| {rank} | {query} | {kv} |")
    return "\n".join(lines)


def vocabulary_part(rank: int, ranks: int, vocab: int) -> range:
    """Token ids whose rows a rank holds; all parts are padded to the size of the largest."""
    rows = -(-vocab // ranks)
    return range(min(rank * rows, vocab), min((rank + 1) * rows, vocab))


def embedding_table(vocab: int, ranks: int, token_id: int) -> str:
    """The rank that has the row of a token; all others contribute zeros to the sum."""
    lines = ["| rank | token ids | padding rows | contributes |", "|---|---|---|---|"]
    rows = -(-vocab // ranks)
    for rank in range(ranks):
        part = vocabulary_part(rank, ranks, vocab)
        ids = f"{part[0]} to {part[-1]}" if part else "none"
        what = f"the row of token {token_id}" if token_id in part else "zeros"
        lines.append(f"| {rank} | {ids} | {rows - len(part)} | {what} |")
    return "\n".join(lines)


def decode_ms(
    weight_bytes: float, layers: int, ranks: int, bandwidth: float, all_reduce_us: float
) -> float:
    """A model of one decode step of one sequence, in milliseconds.

    Each rank reads its part of the weights; each all-reduce of so few bytes costs its latency.
    """
    waiting = all_reduces(layers) * all_reduce_us / 1e3 if ranks > 1 else 0.0
    return weight_bytes / ranks / bandwidth * 1e3 + waiting


def decode_table(bandwidth: float, all_reduce_us: float) -> str:
    """Three models over ranks: milliseconds of a decode step, and the speed-up over one rank."""
    # Parameters and layers; the small one has one table for embedding and head.
    models = {
        "Qwen3-0.6B": (596_049_920, 28),
        "LLaMA-2-7B": (parameters(32_000, 4096, 11_008, 32, 32, 32, 128), 32),
        "LLaMA-2-70B": (llama_2_70b(), 80),
    }
    lines = ["| model | 1 rank | 2 | 4 | 8 |", "|---|---|---|---|---|"]
    for name, (count, layers) in models.items():
        times = [decode_ms(2 * count, layers, n, bandwidth, all_reduce_us) for n in (1, 2, 4, 8)]
        cells = [f"{ms:.2f} ms ({times[0] / ms:.1f}x)" for ms in times]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def all_reduce(parts: Matrix) -> Matrix:
    """Every rank ends with the sum over the ranks."""
    total = [sum(column) for column in zip(*parts, strict=True)]
    return [list(total) for _ in parts]


def all_gather(parts: Matrix) -> Matrix:
    """Every rank ends with all parts, concatenated."""
    joined = [value for part in parts for value in part]
    return [list(joined) for _ in parts]


def default(option: str) -> int:
    """The default of an engine option."""
    return getattr(EngineConfig("none"), option)
