"""benchmarks/gpu_day.py: every stage runs, tiny; one that fails or takes too long is told."""

import ast
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

pytest.importorskip("triton")

import gpu_day
import gpu_programs
import gpu_stage
import tune
from gpu_job import ROOT, Job
from gpu_table import MAX_LINES, MAX_WIDTH, table
from paged_rows import Shape, make_rows

SCRIPT = Path(gpu_day.__file__)
RATE = {"us": 12.3, "GB/s": 2500.0, "of a copy": 0.84}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    """In this process; some of the others need one of their own, and whole programs."""
    job, file = Job("cpu", time.monotonic() + 1000, tmp_path, None), tmp_path / "result.json"
    assert gpu_stage.run("facts", job, file)
    result = json.loads(file.read_text())
    assert result["copy GB/s"] > 0 and result["versions"]["torch"]
    record = {"stage": "facts", "rc": 0, "seconds": 1.0, "result": result}
    assert "GB/s" in "\n".join(table([record]))


@pytest.mark.size("full")
def test_the_stages_run_on_a_cpu(tmp_path: Path, by_size: Callable[..., Any]) -> None:
    some = ["facts", "bench", "tp", "sweep"]
    # What is left out even then runs whole programs, which have tests of their own.
    most = ["facts", "smoke", "tests", "bench", "profile", "drafts", "fewer_bits"]
    most += ["kernels", "tp", "sweep"]
    stages = by_size(some, some, most)
    out = tmp_path / "day"
    day = run("--out", str(out), "--device", "cpu", "--stages", ",".join(reversed(stages)))
    assert day.returncode == 0, day.stdout + (out / "log.txt").read_text()
    records = json.loads((out / "gpu_day.json").read_text())
    assert [record["stage"] for record in records] == stages  # what matters most first
    for record in records:
        assert record["rc"] == 0 and record["seconds"] > 0 and record["result"], record
    result = {record["stage"]: record["result"] for record in records}
    assert result["facts"]["copy GB/s"] > 0
    assert len(result["bench"]["default"]["seconds"]) == 2
    if "tests" in stages:  # they are only collected
        files = sorted((ROOT / "tests/gpu").glob("test_*_gpu.py"))
        assert len(result["tests"]) == len(files) + 2  # one has two processes
        assert all(found["collected"] > 4 for found in result["tests"].values())
        assert result["drafts"].keys() == {"7 draft tokens"}
        assert result["drafts"]["7 draft tokens"].keys() == {"copy 1", "random 1"}
        assert {"int8 KV cache", "8B, bfloat16", "8B, int4"} < result["fewer_bits"].keys()
        assert result["fewer_bits"]["8B, int4"]["1 rows us"] > 0
    assert result["tp"]["an engine over it"] == "same answers"
    assert result["sweep"]["tiny: ragged"]["best"][0]["us"] > 0
    assert day.stdout.rstrip().endswith("\n".join(table(records)))
    assert {file.name for file in out.iterdir()} == {"gpu_day.json", "log.txt"}


@pytest.mark.size("full")
def test_no_stage_ends_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = gpu_day.Day(tmp_path, 1000, "cpu", fa3=tmp_path)
    failed = day.run("fa3", 100)
    assert failed["rc"] == 1
    assert "NVIDIA GPUs only" in failed["result"]["what comes next"]["error"]
    monkeypatch.setattr(gpu_day, "_LEAST", 0.0)
    assert day.run("smoke", 0.1)["rc"] == gpu_day.TIMED_OUT
    monkeypatch.setattr(gpu_day, "_LEAST", 1001.0)
    assert "of the budget are left" in day.run("kernels", 100)["skipped"]
    assert json.loads((tmp_path / "gpu_day.json").read_text()) == day.records
    first, *others = table(day.records)
    assert "fa3 FAILED (1)" in first and "smoke CUT OFF" in first and "kernels SKIPPED" in first
    assert any("NVIDIA GPUs only" in line for line in others)
    assert "ValueError" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("value", "is_good"), [({"rc": 0}, True), ({"bad": True}, False), ({"error": "no"}, False)]
)
def test_a_stage_is_as_good_as_its_results(
    value: dict[str, Any], is_good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("cpu", 0.0, tmp_path, None)
    monkeypatch.setattr(gpu_programs, "tests", lambda job: iter([("some", lambda: value)]))
    assert gpu_stage.run("tests", job, tmp_path / "result.json") is is_good
    assert json.loads((tmp_path / "result.json").read_text()) == {"some": value}


def test_gpu_tests_with_an_engine_run_in_the_half_of_the_engines() -> None:
    """One in the other half would measure memory that a dozen processes use at the same time."""
    names: dict[str, set[str]] = {}  # of each function and variable of the file: those that it uses
    for node in ast.parse((ROOT / gpu_programs._GPU_TESTS).read_text()).body:
        if isinstance(node, ast.FunctionDef):  # but not in annotations
            code = [part for statement in node.body for part in ast.walk(statement)]
            fixtures = {argument.arg for argument in node.args.args}
            names[node.name] = fixtures | {part.id for part in code if isinstance(part, ast.Name)}
        elif isinstance(node, ast.Assign):
            used = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            names |= {part.id: used for part in node.targets if isinstance(part, ast.Name)}
    with_engine, num_known = {"LLM"}, 0
    while num_known < len(with_engine):  # also through fixtures and helpers
        num_known = len(with_engine)
        with_engine |= {name for name, within in names.items() if within & with_engine}

    half = Expression.compile(gpu_programs._ENGINES)
    tests = [name for name in names if name.startswith("test_")]
    chosen = {test for test in tests if half.evaluate(lambda word, test=test, **_: word in test)}
    assert chosen == with_engine.intersection(tests) != set()


@pytest.mark.size("full")
def test_what_a_stage_has_started_ends_with_it() -> None:
    """Else it would keep the memory of the GPU."""
    reader, writer = os.pipe()
    start = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    rc = gpu_day._run_in_group([sys.executable, "-c", start], 1.0, dict(os.environ), writer)
    assert rc == gpu_day.TIMED_OUT
    os.close(writer)
    is_closed, _, _ = select.select([reader], [], [], 20)  # by the last who could write
    assert is_closed and os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--stages", "facts,nothing"), "no nothing; known are facts"),
        (("--stages", "fa3"), "needs --fa3"),
        (("--fa3", "no/such/folder"), "--fa3 no/such/folder is not a folder"),
        (("--peers", "no/such/folder"), "--peers no/such/folder is not a folder"),
        (("--plan", "first", "--stages", "facts"), "--plan has stages of its own"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    refused = run("--out", str(tmp_path), *options)
    assert refused.returncode == 2 and told in refused.stderr


def test_two_plans_fit_into_fifteen_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a minute to start, and one to spare; nothing is measured twice."""
    budgets, stages = [], []
    for plan in gpu_day.PLANS:
        monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--out", "day", "--plan", plan])
        args = gpu_day.parse_args()
        budgets.append(args.budget)
        stages += args.stages
        assert args.limits == gpu_day.PLANS[plan]
    assert 600 < sum(budgets) <= 900 - 120
    assert len(stages) == len({*stages}) and {*stages} < {*gpu_day.LIMITS}
    assert stages[:2] == ["facts", "tests"]  # what has never run comes first


@pytest.mark.size("full")  # an engine
def test_peers_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder that has them; here only the one that runs on a CPU, and one that is absent."""
    monkeypatch.setattr(gpu_programs, "_PEERS", {"vllm": 0.5, "nanoserve": 1.0})
    job, file = Job("cpu", time.monotonic() + 200, tmp_path, None, tmp_path), tmp_path / "r.json"
    assert not gpu_stage.run("peers", job, file)
    result = json.loads(file.read_text())
    assert "no run was finished" in result["vllm"]["error"]
    assert result["nanoserve"].keys() == {"seconds", "1 rows ms", "8 rows ms", "rc", "bad"}
    assert len(result["nanoserve"]["seconds"]) == 2 and not result["nanoserve"]["bad"]
    shown = "\n".join(table([{"stage": "peers", "rc": 1, "seconds": 1.0, "result": result}]))
    assert "nanoserve, s of the workload" in shown and "FAILED: peers, vllm" in shown


def results() -> dict[str, dict[str, Any]]:
    """As a GPU might give them, with more of each than there is room for."""
    tests = {"passed": 250, "failed": 30, "skipped": 1, "rc": 1}
    tests["names"] = [f"test_attention[{i}-torch.bfloat16-128-16]" for i in range(30)]
    step = {"wall us": 5000.0, "busy us": 3500.0, "busy share": 0.7, "largest gap us": 900.0}
    step |= {"launches per layer": 9.1, "shares": {"attention": 0.6, "products": 0.4}}
    variant = {"seconds": [7.0, 6.9], "tok/s": 19_500.0, "of roofline": 0.61, "start s": 5.0}
    variant["idle s"] = 0.1
    beside = {"ours us": 350.0, "theirs us": 340.0, "ours of peak": 0.98, "theirs of peak": 1.0}
    beside |= {"theirs over ours": 0.97, "same": True, "largest difference": 0.01}
    point = {"us": 350.0, "of a copy": 0.99, "tile_n": 64}
    return {
        "facts": {"machine": "GPU", "copy GB/s": 2972.1, "graph": {"launch us": 3.4}},
        "smoke": {"graphs": "8 of 8", "eager": {"error": "AssertionError: 7 of 8"}},
        "tests": {"kernel tests": tests, "engine tests": tests | {"rc": 124}},
        "bench": {f"variant {i}": variant | {"KV blocks": 40_000} for i in range(5)},
        "profile": {f"{n} rows": step for n in range(10)} | {"0 rows": {"wall us": 1.0}},
        "kernels": {f"decode {n}": RATE for n in range(20)}
        | {f"product {n}": {"16": RATE | {"TFLOP/s": 1.0}} for n in range(5)},
        "drafts": {"graphs": {"copy 1": 2.5, "random 16": 0.99}},
        "fewer_bits": {"default": variant | {"KV blocks": 40_000}, "8B, int4": {"1 rows us": 9.0}},
        "options": {"no graphs": variant | {"KV blocks": 40_000}},
        "tp": {"all-reduce": "right"},
        "peers": {"in turns": {"unit": "tok/s", "nanoserve": [9.0], "failed": ["b FAILED: c"]}},
        "fa3": {f"decode {n}": beside for n in range(10)},
        "sweep": {f"{n}": {"current": point, "best": [point] * 5} for n in range(8)},
        "sanitize": {"memcheck": {"rc": 0, "said": ["0 errors"]}, "ncu": {"left out": "no ncu"}},
    }


def test_the_table_fits_on_a_screen() -> None:
    records = [
        {"stage": stage, "rc": 0, "seconds": 1.0, "result": result}
        for stage, result in results().items()
    ]
    assert set(results()) == set(gpu_day.LIMITS)
    lines = table(records)
    assert len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_WIDTH
    assert any("FAILED: smoke, eager: AssertionError: 7 of 8" in line for line in lines)
    for record in records:  # each has its lines, and none cannot be shown
        shown = "\n".join(table([record]))
        assert shown.count("\n") >= 1 and "cannot be shown" not in shown
    records[3]["result"] = {"default": {"seconds": "?"}}
    assert any("bench: cannot be shown here" in line for line in table(records))


def test_tiles_are_replaced_while_they_are_tried() -> None:
    shape = Shape("tiny", 2, 1, 16, 0, 0, 0)
    rows, grid = make_rows(shape, [5, 20], 1, 1, "cpu"), {"tile_n": [16, 32]}
    before = tune.current(rows, grid)["tile_n"]
    with tune.tiles({"tile_n": 2 * before}) as made:
        rows.attend(0)
    assert [config.tile_n for config in made] == [2 * before]
    assert tune.current(rows, grid) == {"tile_n": before}
    assert tune.points({"tile_n": [16, 32], "num_warps": [4]})[1] == {"tile_n": 32, "num_warps": 4}
    with pytest.raises(SystemExit, match="has no width; it has block_m, tile_n"):
        tune.parse_grid(["width=1,2"], "cpu")
    with pytest.raises(SystemExit, match="--grid FIELD=1,2,4"):
        tune.parse_grid(["tile_n"], "cpu")
