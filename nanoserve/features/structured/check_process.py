"""The child process in which each grammar is compiled for the first time, as a check.

It is run as `python -c "..."` by `nanoserve.features.structured.checker`, with the other end of a
pipe. A grammar that overflows a native stack, or that takes too much memory or time, ends only this
process.
"""

import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from nanoserve.features.structured.grammar import Source
from nanoserve.utils.registry import Registry

READY = "ready"
_STACK = 16 * 2**20  # bytes: a quarter of the stacks in which checked grammars are compiled
_MEMORY = 2 * 2**30  # bytes, besides what is used after the library was imported
_IDLE = 60.0  # seconds without a grammar after which this process ends


def main(file_descriptor: int, location: str) -> None:
    """Answer each `Source` with its error or None until the pipe is closed.

    location: the backend that checks the grammars, as "module:Class".
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started this one
    pipe = Connection(file_descriptor)
    try:
        backends: Registry[Any] = Registry("grammar backend", {"this one": location})
        backend = backends.get("this one")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    _limit_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected: no core dumps
    os.nice(5)  # running requests have priority
    pipe.send(READY)
    thread = start_thread(_answer, (pipe, backend.check, backend.check_seconds), _STACK, "check")
    thread.join()


def _answer(pipe: Connection, check: Any, seconds: int) -> None:
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while pipe.poll(_IDLE):
            source = Source(*pipe.recv())
            _limit_time(seconds)
            try:
                check(source)
            except ValueError as error:
                pipe.send(str(error))
            except Exception as error:  # a library may raise its own exceptions
                pipe.send(f"{type(error).__name__}: {error!s:.300}")
            else:
                pipe.send(None)


def _limit_time(seconds: int) -> None:
    """Let the system kill this process after `seconds` of further CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + seconds + 1
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _limit_memory() -> None:
    """Let allocations beyond `_MEMORY` fail, if /proc reports memory sizes."""
    with suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = taken + _MEMORY
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


_lock = threading.Lock()


def start_thread(
    target: Callable[..., Any], args: tuple[Any, ...], num_bytes: int, name: str
) -> threading.Thread:
    """Start a daemon thread with a stack of `num_bytes`, of which only the used part takes memory.

    Python sets the stack size of new threads for the whole process. So a thread that is started
    elsewhere at the same moment may get a large stack too, which does no harm.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _lock:
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
