"""Where the ranks of one engine meet, and the collectives that its layers need.

No default process group: that would be one for the whole process, and an engine is not alone in
its process. Each engine has a group of its own, on a store of its own, at whichever port is free.
"""

import contextlib
import ctypes
import logging
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"  # where all ranks are on one machine
_LOOK_UP = timedelta(seconds=0.1)
_MEET_TIMEOUT = timedelta(seconds=120)
_FAREWELL = timedelta(seconds=1)  # for a collective that was left, when all others are dead


class Group:
    """The collectives of one engine's ranks, over a process group that can be let go.

    Layers hold this object; the process group must not outlive the engine, because some of torch's
    groups end the process if they are still there when Python ends.
    """

    def __init__(self, process_group: Any, store: dist.Store, device: torch.device) -> None:
        self._process_group, self._store, self._device = process_group, store, device
        self._is_cuda = device.type == "cuda"
        self._is_aborted = False
        self._left: Any = None  # a collective that nobody waits for any more
        self.device_bytes = 0  # that NCCL has taken from the GPU, beside torch's own memory
        self._sum, self._minimum, self._maximum = (dist.AllreduceOptions() for _ in range(3))
        self._minimum.reduceOp, self._maximum.reduceOp = dist.ReduceOp.MIN, dist.ReduceOp.MAX
        for options in (self._sum, self._minimum, self._maximum):
            # By default NCCL has a stream of its own, which costs two events for each sum.
            if self._is_cuda and hasattr(options, "asyncOp"):
                options.asyncOp = False

    def all_reduce(self, x: torch.Tensor) -> None:
        self.wait(self._process_group.allreduce([x], self._sum))

    def largest(self, x: torch.Tensor) -> None:
        """Of each element, the largest of all ranks, in place."""
        self.wait(self._process_group.allreduce([x], self._maximum))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        is_first = self._process_group.rank() == 0
        parts = [torch.empty_like(x) for _ in range(self._process_group.size())]
        self.wait(self._process_group.gather([parts] if is_first else [], [x.contiguous()]))
        return parts if is_first else None

    def broadcast(self, x: torch.Tensor) -> None:
        """From rank 0."""
        self.wait(self.start_broadcast(x))

    def start_broadcast(self, x: torch.Tensor) -> Any:
        """The same; `x` must be kept until `wait` has been called with what is returned."""
        return self._process_group.broadcast(x, 0)

    def smallest(self, value: int) -> int:
        x = torch.tensor([value], dtype=torch.int64, device=self._device)
        self.wait(self._process_group.allreduce([x], self._minimum))
        return int(x)

    def abort(self) -> None:
        """Make collectives that wait for a dead rank fail."""
        self._is_aborted = True
        process_group = self._process_group
        # It may have been let go meanwhile. Gloo cannot abort: whoever waits looks up, and leaves.
        if process_group is None or not self._is_cuda:
            return
        try:
            process_group.abort()
        except Exception:  # it is broken already; but whoever hangs next should find out why
            logger.warning("the process group could not be aborted", exc_info=True)

    def close(self) -> None:
        if self._is_cuda:  # else its destructor says that nobody has destroyed it
            self.abort()
        elif self._left is not None:
            with contextlib.suppress(RuntimeError):
                self._left.wait(_FAREWELL)
            if not self._left.is_completed():  # the destructor would wait for it
                self.leak()
        self._process_group = self._store = self._left = None

    def leak(self) -> None:
        """Keep the group and its store for ever, even when Python ends."""
        for kept in (self._process_group, self._store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def wait(self, work: Any) -> None:
        """For a collective.

        On a CPU look up now and then: inside torch's own wait, a Ctrl-C would not be heard.
        Nor is a dead rank always noticed there: gloo was seen to wait out its whole timeout.
        """
        if self._is_cuda:
            if work is not None:  # None: it was launched on the current stream, in order
                work.wait()  # for the stream: this does not block
            return
        while not work.is_completed():
            if self._is_aborted:
                self._left = work
                raise RuntimeError("another rank is gone, and this collective was left")
            with contextlib.suppress(RuntimeError):  # this wait has ended, or the work has failed
                work.wait(_LOOK_UP)
        work.wait()  # at once: its error, if it has one


def join_group(
    rank: int,
    size: int,
    store: dist.Store,
    device: torch.device,
    timeout: float,
    host: str = LOOPBACK,
) -> Group:
    """Meet the other ranks. Returns when all have come; raises if one does not in time.

    `timeout`, in seconds, is also what a collective waits for a rank that does not take part.
    `host` is an address of this machine that the others reach.
    """
    if device.type == "cuda":
        return _join_nccl(rank, size, store, device, timeout)
    options = dist.ProcessGroupGloo._Options()
    # By address: the machine's own name may not resolve.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return Group(dist.ProcessGroupGloo(store, rank, size, options), store, device)


def _join_nccl(
    rank: int, size: int, store: dist.Store, device: torch.device, timeout: float
) -> Group:
    """NCCL meets only in the first collective, and waits there for ever for a rank that has died.

    So it is done here, where the caller still watches the others, and not after minutes of loading.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    group = Group(dist.ProcessGroupNCCL(store, rank, size, options), store, device)
    with torch.cuda.device(device):  # of this thread
        before, _ = torch.cuda.mem_get_info(device)
        group.smallest(0)
        after, _ = torch.cuda.mem_get_info(device)
    group.device_bytes = max(0, before - after)
    return group


def serve_store(size: int, host: str = LOOPBACK) -> dist.TCPStore:
    """Where `size` ranks find each other, on a free port of an address of this machine."""
    listener = socket.create_server((host, 0))
    return _store(
        host, listener.getsockname()[1], size, is_master=True, master_listen_fd=listener.detach()
    )


def find_store(port: int, size: int, host: str = LOOPBACK) -> dist.TCPStore:
    """The store that rank 0 serves at `port`."""
    return _store(host, port, size, is_master=False)


def _store(host: str, port: int, size: int, **kind: Any) -> dist.TCPStore:
    return dist.TCPStore(host, port, size, wait_for_workers=False, timeout=_MEET_TIMEOUT, **kind)
