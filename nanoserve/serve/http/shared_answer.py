"""One answer for all who ask at about the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Await `make()`, at most once at a time and not sooner than `interval` seconds after the last.

    Who asks meanwhile waits and shares the next answer, so none is older than its question by more
    than the time that `make` takes. However many ask, and however often, the rate of calls is
    bounded; who asks alone and seldom waits for nothing.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], interval: float) -> None:
        self._make, self._interval = make, interval
        self._next: asyncio.Task[T] | None = None
        self._last_end = float("-inf")

    async def get(self) -> T:
        """Raises what `make` raises."""
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)  # one of those who wait may give up

    async def _run(self) -> T:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._last_end + self._interval - clock()))
        try:
            return await self._make()
        finally:
            self._last_end = clock()
