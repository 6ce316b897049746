"""A GPU that is a CPU: everything of a CUDA device but the hardware."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import finalize

import numpy as np
import torch

GIB = 2**30


class FakeEvent:
    def __init__(self) -> None:
        self.is_recorded = self.is_over = False
        self.num_waits = 0

    def record(self) -> None:
        self.is_recorded, self.is_over = True, False

    def synchronize(self) -> None:
        assert self.is_recorded, "there is nothing to wait for"
        self.is_over = True
        self.num_waits += 1


class FakeCuda:
    """`Cuda` whose graphs are functions that are called again.

    As with real ones, a replay sees what the device buffer holds at that time and nothing else
    that may have changed since the capture, and it overwrites the output of the capture. A pool
    takes `pool_bytes` with its first graph, and `graph_bytes` with each; when its graphs are gone,
    they are kept for the next ones until `release_unused`. The first graph that there is takes
    `stream_bytes` for good.
    """

    def __init__(
        self,
        total: int = 16 * GIB,
        free: int = 15 * GIB,
        pool_bytes: int = 0,
        graph_bytes: int = 0,
        stream_bytes: int = 0,
    ) -> None:
        self.device = torch.device("cpu")
        self.total, self.free, self.unused = total, free, 0
        self.pool_bytes, self.graph_bytes = pool_bytes, graph_bytes
        self.stream_bytes = stream_bytes
        self.events: list[str] = []  # what was done
        self.peak = 0
        self.own: dict[int, torch.Tensor] = {}  # by address: page-locked from the start

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.zeros(*shape, dtype=dtype)
        self.own[memory.data_ptr()] = memory
        return memory

    def page_lock(self, memory: np.ndarray) -> None:
        if memory.ctypes.data not in self.own:
            self.events.append(f"lock {memory.nbytes}")

    def close(self) -> None:
        self.events.append("close")

    def event(self) -> FakeEvent:
        return FakeEvent()

    @contextmanager
    def guard(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def graph_pool(self) -> list[int]:
        """Its graphs' sizes."""
        return []

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: list[int]
    ) -> tuple[Callable[[], None], torch.Tensor]:
        output = forward()
        num_bytes = self.graph_bytes + (0 if pool else self.pool_bytes)
        pool.append(len(output))
        reused = min(num_bytes, self.unused)
        self.unused -= reused
        self.free -= num_bytes - reused + self.stream_bytes
        self.stream_bytes = 0
        self.events.append(f"capture {len(output)}")

        def replay() -> None:
            self.events.append(f"replay {len(output)}")
            output.copy_(forward())

        finalize(replay, self._keep, num_bytes)
        return replay, output

    def _keep(self, num_bytes: int) -> None:
        self.unused += num_bytes

    def memory_info(self) -> tuple[int, int]:
        return self.free, self.total

    def allocated(self) -> int:
        return 0

    def held_by_others(self) -> int:
        """Its tensors take nothing; so it can be asked while there are no graphs."""
        return self.total - self.free

    def peak_allocated(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.events.append("reset")

    def release_unused(self) -> None:
        self.events.append("release")
        gc.collect()
        self.free += self.unused
        self.unused = 0
