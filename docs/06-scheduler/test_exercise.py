"""Tests for the exercise of chapter 6, against the engine's own scheduler."""

import random

import pytest

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence

from .exercise import Request, simulate


def test_one_request_catches_up_and_then_decodes() -> None:
    assert simulate([Request("a", 40, 3)], max_num_seqs=1, budget=16) == [
        {"a": 16},
        {"a": 16},
        {"a": 8},
        {"a": 1},
        {"a": 1},
    ]


def test_a_prompt_and_a_decode_share_a_step() -> None:
    requests = [Request("a", 4, 3), Request("b", 10, 1, arrival_step=1)]
    expected = [{"a": 4}, {"a": 1, "b": 10}, {"a": 1}]
    assert simulate(requests, 2, 100) == expected, f"simulate({requests}, 2, 100)"


def test_the_threshold_leaves_tokens_for_others() -> None:
    requests = [Request("a", 1000, 1), Request("b", 50, 1)]
    steps = simulate(requests, max_num_seqs=2, budget=2048, threshold=256)
    expected = [{"a": 256, "b": 50}, {"a": 256}, {"a": 256}, {"a": 232}]
    assert steps == expected, f"simulate({requests}, 2, 2048, 256)"


def test_an_engine_without_requests_idles() -> None:
    requests = [Request("a", 1, 1), Request("b", 1, 1, arrival_step=3)]
    expected = [{"a": 1}, {}, {}, {"b": 1}]
    assert simulate(requests, 1, 1) == expected, f"simulate({requests}, 1, 1)"


@pytest.mark.parametrize(
    ("output_lens", "num_steps"),
    [([10, 50, 100, 40, 30], 100), ([50, 100, 200, 50, 80, 150], 250)],
)
def test_the_two_traces_of_the_chapter(output_lens: list[int], num_steps: int) -> None:
    requests = [Request(str(i), 1, n) for i, n in enumerate(output_lens)]
    assert len(simulate(requests, 3, 3)) == num_steps, f"simulate({requests}, 3, 3)"


def by_the_engine(
    requests: list[Request], max_num_seqs: int, budget: int, threshold: int
) -> list[dict[str, int]]:
    config = EngineConfig(
        "none",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(config, num_kv_blocks=10_000, max_model_len=4096)
    steps: list[dict[str, int]] = []
    while len(steps) <= max(r.arrival_step for r in requests) or scheduler.has_unfinished():
        for i, r in enumerate(requests):
            if r.arrival_step == len(steps):
                params = SamplingParams(max_tokens=r.output_len)
                scheduler.add(Sequence(r.name, [1] * r.prompt_len, params, 4096, arrival=i))
        plan = scheduler.schedule()
        scheduler.commit(plan)
        scheduler.update(plan, [[7] for _ in plan.sampled])
        steps.append({row.seq.request_id: row.n for row in plan.rows})
    return steps


@pytest.mark.parametrize("seed", range(100))
def test_it_plans_what_the_engine_plans(seed: int) -> None:
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 5)
    budget = max_num_seqs + rng.choice([0, 1, 5, 30])
    threshold = rng.choice([0, 0, 1, 4])
    steps = sorted(rng.randint(0, 30) for _ in range(rng.randint(1, 12)))
    requests = [
        Request(str(i), rng.randint(1, 40), rng.randint(1, 12), step)
        for i, step in enumerate(steps)
    ]
    expected = by_the_engine(requests, max_num_seqs, budget, threshold)
    case = f"simulate({requests}, {max_num_seqs}, {budget}, {threshold})"
    assert simulate(requests, max_num_seqs, budget, threshold) == expected, case
