"""Rows with paged caches full of random keys and values, for whoever times attention."""

from dataclasses import dataclass

import torch

from nanoserve.bench.workloads import draw_workload
from nanoserve.kernels.paged_attention import paged_attention

DTYPE = torch.bfloat16
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


@dataclass(frozen=True)
class Rows:
    """The last `query_len` tokens of each of some contexts, and caches that hold the contexts."""

    q: torch.Tensor
    kv_caches: list[torch.Tensor]
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_len: int
    max_context_len: int

    def attend(self, layer: int) -> torch.Tensor:
        return paged_attention(
            self.q,
            self.kv_caches[layer],
            self.cu_seqlens_q,
            self.context_lens,
            self.block_tables,
            scale=self.q.shape[2] ** -0.5,
            num_decode_rows=len(self.context_lens) if self.query_len == 1 else 0,
            max_context_len=self.max_context_len,
        )


def make_rows(
    shape: Shape,
    contexts: list[int],
    query_len: int,
    num_layers: int,
    device: str,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = 0,
) -> Rows:
    """With `num_layers` caches of `num_blocks`, or as many as it takes; their order is random."""
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
        randn(len(contexts) * query_len, shape.num_heads, shape.head_dim, device=device),
        kv_caches,
        torch.arange(len(contexts) + 1, dtype=torch.int32, device=device) * query_len,
        torch.tensor(contexts, dtype=torch.int32, device=device),
        tables.to(device),
        query_len,
        max(contexts),
    )


def randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device)


def decode_cases(is_tiny: bool) -> dict[str, list[int]]:
    """Contexts of decode steps: alike, and as nano-vllm's workload has them at some steps."""
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
