"""Restart the engine after a crash, and find the line that crashes it by bisection.

Requests run concurrently, so any request in flight may have caused the crash. They are answered
again, all together. If the engine crashes again, each half runs separately, and so on. A line that
crashes an engine when it runs alone is answered with an error, and the other lines continue.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoserve.serve.batch.request_executor import Answered, Answerer, error_answer
from nanoserve.serve.batch.requests import BatchLine
from nanoserve.serve.engine_thread import EngineDeadError

if TYPE_CHECKING:
    from nanoserve.serve.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

# First request to a new engine. If it crashes the engine, no line of the input is the cause.
_SMALLEST = BatchLine(
    0,
    "smallest",
    {
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": [0], "max_tokens": 1, "temperature": 0},
    },
    "",
)


class RestartingAnswerer:
    """An answerer that starts a new engine when the current engine has ended.

    All methods must be called in the same event loop. Raises what `make_answerer` raises, but
    calls it again, once, if the engine's process is killed while it starts.
    """

    def __init__(self, make_answerer: Callable[[], Answerer]) -> None:
        self._make_answerer = make_answerer
        self._answerer = self._make()
        self._changed = asyncio.Condition()
        self._running: set[int] = set()  # lines that are being answered
        self._suspects: set[int] = set()  # lines in flight when the engine ended
        self._group: set[int] | None = None  # lines that may run now; None: all
        self._is_single = False  # True if the group consists of one line
        self._groups: deque[list[int]] = deque()  # groups that run next
        self._is_restarting = False
        self._failure: Exception | None = None  # reason why no engine could be started
        self._restart: asyncio.Task[None] | None = None

    @property
    def llm(self) -> "AsyncLLM":
        return self._answerer.llm

    async def answer(self, line: BatchLine) -> Answered:
        """Answer a line; see `Answerer.answer`.

        Raises `EngineDeadError` if a new engine crashes before its first line, and the errors of
        starting an engine.
        """
        number = line.number
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_run(number))
            if self._failure is not None:
                raise self._failure
            self._running.add(number)
            try:
                answered = await self._answerer.answer(line)
            except EngineDeadError as error:
                is_to_blame = self._is_single
                if not is_to_blame:
                    self._suspects.add(number)
                self._leave(number, error)
                if is_to_blame:
                    message = f"the engine crashes on this line, even when it runs alone: {error}"
                    return error_answer(line, message)
            except BaseException:
                self._leave(number)
                raise
            else:
                self._leave(number)
                return answered

    def close(self) -> None:
        """Abort running requests, and release the engine. No other engine is started."""
        if self._failure is None:
            self._failure = EngineDeadError()
        self._answerer.close()

    def _make(self) -> Answerer:
        try:
            return self._make_answerer()
        except EngineDeadError as error:
            logger.warning("the engine has ended while it started (%s); starting another", error)
            return self._make_answerer()

    def _may_run(self, number: int) -> bool:
        if self._failure is not None:
            return True  # to raise it
        is_its_turn = self._group is None or number in self._group
        return is_its_turn and not self._is_restarting and not self._suspects

    def _leave(self, number: int, error: EngineDeadError | None = None) -> None:
        """Record that a line is no longer in flight. `error`: set if the engine has ended."""
        self._running.discard(number)
        has_ended = error is not None or bool(self._suspects)
        if self._group is not None and number not in self._suspects:
            self._group.discard(number)
        if has_ended and not self._running:
            self._split()
            self._is_restarting = True
            self._restart = asyncio.ensure_future(self._start_another(error))
        elif not has_ended and self._group is not None and not self._group:
            self._next_group()
            self._restart = asyncio.ensure_future(self._wake())

    def _split(self) -> None:
        """Split the lines that may have crashed the engine into groups."""
        if self._group is None:
            groups = [sorted(self._suspects)]
        else:
            left = sorted(self._group)
            half = (len(left) + 1) // 2
            groups = [left[:half], left[half:]]
        self._groups.extendleft(group for group in reversed(groups) if group)
        self._suspects.clear()
        self._next_group()

    def _next_group(self) -> None:
        group = self._groups.popleft() if self._groups else None
        self._group = None if group is None else set(group)
        self._is_single = group is not None and len(group) == 1

    async def _start_another(self, error: EngineDeadError | None) -> None:
        logger.warning("the engine has ended (%s); starting another engine", error)
        try:
            self._answerer.close()
            self._answerer = self._make()
            await self._answerer.answer(_SMALLEST)
        except Exception as failure:
            self._failure = failure
        self._is_restarting = False
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
