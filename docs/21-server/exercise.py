"""Exercise: an engine in a thread of its own, and any number of readers in an event loop.

Complete `Hub`, a small `AsyncLLM`. It is created inside a running event loop. The rules:

1. Only the hub's thread calls the engine. Other code sends commands, which the thread executes
   between two steps, first come, first served. It steps while there is work, and otherwise waits
   for a command, without polling.
2. `stream` yields non-empty lists of tokens: each token once, in order. It ends when the request's
   last news were read.
3. The engine never waits for a reader. The unread tokens of a request are *one* list, regardless of
   how many steps have added to it, and are yielded together.
4. The event loop is woken (`call_soon_threadsafe`) at most once per step, for all readers together,
   and not after a step without news.
5. A stream that is left before the last news have arrived (by `aclose`, an exception, a cancelled
   task) aborts its request, once. Nothing of it stays in the hub.
6. If a step raises, every open stream raises `HubError` with that exception as its cause, after the
   tokens that came before. Later calls of `stream` do so at once.
7. `close` tells the thread to stop, and does not wait for it. Open streams then raise `HubError`.
   In every case, the thread's last call of the engine is `engine.close()`.

Test it with `pytest -x docs/21-server/test_exercise.py`.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol


class News(NamedTuple):
    """New tokens of one request from one step."""

    request_id: str
    tokens: list[int]
    is_last: bool


class Engine(Protocol):
    """The interface of an engine."""

    def add(self, request_id: str, num_tokens: int) -> None: ...

    def abort(self, request_id: str) -> None:
        """Unknown and finished ids are ignored."""

    def has_work(self) -> bool: ...

    def step(self) -> list[News]: ...

    def close(self) -> None: ...


class HubError(RuntimeError):
    """The engine has failed or was closed."""


class Hub:
    def __init__(self, engine: Engine) -> None:
        raise NotImplementedError

    async def stream(self, request_id: str, num_tokens: int) -> AsyncIterator[list[int]]:
        """Request so many tokens, and yield them as they arrive."""
        raise NotImplementedError
        yield  # makes this an asynchronous generator

    def close(self) -> None:
        raise NotImplementedError
