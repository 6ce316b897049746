"""Result of an asynchronous call, shared by concurrent callers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Rate limiter for `make()`: one call at a time, and at least `interval` seconds between two.

    Callers that arrive meanwhile wait for the next result and share it, so a result is at most as
    old as the time that `make` takes. The rate of calls is bounded for any number of callers; an
    occasional single caller does not wait.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], interval: float) -> None:
        self._make, self._interval = make, interval
        self._next: asyncio.Task[T] | None = None
        self._last_end = float("-inf")

    async def get(self) -> T:
        """Return the next result of `make`, or raise what it raises."""
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)  # a waiting caller may be cancelled

    async def _run(self) -> T:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._last_end + self._interval - clock()))
        try:
            return await self._make()
        finally:
            self._last_end = clock()
