"""Measure handing a step to a tensor-parallel worker, compared with pickling it through a pipe.

    python benchmarks/handover.py

Rank 0 sends a decode step; a worker process records when it could start. With shared memory the
batch is there already and the pipe carries its number; otherwise the pipe carries the arrays of
the same batch, pickled. Both in turns: microseconds from before the hand-over until the worker has
its batch, by the system's clock, medians of 400.
"""

import os
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.features.parallel.process_group import anonymous_file, map_memory
from nanoserve.sampling_params import SamplingParams

_ROUNDS = 400
_BLOCK_SIZE = 16
_ARRAYS = ("input_ids", "positions", "slot_mapping", "context_lens", "output_rows")


def layout_for(num_seqs: int, context: int) -> BatchLayout:
    return BatchLayout(max(8192, num_seqs), num_seqs, -(-context // _BLOCK_SIZE))


def pack_decode_step(batch: Batch, num_seqs: int, context: int) -> None:
    """Return a batch in which every sequence has one token and a full block table."""
    plan, params = Plan(budget=0), SamplingParams(max_tokens=None)
    for slot in range(num_seqs):
        seq = Sequence(str(slot), [7] * context, params, max_model_len=context + 1)
        seq.slot = slot
        plan.rows.append(Row(seq, context - 1, 1, 1, 1))
    tables = np.ones((1, num_seqs, -(-context // _BLOCK_SIZE)), dtype=np.int32)  # one group
    batch.pack(plan, tables, _BLOCK_SIZE)


def arrays_of(batch: Batch) -> dict[str, np.ndarray]:
    """Read the fields of a decode step that a worker needs."""
    header = batch.header
    arrays = {name: getattr(batch, name)[..., : header.num_rows] for name in _ARRAYS}
    return arrays | {"block_tables": batch.block_tables(header.num_rows, header.table_width)}


def worker(num_seqs: int, context: int, memory: int, step_fd: int, pickle_fd: int, to: int) -> None:
    """Answer every step with the time at which its batch was available."""
    layout = layout_for(num_seqs, context)
    batch = Batch(layout, map_memory(memory, layout.num_bytes))
    connection, answers = Connection(pickle_fd, writable=False), os.fdopen(to, "w")
    for turn in range(2 * _ROUNDS):
        if turn % 2:
            arrays = connection.recv()
        else:
            os.read(step_fd, 4)
            arrays = arrays_of(batch)
        now = time.monotonic_ns()
        print(now, int(arrays["context_lens"].sum()), file=answers, flush=True)


def measure(num_seqs: int, context: int) -> tuple[float, float]:
    """Return median microseconds: (a number through a pipe, the arrays through a pipe)."""
    layout, memory = layout_for(num_seqs, context), anonymous_file()
    os.ftruncate(memory, layout.num_bytes)
    batch = Batch(layout, map_memory(memory, layout.num_bytes))
    pack_decode_step(batch, num_seqs, context)
    (step_there, step_here), (pickle_there, pickle_here), (back, to) = (os.pipe() for _ in range(3))
    there = [memory, step_there, pickle_there, to]
    command = [sys.executable, __file__, *map(str, (num_seqs, context, *there))]
    with subprocess.Popen(command, pass_fds=there):
        connection, times = Connection(pickle_here, readable=False), ([], [])
        with os.fdopen(back) as answers:
            for turn in range(2 * _ROUNDS):
                time.sleep(0.001)  # the worker waits, as it does between steps
                start = time.monotonic_ns()
                if turn % 2:
                    connection.send(arrays_of(batch))
                else:
                    os.write(step_here, turn.to_bytes(4, "little"))
                arrived, total = map(int, answers.readline().split())
                if total != num_seqs * context:
                    raise RuntimeError(f"the worker saw {total} tokens of {num_seqs * context}")
                times[turn % 2].append((arrived - start) / 1000)
    for fd in (*there, step_here):
        os.close(fd)
    shared, pickled = map(statistics.median, times)
    return shared, pickled


def main() -> None:
    print("| sequences | context | shared memory us | pickled us | ratio |\n|---|---|---|---|---|")
    for num_seqs, context in ((1, 1000), (64, 1000), (256, 1000), (256, 4000)):
        shared, pickled = measure(num_seqs, context)
        print(f"| {num_seqs} | {context} | {shared:.0f} | {pickled:.0f} | {pickled / shared:.1f} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(*map(int, sys.argv[1:]))
    else:
        main()
