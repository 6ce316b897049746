"""Rows with paged caches full of random keys and values, for timing attention."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from nanoserve.cli.bench.workloads import draw_workload
from nanoserve.kernels.triton.paged_attention import paged_attention

DTYPE = torch.bfloat16
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model that matter for the kernels."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


@dataclass(frozen=True)
class Rows:
    """The last tokens of some contexts, and caches that hold the contexts."""

    q: torch.Tensor
    kv_caches: list[torch.Tensor]
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_len: int  # the longest
    max_context_len: int
    num_decode_rows: int  # rows of one token, which come first
    kv_scales: list[torch.Tensor] | None = None  # of caches that hold codes

    def attend(self, layer: int) -> torch.Tensor:
        return paged_attention(
            self.q,
            self.kv_caches[layer],
            self.cu_seqlens_q,
            self.context_lens,
            self.block_tables,
            scale=self.q.shape[2] ** -0.5,
            num_decode_rows=self.num_decode_rows,
            max_context_len=self.max_context_len,
            kv_scales=self.kv_scales[layer] if self.kv_scales else None,
        )

    def decode_rows(self) -> "Rows":
        """Return the decode rows only."""
        n = self.num_decode_rows
        rows = {"context_lens": self.context_lens[:n], "block_tables": self.block_tables[:n]}
        tokens = {"q": self.q[:n], "cu_seqlens_q": self.cu_seqlens_q[: n + 1]}
        return replace(self, **tokens, **rows, query_len=1)

    def chunks(self) -> "Rows":
        """Return the rows of several tokens only."""
        n = self.num_decode_rows
        if n == 0:
            return self
        rows = {"context_lens": self.context_lens[n:], "block_tables": self.block_tables[n:]}
        tokens = {"q": self.q[n:], "cu_seqlens_q": self.cu_seqlens_q[n:] - n}
        return replace(self, **tokens, **rows, num_decode_rows=0)


def make_rows(
    shape: Shape,
    contexts: list[int],
    query_len: int | list[int],
    num_layers: int,
    device: str,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = 0,
) -> Rows:
    """Return rows with `num_layers` caches of `num_blocks`, or as many as needed, in random order.

    `query_len` is the length of all rows, or of each, decode rows first.
    """
    lens = [query_len] * len(contexts) if isinstance(query_len, int) else query_len
    blocks = [-(-context // block_size) for context in contexts]
    num_blocks = max(num_blocks, sum(blocks) + 1)
    block = (shape.num_kv_heads, block_size, shape.head_dim)
    kv_caches = [randn(2, num_blocks, *block, device=device) for _ in range(num_layers)]
    scattered, start = 1 + torch.randperm(num_blocks - 1, dtype=torch.int32), 0
    tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    for table, n in zip(tables, blocks, strict=True):
        table[:n] = scattered[start : start + n]
        start += n
    return Rows(
        randn(sum(lens), shape.num_heads, shape.head_dim, device=device),
        kv_caches,
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        tables.to(device),
        max(lens),
        max(contexts),
        lens.count(1),
    )


def randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device)


def decode_cases(is_tiny: bool) -> dict[str, list[int]]:
    """Return contexts of decode steps: equal ones, and those of nano-vllm's workload."""
    if is_tiny:
        return {"2x20": [20, 20], "ragged": [7, 40, 21]}
    prompts, output_lens = draw_workload(256, (100, 1024), (100, 1024), 151_936)
    cases = {"256x1000": [1000] * 256}
    for step in (300, 600, 900):
        rows = zip(prompts, output_lens, strict=True)
        cases[f"ragged {step}"] = [len(prompt) + step for prompt, n in rows if n > step]
    for num_rows, context in ((64, 1000), (32, 1000), (8, 1000), (64, 8000), (1, 8000)):
        cases[f"{num_rows}x{context}"] = [context] * num_rows
    return cases
