"""Threads with a given stack size, for native code that recurses."""

import threading
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()


def start_thread(
    target: Callable[..., Any], args: tuple[Any, ...], num_bytes: int, name: str
) -> threading.Thread:
    """Start a daemon thread with a stack of `num_bytes`; only the used part of it takes memory.

    Python sets the stack size of new threads for the whole process. So a thread that another part
    of the program starts at the same moment may get a large stack too, which does no harm.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _lock:
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
