"""`AsyncLLM` and its HTTP server for a fleet of replicas instead of one engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Response
from ray.serve.handle import DeploymentHandle

from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.metrics import exposition
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.engine_thread import EngineDeadError, News
from nanoserve.serve.http.app import ApiServer
from nanoserve.serve.replicas.live_replicas import LiveReplicas
from nanoserve.serve.replicas.merged_metrics import merged
from nanoserve.serve.replicas.router_client import Fleet

T = TypeVar("T")

_SCRAPE_SECONDS = 2.0  # timeout for the metrics of a replica; Prometheus has a timeout of 10 s


class FleetLLM(AsyncLLM):
    """An asynchronous engine over all replicas of a Ray Serve handle, used like one model.

    `call_in_engine` calls its function in all replicas, and returns {replica number: result}.
    """

    owner: Fleet  # type: ignore[assignment]  # it has the methods of the other two

    def __init__(self, handle: DeploymentHandle, stream_interval: int = 1) -> None:
        self._handle = handle
        super().__init__(handle.deployment_name, stream_interval=stream_interval)
        # Unique across the ingresses that share the replicas.
        self._request_ids = map(f"{self.owner.name}-{{}}".format, count())

    async def call_in_replica(self, number: int, function: Callable[[GuardedEngine], T]) -> T:
        """Call `function(engine)` in one replica and return its result.

        Raises `ValueError` if there is no such replica.
        """
        return await self._result_of(partial(self.owner.call_one, number, function))

    async def sleep(self, level: int = 1, *, mode: str = "abort") -> None:
        """Raise `ValueError`: replicas are replaced and added at any time, and are then awake."""
        raise ValueError("sleep() is not supported with replicas: stop the server instead")

    async def update_weights(
        self, source: Any, *, mode: str | None = None, version: int | str | None = None
    ) -> int | str:
        """Raise `ValueError`: a replica that joins later would have the old weights."""
        raise ValueError("update_weights() is not supported with replicas: restart them instead")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Raise `ValueError`: the number of replicas, and so of ranks, may change at any time."""
        raise ValueError(
            "collective_rpc() is not supported with replicas: call it in a program with one engine"
        )

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing, since replicas do not sleep."""

    def _make_owner(  # type: ignore[override]  # as above
        self,
        model: str | Path,
        engine_process: bool,
        options: dict[str, Any],
        post: Callable[[News | None], None],
    ) -> Fleet:
        return Fleet(self._handle, post)


class FleetServer(ApiServer):
    """An HTTP server for replicas.

    Metrics have an additional label `replica`, and the live view shows one replica at a time.
    """

    llm: FleetLLM

    async def health(self) -> Response:
        """Return 200 while a replica is available, else 503, although requests may wait for it."""
        is_healthy = self.llm.is_running and not self.is_draining and self.llm.owner.replicas
        return Response(status_code=200 if is_healthy else 503)

    async def _read_metrics(self) -> bytes:
        """Return the metrics of all replicas that answer, each with its number as a label."""
        numbers = list(self.llm.owner.replicas)
        texts = await asyncio.gather(*map(self._exposition, numbers))
        return merged({number: text for number, text in zip(numbers, texts, strict=True) if text})

    async def _exposition(self, number: int) -> bytes | None:
        """Return a replica's metrics in Prometheus text format, or None if it is too slow or gone.

        This way, one bad replica does not block the scrape.
        """
        text = self.llm.call_in_replica(number, exposition)
        try:
            return await asyncio.wait_for(text, _SCRAPE_SECONDS)
        except (asyncio.TimeoutError, ValueError, EngineDeadError):  # late, or terminated meanwhile
            return None

    def _measure(self) -> None:
        """Do nothing: each replica starts its metrics itself, before its first request."""

    def _show_live(self) -> LiveReplicas:  # type: ignore[override]  # methods of `LiveView`
        return LiveReplicas(self.app, self.llm.call_in_replica, lambda: self.llm.owner.replicas)
