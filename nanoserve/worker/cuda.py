"""CUDA calls, collected in one class, so that code that uses it can be tested without a GPU."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# One lock for the process: synchronizing a device invalidates a capture by any thread on it.
_RECORDING = threading.RLock()

# Capture streams that no engine uses now. Engines that exist at the same time have one each: cuBLAS
# keeps a workspace for every stream, and graphs contain its address. The workspace is never freed
# (32 MiB on Hopper), so the next engine reuses a free stream.
_FREE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = {}


class Cuda:
    """The interface of one engine to one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._locked: list[np.ndarray] = []
        self._capture_stream: torch.cuda.Stream | None = None

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in page-locked host memory: copies from and to it are asynchronous."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def page_lock(self, memory: np.ndarray) -> None:
        """Page-lock memory that was allocated elsewhere, until `close`."""
        if not torch.from_numpy(memory).is_pinned():
            lock = torch.cuda.cudart().cudaHostRegister
            torch.cuda.check_error(int(lock(memory.ctypes.data, memory.nbytes, 0)))
            self._locked.append(memory)

    def close(self) -> None:
        """Undo every `page_lock` before the memory is released, and free the capture stream."""
        while self._locked:
            unlock = torch.cuda.cudart().cudaHostUnregister
            torch.cuda.check_error(int(unlock(self._locked.pop().ctypes.data)))
        if self._capture_stream is not None:
            _FREE_STREAMS.setdefault(self.device, []).append(self._capture_stream)
            self._capture_stream = None

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def guard(self) -> Any:
        """Return a context in which kernels run on this device, whatever device is current."""
        return torch.cuda.device(self.device)

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture what `forward` launches; return a function that replays it, and its output.

        The output is the same tensor every time. Graphs of one `pool` share their memory.
        """
        if self._capture_stream is None:
            free = _FREE_STREAMS.get(self.device)
            self._capture_stream = free.pop() if free else torch.cuda.Stream(self.device)
        graph, stream = torch.cuda.CUDAGraph(), self._capture_stream
        # A run before the capture compiles kernels and initializes libraries, which cannot be
        # captured. It is on the same stream: otherwise a library's workspace would be allocated in
        # the memory of these graphs, and released with them.
        self.synchronize()
        with torch.cuda.stream(stream):
            forward()
        with _RECORDING:
            self.synchronize()
            # "thread_local": the threads of other engines may allocate memory meanwhile.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                is_enabled = gc.isenabled()
                gc.disable()  # the destructor of another engine would synchronize the device
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
        """Return the free and the total bytes of the device; all processes count."""
        return torch.cuda.mem_get_info(self.device)

    def allocated(self) -> int:
        """Return the bytes of this process's tensors."""
        return torch.cuda.memory_allocated(self.device)

    def held_by_others(self) -> int:
        """Return the bytes in use outside this process's torch: by CUDA and by other processes."""
        free, total = self.memory_info()
        return total - free - torch.cuda.memory_reserved(self.device)

    def peak_allocated(self) -> int:
        """Return the highest value of `allocated` since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_unused(self) -> None:
        """Return memory that no tensor uses to the device."""
        gc.collect()
        with _RECORDING:
            self.synchronize()
            torch.cuda.empty_cache()
