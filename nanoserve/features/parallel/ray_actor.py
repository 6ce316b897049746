"""A rank in a process that Ray has started. Importing this module imports neither torch nor Ray."""

import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.engine.batch import Batch

_GRACE = 2.0  # seconds for the end of a step, when rank 0 is gone


class RankActor:
    """`run` serves until rank 0 has no more steps; if it fails or rank 0 is gone, the process ends.
    Otherwise rank 0 has Ray end it."""

    def run(self, job: dict[str, Any]) -> None:
        """`job` is as in `nanoserve.features.parallel.tp_worker`, with where rank 0 listens."""
        import ray

        os.environ["OMP_NUM_THREADS"] = str(job["num_threads"])  # Ray has set another one
        from nanoserve.features.parallel.tp_worker import Reporter, run

        connection = socket.create_connection((job["host"], job["steps_port"]))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        report = Reporter(connection.sendall)
        report(secret=job["secret"], rank=job["rank"], pid=os.getpid())
        steps = SentSteps(connection)
        if run(job | {"own_host": ray.util.get_node_ip_address()}, steps, report):
            os._exit(1)


class Seat:
    """Keeps a GPU of rank 0's machine for rank 0, which is no actor."""

    def gpus(self) -> list[int]:
        import ray

        return [int(gpu) for gpu in ray.get_gpu_ids()]


class SentSteps:
    """Steps as messages of `nanoserve.features.parallel.ray_workers`.

    A thread reads them, also while this rank waits for others in a step: so it hears at once that
    rank 0 is gone, whose connection ends with it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._told: deque[tuple[int, bytes] | None] = deque()
        self._is_there = threading.Semaphore(0)
        self._content, self._is_over = b"", False
        threading.Thread(target=self._read_all, daemon=True).start()

    def next(self) -> int | None:
        self._is_there.acquire()
        told = self._told.popleft()
        if told is None:
            self._is_over = True
            return None
        step, self._content = told
        return step

    def fetch(self, step: int, own: "Batch") -> "Batch":
        import numpy as np

        own.memory[: len(self._content)] = np.frombuffer(self._content, dtype=np.uint8)
        if own.header.step != step:
            raise RuntimeError(f"step {step} came with the batch of {own.header.step}")
        return own

    def _read_all(self) -> None:
        told: tuple[int, bytes] | None
        while True:
            try:
                step, size = (int.from_bytes(self._read(4), "little") for _ in range(2))
                told = step, self._read(size)
            except OSError:
                told = None
            self._told.append(told)
            self._is_there.release()
            if told is None:
                time.sleep(_GRACE)
                if not self._is_over:
                    os._exit(1)  # it waits for ranks that will not come
                return

    def _read(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part = self._connection.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionError("rank 0 is gone")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
