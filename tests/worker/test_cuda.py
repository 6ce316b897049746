"""What `Cuda` asks of torch, where torch is a stand-in; on a GPU, tests/gpu/test_gpu.py."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import nanoserve.worker.cuda
from nanoserve.compat.memory import cleanup_dist_env_and_memory
from nanoserve.worker.cuda import Cuda

GPU = torch.device("cuda", 0)


class Graph:
    def replay(self) -> None:
        """Launches nothing."""


class Recorder:
    """Of what torch is asked: `streams` that were made, and those that graphs were recorded on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[object] = []
        self.recorded_on: list[object] = []
        self.launched_on: list[object] = []
        self.waits_while_recording = 0
        self.is_recording = False
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self.record)
        monkeypatch.setattr(torch.cuda, "stream", self.launch_on)
        monkeypatch.setattr(nanoserve.worker.cuda, "_FREE_STREAMS", {})
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.synchronize(GPU))
        for name in ("is_available", "is_initialized"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def make_stream(self, device: torch.device) -> object:
        self.streams.append(object())
        return self.streams[-1]

    @contextmanager
    def launch_on(self, stream: object) -> Iterator[None]:
        self.launched_on.append(stream)
        yield

    @contextmanager
    def record(self, graph: Graph, pool: Any, stream: object, **mode: str) -> Iterator[None]:
        self.recorded_on.append(stream)
        self.is_recording = True
        yield
        self.is_recording = False

    def synchronize(self, device: torch.device) -> None:
        self.waits_while_recording += self.is_recording


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_each_engine_records_on_a_stream_of_its_own(recorder: Recorder) -> None:
    """Made when it is used: one that runs without graphs has none."""
    first, second = Cuda(GPU), Cuda(GPU)
    assert not recorder.streams
    for cuda in (first, first, second, first):
        cuda.capture(lambda: torch.zeros(1), pool=None)
    a, b = recorder.streams
    assert a is not b and recorder.recorded_on == recorder.launched_on == [a, a, b, a]


def test_streams_are_used_again(recorder: Recorder) -> None:
    """What cuBLAS keeps for one is never given back: an engine after another adds nothing."""
    first, second = Cuda(GPU), Cuda(GPU)
    for cuda in (first, second):
        cuda.capture(lambda: torch.zeros(1), pool=None)
    first.close()
    first.close()  # a second time changes nothing
    third, fourth = Cuda(GPU), Cuda(GPU)
    for cuda in (third, fourth):
        cuda.capture(lambda: torch.zeros(1), pool=None)
    a, b, c = recorder.streams
    assert recorder.recorded_on == [a, b, a, c]


def clean_up(cuda: Cuda) -> None:
    """What vLLM's scripts call between two engines."""
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("wait", [Cuda.synchronize, Cuda.release_unused, Cuda.capture, clean_up])
def test_while_one_engine_records_no_other_thread_waits_for_the_device(
    recorder: Recorder, wait: Any
) -> None:
    """CUDA allows no such wait, and the recording would be lost as well."""
    arguments = ((lambda: torch.zeros(1)), None) if wait is Cuda.capture else ()
    has_come = threading.Event()

    def wait_in_thread() -> None:
        cuda = Cuda(GPU)
        has_come.set()
        wait(cuda, *arguments)

    other = threading.Thread(target=wait_in_thread)

    def forward() -> torch.Tensor:
        if recorder.is_recording:
            other.start()
            assert has_come.wait(60)
            other.join(0.05)  # time for the other one, which must not use it
        return torch.zeros(1)

    Cuda(GPU).capture(forward, pool=None)
    other.join(60)
    assert not other.is_alive() and recorder.waits_while_recording == 0


def test_nobody_else_waits_for_the_device_or_empties_its_cache() -> None:
    """Not without the lock, which is in one file; a benchmark has no engine beside it."""
    package = Path(nanoserve.worker.cuda.__file__).parents[1]
    calls = ("torch.cuda.synchronize(", "torch.cuda.empty_cache(")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(call in path.read_text(encoding="utf-8") for call in calls)
    }
    assert found == {"worker/cuda.py", "cli/bench/hardware.py"}
