"""Several engines on Ray: the same answers, whoever is killed."""

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from batch_files import OPTIONS, answers, line, small_requests, start, texts, write
from serving import wait_until

from nanoserve.cli.main import main

pytest.importorskip("fastapi", reason="a batch needs pip install 'nanoserve[serve]'")

from nanoserve.config import EngineConfig
from nanoserve.serve.batch.ray_runner import Replica, _chunks, _resources
from nanoserve.serve.batch.requests import Todo, read_lines
from nanoserve.serve.engine_thread import EngineDeadError

ENGINE = {"dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 500, "max_model_len": 512}
ANSWERER: dict[str, Any] = {"model": "tiny-qwen3", "options": ENGINE, "settings": {}}
ANSWERER |= {"engine_process": False}
# What Ray's own helpers wait for when their cluster is gone; they compute nothing meanwhile.
LATE = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def places_of(source: Path) -> list[tuple[int, int]]:
    with source.open("rb") as file:
        return [(number, at) for number, (at, _) in enumerate(read_lines(file), 1)]


@pytest.mark.parametrize(
    ("num_lines", "max_num_seqs", "replicas", "size"),
    [
        (1, 256, 4, 1),
        (100, 256, 2, 6),  # so that both have eight, and end together
        (20_000, 256, 2, 128),
        pytest.param(1_000_000, 8192, 2, 1024, marks=pytest.mark.size("full")),
        (20_000, 4, 2, 8),
    ],
)
def test_chunks_are_small_enough_to_share(
    num_lines: int, max_num_seqs: int, replicas: int, size: int
) -> None:
    places = [(number, 10 * number) for number in range(num_lines)]
    chunks = _chunks(Todo(places), max_num_seqs, replicas)
    assert len(chunks[0]) == size
    assert [place for chunk in chunks for place in chunk] == places


def test_replicas_that_have_no_room_are_told() -> None:
    """Ray would wait for ever."""
    config = EngineConfig("tiny-qwen3", tensor_parallel_size=2)
    there = {"CPU": 4.0, "GPU": 4.0}
    assert _resources(config, 1, 2, there) == {"num_cpus": 1, "num_gpus": 2}
    with pytest.raises(ValueError, match="replicas=3 need 2 GPUs each, but Ray has 4"):
        _resources(config, 1, 3, there)
    with pytest.raises(ValueError, match="replicas=3 need 2 CPUs each, but Ray has 4"):
        _resources(EngineConfig("tiny-qwen3", device="cpu"), 2, 3, there)
    with pytest.raises(ValueError, match="need 1 GPUs each, but Ray has 0"):
        _resources(EngineConfig("tiny-qwen3", device="cuda"), 1, 1, {"CPU": 4.0})
    assert _resources(EngineConfig("tiny-qwen3"), 2, 2, {"CPU": 4.0})["num_gpus"] == 0


def outcomes(replica: Replica, places: list[tuple[int, int]]) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        (batch,) = [each async for each in replica({"places": [json.dumps(places)]})]
        return batch

    return asyncio.run(ask())


def test_a_replica_answers_a_chunk(tmp_path: Path) -> None:
    good = line("a", prompt="A KV cache", max_tokens=3)
    source = write(tmp_path / "in", [good, line("b", prompt=""), line("c", prompt=[4], seed=-1)])
    places = places_of(source)
    replica = Replica(source, source.stat().st_size, "", ANSWERER)
    try:
        found = outcomes(replica, places[:2])
    finally:
        replica._answerer.close()
    assert [*found["number"]] == [1, 2]
    assert '"custom_id": "a"' in found["content"][0] and found["error"][0] == ""
    assert '"status_code": 400' in found["content"][1] and "'b'" in found["error"][1]
    assert not replica._running
    # Nobody is left to answer, which is no line's fault.
    found = outcomes(replica, places[2:])
    assert [*found["number"]] == [0] and "not running" in found["error"][0]


def test_nobody_else_need_hold_what_a_replica_does(tmp_path: Path) -> None:
    """Ray does not, and of a task that waits the event loop knows only weakly."""
    wishes = {"max_tokens": 50, "ignore_eos": True}
    source = write(tmp_path / "in", [line(f"{n}", prompt="A KV cache", **wishes) for n in range(8)])
    replica = Replica(source, source.stat().st_size, "", ANSWERER)
    places, done = json.dumps(places_of(source)), SimpleQueue()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)

    async def ask() -> None:
        async for each in replica({"places": [places]}):
            done.put(each)

    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(ask(), loop)

        def is_done() -> bool:
            gc.collect()
            return not done.empty()

        wait_until(is_done, 60)
        assert [*done.get()["number"]] == list(range(1, 9))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        replica._answerer.close()


@pytest.mark.parametrize("wrong", ["size", "model"])
def test_a_replica_that_cannot_start_says_why(wrong: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line("a", prompt="A KV cache")])
    size = source.stat().st_size + (wrong == "size")
    asked = ANSWERER | ({"model": "no-such-model"} if wrong == "model" else {})
    found = outcomes(Replica(source, size, "", asked), places_of(source))
    told = "must exist on every machine" if wrong == "size" else "no-such-model"
    assert [*found["number"]] == [0] and told in found["error"][0]


@pytest.mark.parametrize("kind", [RuntimeError, EngineDeadError, OSError])
def test_any_error_of_starting_an_engine_is_the_result(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would print a hundred lines for an error of its actor."""

    def fail(**options: Any) -> None:
        raise kind("out of memory")

    monkeypatch.setattr("nanoserve.serve.batch.ray_runner.Answerer", fail)
    source = write(tmp_path / "in", [line("a", prompt="A KV cache")])
    found = outcomes(Replica(source, source.stat().st_size, "", ANSWERER), places_of(source))
    assert [*found["number"]] == [0] and found["error"] == ["out of memory"]


# ---------------------------------------------------------------- with Ray


@pytest.fixture
def a_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its files are in a folder of its own: sockets there need a short path."""
    pytest.importorskip("ray", reason="replicas need pip install 'nanoserve[ray]'")
    folder = tempfile.mkdtemp(prefix="nsb", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)


def processes_below(pid: int) -> dict[int, str]:
    """All that `pid` has started, and they; with their commands."""
    shown = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    rows = [row.split(None, 2) for row in shown.stdout.splitlines()]
    found, parents = {}, {pid}
    while parents:
        below = {int(own): command for own, parent, command in rows if int(parent) in parents}
        found |= below
        parents = set(below)
    return found


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.size("full")  # Ray takes its time to start
@pytest.mark.full(killed=["replica", "engine"])
@pytest.mark.parametrize("killed", ["job", "replica", "engine", "stopped"])
@pytest.mark.usefixtures("a_ray")
def test_every_line_is_answered_once(killed: str, tmp_path: Path) -> None:
    number = 2000 if killed == "job" else 600
    requests = small_requests(number)
    source, out = write(tmp_path / "in", requests), tmp_path / "out"
    for part in (0.1, 0.5, 0.8) if killed == "job" else (0.1,):
        process = start(source, out, "--replicas", "2")
        try:
            aim = max(num_lines(out) + 1, part * number)
            wait_until(lambda: num_lines(out) >= aim, 200)  # noqa: B023
            started = processes_below(process.pid)
            engines = [pid for pid, command in started.items() if "engine_process" in command]
            assert len(engines) == 2
            if killed == "job":
                process.kill()
                process.wait()
                wanted = [pid for pid, command in started.items() if command not in LATE]
                wait_until(lambda: not any(map(is_there, wanted)), 30)  # noqa: B023
            elif killed == "stopped":
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 128 + signal.SIGTERM
                wait_until(lambda: not any(map(is_there, started)), 30)  # noqa: B023
            else:
                replicas = [pid for pid, command in started.items() if "Replica" in command]
                victims = replicas if killed == "replica" else engines
                os.kill(victims[0], signal.SIGKILL)
                _, told = process.communicate(timeout=300)
                assert process.returncode == 0, told
        finally:
            process.kill()
    process = start(source, out, "--replicas", "2")
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert answers(out).keys() == {each["custom_id"] for each in requests}
    alone = tmp_path / "alone"
    assert main(["batch", str(source), str(alone), *OPTIONS, "--no-engine-process"]) == 0
    assert texts(out) == texts(alone)


@pytest.mark.size("soak")
@pytest.mark.parametrize("number", [100_000])
@pytest.mark.usefixtures("a_ray")
def test_what_no_replica_can_do_is_told_in_one_line(number: int, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line("a", prompt="A KV cache")])
    process = start(source, tmp_path / "out", "--replicas", "2", "--max-model-len", str(number))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 2
    last = error.strip().splitlines()[-1]
    assert last.startswith("nanoserve batch: ") and f"max_model_len={number}" in last


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trace", "x.jsonl"], "trace needs a single engine"),
        (["--kv-offloading-path", "kv"], "kv_offloading_path needs a single engine"),
        (
            ["--kv-transfer-config", '{"kv_connector": "socket", "kv_role": "kv_producer"}'],
            "the KV connector 'socket' needs a single engine",
        ),
        (["--distributed-executor-backend=ray", "--tensor-parallel-size=2"], "must be 'mp'"),
        (["--dtype", "float7"], "float7"),
    ],
)
def test_what_replicas_cannot_have_is_refused_before_ray_starts(
    arguments: list[str], told: str, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("ray.data", reason="replicas need pip install 'nanoserve[ray]'")
    source = write(tmp_path / "in", [line("a", prompt="A KV cache")])
    files = [str(source), str(tmp_path / "out")]
    assert main(["batch", *files, "--replicas", "2", *arguments]) == 2
    assert told in capsys.readouterr().err
