"""Ranks as Ray actors, on one machine or on several; rank 0 stays in the caller's process.

Ray does what it does well: it finds a place for each rank, starts a process there, and tells when
one is gone. Steps do not go through it. Each worker opens a connection to rank 0, on which a step
comes as one message, its number and its packed batch; what the worker has to say goes back on it,
in the lines that a worker of this machine writes into a pipe. The ranks find each other through a
store at rank 0, as ever. All machines must see the model at the same path, and trust each other:
what travels is not encrypted.

A cluster of Ray is used if there is one (`RAY_ADDRESS`, or one that this machine is part of);
otherwise a local one is started. The last engine that uses it leaves it, or ends it.
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

# By name, as a worker of this machine is started by name: what it builds may be what is here.
_ACTORS = "nanoserve.features.parallel.ray_actor"
_PLACE_TIMEOUT = 60.0  # seconds until Ray has a place for all ranks
_CONNECT_TIMEOUT = 120.0  # seconds: importing torch on a busy machine
_NO_PROCESS = -1

_USERS: "list[RayWorkers]" = []  # of a Ray that was joined here


class ActorProcess:
    """A rank's actor, with what is asked of a `subprocess.Popen`."""

    def __init__(self, actor: Any, job: dict[str, Any]) -> None:
        self._actor, self.pid = actor, _NO_PROCESS
        self._running = actor.run.remote(job)
        self.error: Exception | None = None  # with which it has ended

    def kill(self) -> None:
        import ray

        if ray.is_initialized():  # else asking would start another one
            with contextlib.suppress(Exception):  # it has ended
                ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. 0, or 1 if that was not by itself."""
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
    """Ranks 1, 2, ... in a placement group; see `Workers` for what they are told and tell."""

    def __init__(self, *args: Any) -> None:
        self._connections: list[socket.socket] = []
        self._group: Any = None  # Ray's, of places
        _USERS.append(self)
        super().__init__(*args)

    @staticmethod
    def own_address() -> str:
        """This machine's, as the others reach it. Ray is running from here on."""
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
        """Ray, if it was joined by `own_address` and no engine uses it any more."""
        if _JOINED and not _USERS:
            import ray

            _JOINED.clear()
            ray.shutdown()

    def announce(self, batch: Batch) -> None:
        """Send every worker the step of `batch`."""
        self.check()
        used = batch.num_bytes_used(batch.header)
        self._send(message(batch.step, batch.memory[:used].tobytes()))

    def _tell(self, number: bytes) -> None:
        self._send(message(int.from_bytes(number, "little"), b""))

    def _send(self, whole: bytes) -> None:
        for connection in self._connections:
            try:
                connection.sendall(whole)
            except OSError:
                self.explain()
                self.check()

    def _start_all(self, size: int, job: dict[str, Any], memory: int, num_threads: int) -> None:
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
        """What each rank needs; Ray has set it aside. Rank 0's place is on this machine."""
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
            f"{size} ranks, of which one is here, take {num_wanted} {kind}s of Ray's cluster, "
            f"which has {has:g}",
        )
        self._group = placement_group(places)
        if not self._group.wait(_PLACE_TIMEOUT):
            raise RuntimeError(
                f"Ray had no place for {size} ranks within {_PLACE_TIMEOUT:.0f} seconds: "
                f"{num_wanted} {kind}s are wanted, {ray.available_resources().get(kind, 0):g} free"
            )
        if is_cuda:  # Ray must give this process's GPU to nobody else
            import torch

            seat = PlacementGroupSchedulingStrategy(self._group, 0)
            self._seat = ray.remote(import_module(_ACTORS).Seat).options(
                num_cpus=0, num_gpus=1, scheduling_strategy=seat
            ).remote()  # fmt: skip
            gpus = ray.get(self._seat.gpus.remote())
            current = torch.cuda.current_device()
            require(
                gpus == [current],
                f"Ray has set GPU {gpus} aside for rank 0, whose current one is {current}: choose "
                "that with torch.cuda.set_device before the engine is made",
            )
        return places

    def _accept_all(
        self, listener: socket.socket, size: int, secret: str
    ) -> dict[int, socket.socket]:
        """Each worker's connection. Who does not know the secret is not listened to."""
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
                    told = "ended in Ray before they began" if ended else "have not come from Ray"
                    errors = [self._processes[rank - 1].error for rank in ended]
                    raise RuntimeError(f"ranks {ended or missing} {told}") from next(
                        iter(errors), None
                    )
                continue
            connection.settimeout(5.0)
            with contextlib.suppress(OSError, ValueError, KeyError):
                told = json.loads(_read_line(connection))
                if secrets.compare_digest(told["secret"], secret):
                    found[told["rank"]] = connection
                    self._processes[told["rank"] - 1].pid = told["pid"]
                    continue
            connection.close()
        return found

    def _pulse(self, rank: int) -> Pulse:
        """It may be on another machine: its beats are all that is heard of it."""
        return Pulse(_NO_PROCESS)

    def _read(self, fd: int) -> bytes:
        try:
            return super()._read(fd)
        except OSError:  # of a machine that is gone
            return b""

    def _close_status(self, fd: int) -> None:
        """It is the connection on which steps are sent, too, and is closed with that."""

    def _note_end(self, rank: int) -> None:
        if not self._is_closing:  # Ray would take its time to say why
            self.fail(f"rank {rank}, in Ray: its process or its connection has ended")

    def _close_steps(self) -> None:
        """Workers read an end, and go."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _end_lives(self) -> None:
        """Of a worker that does not go by itself Ray ends the process."""

    def close(self) -> None:
        super().close()
        for connection in self._connections:
            connection.close()
        if self in _USERS:
            _USERS.remove(self)
            self._give_places_back()

    def forget(self) -> None:
        self._is_closing = True
        self.failure = "this engine belongs to another process: instead of fork, use spawn"
        for connection in self._connections:
            connection.close()

    def _give_places_back(self) -> None:
        import ray

        if ray.is_initialized() and self._group is not None:
            ray.util.remove_placement_group(self._group)


_JOINED: list[bool] = []  # whether Ray was, for these engines alone


def message(step: int, content: bytes) -> bytes:
    """A step's number, how many bytes follow, and these: nothing, or its packed batch."""
    return step.to_bytes(4, "little") + len(content).to_bytes(4, "little") + content


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        some = connection.recv(1)
        if not some or len(line) > 4096:
            raise ValueError("this is no worker")
        line += some
    return line
