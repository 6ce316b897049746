"""Load generators with an open loop of arrival times, or a closed loop of waiting clients."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.cli.bench.serve.connection import Server
from nanoserve.cli.bench.serve.response import Response


@dataclass
class Exchange:
    """One request with its response or error. Times are from `time.perf_counter`."""

    due: float
    sent: float
    ended: float = 0.0
    response: Response | None = None
    error: str | None = None


async def open_loop(
    server: Server, requests: Sequence[bytes], arrivals: Sequence[float]
) -> list[Exchange]:
    """Send each request at its arrival time, in seconds after the start, without waiting."""
    tasks, start = [], time.perf_counter()
    for request, arrival in zip(requests, arrivals, strict=True):
        wait = start + arrival - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_exchange(server, request, start + arrival)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    server: Server, requests: Sequence[bytes], concurrency: int
) -> list[Exchange]:
    """Send requests from `concurrency` clients, each of which waits for its answer."""
    left, done = iter(enumerate(requests)), {}

    async def work() -> None:
        for index, request in left:
            done[index] = await _exchange(server, request, time.perf_counter())

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [done[index] for index in range(len(requests))]


async def _exchange(server: Server, request: bytes, due: float) -> Exchange:
    exchange = Exchange(due, time.perf_counter())
    try:
        exchange.response = await server.send(request)
    except (OSError, ValueError) as error:  # a TimeoutError is an OSError
        exchange.error = f"{type(error).__name__}: {error}"
    exchange.ended = time.perf_counter()
    return exchange
