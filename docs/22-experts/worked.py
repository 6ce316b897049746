"""Chapter 22's numbers: what a router chooses, and what a step reads, computes and sends for it.

Single cases use the engine's own router and experts; probabilities come from a formula and from
simulations with a seeded generator. Times are lower bounds from data sheets.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from numpy import ndarray
from tables import table

from nanoserve.models.layers.experts import SparseMoE


@dataclass(frozen=True)
class Shape:
    """The fields of a config.json, for a mixture without dense layers and shared experts."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_size: int
    vocab: int
    has_head_norms: bool

    @property
    def expert(self) -> int:
        """Parameters of one expert in one layer: gate, up and down."""
        return 3 * self.hidden * self.expert_size

    @property
    def outside(self) -> int:
        """Parameters that every token uses: attention, norms, routers, LM head; no embedding."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.has_head_norms else 0)
        layer = attention + norms + self.hidden * self.experts
        return self.layers * layer + self.hidden + self.vocab * self.hidden

    def parameters(self, experts: int) -> int:
        """Parameters of the model with this many experts per layer, embedding included."""
        return self.outside + self.vocab * self.hidden + self.layers * experts * self.expert


MODELS = {
    "Qwen3-30B-A3B": Shape(2048, 48, 32, 4, 128, 128, 8, 768, 151936, True),
    "Mixtral-8x7B": Shape(4096, 32, 32, 8, 128, 8, 2, 14336, 32000, False),
}
_BANDWIDTH, _RATE = 3.35e12, 989e12  # of an H100: bytes, and bfloat16 operations, per second


def total(model: str) -> int:
    return MODELS[model].parameters(MODELS[model].experts)


def active(model: str) -> int:
    return MODELS[model].parameters(MODELS[model].top_k)


def parameter_table() -> str:
    rows = [
        (
            name,
            f"{shape.top_k} of {shape.experts}",
            f"{total(name) / 1e9:.2f}",
            f"{active(name) / 1e9:.2f}",
            f"{shape.layers * shape.experts * shape.expert / total(name):.0%}",
        )
        for name, shape in MODELS.items()
    ]
    head = ("model", "experts a token", "parameters, 10^9", "active", "of all are experts'")
    return table(head, rows)


# ---------------------------------------------------------------- what a step reads


def touched(tokens: float, experts: int, top_k: int) -> float:
    """Experts of a layer that at least one of the tokens uses, on average, if each token chooses
    evenly and independently: a token does not use an expert with probability 1 - top_k / experts.
    """
    return experts * (1 - (1 - top_k / experts) ** tokens)


def read_bytes(tokens: float, model: str) -> float:
    """Bytes of weights that a step reads in 16 bits, without the few rows of the embedding."""
    shape = MODELS[model]
    experts = touched(tokens, shape.experts, shape.top_k)
    return 2 * (shape.outside + shape.layers * experts * shape.expert)


def _computing(tokens: float, model: str) -> float:
    """Seconds of arithmetic: only the chosen experts count, however many are read."""
    shape = MODELS[model]
    used = shape.outside + shape.layers * shape.top_k * shape.expert
    return 2 * used * tokens / _RATE


def step_seconds(tokens: float, model: str) -> float:
    """Time of a step: reading or computing, whichever takes longer."""
    return max(read_bytes(tokens, model) / _BANDWIDTH, _computing(tokens, model))


def dense_seconds(tokens: float, model: str) -> float:
    """The same for a dense model with as many parameters as this one has active ones."""
    return max(read_bytes(1, model) / _BANDWIDTH, _computing(tokens, model))


def batch_table(batches: list[int], model: str) -> str:
    shape = MODELS[model]
    rows = []
    for tokens in batches:
        experts = touched(tokens, shape.experts, shape.top_k)
        seconds, other = step_seconds(tokens, model), dense_seconds(tokens, model)
        rows.append(
            (
                f"{tokens:,}",
                f"{experts:.1f} of {shape.experts}",
                f"{read_bytes(tokens, model) / tokens / 1e9:.3f} GB",
                f"{1e3 * seconds:.1f} ms",
                f"{seconds / other:.1f}",
            )
        )
    return table(
        (
            "tokens in the step",
            "experts touched",
            "read for each token",
            "the step",
            "times the dense one's",
        ),
        rows,
    )


def balanced_tokens(model: str, is_dense: bool = False) -> int:
    """Tokens at which computing takes as long as reading all experts, or the dense model."""
    shape = MODELS[model]
    whole = 2 * (shape.outside + shape.layers * shape.experts * shape.expert)
    read = read_bytes(1, model) if is_dense else whole
    return math.ceil(read / _BANDWIDTH / _computing(1, model))


def rows_per_expert(tokens: int, model: str) -> float:
    """Pairs per expert, on average."""
    return tokens * MODELS[model].top_k / MODELS[model].experts


# ---------------------------------------------------------------- the router


def engine_weights(logits: list[float], top_k: int, renormalise: bool) -> tuple[list, list]:
    """Experts and weights of one token with these router logits, by the engine's own `route`."""
    layer = SimpleNamespace(
        router_logits=lambda hidden: torch.tensor([logits]),
        top_k=top_k,
        norm_topk_prob=renormalise,
        rounds_weights=False,
    )
    ids, weights = SparseMoE.route(layer, torch.ones(1, 1))
    return ids[0].tolist(), weights[0].tolist()


def routing_table(logits: list[float], top_k: int) -> str:
    """One token's weights by the rules of several families."""
    best, plain = engine_weights(logits, top_k, renormalise=False)
    _, renormalised = engine_weights(logits, top_k, renormalise=True)
    chosen = [math.exp(logits[expert]) for expert in best]
    after = [value / sum(chosen) for value in chosen]
    sigmoids = [1 / (1 + math.exp(-logits[expert])) for expert in best]
    gated = [value / sum(sigmoids) for value in sigmoids]
    rules = [
        ("softmax of all, the best k", plain, "OLMoE, Qwen2-MoE"),
        ("the same, divided by their sum", renormalised, "Mixtral, Qwen3-MoE"),
        ("the best k, then softmax of these", after, "gpt-oss"),
        ("sigmoid of each, divided by the sum", gated, "DeepSeek-V3"),
    ]
    rows = [
        (name, ", ".join(f"{each:.3f}" for each in weights), f"{sum(weights):.3f}", who)
        for name, weights, who in rules
    ]
    head = ("rule", f"weights of experts {', '.join(map(str, best))}", "sum", "for example")
    return table(head, rows)


# ---------------------------------------------------------------- grouping


def grouping_table(ids: list[list[int]], num_experts: int) -> str:
    """The pairs of each expert, in the order in which the engine sorts them."""
    flat, top_k = np.array(ids).ravel(), len(ids[0])
    order = np.argsort(flat, kind="stable")
    rows = []
    for expert in range(num_experts):
        pairs = [int(pair) for pair in order if flat[pair] == expert]
        tokens = ", ".join(str(pair // top_k) for pair in pairs) or "none"
        rows.append((expert, ", ".join(map(str, pairs)) or "none", tokens))
    return table(("expert", "its pairs", "their tokens"), rows)


def products(ids: list[list[int]], is_grouped: bool) -> int:
    """Number of matrix products: gate and up in one, and down, for each pair or touched expert."""
    experts = [expert for row in ids for expert in row]
    return 2 * len(set(experts) if is_grouped else experts)


# ---------------------------------------------------------------- imbalance, and several ranks


def choose(
    tokens: int, experts: int, top_k: int, skew: float, generator: np.random.Generator
) -> ndarray:
    """int [tokens, top_k]: experts drawn without replacement (Gumbel top-k). The popularities are
    (i + 1) ** -skew, assigned to the experts in random order."""
    popularity = -skew * np.log(np.arange(experts) + 1.0)
    noise = -np.log(-np.log(generator.random((tokens, experts))))
    score = generator.permutation(popularity) + noise
    return np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]


def rank_of(expert: int, experts: int, ranks: int) -> int:
    """The rank that has this expert: the last rank whose first expert is not behind it."""
    return max(rank for rank in range(ranks) if rank * experts // ranks <= expert)


def rank_table(experts: int, ranks: int) -> str:
    homes = [rank_of(expert, experts, ranks) for expert in range(experts)]
    rows = [
        (rank, ", ".join(str(expert) for expert in range(experts) if homes[expert] == rank))
        for rank in range(ranks)
    ]
    return table(("rank", "its experts"), rows)


def simulate(tokens: int, model: str, skew: float, ranks: int) -> tuple[float, float, float]:
    """Averages over 40 steps: experts touched, pairs of the busiest expert over the mean, and pairs
    of the busiest rank over the mean."""
    shape, generator = MODELS[model], np.random.default_rng(0)
    homes = np.array([rank_of(expert, shape.experts, ranks) for expert in range(shape.experts)])
    found = []
    for _ in range(40):
        ids = choose(tokens, shape.experts, shape.top_k, skew, generator)
        counts = np.bincount(ids.ravel(), minlength=shape.experts)
        on_ranks = np.bincount(homes, weights=counts, minlength=ranks)
        found.append(
            ((counts > 0).sum(), counts.max() / counts.mean(), on_ranks.max() / on_ranks.mean())
        )
    return tuple(float(each) for each in np.mean(found, axis=0))


def imbalance_table(batches: list[int], model: str, ranks: int) -> str:
    rows = []
    for tokens in batches:
        for name, skew in (("even", 0.0), ("skewed", 0.5)):
            experts, expert, rank = simulate(tokens, model, skew, ranks)
            rows.append((f"{tokens:,}", name, f"{experts:.0f}", f"{expert:.1f}", f"{rank:.2f}"))
    head = ("tokens", "router", "touched", "busiest expert / mean", "busiest rank / mean")
    return table(head, rows)


def ranks_of_a_token(model: str, ranks: int) -> float:
    """Number of ranks that have experts of a token, on average, with equally many on each rank."""
    shape = MODELS[model]
    elsewhere = shape.experts - shape.experts // ranks
    missed = math.comb(elsewhere, shape.top_k) / math.comb(shape.experts, shape.top_k)
    return ranks * (1 - missed)


def sent_all_reduce(model: str, ranks: int) -> float:
    """Bytes that a rank sends in a layer for each token of the step, in 16 bits: a ring reduces and
    then gathers, each in ranks - 1 steps of one part."""
    return 2 * (ranks - 1) / ranks * MODELS[model].hidden * 2


def sent_all_to_all(model: str, ranks: int) -> float:
    """The same where a token is on one rank: it is sent to each other rank that has one of its
    experts, and each sends a result back. The average over the ranks."""
    others = ranks_of_a_token(model, ranks) * (ranks - 1) / ranks
    return 2 * others / ranks * MODELS[model].hidden * 2


def sent_table(sizes: list[int], model: str) -> str:
    rows = [
        (
            ranks,
            f"{ranks_of_a_token(model, ranks):.1f}",
            f"{sent_all_reduce(model, ranks) / 1024:.1f} KiB",
            f"{sent_all_to_all(model, ranks) / 1024:.1f} KiB",
        )
        for ranks in sizes
    ]
    head = ("ranks", "a token's experts lie on", "all-reduce", "all-to-all, there and back")
    return table(head, rows)


def with_copies(loads: list[int], ranks: int, copies: int) -> list[float]:
    """Loads of the ranks with redundant copies of the busiest experts, all placed greedily.

    Each copy is made of the expert with the largest load per copy. Then each copy, the heaviest
    first, is placed on the least loaded rank that still has room: all ranks hold equally many.
    """
    count = [1] * len(loads)
    for _ in range(copies):
        busiest = max(range(len(loads)), key=lambda expert: loads[expert] / count[expert])
        count[busiest] += 1
    shares = [load / n for load, n in zip(loads, count, strict=True) for _ in range(n)]
    room, on_ranks = [len(shares) // ranks] * ranks, [0.0] * ranks
    for share in sorted(shares, reverse=True):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: on_ranks[r])
        on_ranks[rank] += share
        room[rank] -= 1
    return on_ranks


def in_order(loads: list[int], ranks: int) -> list[float]:
    """Loads of the ranks if each has a contiguous part of the experts."""
    found = [0.0] * ranks
    for expert, load in enumerate(loads):
        found[rank_of(expert, len(loads), ranks)] += load
    return found


def placement_table(loads: list[int], ranks: int, copies: int) -> str:
    ways = [
        ("contiguous parts", in_order(loads, ranks)),
        ("placed by load", with_copies(loads, ranks, 0)),
        (f"with {copies} copies, placed by load", with_copies(loads, ranks, copies)),
    ]
    rows = [
        (name, ", ".join(f"{each:g}" for each in found), f"{max(found) * ranks / sum(found):.2f}")
        for name, found in ways
    ]
    return table(("experts", "loads of the ranks", "busiest / mean"), rows)


def physical_per_rank(experts: int, copies: int, ranks: int) -> int:
    return (experts + copies) // ranks
