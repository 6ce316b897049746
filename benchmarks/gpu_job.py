"""What a stage of gpu_day.py is given, and how it runs another program within its time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_LAST_WORDS = 20.0  # seconds for a program that is told to end: pytest writes its report


class Job(NamedTuple):
    device: str  # "cuda", or "cpu": everything tiny, to see that it runs
    deadline: float  # of time.monotonic
    scratch: Path  # a folder that is gone afterwards
    fa3: Path | None  # the folder with FlashAttention 3

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()


# A stage is a generator of these: a name, and what measures it and returns something for JSON.
Measurements = Iterator[tuple[str, Callable[[], Any]]]


class Program:
    """Another program, in this stage's process group, so that it ends with the stage at the latest.

    What it prints goes to a file and, when it has ended, to the stage's own output.
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
        """Its exit status and what it said.

        When `share` of the time is nearly up, it is interrupted.
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
    """At once: who is ended in the middle of it leaves what was there before."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1))
    unfinished.replace(file)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
