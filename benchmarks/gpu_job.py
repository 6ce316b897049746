"""Inputs of a stage of gpu_day.py, and helpers that run processes and record results."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_LAST_WORDS = 20.0  # seconds for a program to end after an interrupt: pytest writes its report


class Job(NamedTuple):
    device: str  # "cuda", or "cpu": everything tiny, to check that it runs
    deadline: float  # of time.monotonic
    scratch: Path  # a temporary folder
    fa3: Path | None  # the folder with FlashAttention 3
    peers: Path | None = None  # the folder with vLLM and nano-vllm, from pack_peers.py

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()


# A stage is a generator of these: a name, and a function that measures and returns JSON values.
Measurements = Iterator[tuple[str, Callable[[], Any]]]


class Program:
    """Another program in this stage's process group, so that it ends with the stage at the latest.

    Its output goes to a file and, when it has ended, to the stage's own output.
    """

    def __init__(self, command: list[str], job: Job, name: str, **variables: str) -> None:
        self._job, self._file = job, job.scratch / f"{name}.txt"
        self._output = self._file.open("w")
        self._process = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | variables,
        )

    def wait(self, share: float = 1.0) -> tuple[int, str]:
        """Return its exit status and output.

        It is interrupted when `share` of the time is nearly up.
        """
        try:
            rc = self._process.wait(max(0.0, share * self._job.left - _LAST_WORDS - 2))
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(max(1.0, min(_LAST_WORDS, self._job.left - 1)))
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._process.wait()
            rc = 124  # as of `timeout`
        self._output.close()
        said = self._file.read_text(errors="replace")
        print(said, flush=True)
        return rc, said


def write_json(file: Path, value: Any) -> None:
    """Write a file atomically: if the process is killed meanwhile, the old content stays."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1))
    unfinished.replace(file)


class Lines:
    """Results, printed as JSON objects, one a line, and kept in a file."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._lines = file, list[dict[str, Any]]()
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return round(time.monotonic() - self._start, 1)

    def say(self, **found: Any) -> None:
        self._lines.append(found)
        print(json.dumps(found), flush=True)
        if self._file:
            write_json(self._file, self._lines)


class Processes:
    """Call `run(argument)` for some arguments in parallel, to fill Triton's cache on the disk."""

    def __init__(
        self, run: Callable[[Any], None], arguments: Iterable[Any], method: str = "spawn"
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self._processes = [context.Process(target=run, args=(each,)) for each in arguments]
        for process in self._processes:
            process.start()

    def wait(self, limit: float | None = None) -> list[int | None]:
        """Return the exit statuses; None for a process that was still running after the limit."""
        deadline = None if limit is None else time.monotonic() + limit
        for process in self._processes:
            process.join(deadline and max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()
        return codes


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
