"""A trace that is computed again has the same steps, down to the numbers of its KV blocks."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from counting_executor import byte_tokenizer, make_engine

from nanoserve import SamplingParams
from nanoserve.cli.main import main
from nanoserve.cli.simulate.replay import Replay, counts, first_difference
from nanoserve.engine.draft_room import add_draft_tokens
from nanoserve.engine.extension import Extension
from nanoserve.features.trace import start_trace
from nanoserve.features.trace.reader import Trace, read_trace

DOCS = Path(__file__).parents[3] / "docs"
RECORDED = sorted(DOCS.glob("*/*.jsonl"))
# Replaced weights empty the prefix cache, and traces have neither them nor other policies.
OTHER = {"other-weights.jsonl", "shortest-first.jsonl"}
PAIRS = [chr(code) + chr(code + 1) for code in range(70, 120, 10)]  # the executor counts
# These are rejected: pipeline stages, and blocks that come back from the host.
REJECTED = {"two-stages.jsonl", "blocks-come-back.jsonl"}


def replayed(trace: Trace, folder: Path, model: str | None = None) -> Trace:
    return Replay(trace, folder / "again.jsonl", model).run()


@pytest.mark.parametrize(
    "path", [p for p in RECORDED if p.name not in OTHER | REJECTED], ids=lambda path: path.stem
)
def test_the_traces_of_the_course_are_computed_again(path: Path, tmp_path: Path) -> None:
    """They were recorded with the real model, on other days."""
    trace = read_trace(path)
    again = replayed(trace, tmp_path)
    assert first_difference(trace, again) is None
    assert counts(trace) == counts(again)


def test_what_a_trace_does_not_have_is_found(tmp_path: Path) -> None:
    trace = read_trace(DOCS / "26-reinforcement-learning" / "other-weights.jsonl")
    assert "batch" in first_difference(trace, replayed(trace, tmp_path))
    trace = read_trace(DOCS / "28-simulation" / "shortest-first.jsonl")
    found = first_difference(trace, replayed(trace, tmp_path))
    assert found == "step 1: admitted [4] became [2]"  # as the chapter says
    trace = read_trace(DOCS / "23-scaling-out" / "two-stages.jsonl")
    with pytest.raises(ValueError, match=r"step 0 of the trace ran in pipeline stages: record"):
        replayed(trace, tmp_path)
    trace = read_trace(DOCS / "25-disaggregation" / "blocks-come-back.jsonl")
    with pytest.raises(ValueError, match=r"got KV blocks from the host: record .* without kv_off"):
        replayed(trace, tmp_path)


class Doubles(Extension):
    """Proposes tokens of which the first few are right: the counting executor adds one."""

    def __init__(self, engine: Any, rng: Random) -> None:
        self._scheduler, self._rng = engine.scheduler, rng

    def extend_plan(self, plan: Any) -> None:
        for index, row in enumerate(plan.rows):
            if row.num_sampled and self._rng.random() < 0.5:
                last = row.seq.token_ids[-1]
                drafts = [(last + i) % 256 for i in range(1, 5)]
                drafts[self._rng.randrange(4)] = 7
                add_draft_tokens(self._scheduler, plan, index, drafts)


def record(path: Path, seed: int, **options: Any) -> Trace:
    """Record a life with everything in it: arrivals, aborts, siblings, stops, preemptions."""
    rng = Random(seed)
    tokenizer = byte_tokenizer(eos_token_id=rng.choice([None, 65]))
    engine = make_engine(tokenizer, trace=path, **options)
    if rng.random() < 0.5:
        engine.add_extension(Doubles(engine, rng))
    running: list[str] = []
    prefix = [rng.randrange(256) for _ in range(40)]
    with start_trace(engine):
        for number in range(25):
            prompt = [*prefix[: rng.choice([0, 13, 40])], *rng.choices(range(256), k=20)]
            stops: dict[str, Any] = {"stop": PAIRS} if rng.random() < 0.3 else {}
            stops |= {"stop_token_ids": [rng.randrange(256)]} if rng.random() < 0.3 else {}
            params = SamplingParams(
                max_tokens=rng.randint(1, 60), n=rng.choice([1, 1, 3]), temperature=1, **stops
            )
            by_priority = options.get("scheduling_policy") == "priority"
            engine.add_request(str(number), prompt, params, rng.randint(0, 2) * by_priority)
            running.append(str(number))
            for _ in range(rng.randint(0, 6)):
                engine.step()
            if rng.random() < 0.2:
                engine.abort_request(rng.choice(running))
        while engine.has_unfinished_requests():
            engine.step()
        engine.close()
    return read_trace(path)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_is_computed_again(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    options = {
        "num_kv_blocks": rng.choice([40, 64, 200]),
        "block_size": rng.choice([4, 16]),
        "max_num_seqs": rng.choice([2, 8]),
        "max_num_batched_tokens": rng.choice([16, 64, 2048]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    trace = record(tmp_path / "run.jsonl", seed, **options)
    again = replayed(trace, tmp_path, "tiny")
    assert first_difference(trace, again) is None
    assert counts(trace) == counts(again)


def test_the_random_lives_have_everything_in_them(tmp_path: Path) -> None:
    traces = [
        record(tmp_path / "run.jsonl", seed, num_kv_blocks=40, block_size=4) for seed in range(3)
    ]
    totals = [counts(trace) for trace in traces]
    for name in ("cached tokens", "preemptions", "evicted blocks"):
        assert any(total[name] for total in totals), name
    steps = [step for trace in traces for step in trace.steps]
    assert any(step["aborted"] for step in steps)
    assert any("guesses" in row for step in steps for row in step["rows"])
    assert any(arrival["index"] for step in steps for arrival in step["arrived"])
    ends = {(end["reason"], end["stop_reason"]) for step in steps for end in step["finished"]}
    assert ("length", None) in ends and ("stop", None) in ends
    assert {str, int} < {type(reason) for _, reason in ends}


def test_an_id_may_be_used_again(tmp_path: Path) -> None:
    """The next request with the same id is not a further completion of the first."""
    engine = make_engine(trace=tmp_path / "run.jsonl")
    with start_trace(engine):
        for start in (1, 50):
            engine.add_request("same", [start, start + 1], SamplingParams(max_tokens=4))
            while engine.has_unfinished_requests():
                engine.step()
        engine.close()
    trace = read_trace(tmp_path / "run.jsonl")
    assert trace.num_sequences == 2
    assert first_difference(trace, replayed(trace, tmp_path, "tiny")) is None


@pytest.mark.parametrize("changed", ["computed", "new", "blocks"])
def test_a_change_of_one_number_is_found(changed: str, tmp_path: Path) -> None:
    path = DOCS / "07-preemption" / "preemption.jsonl"
    trace, again = read_trace(path), replayed(read_trace(path), tmp_path)
    row = again.steps[11]["rows"][1]
    row[changed] = [99] if changed == "blocks" else row[changed] + 1
    assert first_difference(trace, again).startswith("step 11: rows ")


def test_traces_that_cannot_be_computed_again_are_refused(tmp_path: Path) -> None:
    trace = read_trace(DOCS / "07-preemption" / "preemption.jsonl")
    trace.steps[3]["undone"] = [1]
    with pytest.raises(ValueError, match=r"step 3 of the trace follows a step that raised"):
        replayed(trace, tmp_path)
    trace.steps[3]["undone"] = []
    trace.steps[4]["arrived"] = [trace.steps[0]["arrived"][0]]
    with pytest.raises(ValueError, match=r"step 4 .* sequence 1, which an extension had held"):
        replayed(trace, tmp_path)
    trace.steps.clear()
    with pytest.raises(ValueError, match="has no steps"):
        replayed(trace, tmp_path)


def test_the_command_says_where_runs_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--replay", str(DOCS / "07-preemption" / "preemption.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "both runs are equal, step by step" in out and "preemptions" in out
    other = DOCS / "26-reinforcement-learning" / "other-weights.jsonl"
    assert main(["simulate", "--replay", str(other)]) == 1
    assert "became" in capsys.readouterr().out
