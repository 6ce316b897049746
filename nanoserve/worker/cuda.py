"""The calls that only a GPU can answer, in one place; what uses them can be tested without one."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# For the whole process: to wait for a device spoils what any thread is recording on it.
_RECORDING = threading.RLock()


class Cuda:
    """One CUDA device, as one engine uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._locked: list[np.ndarray] = []
        self._capture_stream: torch.cuda.Stream | None = None

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in page-locked host memory: copies from and to it do not wait."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def page_lock(self, memory: np.ndarray) -> None:
        """As `pinned`, for memory that comes from elsewhere, until `unlock`."""
        if not torch.from_numpy(memory).is_pinned():
            lock = torch.cuda.cudart().cudaHostRegister
            torch.cuda.check_error(int(lock(memory.ctypes.data, memory.nbytes, 0)))
            self._locked.append(memory)

    def unlock(self) -> None:
        """Undo every `page_lock`, before the memory goes."""
        while self._locked:
            unlock = torch.cuda.cudart().cudaHostUnregister
            torch.cuda.check_error(int(unlock(self._locked.pop().ctypes.data)))

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def guard(self) -> Any:
        """A context in which kernels are launched on this device, whatever the caller chose."""
        return torch.cuda.device(self.device)

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """Record what `forward` launches. Returns what launches it again, and its output.

        The output is the same tensor every time. Graphs of one `pool` share their memory.
        """
        forward()  # kernels are compiled and libraries set up now: neither can be recorded
        if self._capture_stream is None:
            # Not shared: cuBLAS keeps a workspace for each stream, in the graphs' memory of the
            # engine that was the first to use it, and there it is gone when that engine is closed.
            self._capture_stream = torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": another engine's thread may go on allocating meanwhile.
        mode, stream = "thread_local", self._capture_stream
        with _RECORDING:
            torch.cuda.synchronize(self.device)
            with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
                output = forward()
        return graph.replay, output

    def synchronize(self) -> None:
        """Wait for everything that was launched on this device."""
        with _RECORDING:
            torch.cuda.synchronize(self.device)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def memory_info(self) -> tuple[int, int]:
        """Bytes that are free and bytes in all, over every process of the device."""
        return torch.cuda.mem_get_info(self.device)

    def allocated(self) -> int:
        """Bytes of this process's tensors."""
        return torch.cuda.memory_allocated(self.device)

    def held_by_others(self) -> int:
        """Bytes in use that are not torch's in this process: CUDA's own, and other processes'."""
        free, total = self.memory_info()
        return total - free - torch.cuda.memory_reserved(self.device)

    def peak_allocated(self) -> int:
        """The most that `allocated` has been since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_unused(self) -> None:
        """Give memory that no tensor uses back to the device."""
        gc.collect()
        with _RECORDING:
            self.synchronize()
            torch.cuda.empty_cache()
