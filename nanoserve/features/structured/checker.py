"""Check grammars in child processes, which a bad grammar may crash without harm.

The grammar of a request is checked before the request is queued. The library that will compile the
grammar checks it in a child process. If the library crashes there, only that request gets an error.
A valid grammar is compiled again in the engine's process, for its tokenizer, by threads whose
stacks are four times as large.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nanoserve.features.structured import check_process
from nanoserve.features.structured.config import GRAMMAR_BACKENDS
from nanoserve.features.structured.grammar import Source

_MOST = 4  # processes per library
_MOST_LARGE = 2  # processes per library that check large grammars at the same time
_LARGE = 16_384  # characters from which a grammar is large: it may take seconds
_TIME_LIMIT = 20.0  # seconds of wall time; CPU time is limited by the backend's `check_seconds`
_START_LIMIT = 120.0  # seconds for a process to start: xgrammar imports torch
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from nanoserve.features.structured.check_process import main; "
    "main(int(sys.argv[1]), sys.argv[2])"
)


class Checker:
    """A pool of processes that check grammars for one library, started when they are needed.

    A process ends after a minute without work, or when this process ends.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._reset()

    def check(self, source: Source) -> str | None:
        """Return the error of a grammar, or None. Thread-safe.

        Raises `ValueError` if no process can be started.
        """
        is_large = len(source.text) > _LARGE
        if self._pid != os.getpid():  # after a fork: the processes and pipes are the parent's
            self._reset()
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(is_large))
            self._num_busy += 1
            self._num_large += is_large
            process = self._idle.pop() if self._idle else None
        try:
            is_used = process is not None
            process = process or _Process(self._library)
            try:
                fault = process.check(source)
            except _Died as died:
                if not (is_used and died.has_crashed):
                    raise
                process = _Process(self._library)  # the old one may have ended as it was idle
                fault = process.check(source)
        except _Died as died:
            process, fault = None, str(died)
        except BaseException:
            process = None
            raise
        finally:
            with self._changed:
                self._num_busy -= 1
                self._num_large -= is_large
                if process is not None:
                    self._idle.append(process)
                self._changed.notify_all()
        return fault

    def _has_room(self, is_large: bool) -> bool:
        return self._num_busy < _MOST and not (is_large and self._num_large >= _MOST_LARGE)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._num_busy = self._num_large = 0


class _Died(Exception):
    """A process ended or was killed while it checked a grammar. `reason` says why."""

    def __init__(self, reason: str, has_crashed: bool = False) -> None:
        super().__init__(reason)
        self.has_crashed = has_crashed  # True also if the process had ended before


class _Process:
    """A child process that checks one grammar at a time."""

    def __init__(self, library: str) -> None:
        """Start the process, and wait until it is ready. Raises `ValueError` if that fails."""
        self._library = library
        self._pipe, theirs = Pipe()
        with theirs:
            number, location = theirs.fileno(), str(GRAMMAR_BACKENDS.entry(library))
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(number), location, *sys.path],
                    pass_fds=[number],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                raise _cannot_start(error) from error
        try:
            answer = _received(self._pipe, _START_LIMIT)
        except (OSError, EOFError) as error:
            self._end(0)
            raise _cannot_start(error) from error
        if answer != check_process.READY:
            self._end(0)
            raise _cannot_start(answer)

    def check(self, source: Source) -> str | None:
        """Return the error of a grammar, or None. Raises `_Died` if the process has ended."""
        try:
            self._pipe.send(tuple(source))
            return _received(self._pipe, _TIME_LIMIT)
        except TimeoutError:
            self._end(0)
            raise _Died(f"it was not compiled within {_TIME_LIMIT:g} seconds") from None
        except (OSError, EOFError):
            code = self._end(1.0)
            if code == -signal.SIGXCPU:
                most = GRAMMAR_BACKENDS.get(self._library).check_seconds
                reason = f"compiling it takes more than {most} seconds of CPU time"
                raise _Died(reason) from None
            reason = f"the library that compiles it crashed (exit status {code})"
            raise _Died(reason, has_crashed=True) from None
        except BaseException:  # Ctrl-C: a late answer would be taken for that of the next grammar
            self._end(0)
            raise

    def _end(self, seconds: float) -> int:
        """Kill the process if it has not ended within `seconds`; return its exit status."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)
        self._child.kill()
        self._pipe.close()
        return self._child.wait()


def _cannot_start(reason: object) -> ValueError:
    return ValueError(
        f"the process that checks grammars cannot start: {str(reason) or 'it ended at once'}"
    )


def _received(pipe: Connection, seconds: float) -> str | None:
    """Wait for an answer and return it.

    Raises `TimeoutError` after `seconds`, and `EOFError` if the process has ended.
    """
    deadline = time.monotonic() + seconds
    while not pipe.poll(max(0.0, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            raise TimeoutError
    return pipe.recv()
