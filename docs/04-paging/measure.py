"""Compares gathering with walking on this machine: `python docs/04-paging/measure.py`.

Attention of one layer for a decode step, by the two backends for a CPU. One gathers the blocks of
each row and lets torch attend (`TorchAttention`), the other reads every block in place
(`NumbaAttention`, which needs numba). They take turns on one thread, and before each call the
caches of the processor are filled with other data, as the other layers of a model would do. It
measures processor time, which other processes affect less than wall-clock time.
"""

import argparse
import statistics
import time

import torch

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.numba import NumbaAttention
from nanoserve.attention.torch import TorchAttention

BLOCK_SIZE = 16
LAYER = AttentionLayer(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)  # Qwen3-0.6B
ROWS = ((1, 1024), (16, 256), (16, 1024), (4, 4096))  # (sequences, tokens of context of each)


def decode_rows(num_rows: int, context: int) -> AttentionMetadata:
    """Return a batch of decode rows, whose blocks lie anywhere in the pool."""
    num_blocks = -(-context // BLOCK_SIZE)
    tables = 1 + torch.randperm(num_rows * num_blocks).int().view(num_rows, num_blocks)
    last = context - 1
    return AttentionMetadata(
        positions=torch.full((num_rows,), last, dtype=torch.int32),
        slot_mapping=tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32),
        context_lens=torch.full((num_rows,), context, dtype=torch.int32),
        block_tables=tables,
        num_decode_rows=num_rows,
        max_query_len=1,
        max_context_len=context,
    )


def seconds(
    backend: AttentionBackend, q: torch.Tensor, cache: KVCache, rows: AttentionMetadata
) -> float:
    begin = time.process_time()
    backend.attend(LAYER, q, cache, rows)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeat", type=int, default=30)
    repeat = parser.parse_args().repeat
    torch.manual_seed(0)
    torch.set_num_threads(1)
    walk, gather = NumbaAttention(), TorchAttention()
    elsewhere = torch.ones(2**24)  # 64 MiB
    print("| sequences | context | gathered | walked | ratio of pairs, and their middle half |")
    print("|---:|---:|---:|---:|---|")
    for num_rows, context in ROWS:
        rows = decode_rows(num_rows, context)
        shape = (2, int(rows.block_tables.max()) + 1, 8, BLOCK_SIZE, 128)
        cache = KVCache(torch.randn(shape).bfloat16())
        q = torch.randn(num_rows, LAYER.num_heads, LAYER.head_dim).bfloat16()
        answers = [backend.attend(LAYER, q, cache, rows).float() for backend in (gather, walk)]
        torch.testing.assert_close(*answers, atol=0.02, rtol=0.02)
        pairs = []
        for _ in range(repeat):
            times = []
            for backend in (gather, walk):
                elsewhere.sum()
                times.append(seconds(backend, q, cache, rows))
            pairs.append(times)
        gathered, walked = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        print(
            f"| {num_rows} | {context:,} | {gathered:.2f} ms | {walked:.2f} ms "
            f"| {middle:.1f} ({low:.1f} to {high:.1f}) |"
        )


if __name__ == "__main__":
    main()
