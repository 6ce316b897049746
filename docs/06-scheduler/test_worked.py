"""Chapter 6's numbers against values worked by hand. W7 and W8 are the course's own examples."""

import random

import pytest

from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.sampling_params import SamplingParams

from . import worked

W7 = [10, 50, 100, 40, 30]
W8 = [50, 100, 200, 50, 80, 150]


def cells(table: str) -> list[list[str]]:
    """Return the rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_w7_and_w8_continuous() -> None:
    found = worked.spans(W7, max_num_seqs=3, static=False)
    assert found == [(0, 10), (0, 50), (0, 100), (10, 50), (50, 80)]
    found = worked.spans(W8, max_num_seqs=3, static=False)
    assert found == [(0, 50), (0, 100), (0, 200), (50, 100), (100, 180), (100, 250)]


def test_w7_and_w8_static() -> None:
    found = worked.spans(W7, max_num_seqs=3, static=True)
    assert found == [(0, 10), (0, 50), (0, 100), (100, 140), (100, 130)]
    found = worked.spans(W8, max_num_seqs=3, static=True)
    assert found == [(0, 50), (0, 100), (0, 200), (200, 250), (200, 280), (200, 350)]


def test_running_sequences_get_tokens_before_new_ones() -> None:
    """By hand: prompts of 20, 6 and 9 tokens for A, B and C; 8 tokens per step, 3 output tokens."""
    assert [row[1:] for row in cells(worked.budget_shares([20, 6, 9], max_tokens=3, budget=8))] == [
        ["8", "waits", "waits", "0"],
        ["8", "waits", "waits", "0"],
        ["4", "4", "waits", "0"],
        ["1", "2", "5", "0"],
        ["1", "1", "4", "2"],
        ["ended", "1", "1", "6"],
        ["ended", "ended", "1", "7"],
    ]


@pytest.mark.parametrize(
    ("lens", "static", "steps", "use"),
    [
        (W7, True, 140, 230 / 420),
        (W7, False, 100, 230 / 300),
        (W8, True, 350, 630 / 1050),
        (W8, False, 250, 630 / 750),
        ([50] * 6, True, 100, 1.0),  # equal lengths: nothing to be gained
        ([50] * 6, False, 100, 1.0),
    ],
)
def test_steps_and_the_use_of_slots(lens, static, steps, use) -> None:
    assert worked.num_steps(lens, max_num_seqs=3, static=static) == steps
    assert worked.slot_use(lens, max_num_seqs=3, static=static) == pytest.approx(use)


def test_computed_tokens_catch_up_with_known_ones() -> None:
    assert cells(worked.catching_up(prompt_len=40, max_tokens=3, budget=16)) == [
        ["1", "0", "40", "16", "0"],
        ["2", "16", "40", "16", "0"],
        ["3", "32", "40", "8", "1"],
        ["4", "40", "41", "1", "1"],
        ["5", "41", "42", "1", "1"],
    ]


def test_the_order_of_both_policies() -> None:
    assert worked.service_order([2, 0, 1, 0], policy="fcfs") == "A, B, C, D"
    assert worked.service_order([2, 0, 1, 0], policy="priority") == "B, D, C, A"


def test_no_request_overtakes_the_head_of_the_queue() -> None:
    # A holds 8 of 12 blocks for its 20 steps; B needs 6, and C one, which is free all the time.
    table = worked.first_steps([120, 96, 5], max_tokens=20, num_kv_blocks=12)
    assert cells(table) == [["A", "8", "1"], ["B", "6", "21"], ["C", "1", "21"]]


def test_after_a_failed_step_all_tokens_are_recomputed() -> None:
    rows = {row[0]: row[1:] for row in cells(worked.undone(decoding_len=40, new_len=20))}
    assert rows == {
        "running": ["A", "A, B", "none", "A, B"],
        "waiting": ["B", "none", "A, B", "none"],
        "blocks in use": ["3", "5", "0", "5"],
        "cached tokens of A": ["32", "32", "0", "32"],
        "cached tokens of B": ["0", "16", "0", "16"],
        "planned": ["none", "A: 1, B: 20", "none", "A: 41, B: 20"],
    }


def test_a_running_sequence_computes_in_every_step_or_is_preempted() -> None:
    """Chapter 6 gives the reason: the demand of the sequences before it never grows."""
    for seed in range(200):
        rng = random.Random(seed)
        max_num_seqs, num_blocks = rng.randint(1, 6), rng.randint(6, 20)
        config = EngineConfig(
            "none",
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 10, 40]),
            long_prefill_token_threshold=rng.choice([0, 1, 3]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
        )
        scheduler = Scheduler(config, num_blocks, max_model_len=24)
        num_to_come, step = 12, 0
        while num_to_come or scheduler.has_unfinished():
            while num_to_come and rng.random() < 0.4:
                num_to_come -= 1
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 23))]
                params = SamplingParams(max_tokens=rng.choice([1, 3, None]))
                settings = {"arrival": 12 - num_to_come, "priority": rng.randint(0, 2)}
                scheduler.add(Sequence("r", prompt, params, max_model_len=24, **settings))
            running = list(scheduler.running)
            plan = scheduler.schedule()
            left_in = {seq for seq in running if seq.status is SequenceStatus.RUNNING}
            assert left_in <= {row.seq for row in plan.rows if row.n > 0}, seed
            scheduler.commit(plan)
            scheduler.update(plan, [[rng.randrange(3)] for _ in plan.sampled])
            step += 1
            assert step < 5000, seed
