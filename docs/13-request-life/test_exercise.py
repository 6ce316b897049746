"""Test of the exercise of chapter 13, on the bundled model in a pool that is too small."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.engine.guard import GuardedEngine

from .exercise import Job, serve

NUM_BLOCKS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [[40 + i] * 3 + list(range(50, 50 + 3 * i)) for i in range(8)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"num_kv_blocks": NUM_BLOCKS, "block_size": 4, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 32, "attention_backend": "torch"}  # starts at once
    with LLM("tiny-qwen3", dtype="float32", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def engine(llm: LLM, answers: list[list[int]]) -> Iterator[GuardedEngine]:
    yield llm.engine
    for request_id in list(llm.engine.output_processor.requests):
        llm.engine.abort_request(request_id)  # left over by a failed test


def check_idle(engine: GuardedEngine, jobs: object) -> None:
    engine.scheduler.check()
    left = list(engine.output_processor.requests)
    assert not engine.has_unfinished_requests() and not left, f"left: {left}; jobs {jobs}"
    assert engine.scheduler.block_manager.num_free_blocks == NUM_BLOCKS, f"after jobs {jobs}"


def tokens(result: RequestOutput | ValueError) -> list[int]:
    assert isinstance(result, RequestOutput) and result.finished, result
    return result.outputs[0].token_ids


def fail(monkeypatch: pytest.MonkeyPatch, engine: GuardedEngine, calls: set[int]) -> None:
    """The device fails at these calls, counted from 0."""
    forward, num_calls = engine.executor.forward, iter(range(10_000))

    def broken(*args: Any) -> Any:
        if next(num_calls) in calls:
            raise RuntimeError("the device has failed")
        return forward(*args)

    monkeypatch.setattr(engine.executor, "forward", broken)


def test_no_jobs_are_no_results(engine: GuardedEngine) -> None:
    assert serve(engine, []) == {}


def test_jobs_that_come_later_get_what_generate_gives(engine: GuardedEngine, answers) -> None:
    arrivals = [0, 0, 3, 3, 40, 41, 95, 95]  # with pauses in which no job runs
    jobs = [Job(f"job {i}", arrivals[i], PROMPTS[i], PARAMS) for i in range(8)]
    results = serve(engine, jobs)
    assert [tokens(results[f"job {i}"]) for i in range(8)] == answers, jobs
    check_idle(engine, jobs)


def test_a_job_joins_at_its_tick(engine: GuardedEngine) -> None:
    steps_of: dict[str, list[int]] = {"early": [], "late": []}

    def observe(plan: Any, batch: Any, result: Any, times: Any) -> None:
        now = engine.stats.num_steps - first
        for row in plan.rows:
            steps_of[row.seq.request_id].append(now)

    first = engine.stats.num_steps + 1
    engine.observers.append(observe)
    jobs = [Job("early", 0, [1, 2], PARAMS), Job("late", 7, [3, 4], PARAMS)]
    try:
        serve(engine, jobs)
    finally:
        engine.observers.remove(observe)
    assert steps_of == {"early": list(range(20)), "late": list(range(7, 27))}, jobs


def test_a_rejected_job_disturbs_no_other(engine: GuardedEngine, answers) -> None:
    jobs = [
        Job("good", 0, PROMPTS[0], PARAMS),
        Job("empty", 0, [], PARAMS),
        Job("too long", 2, [1] * 500, PARAMS),
        Job("no such token", 30, [10**6], PARAMS),
    ]
    results = serve(engine, jobs)
    assert tokens(results["good"]) == answers[0], jobs
    assert all(isinstance(results[job.request_id], ValueError) for job in jobs[1:]), results
    check_idle(engine, jobs)


@pytest.mark.parametrize("deadline", [0, 1, 5, 19])
def test_a_deadline_leaves_exactly_its_ticks(engine: GuardedEngine, answers, deadline: int) -> None:
    jobs = [Job("a", 2, PROMPTS[0], PARAMS, deadline), Job("b", 2, PROMPTS[1], PARAMS)]
    results = serve(engine, jobs)
    assert tokens(results["a"]) == answers[0][:deadline], jobs
    assert results["a"].outputs[0].finish_reason == "abort", jobs
    assert tokens(results["b"]) == answers[1], jobs
    check_idle(engine, jobs)


def test_a_deadline_after_the_end_changes_nothing(engine: GuardedEngine, answers) -> None:
    """The last token comes in the tick before the abort, or long before."""
    jobs = [Job("a", 0, PROMPTS[0], PARAMS, 20), Job("b", 0, PROMPTS[1], PARAMS, 90)]
    results = serve(engine, jobs)
    assert [tokens(results[name]) for name in "ab"] == answers[:2], jobs
    assert {results[name].outputs[0].finish_reason for name in "ab"} == {"length"}, jobs


@pytest.mark.parametrize("calls", [{0}, {5, 6}, {3, 8, 9, 20}])
def test_a_step_that_fails_once_or_twice_costs_only_time(
    engine: GuardedEngine, answers, calls: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, engine, calls)
    jobs = [Job(f"{i}", i, PROMPTS[i], PARAMS) for i in range(4)]
    results = serve(engine, jobs)
    case = f"steps {sorted(calls)} fail, jobs {jobs}"
    assert [tokens(results[f"{i}"]) for i in range(4)] == answers[:4], case
    check_idle(engine, jobs)


def test_a_step_that_fails_three_times_leaves_nothing(
    engine: GuardedEngine, answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(f"{i}", 0, PROMPTS[i], PARAMS) for i in range(6)]
    with monkeypatch.context() as patched:
        fail(patched, engine, {4, 5, 6})
        with pytest.raises(RuntimeError, match="has failed"):
            serve(engine, jobs)
    check_idle(engine, jobs)
    again = serve(engine, [Job("again", 0, PROMPTS[2], PARAMS)])["again"]
    assert tokens(again) == answers[2], f"{PROMPTS[2]}, after the failure of {jobs}"


def test_ctrl_c_leaves_nothing(engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_calls = engine.step, iter(range(10_000))

    def interrupted() -> list[RequestOutput]:
        if next(num_calls) == 6:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    jobs = [Job(f"{i}", i, PROMPTS[i], PARAMS) for i in range(8)]
    with pytest.raises(KeyboardInterrupt):
        serve(engine, jobs)
    check_idle(engine, jobs)


@pytest.mark.parametrize("seed", range(4))
def test_random_days(
    engine: GuardedEngine, answers, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    failing = rng.sample(range(0, 60, 3), 8)
    fail(monkeypatch, engine, set(failing))
    jobs = [
        Job(
            f"{i}",
            rng.randrange(25),
            PROMPTS[i % 8] if rng.random() < 0.9 else [],
            PARAMS,
            rng.choice([None, None, rng.randrange(30)]),
        )
        for i in range(16)
    ]
    num_preempted = engine.stats.num_preemptions
    results = serve(engine, jobs)
    case = f"steps {sorted(failing)} fail, jobs {jobs}"
    assert set(results) == {job.request_id for job in jobs}, case
    for i, job in enumerate(jobs):
        result = results[job.request_id]
        if not job.prompt:
            assert isinstance(result, ValueError), f"{job}; {case}"
        elif result.outputs[0].finish_reason == "length":
            assert tokens(result) == answers[i % 8], f"{job}; {case}"
        else:
            assert job.deadline is not None, f"{job}; {case}"
            assert result.outputs[0].finish_reason == "abort", f"{job}; {case}"
            assert tokens(result) == answers[i % 8][: len(tokens(result))], f"{job}; {case}"
    assert engine.stats.num_preemptions > num_preempted, case
    check_idle(engine, jobs)
