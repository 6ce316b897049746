"""Run ranks as Ray actors, on one or several machines. Rank 0 stays in the caller's process.

Ray places each rank, starts its process, and reports when it terminates. Steps do not go through
Ray. Each worker opens a connection to rank 0, on which it receives each step as one message with
the step's number and packed batch. The worker sends reports back on it, as the same lines that a
worker on this machine writes into a pipe. The ranks join through a store at rank 0, as without Ray.
All machines must have the model at the same path, and must trust each other, because messages are
not encrypted.

An existing Ray cluster is used (`RAY_ADDRESS`, or one that this machine is part of); otherwise a
local one is started. The last engine that uses it disconnects from it, or shuts it down.
"""

import contextlib
import json
import secrets
import socket
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nanoserve.engine.batch import Batch
from nanoserve.features.parallel.heartbeat import Pulse
from nanoserve.features.parallel.worker_processes import Workers
from nanoserve.utils.checks import require

# Imported by name, as a local worker is started by name, so that this module does not import it.
_ACTORS = "nanoserve.features.parallel.ray_actor"
_PLACE_TIMEOUT = 60.0  # seconds to wait for a placement of all ranks
_CONNECT_TIMEOUT = 120.0  # seconds: importing torch on a busy machine
_NO_PROCESS = -1

_USERS: "list[RayWorkers]" = []  # engines that use Ray


class ActorProcess:
    """A rank's actor, with the methods of `subprocess.Popen` that `Workers` uses."""

    def __init__(self, actor: Any, job: dict[str, Any]) -> None:
        self._actor, self.pid = actor, _NO_PROCESS
        self._running = actor.run.remote(job)
        self.error: Exception | None = None  # the error that ended it

    def kill(self) -> None:
        import ray

        if ray.is_initialized():  # otherwise ray.kill would start a cluster
            with contextlib.suppress(Exception):  # the actor has already terminated
                ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the actor has terminated; return 0, or 1 if it failed or was killed."""
        import ray

        if ray.is_initialized():
            ended, _ = ray.wait([self._running], timeout=timeout)
            try:
                ray.get(ended)
            except Exception as error:
                self.error = error
                return 1
        return 0


class RayWorkers(Workers):
    """Ranks 1, 2, ... in a placement group. `Workers` documents the messages."""

    def __init__(self, *args: Any) -> None:
        self._connections: list[socket.socket] = []
        self._group: Any = None  # Ray's placement group
        _USERS.append(self)
        super().__init__(*args)

    @staticmethod
    def own_address() -> str:
        """Return this machine's address, as other machines reach it; start or join Ray first."""
        require(
            find_spec("ray") is not None,
            "distributed_executor_backend='ray' needs Ray: pip install 'nanoserve[ray]'",
        )
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False)
            _JOINED.append(True)
        return ray.util.get_node_ip_address()

    @staticmethod
    def leave() -> None:
        """Shut Ray down if `own_address` initialized it and no engine uses it any more."""
        if _JOINED and not _USERS:
            import ray

            _JOINED.clear()
            ray.shutdown()

    def announce(self, batch: Batch) -> None:
        """Send the step of `batch` to every worker."""
        self.check()
        used = batch.num_bytes_used(batch.header)
        self._send(message(batch.step, batch.memory[:used].tobytes()))

    def send_order(self, order: int, content: bytes = b"") -> None:
        self.check()
        self.refusals.clear()
        self._send(message(order, content))

    def _send_number(self, number: bytes) -> None:
        self._send(message(int.from_bytes(number, "little"), b""))

    def _send(self, whole: bytes) -> None:
        for connection in self._connections:
            try:
                connection.sendall(whole)
            except OSError:
                self.explain()
                self.check()

    def _start_all(
        self, size: int, job: dict[str, Any], files: dict[str, int], num_threads: int
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        places = self._find_places(size, job)
        secret = secrets.token_hex()
        with socket.create_server((job["host"], 0)) as listener:
            shared = job | {"steps_port": listener.getsockname()[1], "secret": secret}
            shared = json.loads(json.dumps(shared, default=str))
            for rank in range(1, size):
                actor = ray.remote(import_module(_ACTORS).RankActor).options(
                    num_cpus=places[rank]["CPU"],
                    num_gpus=places[rank].get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
                )
                own = {"rank": rank, "num_threads": num_threads}
                self._processes.append(ActorProcess(actor.remote(), shared | own))
            found = self._accept_all(listener, size, secret)
        for rank, connection in sorted(found.items()):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
            self._statuses[connection.fileno()] = rank

    def _find_places(self, size: int, job: dict[str, Any]) -> list[dict[str, float]]:
        """Reserve resources for each rank, and return them. Rank 0 is placed on this machine."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        is_cuda = job["options"]["device"] == "cuda"
        kind = "GPU" if is_cuda else "CPU"
        need = {"CPU": 1.0} | ({"GPU": 1.0} if is_cuda else {})
        here = {f"node:{job['host']}": 0.001} | ({"GPU": 1.0} if is_cuda else {})
        places, num_wanted = [here] + [need] * (size - 1), size - (not is_cuda)
        has = ray.cluster_resources().get(kind, 0)
        require(
            has >= num_wanted,
            f"{size} ranks need {num_wanted} {kind}s, but Ray's cluster has {has:g}; add machines, "
            f"or lower tensor_parallel_size or pipeline_parallel_size",
        )
        self._group = placement_group(places)
        if not self._group.wait(_PLACE_TIMEOUT):
            raise RuntimeError(
                f"Ray could not place {size} ranks within {_PLACE_TIMEOUT:.0f} seconds: they need "
                f"{num_wanted} {kind}s, and {ray.available_resources().get(kind, 0):g} are free"
            )
        if is_cuda:  # Ray must not give this process's GPU to another actor
            import torch

            seat = PlacementGroupSchedulingStrategy(self._group, 0)
            self._seat = ray.remote(import_module(_ACTORS).Seat).options(
                num_cpus=0, num_gpus=1, scheduling_strategy=seat
            ).remote()  # fmt: skip
            gpus = ray.get(self._seat.gpus.remote())
            current = torch.cuda.current_device()
            require(
                gpus == [current],
                f"Ray has reserved GPU {gpus} for rank 0, whose current GPU is {current}; select "
                "the reserved GPU with torch.cuda.set_device before the engine is created",
            )
        return places

    def _accept_all(
        self, listener: socket.socket, size: int, secret: str
    ) -> dict[int, socket.socket]:
        """Accept a connection from each worker. Connections without the secret are closed."""
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _CONNECT_TIMEOUT
        while len(found) < size - 1:
            listener.settimeout(1.0)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, size)) - found.keys())
                ended = [rank for rank in missing if self._processes[rank - 1].wait(0)]
                if ended or time.monotonic() > deadline:
                    status = (
                        "ended before they connected" if ended else "have not connected in time"
                    )
                    errors = [self._processes[rank - 1].error for rank in ended]
                    raise RuntimeError(
                        f"ranks {ended or missing}, started by Ray, {status}"
                    ) from next(iter(errors), None)
                continue
            connection.settimeout(5.0)
            with contextlib.suppress(OSError, ValueError, KeyError):
                greeting = json.loads(_read_line(connection))
                if secrets.compare_digest(greeting["secret"], secret):
                    found[greeting["rank"]] = connection
                    self._processes[greeting["rank"] - 1].pid = greeting["pid"]
                    continue
            connection.close()
        return found

    def _pulse(self, rank: int) -> Pulse:
        """Return a pulse that only counts heartbeats, as the process may be on another machine."""
        return Pulse(_NO_PROCESS)

    def _read(self, fd: int) -> bytes:
        try:
            return super()._read(fd)
        except OSError:  # the machine may have terminated
            return b""

    def _close_status(self, fd: int) -> None:
        """Do nothing, as this connection also carries steps and is closed with them."""

    def _note_end(self, rank: int) -> None:
        if not self._is_closing:  # Ray may take long to report the reason
            self.fail(f"rank {rank}, started by Ray: its process or its connection has ended")

    def _close_steps(self) -> None:
        """Close the sending direction, after which workers exit."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _end_lives(self) -> None:
        """Do nothing, as Ray ends the process of a worker that does not exit by itself."""

    def close(self) -> None:
        super().close()
        for connection in self._connections:
            connection.close()
        if self in _USERS:
            _USERS.remove(self)
            self._give_places_back()

    def forget(self) -> None:
        self._is_closing = True
        self.failure = "this engine belongs to another process; use spawn instead of fork"
        for connection in self._connections:
            connection.close()

    def _give_places_back(self) -> None:
        import ray

        if ray.is_initialized() and self._group is not None:
            ray.util.remove_placement_group(self._group)


_JOINED: list[bool] = []  # not empty if Ray was initialized here


def message(step: int, content: bytes) -> bytes:
    """Return the message of a step.

    It has the step's number, the number of bytes that follow, and these bytes, which are the packed
    batch or empty.
    """
    return step.to_bytes(4, "little") + len(content).to_bytes(4, "little") + content


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        some = connection.recv(1)
        if not some or len(line) > 4096:
            raise ValueError("the connection is not from a worker")
        line += some
    return line
