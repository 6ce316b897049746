"""A worker that hangs is told from one that is busy. The workers here are small scripts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from nanoserve.features.parallel import heartbeat, worker_processes
from nanoserve.features.parallel.heartbeat import BEAT, IDLE_LIMIT, WORK_LIMIT, Pulse, WorkWatch
from nanoserve.features.parallel.tp_worker import Reporter
from nanoserve.features.parallel.worker_processes import WorkerError, Workers

pytestmark = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="asks /proc for processor time"
)
SHORT_BEAT = 0.2  # seconds: for tests that wait for silence
TIMEOUT = 1.4  # of which the two last beats are not waited for: a second of silence is one
PATIENCE = 60.0
IDLE = "time.sleep(100)"
BUSY = "re.match('(a*)*b', 'a' * 200)"  # holds Python's lock, as compiled code may
SCRIPT = """#!{python}
import json, os, re, sys, threading, time
fds = json.loads(sys.argv[-1])["fds"]
def say(line): os.write(fds["status"], line.encode() + b"\\n")
def leave(): os.read(fds["life"], 1); os._exit(0)
threading.Thread(target=leave, daemon=True).start()
say("")
{body}
"""
BEATING = """
def beat():
    while True: say(""); time.sleep(0.1)
threading.Thread(target=beat, daemon=True).start()
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workers]]:
    """Starts one worker that does what it is told, in Python."""
    for module in (heartbeat, worker_processes):
        monkeypatch.setattr(module, "BEAT", SHORT_BEAT)
    started: list[Workers] = []
    memory = os.open(tmp_path, os.O_RDONLY)  # any descriptor: nobody maps it

    def start(body: str, timeout: float = TIMEOUT) -> Workers:
        script = tmp_path / "worker"
        script.write_text(SCRIPT.format(python=sys.executable, body=body))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        started.append(Workers(2, {}, {"memory": memory}, 1, timeout))
        return started[-1]

    yield start
    for workers in started:
        workers._processes[0].kill()
        workers.close()
    os.close(memory)


def within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def test_a_silent_worker_is_killed_and_told_of(start: Callable[..., Workers]) -> None:
    workers = start(IDLE)
    told: list[int] = []
    workers.call_on_failure(lambda: told.append(1))
    assert within(PATIENCE, lambda: workers.failure)
    assert f"rank 1, process {workers.pids[0]}, has sent no heartbeat" in workers.failure
    with pytest.raises(WorkerError, match="no heartbeat"):
        workers.wait_for("built", timeout=PATIENCE)
    assert within(PATIENCE, lambda: workers._processes[0].poll() == -signal.SIGKILL)
    assert told == [1]


@pytest.mark.size("full")
@pytest.mark.parametrize("body", [BUSY, BEATING + IDLE])
def test_a_busy_worker_or_one_that_beats_is_not(start: Callable[..., Workers], body: str) -> None:
    workers = start(body)
    assert not within(TIMEOUT + SHORT_BEAT, lambda: workers.failure)
    workers.check()


def test_a_worker_that_answers_late_has_not_failed(start: Callable[..., Workers]) -> None:
    answers = "while os.read(fds['steps'], 4): time.sleep(0.5); say('{\"state\": \"waiting\"}')"
    workers = start(BEATING + answers)
    assert not workers.are_waiting(timeout=0.1)
    assert workers.are_waiting(timeout=PATIENCE)
    assert workers.failure is None


@pytest.mark.size("full")
def test_to_close_a_worker_that_is_stopped_takes_a_few_seconds(
    start: Callable[..., Workers],
) -> None:
    workers = start(BEATING + 'say(\'{"state": "built"}\');' + IDLE, timeout=PATIENCE)
    workers.wait_for("built", timeout=PATIENCE)
    os.kill(workers.pids[0], signal.SIGSTOP)
    began = time.monotonic()
    workers.close()
    assert time.monotonic() - began < 8  # where one that does not react has two times five
    assert workers.failure is None and workers._processes[0].poll() == -signal.SIGKILL


def test_whoever_was_stopped_itself_gives_the_others_time() -> None:
    process = subprocess.Popen(["sleep", "100"])
    try:
        pulse = Pulse(process.pid)
        for elapsed in (BEAT, BEAT, 3600.0):
            time.sleep(0.05)  # until it sleeps: then it uses no processor time
            pulse.look(elapsed, received=False)
        assert pulse.silence <= 4 * BEAT
        pulse.look(BEAT, received=True)
        assert pulse.silence == 0.0
    finally:
        process.kill()
        process.wait()


def watched(body: Callable[[], object], elapsed: list[float]) -> list[str | None]:
    """What is told after each of those looks, `body` of a thread's work being done before it."""
    watch, turn, told = WorkWatch(), threading.Barrier(2), []

    def run() -> None:
        with watch.work():
            for _ in elapsed:
                body()
                turn.wait()
                turn.wait()

    thread = threading.Thread(target=run)
    thread.start()
    for seconds in elapsed:
        turn.wait()
        watch.look(seconds)
        told.append(watch.stall)
        turn.wait()
    thread.join()
    watch.look(BEAT)
    assert watch.stall is None  # it has ended
    return told


def spin() -> None:
    """Twenty milliseconds of processor time, however long that takes."""
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass


def test_work_that_computes_may_take_minutes_and_work_that_waits_half_of_one() -> None:
    looks = [BEAT] * (int(IDLE_LIMIT / BEAT) + 2)
    assert not any(watched(spin, looks))
    *before, at_last = watched(lambda: None, looks)
    assert not any(before[:-2]) and "computed nothing for 30" in at_last


def test_work_that_does_not_end_is_told_of_though_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert WORK_LIMIT == 300
    monkeypatch.setattr(heartbeat, "WORK_LIMIT", 3.0)
    first, *_, last = watched(spin, [BEAT] * 9)
    assert first is None and "has not ended after 4 seconds" in last


def test_work_is_not_hung_because_the_machine_slept() -> None:
    assert watched(lambda: None, [BEAT, 3600.0, 3600.0, BEAT]) == [None] * 4


def test_no_beat_falls_into_a_long_message() -> None:
    here, there = os.pipe()
    report = Reporter(partial(os.write, there))
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.is_set():
            report.beat()

    def write() -> None:
        for _ in range(20):
            report(error="x" * 300_000)  # more than a pipe takes at once
        is_over.set()
        beating.join()
        os.close(there)

    beating, writing = threading.Thread(target=beat), threading.Thread(target=write)
    beating.start()
    writing.start()
    with open(here, "rb") as file:
        messages = [json.loads(line) for line in file if line != b"\n"]
    writing.join()
    assert messages == [{"error": "x" * 300_000}] * 20
