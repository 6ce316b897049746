"""Answer with one engine: as many lines at a time as keep it busy, and no more."""

import asyncio
import signal
from collections.abc import Callable, Iterator

from nanoserve.serve.batch.request_executor import Answered, Answerer
from nanoserve.serve.batch.requests import BatchLine
from nanoserve.serve.batch.restarts import RestartingAnswerer

_LINES_PER_SLOT = 2  # under way: those that run, and as many that wait for their turn
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def answer_here(
    answerer: "Answerer | RestartingAnswerer",
    lines: Iterator[BatchLine],
    take: Callable[[Answered], None],
    grace_period: float,
) -> int:
    """Take a line when another one has its answer. Returns the signal that ended it early, or 0.

    After the first signal no line is begun, and what runs may end within `grace_period` seconds;
    a second one does not wait. What is aborted is as if it had not begun.
    """
    loop, stopped_by = asyncio.get_running_loop(), 0

    async def work() -> None:
        while not stopped_by and (line := next(lines, None)) is not None:
            take(await answerer.answer(line))

    def hurry() -> None:
        for worker in workers:
            worker.cancel()

    def stop(number: int) -> None:
        nonlocal stopped_by
        if stopped_by:
            hurry()
        stopped_by = stopped_by or number
        loop.call_later(grace_period, hurry)

    most = _LINES_PER_SLOT * answerer.llm.engine.config.max_num_seqs
    workers = [asyncio.ensure_future(work()) for _ in range(most)]
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        hurry()
        outcomes = await asyncio.gather(*workers, return_exceptions=True)
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return stopped_by
