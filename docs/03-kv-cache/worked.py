"""Sizes of the KV cache, and the work it saves: the arithmetic of chapters 1, 3 and 4."""

from typing import NamedTuple

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Heads(NamedTuple):
    """The part of a model's shape that its KV cache depends on, and its query heads."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """In 16 bits."""
        return bytes_per_token(self.layers, self.kv_heads, self.head_dim, dtype_bytes=2)


# From each model's public config.json.
MODELS = {
    "tiny-qwen3 (bundled)": Heads(6, 8, 2, 32),
    "Qwen2.5-0.5B": Heads(24, 14, 2, 64),
    "Llama-3.2-1B": Heads(16, 32, 8, 64),
    "Qwen3-30B-A3B": Heads(48, 32, 4, 128),
    "Qwen3-0.6B": Heads(28, 16, 8, 128),
    "Llama-3.1-8B": Heads(32, 32, 8, 128),
    "Qwen3-8B": Heads(36, 32, 8, 128),
    "LLaMA-2-70B": Heads(80, 64, 8, 128),
    "LLaMA-2-7B": Heads(32, 32, 32, 128),
}


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes of K and V of one token, over all layers.

    Kwon et al. 2023 (arXiv 2309.06180), section 3, for OPT-13B: 2 vectors x hidden size 5120 x
    40 layers x 2 bytes = 800 KiB. There hidden size is KV heads x head_dim; with grouped queries
    it is not.
    """
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def full_bytes(layers: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Return the bytes of one token in 16 bits, if each head keeps its own key and value."""
    return layers * heads * (key_dim + value_dim) * 2


def latent_bytes(layers: int, latent: int, rotated: int) -> int:
    """Return the bytes of a token in 16 bits with MLA (arXiv 2405.04434, section 2.1)."""
    return layers * (latent + rotated) * 2


def windowed_share(length: int, window: int, windowed: int, layers: int) -> float:
    """Return the share of a full cache that is needed if `windowed` layers have a window."""
    kept = (layers - windowed) * length + windowed * min(window, length)
    return kept / (layers * length)


def groups_table(lengths: list[int], window: int, block_size: int, windowed: int) -> str:
    """Markdown: blocks of a text by cache group; one group is full, `windowed` have a window."""
    lines = [
        "| tokens | full group | each group with a window | share of a cache without windows |"
    ]
    lines.append("|---:|---:|---:|---:|")
    for length in lengths:
        full = -(-length // block_size)
        # A window that begins within a block needs that block, too.
        seen = min(full, -(-window // block_size) + 1)
        share = (full + windowed * seen) / ((windowed + 1) * full)
        lines.append(f"| {length:,} | {full:,} | {seen:,} | {100 * share:.0f} % |")
    return "\n".join(lines)


def growth_table(lengths: list[int], per_token: int) -> str:
    """Markdown: the cache of one sequence at several lengths."""
    rows = [f"| {n:,} | {n * per_token / MIB:,.0f} MiB |" for n in lengths]
    return "\n".join(["| tokens | KV cache |", "|---:|---:|", *rows])


def sizes_table(context: int) -> str:
    """Markdown: every model of `MODELS`, per token and for one sequence of `context` tokens."""
    lines = [
        f"| model | layers | query heads | KV heads | head_dim | per token | {context:,} tokens |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, model in MODELS.items():
        size = model.bytes_per_token
        lines.append(
            f"| {name} | {model.layers} | {model.heads} | {model.kv_heads} | {model.head_dim} | "
            f"{size / KIB:,.1f} KiB | {context * size / MIB:,.0f} MiB |"
        )
    return "\n".join(lines)


def projections(num_tokens: int, cached: bool) -> int:
    """Return how often K and V are computed while a sequence grows to `num_tokens` tokens.

    Without a cache, step n computes them for all n tokens: 1 + 2 + ... + n.
    """
    return num_tokens if cached else num_tokens * (num_tokens + 1) // 2


def scores(num_tokens: int) -> int:
    """Return the query-key pairs that a head evaluates over the same steps, with a cache.

    Step n compares one query with n keys. A cache does not change this number.
    """
    return num_tokens * (num_tokens + 1) // 2


def projections_table(lengths: list[int]) -> str:
    """Markdown: K and V computed without and with a cache, and the pairs that attention needs."""
    lines = ["| tokens | K, V without cache | with cache | pairs without cache | with cache |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for n in lengths:
        without, with_cache = projections(n, cached=False), projections(n, cached=True)
        pairs = sum(map(scores, range(1, n + 1)))  # each step recomputes all tokens so far
        lines.append(f"| {n:,} | {without:,} | {with_cache:,} | {pairs:,} | {scores(n):,} |")
    return "\n".join(lines)


def block_bytes(block_size: int, per_token: int) -> int:
    """Return the bytes of K and V of one block, over all layers."""
    return block_size * per_token


def usable_blocks(pool_bytes: int, bytes_of_block: int) -> int:
    """Return the number of blocks of a pool, without dummy block 0."""
    return pool_bytes // bytes_of_block - 1


def run_bytes(
    kv_heads: int, block_size: int, head_dim: int, dtype_bytes: int, head_first: bool
) -> int:
    """Return the longest contiguous piece that attention reads for one KV head of one block.

    [..., kv_heads, block_size, head_dim] keeps a head's tokens together; in
    [..., block_size, kv_heads, head_dim] they are contiguous only if there is a single head.
    """
    tokens_in_a_row = block_size if head_first or kv_heads == 1 else 1
    return tokens_in_a_row * head_dim * dtype_bytes


def pool_bytes(total: int, utilization: float, weights: int, activations: int, graphs: int) -> int:
    """Return what an engine's share of a GPU's memory leaves for KV blocks."""
    return int(total * utilization) - weights - activations - graphs
