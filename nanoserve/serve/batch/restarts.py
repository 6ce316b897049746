"""Answer lines with a new engine whenever one has ended, and find the line that it ends of.

Requests run side by side, so it may have been any of those under way. They are answered once more,
all of them together; if the engine ends again, each half by itself, and so on. What ends an engine
when it is alone gets an error for an answer, and the others go on without it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoserve.serve.batch.request_executor import Answered, Answerer, error_answer
from nanoserve.serve.batch.requests import BatchLine
from nanoserve.serve.response_stream import EngineDeadError

if TYPE_CHECKING:
    from nanoserve.serve.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

# A new engine answers this first. One that ends even of this is itself at fault, and no line is.
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
    """An `Answerer` that starts another engine when one has ended.

    All methods belong to one event loop. Raises what `make_answerer` raises.
    """

    def __init__(self, make_answerer: Callable[[], Answerer]) -> None:
        self._make = make_answerer
        self._answerer = make_answerer()
        self._changed = asyncio.Condition()
        self._running: set[int] = set()  # lines that the engine has
        self._suspects: set[int] = set()  # lines that it had when it ended
        self._group: set[int] | None = None  # lines that may run now; None: all
        self._is_single = False  # whether the group was made of one line
        self._groups: deque[list[int]] = deque()  # that come next
        self._is_restarting = False
        self._failure: Exception | None = None  # why there is no engine any more
        self._restart: asyncio.Task[None] | None = None

    @property
    def llm(self) -> "AsyncLLM":
        return self._answerer.llm

    async def answer(self, line: BatchLine) -> Answered:
        """Answer a line; see `Answerer.answer`.

        Raises `EngineDeadError` if engines end without a line, and what starting one raises.
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
                    told = f"the engine ends when it answers this line, also by itself: {error}"
                    return error_answer(line, told)
            except BaseException:
                self._leave(number)
                raise
            else:
                self._leave(number)
                return answered

    def close(self) -> None:
        """Abort what runs, and release everything. No other engine is started."""
        if self._failure is None:
            self._failure = EngineDeadError()
        self._answerer.close()

    def _may_run(self, number: int) -> bool:
        if self._failure is not None:
            return True  # to raise it
        is_its_turn = self._group is None or number in self._group
        return is_its_turn and not self._is_restarting and not self._suspects

    def _leave(self, number: int, error: EngineDeadError | None = None) -> None:
        """Note that the engine has this line no more; with an `error`, because it has ended."""
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
        """Make groups of the lines that may have ended the engine."""
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
        logger.warning("the engine has ended (%s): another one is started", error)
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
