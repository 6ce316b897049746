"""Our solution: what the thread and the event loop share is a queue of orders and one callback."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from queue import SimpleQueue
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


class _Mailbox:
    """What one reader has not read yet. Only the event loop touches it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_complete = False  # its last news are here, or were read
        self.is_new = asyncio.Event()


class Hub:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._is_over, self._error = False, None
        threading.Thread(target=self._run, daemon=True).start()

    # ------------------------------------------------ in the event loop

    async def stream(self, request_id: str, num_tokens: int) -> AsyncIterator[list[int]]:
        """Ask for so many tokens, and yield them as they come."""
        self._check()
        box = self._mailboxes[request_id] = _Mailbox()
        self._orders.put(partial(self._engine.add, request_id, num_tokens))
        try:
            while box.tokens or not box.is_complete:
                if box.tokens:
                    tokens, box.tokens = box.tokens, []
                    yield tokens
                    continue
                self._check()
                await box.is_new.wait()
                box.is_new.clear()
        finally:
            del self._mailboxes[request_id]
            if not box.is_complete:
                self._orders.put(partial(self._engine.abort, request_id))

    def close(self) -> None:
        self._orders.put(None)

    def _check(self) -> None:
        if self._is_over:
            raise HubError("the engine is not running") from self._error

    def _deliver(self, news: list[News]) -> None:
        for request_id, tokens, is_last in news:
            box = self._mailboxes.get(request_id)
            if box is not None:  # else its reader has left
                box.tokens += tokens
                box.is_complete |= is_last
                box.is_new.set()

    def _end(self, error: BaseException | None) -> None:
        self._is_over, self._error = True, error
        for box in self._mailboxes.values():
            box.is_new.set()

    # ------------------------------------------------ in the thread

    def _run(self) -> None:
        error = None
        try:
            while self._obey():
                news = self._engine.step()
                if news:
                    self._loop.call_soon_threadsafe(self._deliver, news)
        except BaseException as raised:
            error = raised
        finally:
            self._engine.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._end, error)

    def _obey(self) -> bool:
        """All orders that there are; without other work, wait for one. False: it is time to end."""
        while not (has_work := self._engine.has_work()) or not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            order()
        return has_work
