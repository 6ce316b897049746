"""The process group of one engine's ranks, with the collectives that its layers need.

torch's default process group is not used, because there is only one per process, and a process may
have several engines. Each engine has a separate group and store, at a free port.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import tempfile
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"  # used if all ranks are on one machine
_LOOK_UP = timedelta(seconds=0.1)
_MEET_TIMEOUT = timedelta(seconds=120)
_FAREWELL = timedelta(seconds=1)  # for an abandoned collective, after all other ranks have died


class Group:
    """The collectives of one engine's ranks, over a process group that can be released.

    Layers hold this object. The process group must not outlive the engine, because some of torch's
    groups abort the process if they still exist when Python exits.
    """

    def __init__(
        self,
        process_group: Any,
        store: dist.Store,
        device: torch.device,
        sums_in_order: bool = False,
    ) -> None:
        self._process_group: Any = process_group  # like the store, None after `close`
        self._store: Any = store
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._sums_in_order = sums_in_order and process_group.size() > 2
        self._is_aborted = False
        self._left: Any = None  # a collective that was abandoned
        self.device_bytes = 0  # memory of NCCL on the GPU, outside torch's own
        self._sum, self._minimum, self._maximum = (dist.AllreduceOptions() for _ in range(3))
        # torch's stubs know neither these assignments nor `_Options`.
        self._minimum.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self._maximum.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        for options in (self._sum, self._minimum, self._maximum):
            # By default NCCL uses a stream of its own, which costs two events for each all-reduce.
            if self._is_cuda and hasattr(options, "asyncOp"):
                options.asyncOp = False

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace each element by its sum over all ranks."""
        if not self._sums_in_order:
            self.wait(self._process_group.allreduce([x], self._sum))
            return
        # Gloo sums pieces of the tensor in different orders of the ranks: the bits of a token's
        # sums would depend on how many tokens there are.
        parts = [torch.empty_like(x) for _ in range(self._process_group.size())]
        self.wait(self._process_group.allgather([parts], [x.contiguous()]))
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def largest(self, x: torch.Tensor) -> None:
        """Replace each element by its maximum over all ranks."""
        self.wait(self._process_group.allreduce([x], self._maximum))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        is_first = self._process_group.rank() == 0
        parts = [torch.empty_like(x) for _ in range(self._process_group.size())]
        self.wait(self._process_group.gather([parts] if is_first else [], [x.contiguous()]))
        return parts if is_first else None

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy `x` of rank 0 to all ranks."""
        self.wait(self.start_broadcast(x))

    def start_broadcast(self, x: torch.Tensor) -> Any:
        """Start a broadcast from rank 0, and return its work object.

        `x` must be kept until `wait` has been called with that object.
        """
        return self._process_group.broadcast(x, 0)

    def smallest(self, value: int) -> int:
        x = torch.tensor([value], dtype=torch.int64, device=self._device)
        self.wait(self._process_group.allreduce([x], self._minimum))
        return int(x)

    def abort(self) -> None:
        """Make collectives fail that wait for a terminated rank."""
        self._is_aborted = True
        process_group = self._process_group
        # The group may have been released meanwhile. Gloo cannot abort: `wait` polls `_is_aborted`.
        if process_group is None or not self._is_cuda:
            return
        try:
            process_group.abort()
        except Exception:  # it is broken already; the log helps if a later call hangs
            logger.warning("the process group could not be aborted", exc_info=True)

    def close(self) -> None:
        if self._is_cuda:  # without an abort, NCCL's destructor prints a warning
            self.abort()
        elif self._left is not None:
            with contextlib.suppress(RuntimeError):
                self._left.wait(_FAREWELL)
            if not self._left.is_completed():  # its destructor would wait for this collective
                self.leak()
        self._process_group = self._store = self._left = None

    def leak(self) -> None:
        """Keep the group and its store forever, even when Python exits."""
        for kept in (self._process_group, self._store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def wait(self, work: Any) -> None:
        """Wait for a collective.

        On a CPU this polls. Inside torch's wait, Ctrl-C is not handled, and gloo does not always
        notice a terminated rank; it was seen to wait for its whole timeout.
        """
        if self._is_cuda:
            if work is not None:  # None: already ordered on the current stream
                work.wait()  # makes the stream wait; does not block the host
            return
        while not work.is_completed():
            if self._is_aborted:
                self._left = work
                raise RuntimeError("another rank has terminated; this collective was abandoned")
            with contextlib.suppress(RuntimeError):  # this wait has timed out, or the work failed
                work.wait(_LOOK_UP)
        work.wait()  # returns at once; raises if the collective failed


def join_group(
    rank: int,
    size: int,
    store: dist.Store,
    device: torch.device,
    timeout: float,
    host: str = LOOPBACK,
    sums_in_order: bool = False,
) -> Group:
    """Join the other ranks. Returns when all have joined, and raises if a rank does not in time.

    timeout: in seconds; it also limits how long a collective waits for a rank.
    host: an address of this machine that the other ranks can reach.
    sums_in_order: on a CPU, add up the ranks' tensors in the order of the ranks.
    """
    if device.type == "cuda":
        return _join_nccl(rank, size, store, device, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # An address, because the machine's own name may not resolve.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    process_group = dist.ProcessGroupGloo(store, rank, size, options)
    return Group(process_group, store, device, sums_in_order)


def _join_nccl(
    rank: int, size: int, store: dist.Store, device: torch.device, timeout: float
) -> Group:
    """Join an NCCL group, and run a first collective.

    NCCL connects only in the first collective, where it waits forever for a rank that has died. So
    it connects here, where the caller monitors the other ranks, and not after minutes of loading.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    group = Group(dist.ProcessGroupNCCL(store, rank, size, options), store, device)
    with torch.cuda.device(device):  # current device of this thread
        before, _ = torch.cuda.mem_get_info(device)
        group.smallest(0)
        after, _ = torch.cuda.mem_get_info(device)
    group.device_bytes = max(0, before - after)
    return group


def serve_store(size: int, host: str = LOOPBACK) -> dist.TCPStore:
    """Serve a store for `size` ranks, on a free port of an address of this machine."""
    listener = socket.create_server((host, 0))
    return _store(
        host, listener.getsockname()[1], size, is_master=True, master_listen_fd=listener.detach()
    )


def find_store(port: int, size: int, host: str = LOOPBACK) -> dist.TCPStore:
    """Connect to the store that rank 0 serves at `port`."""
    return _store(host, port, size, is_master=False)


def _store(host: str, port: int, size: int, **kind: Any) -> dist.TCPStore:
    return dist.TCPStore(host, port, size, wait_for_workers=False, timeout=_MEET_TIMEOUT, **kind)


def map_memory(fd: int, num_bytes: int) -> np.ndarray:
    """Return the file's bytes as uint8 [num_bytes], shared with every process that maps them."""
    return np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)


def shared_memory(fd: int, num_bytes: int) -> np.ndarray:
    """Give the file `num_bytes`, and return them as `map_memory` does."""
    os.ftruncate(fd, num_bytes)
    return map_memory(fd, num_bytes)


def anonymous_file() -> int:
    """Return a file descriptor of anonymous memory, freed when the last process closes it."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("nanoserve")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
