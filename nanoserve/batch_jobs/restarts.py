"""Answer lines with a new engine whenever one has ended, and find the line that it ends of.

Requests run side by side, so it may have been any of those under way. They are answered once more,
all of them together; if the engine ends again, each half by itself, and so on. What ends an engine
when it is alone gets an error for an answer, and the job goes on without it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator

from nanoserve.batch_jobs.answerer import Answered, Answerer, error_answer
from nanoserve.batch_jobs.here import answer_here
from nanoserve.batch_jobs.lines import BatchLine
from nanoserve.server.output_reader import EngineDeadError

logger = logging.getLogger(__name__)

# Lines in succession that have ended an engine, with no answer in between: then it is not the
# lines, and none of them gets an error.
_MOST_BLAMED = 3


def answer_with_restarts(
    make_answerer: Callable[[], Answerer],
    lines: Iterator[BatchLine],
    take: Callable[[Answered], None],
    grace_period: float,
) -> int:
    """Answer all lines; see `answer_here`, whose result this returns.

    Raises `EngineDeadError` if engines end while there is no line to answer, or whatever line they
    answer, and what `make_answerer` raises.
    """
    job = _Job(lines, take)
    answerer = make_answerer()
    try:
        while True:
            try:
                stopped_by = asyncio.run(answer_here(answerer, job.lines(), job.take, grace_period))
            except EngineDeadError as error:
                job.split(error)
                logger.warning("the engine has ended (%s): another one is started", error)
                answerer.close()
                answerer = make_answerer()
            else:
                if stopped_by or job.is_over():
                    return stopped_by
    finally:
        answerer.close()


class _Job:
    """The lines that are left, in groups: those that may have ended an engine come first."""

    def __init__(self, lines: Iterator[BatchLine], take: Callable[[Answered], None]) -> None:
        self._others, self._take = lines, take
        self._suspects: deque[list[BatchLine]] = deque()
        self._group: list[BatchLine] | None = None  # None: of lines that nobody suspects
        self._under_way: dict[int, BatchLine] = {}
        self._blamed: list[Answered] = []

    def lines(self) -> Iterator[BatchLine]:
        """Yield the next group, or if there is none, all other lines."""
        self._group = self._suspects.popleft() if self._suspects else None
        self._under_way = {line.number: line for line in self._group or ()}
        if self._group is not None:
            yield from self._group
            return
        for line in self._others:
            self._under_way[line.number] = line
            yield line

    def take(self, answered: Answered) -> None:
        self._flush()
        del self._under_way[answered.number]
        self._take(answered)

    def is_over(self) -> bool:
        """Tell whether nothing is left after a group that was answered to its end."""
        if self._group is not None:
            return False
        self._flush()
        return True

    def split(self, error: EngineDeadError) -> None:
        """Note that an engine has ended. Raises `error` if no line is to blame."""
        left = [*self._under_way.values()]
        if not left:
            raise error
        if self._group is None:
            self._suspects.append(left)
        elif len(self._group) > 1:
            half = (len(left) + 1) // 2
            self._suspects.extendleft(
                reversed([part for part in (left[:half], left[half:]) if part])
            )
        else:
            told = f"the engine ends when it answers this line, also by itself: {_cause(error)}"
            self._blamed.append(error_answer(left[0], told))
            if len(self._blamed) >= _MOST_BLAMED:
                raise error

    def _flush(self) -> None:
        for answered in self._blamed:
            self._take(answered)
        self._blamed = []


def _cause(error: EngineDeadError) -> str:
    return str(error.__cause__ or error)
