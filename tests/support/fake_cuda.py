"""A GPU that is a CPU: everything of the GPU runner but the hardware."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GIB = 2**30


class FakeEvent:
    def __init__(self) -> None:
        self.num_waits = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.num_waits += 1


class FakeCuda:
    """`Cuda` whose graphs are functions that are called again.

    As with real ones, a replay sees what the device buffer holds at that time and nothing else
    that may have changed since the capture, and it overwrites the output of the capture.
    """

    def __init__(self, total: int = 16 * GIB, free: int = 15 * GIB, graph_bytes: int = 0) -> None:
        self.total, self.free, self.graph_bytes = total, free, graph_bytes
        self.events: list[str] = []
        self.peak = 0
        self.own: dict[int, torch.Tensor] = {}  # by address: page-locked from the start

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.zeros(*shape, dtype=dtype)
        self.own[memory.data_ptr()] = memory
        return memory

    def page_lock(self, memory: np.ndarray) -> None:
        if memory.ctypes.data not in self.own:
            self.events.append(f"lock {memory.nbytes}")

    def unlock(self) -> None:
        self.events.append("unlock")

    def event(self) -> FakeEvent:
        return FakeEvent()

    @contextmanager
    def guard(self) -> Iterator[None]:
        yield

    def graph_pool(self) -> Any:
        return object()

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[Callable[[], None], torch.Tensor]:
        output = forward()
        self.free -= self.graph_bytes
        self.events.append(f"capture {len(output)}")

        def replay() -> None:
            self.events.append(f"replay {len(output)}")
            output.copy_(forward())

        return replay, output

    def memory_info(self) -> tuple[int, int]:
        return self.free, self.total

    def allocated(self) -> int:
        return 0

    def peak_allocated(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.events.append("reset")

    def release_unused(self) -> None:
        self.events.append("release")
