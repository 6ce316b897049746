"""Exercise: one engine in a thread of its own, and any number of readers in an event loop.

Complete `Hub`, a small `AsyncLLM`. It is made inside of a running event loop. The rules:

1. Only the hub's thread calls the engine. What others want of it is an order, which the thread
   obeys between two steps, in the order in which they were given. It steps while there is work, and
   otherwise waits for an order. It does not look again and again.
2. `stream` yields lists of tokens, none of them empty: each token once, in order. It ends when the
   request's last news were read.
3. The engine never waits for a reader. What somebody has not read yet is *one* list, however many
   steps have added to it, and comes in one piece.
4. The event loop is woken (`call_soon_threadsafe`) at most once a step, for all readers together,
   and not by a step that brought nothing.
5. Who leaves before the last news have come (`aclose`, an exception, a cancelled task) aborts the
   request, once. Nothing of it stays in the hub.
6. If a step raises, every open stream raises `HubError` with that exception as its cause, after the
   tokens that came before. Later calls of `stream` do so at once.
7. `close` orders the end and does not wait for it. Streams that are open then raise `HubError`. The
   last thing that the thread does with the engine, in every case, is `engine.close()`.

Test it with `pytest -x docs/21-server/test_exercise.py`.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol


class News(NamedTuple):
    """What a step has brought to one request."""

    request_id: str
    tokens: list[int]
    is_last: bool


class Engine(Protocol):
    """What the hub knows of an engine."""

    def add(self, request_id: str, num_tokens: int) -> None: ...

    def abort(self, request_id: str) -> None:
        """An id that is unknown, or has ended, is no error."""

    def has_work(self) -> bool: ...

    def step(self) -> list[News]: ...

    def close(self) -> None: ...


class HubError(RuntimeError):
    """The engine has failed, or was closed."""


class Hub:
    def __init__(self, engine: Engine) -> None:
        raise NotImplementedError

    async def stream(self, request_id: str, num_tokens: int) -> AsyncIterator[list[int]]:
        """Ask for so many tokens, and yield them as they come."""
        raise NotImplementedError
        yield  # which makes it an asynchronous generator

    def close(self) -> None:
        raise NotImplementedError
