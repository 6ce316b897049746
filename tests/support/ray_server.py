"""`nanoserve serve --data-parallel-size` as a process, with a Ray of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

OPTIONS = ["--num-kv-blocks", "500", "--max-num-seqs", "64", "--dtype", "float32"]


@dataclass
class RayServer:
    process: subprocess.Popen[str]
    url: str
    start_seconds: float

    def get(self, path: str) -> str:
        with self.open_get(path) as answer:
            return answer.read().decode()

    def open_get(self, path: str) -> Any:
        return urllib.request.urlopen(self.url + path, timeout=20)

    def post(self, path: str, **body: Any) -> Any:
        with urllib.request.urlopen(self._request(path, body), timeout=60) as answer:
            return json.load(answer)

    def complete(self, prompt: str, **body: Any) -> Any:
        return self.post("/v1/completions", prompt=prompt, **body)["choices"][0]

    def open(self, path: str, **body: Any) -> Any:
        return urllib.request.urlopen(self._request(path, body), timeout=60)

    def metric(self, name: str) -> dict[str, float]:
        """By replica, the sum of a metric's samples."""
        found: dict[str, float] = defaultdict(float)
        pattern = rf'^vllm:{name}\{{replica="(\d+)",[^}}]*\}} (\S+)$'
        for replica, value in re.findall(pattern, self.get("/metrics"), re.MULTILINE):
            found[replica] += float(value)
        return dict(found)

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError):
            self.get("/health")
            return True
        return False

    def pids(self, title: str) -> list[int]:
        """Of Ray's processes that have this title: "ServeReplica", "ServeController"."""
        return [pid for pid in descendants(self.process.pid) if title in command_of(pid)]

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        headers = {"content-type": "application/json"}
        return urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)


@contextlib.contextmanager
def ray_server(*arguments: str, **environment: str) -> Iterator[RayServer]:
    """The server, when it answers; afterwards none of its processes is left, or it is told."""
    began = time.monotonic()
    command = [sys.executable, "-m", "nanoserve", "serve", "--port", "0", *OPTIONS, *arguments]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        environment = {**os.environ, "RAY_TMPDIR": folder, **environment}
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stderr=file, stdout=file, env=environment, start_new_session=True
            )
        try:
            wait_for(lambda: " at http" in log.read_text() or process.poll() is not None, 120)
            found = re.search(r" at (http://\S+)", log.read_text())
            assert found, log.read_text()
            server = RayServer(process, found[1], 0.0)
            wait_for(server.is_healthy, 60)
            server.start_seconds = time.monotonic() - began
            yield server
        finally:
            children = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            left = [pid for pid in children if command_of(pid)]
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            print(log.read_text())


@dataclass
class RayCluster:
    process: subprocess.Popen[str]
    address: str

    def pids(self, title: str) -> list[int]:
        found = descendants(self.process.pid)
        return sorted(pid for pid in found if title in command_of(pid))


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Ray with a life of its own."""
    code = (
        "import ray, sys; ray.init(address='local', num_cpus=2, include_dashboard=False);"
        "print('address', ray.get_runtime_context().gcs_address, flush=True); sys.stdin.read()"
    )
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        environment["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] = "1"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
            try:
                lines = iter(process.stdout.readline, "")
                address = next(line.split()[1] for line in lines if line.startswith("address"))
                yield RayCluster(process, address)
            finally:
                process.stdin.close()
                process.wait(60)


def descendants(pid: int) -> list[int]:
    """All processes that this one, or one of those, has started."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(") ")[2].split()
            if fields[0] != "Z":
                children[int(fields[1])].append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return found[1:]


def command_of(pid: int) -> str:
    """ "" of one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def wait_for(is_so: Callable[[], Any], seconds: float) -> float:
    """The seconds that it has taken."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < seconds, f"after {seconds} s it is not so"
        time.sleep(0.05)
    return time.monotonic() - began


@dataclass
class Stream:
    """What a client has seen of one answer."""

    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False  # "[DONE]"
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)


def read_stream(server: RayServer, body: dict[str, Any]) -> Stream:
    """A completion, read to its end."""
    seen, began = Stream(), time.monotonic()
    with server.open("/v1/completions", **body, stream=True) as answer:
        for line in answer:
            if line == b"data: [DONE]\n":
                seen.is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                seen.times.append(time.monotonic())
                seen.error = event.get("error") or seen.error
                for choice in event.get("choices", ()):
                    seen.text += choice["text"]
                    seen.finish_reason = choice["finish_reason"] or seen.finish_reason
    seen.seconds = time.monotonic() - began
    return seen


def read_streams(server: RayServer, bodies: list[dict[str, Any]]) -> list[Stream]:
    """All at the same time."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(partial(read_stream, server), bodies))
