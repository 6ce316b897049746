"""A rank in a process that Ray starts. Importing this module imports neither torch nor Ray."""

import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.engine.batch import Batch

_GRACE = 2.0  # seconds to end a step after rank 0 has terminated


class RankActor:
    """The Ray actor of one rank.

    `run` serves until rank 0 has no more steps; then rank 0 lets Ray end the process. If `run`
    fails, or rank 0 terminates, the process exits.
    """

    def run(self, job: dict[str, Any]) -> None:
        """Run a rank. `job` is as in `features/parallel/tp_worker.py`, with rank 0's address."""
        import ray

        os.environ["OMP_NUM_THREADS"] = str(job["num_threads"])  # Ray has set another value
        from nanoserve.features.parallel.tp_worker import Reporter, run

        connection = socket.create_connection((job["host"], job["steps_port"]))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        report = Reporter(connection.sendall)
        report(secret=job["secret"], rank=job["rank"], pid=os.getpid())
        steps = SentSteps(connection)
        if run(job | {"own_host": ray.util.get_node_ip_address()}, steps, report):
            os._exit(1)


class Seat:
    """A placeholder actor that reserves a GPU for rank 0, which is not an actor."""

    def gpus(self) -> list[int]:
        import ray

        return [int(gpu) for gpu in ray.get_gpu_ids()]


class SentSteps:
    """The steps that rank 0 sends, in the format of `nanoserve.features.parallel.ray_workers`.

    A thread reads them even while this rank waits for other ranks in a step, so it notices at once
    when rank 0 terminates, which closes the connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received: deque[tuple[int, bytes] | None] = deque()
        self._is_there = threading.Semaphore(0)
        self._content, self._is_over = b"", False
        threading.Thread(target=self._read_all, daemon=True).start()

    def next(self) -> int | None:
        self._is_there.acquire()
        received = self._received.popleft()
        if received is None:
            self._is_over = True
            return None
        step, self._content = received
        return step

    def content(self) -> bytes:
        return self._content

    def fetch(self, step: int, own: "Batch") -> "Batch":
        import numpy as np

        own.memory[: len(self._content)] = np.frombuffer(self._content, dtype=np.uint8)
        if own.header.step != step:
            raise RuntimeError(f"step {step} came with the batch of {own.header.step}")
        return own

    def _read_all(self) -> None:
        received: tuple[int, bytes] | None
        while True:
            try:
                step, size = (int.from_bytes(self._read(4), "little") for _ in range(2))
                received = step, self._read(size)
            except OSError:
                received = None
            self._received.append(received)
            self._is_there.release()
            if received is None:
                time.sleep(_GRACE)
                if not self._is_over:
                    os._exit(1)  # the step waits for ranks that will not come
                return

    def _read(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part = self._connection.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionError("rank 0 has closed the connection")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
