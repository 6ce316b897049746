"""Count the sequences that fit into one KV pool if blocks behind sliding windows are freed.

    python benchmarks/window_room.py [--gib 16]

No model runs: `BlockManager` alone allocates, in chunks, as it does for the scheduler. For each
model and context length, sequences of that length are added until one of them gets no blocks.
"before" is one group of all layers, which keeps the K and V of all tokens
(`disable_hybrid_kv_cache_manager=True`).
"""

import argparse
from itertools import count
from typing import NamedTuple

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.kv_groups import group_layers
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

BLOCK_SIZE, STEP = 16, 2048  # tokens
CONTEXTS = (4096, 32768)


class Model(NamedTuple):
    name: str
    windows: tuple[int | None, ...]  # by layer
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, num_layers: int) -> int:
        return num_layers * 2 * self.num_kv_heads * self.head_dim * 2 * BLOCK_SIZE  # 16 bits


MODELS = (
    Model("Mistral 7B 0.1 (4,096 in all)", (4096,) * 32, 8, 128),
    Model("Gemma 2 9B (4,096 in every other)", (4096, None) * 21, 8, 256),
    Model("Gemma 3 1B (512 in 22 of 26)", ((512,) * 5 + (None,)) * 4 + (512,) * 2, 1, 256),
    Model("Gemma 3 27B (1,024 in 52 of 62)", ((1024,) * 5 + (None,)) * 10 + (1024,) * 2, 16, 128),
    Model("gpt-oss 20B (128 in every other)", (128, None) * 12, 8, 64),
)


def num_sequences(model: Model, pool_bytes: int, context: int, has_groups: bool) -> int:
    """Return how many sequences of `context` tokens the pool holds at a time."""
    groups = group_layers(model.windows if has_groups else [None] * len(model.windows))
    num_blocks = pool_bytes // model.block_bytes(max(len(group.layers) for group in groups)) - 1
    windows = [group.window for group in groups]
    manager = BlockManager(num_blocks, BLOCK_SIZE, False, windows=windows, max_step_tokens=STEP)
    prompt = [0] * context
    for number in count():
        seq = Sequence(str(number), prompt, SamplingParams(), context + 1)
        if not manager.allocate(seq, context):
            return number
        for end in range(STEP, context + STEP, STEP):
            if not manager.allocate(seq, min(end, context)):
                return number
            seq.num_computed_tokens = min(end, context)
        # A token more: what lies behind the window of the last chunk is given back, too.
        if not manager.allocate(seq, context + 1):
            return number
    raise AssertionError("a pool has an end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=16, help="size of the pool")
    pool_bytes = int(parser.parse_args().gib * 2**30)
    print("| model | context | before | with groups | times |")
    print("|---|---:|---:|---:|---:|")
    for model in MODELS:
        for context in CONTEXTS:
            before, now = (num_sequences(model, pool_bytes, context, g) for g in (False, True))
            times = f"{now / before:.2f}" if before else ""
            print(f"| {model.name} | {context:,} | {before} | {now} | {times} |")


if __name__ == "__main__":
    main()
