"""A decoder layer by hand, and a model's parameters by part: the arithmetic of chapter 2."""

import math
from typing import NamedTuple

Vector = list[float]
Matrix = list[Vector]

# Three tokens, one head of four dimensions; the queries look for different things. Softmax weights
# of one row sum to 1, and so does the last dimension of every output.
QUERIES: Matrix = [[1, 0, 2, 0], [0, 2, 0, 1], [2, 0, 0, 2]]
KEYS: Matrix = [[2, 0, 1, 1], [0, 2, 1, 0], [1, 0, 2, 1]]
VALUES: Matrix = [[4, 0, 0, 1], [0, 4, 0, 1], [0, 0, 4, 1]]


class Shape(NamedTuple):
    """The shape of a Qwen3 or a Llama, from its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool  # whether the LM head is the embedding
    head_norms: bool  # an RMSNorm for the query heads of a layer, and one for its key heads


QWEN3_06B = Shape(151_936, 1024, 3072, 28, 16, 8, 128, tied=True, head_norms=True)
LLAMA_2_7B = Shape(32_000, 4096, 11_008, 32, 32, 32, 128, tied=False, head_norms=False)


def parameters(shape: Shape) -> dict[str, int]:
    """Return the parameters of each part of the model, over all layers."""
    hidden, layers = shape.hidden_size, shape.layers
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = layers * 2 * hidden + hidden
    if shape.head_norms:
        norms += layers * 2 * shape.head_dim
    return {
        "embedding": shape.vocab_size * hidden,
        "attention": layers * (2 * hidden * q_size + 2 * hidden * kv_size),
        "feed-forward": layers * 3 * hidden * shape.intermediate_size,
        "norms": norms,
        "LM head": 0 if shape.tied else shape.vocab_size * hidden,
    }


def num_parameters(shape: Shape) -> int:
    return sum(parameters(shape).values())


def share(shape: Shape, *parts: str) -> float:
    return sum(parameters(shape)[part] for part in parts) / num_parameters(shape)


def parameter_table(shape: Shape) -> str:
    """Markdown."""
    lines = ["| part | parameters | share |", "|---|---:|---:|"]
    for part, number in parameters(shape).items():
        lines.append(f"| {part} | {number:,} | {100 * share(shape, part):.2f} % |")
    return "\n".join([*lines, f"| together | {num_parameters(shape):,} | |"])


def dot(x: Vector, y: Vector) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def softmax(scores: Vector) -> Vector:
    """Subtract the largest score first, which changes nothing and keeps exp from overflowing."""
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def attention_weights(q: Matrix, k: Matrix, causal: bool) -> Matrix:
    """Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1: softmax(q k^T / sqrt(d)), row by row.

    With the causal mask, query i attends to keys 0 to i only; the others have weight 0.
    """
    rows = []
    for i, query in enumerate(q):
        seen = k[: i + 1] if causal else k
        weights = softmax([dot(query, key) / math.sqrt(len(query)) for key in seen])
        rows.append(weights + [0.0] * (len(k) - len(seen)))
    return rows


def attention(q: Matrix, k: Matrix, v: Matrix, causal: bool) -> Matrix:
    """Return each query's weighted sum of the values."""
    columns = list(zip(*v, strict=True))
    weights = attention_weights(q, k, causal)
    return [[dot(row, list(column)) for column in columns] for row in weights]


def vectors(rows: Matrix) -> str:
    """Return vectors as the text lists them: `(1, 0), (0, 1) and (1, 1)`."""
    *first, last = (f"({_row(row, 0)})" for row in rows)
    return f"{', '.join(first)} and {last}"


def three_tokens_table(causal: bool) -> str:
    """Markdown: how each of `QUERIES` attends to `KEYS`; masked keys are dashes."""
    weights = attention_weights(QUERIES, KEYS, causal)
    outputs = attention(QUERIES, KEYS, VALUES, causal)
    lines = ["| token | scores | divided by 2 | weights | output |", "|---:|---|---|---|---|"]
    for i, query in enumerate(QUERIES):
        seen = i + 1 if causal else len(KEYS)
        scores = [dot(query, key) for key in KEYS[:seen]]
        unseen = ", –" * (len(KEYS) - seen)
        cells = [_row(scores, 0) + unseen, _row([score / 2 for score in scores], 1) + unseen]
        cells += [_row(weights[i], 3), _row(outputs[i], 2)]
        lines.append(f"| {i} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _row(numbers: Vector, digits: int) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def rms_norm(x: Vector, eps: float = 1e-6) -> Vector:
    """Zhang and Sennrich 2019 (arXiv 1910.07467), without its learned weights."""
    scale = 1 / math.sqrt(dot(x, x) / len(x) + eps)
    return [value * scale for value in x]


def rms_norm_row(x: Vector) -> str:
    return _row(rms_norm(x), 2)


def rotate(x: Vector, position: int, theta: float = 10_000.0) -> Vector:
    """Su et al. 2021 (arXiv 2104.09864): rotate (x[i], x[i + d/2]) by position theta^(-2i/d)."""
    half = len(x) // 2
    turned = [0.0] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return turned


def turned_scores_table(pairs: list[tuple[int, int]], theta: float) -> str:
    """Markdown: the score of the last of `QUERIES` and the first of `KEYS`, at some positions."""
    lines = ["| theta | position of query | of key | distance | score |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for m, n in pairs:
        score = dot(rotate(QUERIES[-1], m, theta), rotate(KEYS[0], n, theta))
        lines.append(f"| {theta:,.0f} | {m} | {n} | {m - n} | {score:.4f} |")
    return "\n".join(lines)


def turn_in_tokens(pair: int, head_dim: int, theta: float) -> float:
    """Return the number of tokens in which a pair of dimensions makes a full turn."""
    return 2 * math.pi * theta ** (2 * pair / head_dim)


def kv_head_of(head: int, heads: int, kv_heads: int) -> int:
    """Ainslie et al. 2023 (arXiv 2305.13245): neighbouring query heads share a KV head."""
    return head // (heads // kv_heads)


def kv_heads_row(heads: int, kv_heads: int) -> str:
    """Return the KV head of each query head."""
    return ", ".join(str(kv_head_of(head, heads, kv_heads)) for head in range(heads))
