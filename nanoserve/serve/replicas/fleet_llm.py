"""`AsyncLLM` and its server, with a fleet of replicas in place of one engine."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Response
from ray.serve.handle import DeploymentHandle

from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.metrics import exposition
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.engine_thread import News
from nanoserve.serve.http.app import ApiServer
from nanoserve.serve.replicas.expositions import merged
from nanoserve.serve.replicas.live_replicas import LiveReplicas
from nanoserve.serve.replicas.router_client import Fleet
from nanoserve.serve.response_stream import EngineDeadError

T = TypeVar("T")

_SCRAPE_SECONDS = 2.0  # that a replica has to tell its metrics: Prometheus gives up after ten


class FleetLLM(AsyncLLM):
    """The replicas behind a handle of Ray Serve, asked as one model.

    What is called in the engine is called in all of them: `call_in_engine` returns a dictionary, by
    the number of the replica.
    """

    owner: Fleet

    def __init__(self, handle: DeploymentHandle, stream_interval: int = 1) -> None:
        self._handle = handle
        super().__init__(handle.deployment_name, stream_interval=stream_interval)
        # Other ingresses may have requests at the same replicas.
        self._request_ids = map(f"{self.owner.name}-{{}}".format, count())

    async def call_in_replica(self, number: int, function: Callable[[GuardedEngine], T]) -> T:
        """`ValueError` if there is no such replica."""
        return await self._told_by(partial(self.owner.call_one, number, function))

    def _make_owner(
        self,
        model: str | Path,
        engine_process: bool,
        options: dict[str, Any],
        post: Callable[[News | None], None],
    ) -> Fleet:
        return Fleet(self._handle, post)


class FleetServer(ApiServer):
    """The same endpoints. Metrics have a label more, and the page shows one replica at a time."""

    llm: FleetLLM

    async def health(self) -> Response:
        """200 while there is a replica; 503 while there is none, although requests may wait for
        the next one."""
        is_healthy = self.llm.is_running and not self.is_draining and self.llm.owner.replicas
        return Response(status_code=200 if is_healthy else 503)

    async def _read_metrics(self) -> bytes:
        """Read those of all replicas that answer, each with its number as a label."""
        numbers = list(self.llm.owner.replicas)
        told = await asyncio.gather(*map(self._exposition, numbers))
        return merged({number: one for number, one in zip(numbers, told, strict=True) if one})

    async def _exposition(self, number: int) -> bytes | None:
        """None if it does not come in time: a replica that hangs must not hide the others."""
        asked = self.llm.call_in_replica(number, exposition)
        try:
            return await asyncio.wait_for(asked, _SCRAPE_SECONDS)
        except (asyncio.TimeoutError, ValueError, EngineDeadError):  # it is late, or gone by now
            return None

    def _measure(self) -> None:
        """Replicas do so from their first request on, whoever asks them."""

    def _show_live(self) -> LiveReplicas:
        return LiveReplicas(self.app, self.llm.call_in_replica, lambda: self.llm.owner.replicas)
