"""A solution of `exercise.py`: thread and event loop share a command queue and one callback."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from queue import SimpleQueue
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


class _OutputQueue:
    """Unread tokens of one request. Only the event loop uses it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_complete = False  # its last news have arrived
        self.is_new = asyncio.Event()


class Hub:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queues: dict[str, _OutputQueue] = {}
        self._is_over, self._error = False, None
        threading.Thread(target=self._run, daemon=True).start()

    # ------------------------------------------------ in the event loop

    async def stream(self, request_id: str, num_tokens: int) -> AsyncIterator[list[int]]:
        """Request so many tokens, and yield them as they arrive."""
        self._check()
        queue = self._queues[request_id] = _OutputQueue()
        self._commands.put(partial(self._engine.add, request_id, num_tokens))
        try:
            while queue.tokens or not queue.is_complete:
                if queue.tokens:
                    tokens, queue.tokens = queue.tokens, []
                    yield tokens
                    continue
                self._check()
                await queue.is_new.wait()
                queue.is_new.clear()
        finally:
            del self._queues[request_id]
            if not queue.is_complete:
                self._commands.put(partial(self._engine.abort, request_id))

    def close(self) -> None:
        self._commands.put(None)

    def _check(self) -> None:
        if self._is_over:
            raise HubError("the engine is not running") from self._error

    def _deliver(self, news: list[News]) -> None:
        for request_id, tokens, is_last in news:
            queue = self._queues.get(request_id)
            if queue is not None:  # otherwise its stream was closed
                queue.tokens += tokens
                queue.is_complete |= is_last
                queue.is_new.set()

    def _end(self, error: BaseException | None) -> None:
        self._is_over, self._error = True, error
        for queue in self._queues.values():
            queue.is_new.set()

    # ------------------------------------------------ in the thread

    def _run(self) -> None:
        error = None
        try:
            while self._execute_commands():
                news = self._engine.step()
                if news:
                    self._loop.call_soon_threadsafe(self._deliver, news)
        except BaseException as raised:
            error = raised
        finally:
            self._engine.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there are no readers
                self._loop.call_soon_threadsafe(self._end, error)

    def _execute_commands(self) -> bool:
        """Execute all queued commands; without work, wait for one. Returns False to stop."""
        while not (has_work := self._engine.has_work()) or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return has_work
