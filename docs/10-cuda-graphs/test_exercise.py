"""Tests for the exercise of chapter 10: results of replayed steps, and the slots they write."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from .exercise import GraphRunner, Row

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, SIZES = 2, 25, 8, [1, 2, 4, 6]


class ToyDevice:
    """See the exercise."""

    def __init__(self, max_rows: int) -> None:
        self.block_size = BLOCK_SIZE
        self.input_ids = np.zeros(max_rows, dtype=np.int32)
        self.slot_mapping = np.zeros(max_rows, dtype=np.int32)
        self.context_lens = np.zeros(max_rows, dtype=np.int32)
        self.block_tables = np.zeros((max_rows, MAX_BLOCKS), dtype=np.int32)
        self.kv_cache = np.zeros(NUM_BLOCKS * BLOCK_SIZE)
        self.is_serving = False
        self.replayed: list[int] = []

    def capture(self, num_rows: int) -> Callable[[], np.ndarray]:
        assert not self.is_serving, "a graph was captured after the first step"
        fields = (self.input_ids, self.slot_mapping, self.context_lens, self.block_tables)
        recorded, output = [field[:num_rows] for field in fields], np.zeros(num_rows)

        def replay() -> np.ndarray:
            self.replayed.append(num_rows)
            input_ids, slots, context_lens, tables = recorded
            assert context_lens.min() > 0, "a row without a context cannot be computed"
            self.kv_cache[slots] = input_ids
            for row in range(num_rows):
                output[row] = attend(self.kv_cache, tables[row], context_lens[row])
            return output

        return replay


def attend(kv_cache: np.ndarray, table: np.ndarray, context_len: int) -> float:
    """Return a mean that depends on the order of the tokens."""
    positions = np.arange(context_len)
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return float((kv_cache[slots] * (positions + 1)).mean())


class Sequence:
    """Tokens and the blocks of a sequence; those of its prompt are filled already."""

    def __init__(self, tokens: list[int], blocks: list[int], kv_cache: np.ndarray) -> None:
        self.tokens, self.blocks = tokens, blocks
        for position in range(len(tokens) - 1):
            kv_cache[self.slot(position)] = tokens[position]

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def row(self) -> Row:
        last = len(self.tokens) - 1
        return Row(self.tokens[-1], self.slot(last), last + 1, self.blocks)

    def expected(self) -> float:
        return float(np.mean([token * (i + 1) for i, token in enumerate(self.tokens)]))


class Simulation:
    """Sequences arrive, decode and end; their blocks go to the next one at once."""

    def __init__(self, seed: int) -> None:
        self.rng, self.device = random.Random(seed), ToyDevice(SIZES[-1])
        self.runner = GraphRunner(self.device, list(SIZES))
        self.device.is_serving = True
        self.seed, self.num_steps = seed, 0
        self.free = list(range(1, NUM_BLOCKS))
        self.running: list[Sequence] = []

    def step(self) -> None:
        for seq in [seq for seq in self.running if self.rng.random() < 0.3 or len(seq.tokens) > 7]:
            self.running.remove(seq)
            self.free += seq.blocks
        while not self.running or (len(self.running) < SIZES[-1] and self.rng.random() < 0.4):
            tokens = [self.rng.randrange(1, 1000) for _ in range(self.rng.randint(1, 6))]
            blocks = [self.free.pop() for _ in range(4)]  # the last that were freed
            self.running.append(Sequence(tokens, blocks, self.device.kv_cache))
        self.rng.shuffle(self.running)
        rows = [seq.row() for seq in self.running]
        before = self.device.kv_cache.copy()
        results = self.runner.run(rows)
        self.num_steps += 1
        case = f"step {self.num_steps} of Simulation({self.seed}): run({rows})"
        assert results == pytest.approx([seq.expected() for seq in self.running]), case
        changed = np.flatnonzero(self.device.kv_cache != before)
        theirs = {row.slot for row in rows} | set(range(BLOCK_SIZE))
        others = sorted(set(changed.tolist()) - theirs)
        assert not others, f"slots {others} that belong to no row were overwritten; {case}"
        for seq in self.running:
            seq.tokens.append(self.rng.randrange(1, 1000))


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_any_size_are_correct_and_write_no_other_slot(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(40):
        simulation.step()


def test_a_step_replays_the_smallest_graph_that_holds_it() -> None:
    device = ToyDevice(6)
    runner = GraphRunner(device, [1, 2, 4, 6])
    for n in range(1, 7):
        runner.run([Row(1, (i + 1) * BLOCK_SIZE, 1, [i + 1]) for i in range(n)])
    assert device.replayed == [1, 2, 4, 4, 6, 6], "steps of 1, 2, ... 6 rows; graphs [1, 2, 4, 6]"


def test_results_stay_what_they_were_after_the_next_step() -> None:
    runner = GraphRunner(ToyDevice(2), [1, 2])
    first = runner.run([Row(5, 2, 1, [1]), Row(7, 4, 1, [2])])
    runner.run([Row(50, 2, 1, [1]), Row(70, 4, 1, [2])])
    assert list(first) == [5, 7], "the first step's inputs were 5 and 7, the second's 50 and 70"


def test_more_rows_than_the_largest_graph_has_are_rejected() -> None:
    runner = GraphRunner(ToyDevice(2), [1, 2])
    with pytest.raises(ValueError, match="3"):
        runner.run([Row(1, (i + 1) * BLOCK_SIZE, 1, [i + 1]) for i in range(3)])
