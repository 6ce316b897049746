"""Measure the scheduler side of a decode step: schedule, pack and update, without a model.

    python benchmarks/scheduling_cost.py

Medians over steps in which every sequence decodes one token. The model is not run; its tokens are
made up. The last column divides by the number of sequences: flat means O(sequences in the step).
"""

import statistics
import time

import numpy as np

from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

_STEPS = 200


def measure(num_seqs: int, context: int) -> list[tuple[float, float, float]]:
    """Return the seconds of (schedule, pack, update) of each pure decode step."""
    config = EngineConfig("none", max_num_seqs=num_seqs).for_device("cuda")
    max_model_len = context + 2 * _STEPS + num_seqs
    blocks = -(-max_model_len // config.block_size)
    scheduler = Scheduler(config, num_seqs * blocks, max_model_len)
    layout = BatchLayout(config.max_num_batched_tokens, num_seqs, blocks)
    batch = Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8))
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=None)
    for i in range(num_seqs):
        prompt = rng.integers(0, 150_000, context).tolist()
        scheduler.add(Sequence(str(i), prompt, params, max_model_len, arrival=i))

    times = []
    while len(times) < _STEPS:
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        batch.pack(plan, scheduler.block_tables, config.block_size)
        packed = time.perf_counter()
        header = batch.header
        token_ids = [[7] for _ in range(header.num_sampled)]
        before_update = time.perf_counter()
        scheduler.commit(plan)
        scheduler.update(plan, token_ids)
        updated = time.perf_counter()
        if header.num_decode_rows == num_seqs:
            times.append((scheduled - start, packed - scheduled, updated - before_update))
    return times


def main() -> None:
    print("| sequences | context | schedule us | pack us | update us | total us | us / sequence |")
    print("|---|---|---|---|---|---|---|")
    for num_seqs, context in ((16, 1000), (64, 1000), (256, 1000), (256, 4000), (1024, 1000)):
        columns = list(zip(*measure(num_seqs, context), strict=True))
        parts = [statistics.median(column) * 1e6 for column in columns]
        total = sum(parts)
        cells = " | ".join(f"{part:.0f}" for part in [*parts, total])
        print(f"| {num_seqs} | {context} | {cells} | {total / num_seqs:.2f} |")


if __name__ == "__main__":
    main()
