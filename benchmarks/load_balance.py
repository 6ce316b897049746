"""Simulate how evenly a decode launch loads a GPU, over nano-vllm's workload.

    python benchmarks/load_balance.py

Decode attention reads the keys and values of each row once, and rows are of different lengths. Two
ways to split this work into programs:

    per row       a program for each row and KV head, or several where rows are few, in equal splits
                  that are a power of two; rows follow each other on the multiprocessors
    equal shares  as in nanoserve/kernels/triton/decode_attention_kernels.py: the tiles of all rows
                  form one sequence, which is split into as many shares as make two programs for
                  each multiprocessor; a share has one program for every KV head

The model is a fluid. The running programs share the bandwidth equally, but none gets more than
`per_program`. A program waits for its first tile, and again briefly when it reaches another row. A
launch is as long as its last program; the loss is its time beyond its bytes at the full bandwidth,
before parts of rows are merged.
"""

import heapq
from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nanoserve.cli.bench.roofline import Step, planned_steps
from nanoserve.cli.bench.workloads import WORKLOADS, draw_workload, length_range
from nanoserve.config import EngineConfig
from nanoserve.worker.cuda_graphs import graph_sizes

# A program: pieces of (seconds of waiting, bytes), one after the other.
Program = list[tuple[float, float]]


class Launch(NamedTuple):
    """Decode attention of Qwen3-0.6B on an H100."""

    num_sms: int = 132
    programs_per_sm: int = 3  # running at once, by their shared memory
    shares_per_sm: int = 2  # programs of equal shares: shares times KV heads
    bandwidth: float = 3.0e12  # bytes per second of a large copy
    per_program: float = 25e9  # and at most so many for one: two tiles of 32 KiB under way
    first_tile: float = 2.5e-6  # seconds until it is there, and until a program has ended
    next_row: float = 0.5e-6
    num_kv_heads: int = 8
    key_bytes: int = 2 * 128 * 2  # K and V of a token in one KV head
    tile: int = 64  # keys

    @property
    def num_places(self) -> int:
        return self.num_sms * self.programs_per_sm


def per_row(launch: Launch, contexts: Sequence[int], max_context: int = 40_960) -> list[Program]:
    """Return programs per row; splits are for the longest possible context, as in graphs."""
    num_programs = len(contexts) * launch.num_kv_heads
    wanted = min(2 * launch.num_sms // num_programs, max_context // (4 * launch.tile), 64)
    num_splits = 1 << (max(1, wanted).bit_length() - 1)
    programs: list[Program] = []
    for split in range(num_splits):
        for context in contexts:
            tiles_each = -(-_num_tiles(launch, context) // num_splits)
            first = split * tiles_each * launch.tile
            num_keys = min(max(context - first, 0), tiles_each * launch.tile)
            if num_keys:
                piece = (launch.first_tile, num_keys * launch.key_bytes)
                programs += [[piece] for _ in range(launch.num_kv_heads)]
    return programs


def equal_shares(launch: Launch, contexts: Sequence[int]) -> list[Program]:
    """Return the shares, all of the same size except the last; few tiles make fewer shares.

    Heads are alike: the programs of a share have the same pieces.
    """
    num_shares = max(1, launch.shares_per_sm * launch.num_sms // launch.num_kv_heads)
    size = -(-sum(_num_tiles(launch, context) for context in contexts) // num_shares)
    programs: list[Program] = []
    left = deque(contexts)
    while left:
        program: Program = []
        room = size
        while room and left:
            context = left.popleft()
            taken = min(room, _num_tiles(launch, context))
            num_keys = min(context, taken * launch.tile)
            if context > num_keys:
                left.appendleft(context - num_keys)
            waiting = launch.next_row if program else launch.first_tile
            program.append((waiting, num_keys * launch.key_bytes))
            room -= taken
        programs += [program] * launch.num_kv_heads
    return programs


def _num_tiles(launch: Launch, context: int) -> int:
    return -(-context // launch.tile)


def seconds(launch: Launch, programs: list[Program]) -> float:
    """Return the time until the last program ends, if they start in this order when possible."""
    time, read = 0.0, 0.0  # `read`: bytes that a program would have which has read all the time
    waiting: list[tuple[float, int]] = []  # (until, program)
    reading: list[tuple[float, int]] = []  # (what `read` is when its piece ends, program)
    pieces = [deque(program) for program in programs]
    not_started = deque(range(len(programs)))

    def go_on(program: int) -> None:
        """Continue with the next piece, or with another program."""
        if not pieces[program]:
            if not not_started:
                return
            program = not_started.popleft()
        heapq.heappush(waiting, (time + pieces[program][0][0], program))

    for _ in range(min(launch.num_places, len(programs))):
        first = not_started.popleft()
        heapq.heappush(waiting, (pieces[first][0][0], first))
    while waiting or reading:
        rate = min(launch.per_program, launch.bandwidth / max(1, len(reading)))
        end_of_piece = time + (reading[0][0] - read) / rate if reading else np.inf
        if waiting and waiting[0][0] <= end_of_piece:
            until, program = heapq.heappop(waiting)
            read += (until - time) * rate
            time = until
            heapq.heappush(reading, (read + pieces[program].popleft()[1], program))
        else:
            read, program = heapq.heappop(reading)
            time = end_of_piece
            go_on(program)
    return time


def loss(launch: Launch, programs: list[Program]) -> float:
    """Return the time of the programs beyond that of their bytes, as a share of the latter."""
    num_bytes = sum(piece[1] for program in programs for piece in program)
    return seconds(launch, programs) * launch.bandwidth / num_bytes - 1


def nano_vllm_steps(config: EngineConfig, vocab_size: int) -> tuple[Iterator[Step], int]:
    """Return the steps of nano-vllm's workload, and its number of generated tokens."""
    workload = WORKLOADS["nano-vllm"]
    lengths = (length_range(workload[name]) for name in ("input_len", "output_len"))
    prompts, output_lens = draw_workload(workload["num_seqs"], *lengths, vocab_size)
    return planned_steps(config, prompts, output_lens), sum(output_lens)


def losses(launch: Launch, steps: Iterable[Step]) -> dict[str, float]:
    """Return the loss over all decode steps, as a share of the time of the bytes."""
    spent, least = {"per row": 0.0, "equal shares": 0.0}, 0.0
    sizes = graph_sizes(256)
    for step in steps:
        if step.query_lens.max() > 1:
            continue
        contexts = step.context_lens.tolist()
        num_dummies = next(size for size in sizes if size >= len(contexts)) - len(contexts)
        least += sum(contexts) * launch.num_kv_heads * launch.key_bytes / launch.bandwidth
        contexts += [1] * num_dummies  # a graph has a number of rows
        spent["per row"] += seconds(launch, per_row(launch, contexts))
        spent["equal shares"] += seconds(launch, equal_shares(launch, contexts))
    return {name: total / least - 1 for name, total in spent.items()}


def main() -> None:
    parser = ArgumentParser(description="The loss of ragged rows in decode attention, simulated.")
    parser.add_argument("--every", type=int, default=24, help="simulate every N-th decode step")
    every = parser.parse_args().every
    config = EngineConfig("none", max_num_batched_tokens=8192)
    steps = list(nano_vllm_steps(config, 151_936)[0])[::every]
    print("| GB/s of a program | programs of an SM | per row | equal shares |\n|---|---|---|---|")
    for per_program in (40e9, 25e9, 15e9):
        for programs_per_sm in (2, 3):
            launch = Launch(per_program=per_program, programs_per_sm=programs_per_sm)
            cells = " | ".join(f"{share:.1%}" for share in losses(launch, steps).values())
            print(f"| {per_program / 1e9:.0f} | {programs_per_sm} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
