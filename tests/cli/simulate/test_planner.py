"""Plans and tuned options, in settings in which the best ones are known."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from simulated import Listed, make_setup, random_traffic, simulate

from nanoserve.cli.main import main
from nanoserve.cli.simulate.planner import Design, Goal, best_plan, find_plan
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.sessions import KINDS, Sessions
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival
from nanoserve.cli.simulate.tuner import candidates_of, halve, score, with_options

GPU = ["qwen3-0.6b", "--gpu", "l4", "--max-model-len", "8192"]


def one_by_one(num_kv_blocks: int = 500) -> Setup:
    """An engine that serves a hundred requests a second, one after the other."""
    setup = make_setup(num_kv_blocks, max_num_seqs=1, enable_prefix_caching=False)
    return replace(setup, step_time=LinearTime(fixed=0.01))


def regular(rate: float, num_requests: int = 200) -> Listed:
    return Listed([Arrival(i / rate, [1], [2], 1) for i in range(num_requests)])


@pytest.mark.parametrize(("rate", "expected"), [(95, 1), (110, 2), (390, 4), (470, 5)])
def test_the_fewest_replicas_are_found(rate: float, expected: int) -> None:
    """Regular arrivals need as many replicas as their rate times the service time."""
    goal = Goal(slo_ttft=0.05, attainment=0.999)
    plan = find_plan(Design("one", one_by_one()), lambda: regular(rate), goal)
    assert plan.num_replicas == plan.num_gpus == expected
    assert plan.summary["attainment"] >= 0.999


def test_a_goal_out_of_reach() -> None:
    goal = Goal(slo_ttft=0.05, attainment=0.99)
    plan = find_plan(Design("one", one_by_one(), 2), lambda: regular(1000), goal, most_replicas=3)
    assert plan.num_replicas is None and plan.num_gpus is None
    assert plan.summary["attainment"] < 0.99
    assert best_plan([plan]) is None


def test_the_limit_that_binds_is_named() -> None:
    goal = Goal(slo_ttft=0.05, attainment=0.99)
    plan = find_plan(Design("slots", one_by_one()), lambda: regular(250), goal)
    assert "p99 of the TTFT is" in plan.limit and "mostly for max_num_seqs" in plan.limit
    # Each request needs all blocks but a few: slots are free, blocks are not.
    setup = replace(one_by_one(70), config=replace(one_by_one().config, max_num_seqs=8))
    traffic = Listed([Arrival(i / 6, [1] * 900, [2] * 30, 30) for i in range(60)])
    plan = find_plan(Design("blocks", setup), lambda: traffic, Goal(0.5, 1.0, 0.99))
    assert plan.num_replicas == 2 and "mostly for KV blocks" in plan.limit
    slow = replace(one_by_one(), step_time=LinearTime(fixed=0.3))
    traffic = Listed([Arrival(10.0 * i, [1], [2] * 9, 9) for i in range(9)])
    plan = find_plan(Design("slow", slow), lambda: traffic, Goal(5.0, 0.2), most_replicas=2)
    assert "p99 of the time per token is 1.5 times" in plan.limit and "nothing" in plan.limit


def test_fewer_gpus_win_and_then_goodput() -> None:
    goal = Goal(slo_ttft=0.05, attainment=0.999)
    designs = [Design("two", one_by_one(), 2), Design("one", one_by_one())]
    plans = [find_plan(design, lambda: regular(150), goal) for design in designs]
    assert [plan.num_gpus for plan in plans] == [4, 2]
    assert best_plan(plans).design.name == "one"


def test_goals_are_checked() -> None:
    for name, value in (("slo_ttft", 0), ("attainment", 1.5), ("attainment", 0), ("warm_up", -1)):
        with pytest.raises(ValueError, match=f"{name}={value} must be"):
            Goal(**{name: value})


# ---------------------------------------------------------------------- tuning


def test_tuning_finds_the_best_of_the_grid() -> None:
    """Many rows a step serve more, but each token takes longer: the best is in between."""
    setup = replace(make_setup(3000), step_time=LinearTime(fixed=0.02, per_row=0.004))
    grid = {"max_num_seqs": [1, 2, 4, 8, 16, 32], "max_num_batched_tokens": [64, 256, 2048]}
    traffic, goal = random_traffic(7, num_requests=150, rate=400.0), Goal(10.0, 0.06)
    candidates, said = candidates_of(grid), []
    trials = halve(setup, candidates, traffic, 150, goal, show=said.append)
    scores = {}
    for options in candidates:
        results, _ = simulate(with_options(setup, options), traffic)
        scores[tuple(options.values())] = score(goal.summary(results), goal)
    best = max(scores.values())
    # Halving may drop the very best by its first requests, but nothing that serves more.
    assert score(trials[0].summary, goal)[0] >= 0.99 * best[0]
    assert trials[0].num_requests == 150 and 2 < trials[0].options["max_num_seqs"] < 32
    ran = [int(line.split()[0]) * int(line.split()[2]) for line in said]
    assert len(ran) > 1 and sum(ran) < 0.5 * len(candidates) * 150


def test_rejected_candidates_are_left_out() -> None:
    setup, goal = make_setup(), Goal()
    grid = {"max_num_seqs": [128, 8], "max_num_batched_tokens": [64]}
    trials = halve(setup, candidates_of(grid), random_traffic(0), 60, goal, show=lambda line: None)
    assert [trial.options["max_num_seqs"] for trial in trials] == [8]
    with pytest.raises(ValueError, match=r"rejects all candidates: .*max_num_batched_tokens=64"):
        halve(setup, candidates_of({**grid, "max_num_seqs": [128]}), random_traffic(0), 60, goal)
    with pytest.raises(ValueError, match="the grid is empty"):
        candidates_of({})


def test_blocks_of_another_size_hold_as_many_tokens() -> None:
    setup = make_setup(300)
    other = with_options(setup, {"block_size": 32})
    assert (other.num_kv_blocks, other.config.block_size) == (150, 32)
    assert with_options(setup, {"max_num_seqs": 4096}).config.max_num_batched_tokens == 4096


# ---------------------------------------------------------------------- sessions


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_sessions_come_at_their_rate_from_the_beginning(kind: str) -> None:
    sessions, counts, prompts = Sessions(kind, 12.0, 100.0, 2047, seed=1), [0] * 4, []
    pending = list(sessions.arrivals())
    assert [a.time for a in pending] == sorted(a.time for a in pending)
    while pending:
        arrival = pending.pop()
        if arrival.time < 100:
            counts[int(arrival.time // 25)] += 1
        prompts.append(arrival.prompt)
        following = arrival.conversation.next(arrival.time)  # answered at once
        if following is not None:
            assert following.prompt[: len(arrival.prompt)] == arrival.prompt
            end = len(arrival.prompt) + len(arrival.output)
            assert following.prompt[len(arrival.prompt) : end] == arrival.output
            pending.append(following)
    assert sum(counts) / 100 == pytest.approx(12, rel=0.15)
    assert 0.7 * max(counts) < counts[0] < 1.3 * max(counts)
    assert {tuple(p[: KINDS[kind].shared]) for p in prompts} == {tuple(sessions.prefix)}
    assert max(map(len, prompts)) < 16_000


def test_a_session_does_not_depend_on_others() -> None:
    def prompts(order: int) -> set[tuple[int, ...]]:
        pending, seen = list(Sessions("chat", 2.0, 30.0, 2047).arrivals()), set()
        rng = Random(order)
        while pending:
            arrival = pending.pop(rng.randrange(len(pending)))
            seen.add(tuple(arrival.prompt))
            following = arrival.conversation.next(arrival.time)
            pending += [] if following is None else [following]
        return seen

    assert prompts(0) == prompts(1)


def test_a_batch_comes_at_once() -> None:
    arrivals = list(Sessions("batch", 2.0, 30.0, 2047).arrivals())
    assert len(arrivals) == 60 and {arrival.time for arrival in arrivals} == {0.0}
    assert all(arrival.conversation.next(1.0) is None for arrival in arrivals)


def test_sessions_are_checked() -> None:
    for wrong, message in (
        ({"kind": "talk"}, "kind='talk' is not one of"),
        ({"rate": 0.0}, "rate=0.0 must be"),
        ({"longest": 50}, "longest=50 must be an integer >= 300"),
    ):
        settings: dict[str, Any] = {"kind": "chat", "rate": 1.0, "seconds": 9.0} | wrong
        with pytest.raises(ValueError, match=message):
            Sessions(**settings, vocab_size=2047)


# ---------------------------------------------------------------------- the commands


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plans.json"
    load = ["--request-rate", "4", "--seconds", "5", "--warm-up", "1"]
    flags = ["-tp", "1", "--price", "2", "--json", str(file)]
    assert main(["plan", *GPU, *load, *flags, "--fixed-time", "8", "--slo-itl", "40"]) == 0
    out = capsys.readouterr().out
    assert "not calibrated" in out and "best: " in out and "with a replica less: " in out
    plans = json.loads(file.read_text())
    assert [plan["gpus_per_replica"] for plan in plans] == [1, 1, 1]
    assert all(plan["num_gpus"] == plan["num_replicas"] for plan in plans)
    few = min(plan["num_gpus"] for plan in plans)
    assert f"{few} GPUs, {2 * few:.2f} an hour" in out
    few = ["-tp", "1", "--most-replicas", "2", "--max-num-batched-tokens", "2048"]
    assert main(["plan", *GPU, *load, *few, "--slo-itl", "7", "--fixed-time", "8"]) == 1
    assert "no plan reaches the goal" in capsys.readouterr().out


def test_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tuned.json"
    flags = ["--num-seqs", "60", "--request-rate", "200", "--grid", "max_num_seqs=1,4,64"]
    assert main(["tune", *GPU, *flags, "--slo-ttft", "300", "--json", str(file)]) == 0
    predicted = json.loads(file.read_text())["predicted"]
    assert next(iter(predicted)) in ("default", "max_num_seqs=64")
    assert "4 candidates" in capsys.readouterr().out


@pytest.mark.size("full")  # serves for real
def test_tuned_options_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nanoserve import LLM, SamplingParams

    trace = tmp_path / "run.jsonl"
    with LLM("tiny-qwen3", trace=trace, max_num_seqs=4, skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        llm.generate([[n] * 30 for n in range(1, 13)], params, use_tqdm=False)
    file = tmp_path / "tuned.json"
    flags = ["--requests", str(trace), "--grid", "max_num_seqs=1,8", "--verify", "1"]
    assert main(["tune", "--fit", str(trace), *flags, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert next(iter(found["predicted"])) == "max_num_seqs=8"
    assert {*found["measured"]} == {"max_num_seqs=8", "default"}
    assert all(row["output_tokens_per_s"] > 0 for row in found["measured"].values())
    assert "measured on the real engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", *GPU, "--grid", "max_num_seqs"], "must be an option with its values"),
        (["tune", *GPU, "--request-rate", "1,2"], "has 2 values: options are tuned for one"),
        (["tune", *GPU, "--verify", "1", "--num-seqs", "4"], "use --fit instead of --gpu"),
        (["plan", "qwen3-30b-a3b", "--gpu", "l4", "--request-rate", "1", "-tp", "1"], "not fit"),
        (["plan", *GPU, "--request-rate", "1", "--attainment", "2"], "attainment=2.0 must be"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
