"""Run a batch job with one engine, with only as many concurrent lines as keep it busy."""

import asyncio
import signal
from collections.abc import Callable, Iterator

from nanoserve.serve.batch.request_executor import Answered, Answerer
from nanoserve.serve.batch.requests import BatchLine
from nanoserve.serve.batch.restarts import RestartingAnswerer

_LINES_PER_SLOT = 2  # concurrent lines: one that runs and one that waits, per slot
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def answer_here(
    answerer: "Answerer | RestartingAnswerer",
    lines: Iterator[BatchLine],
    take: Callable[[Answered], None],
    grace_period: float,
) -> int:
    """Answer lines, a new one whenever another has been answered, and pass each answer to `take`.

    Returns the signal that ended the job early, or 0. After the first signal no line is started,
    and running ones have `grace_period` seconds to finish; a second signal aborts them at once.
    Aborted lines get no answer, so that the next run answers them.
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
