"""What several processes may leave behind, and how soon they must be gone."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nanoserve import LLM

SOON = 8.0  # seconds; less than the time-outs that would end a hang, of which the least is 10
PATIENCE = 120.0  # for what only a hang would miss: processes that start on a busy machine
# In the environment of all that a test starts, so that tests of other processes are not seen.
MARK = f"NANOSERVE_TESTED_BY={os.getpid()}"


def workers() -> set[int]:
    """Processes of any engine's workers that these tests have started."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            command, environment = (entry / "cmdline").read_bytes(), entry / "environ"
            is_worker = b"nanoserve.features.parallel.tp_worker" in command.split(b"\0")
            if is_worker and MARK.encode() in environment.read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def tell_time(start: float, limit: float = SOON) -> None:
    seconds = time.monotonic() - start
    print(f"after {seconds:.2f} seconds")  # shown with -s, or on failure
    assert seconds < limit


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(*MARK.split("="))
    before, files = workers(), set(os.listdir("/dev/shm"))
    threads = torch.get_num_threads()
    yield
    assert within(SOON, lambda: workers() <= before), workers() - before
    assert set(os.listdir("/dev/shm")) <= files
    assert torch.get_num_threads() == threads


def soon_after_a_step(llm: LLM, action: Callable[[], None]) -> None:
    """Once, from a thread: so it falls into the middle of some later step."""

    def begin(*args: object) -> None:
        llm.engine.observers.remove(begin)
        threading.Timer(0.05, action).start()

    llm.engine.observers.append(begin)
