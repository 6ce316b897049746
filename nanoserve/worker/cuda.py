"""The calls that only a GPU can answer, in one place; what uses them can be tested without one."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# For the whole process: to wait for a device spoils what any thread is recording on it.
_RECORDING = threading.RLock()

# Streams to record on that no engine has now. Engines that live at the same time have one each:
# cuBLAS keeps a workspace for every stream, and a graph knows its address. It keeps it for good
# (32 MiB on Hopper), so the next engine takes one that is free.
_FREE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = {}


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
        """As `pinned`, for memory that comes from elsewhere, until `close`."""
        if not torch.from_numpy(memory).is_pinned():
            lock = torch.cuda.cudart().cudaHostRegister
            torch.cuda.check_error(int(lock(memory.ctypes.data, memory.nbytes, 0)))
            self._locked.append(memory)

    def close(self) -> None:
        """Undo every `page_lock`, before the memory goes, and leave the stream to the next."""
        while self._locked:
            unlock = torch.cuda.cudart().cudaHostUnregister
            torch.cuda.check_error(int(unlock(self._locked.pop().ctypes.data)))
        if self._capture_stream is not None:
            _FREE_STREAMS.setdefault(self.device, []).append(self._capture_stream)
            self._capture_stream = None

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
        if self._capture_stream is None:
            free = _FREE_STREAMS.get(self.device)
            self._capture_stream = free.pop() if free else torch.cuda.Stream(self.device)
        graph, stream = torch.cuda.CUDAGraph(), self._capture_stream
        # Kernels are compiled and libraries set up now: neither can be recorded. On the same
        # stream: else its workspace would lie in the memory of these graphs, and go with them.
        self.synchronize()
        with torch.cuda.stream(stream):
            forward()
        with _RECORDING:
            self.synchronize()
            # "thread_local": another engine's thread may go on allocating meanwhile.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                is_enabled = gc.isenabled()
                gc.disable()  # an engine that is collected now would wait for the device
                try:
                    output = forward()
                finally:
                    if is_enabled:
                        gc.enable()
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
