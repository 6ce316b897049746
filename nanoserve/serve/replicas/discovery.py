"""Track the available replicas. An ingress reads a stream of updates from each of them."""

import asyncio
import contextlib
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from nanoserve.serve.engine_thread import EngineDeadError
from nanoserve.serve.replicas.messages import Call, FirstCall, NotThereError
from nanoserve.serve.replicas.replica import HEARD_EVERY
from nanoserve.serve.replicas.routing import Placement

logger = logging.getLogger(__name__)

A_MOMENT = 0.02  # polling interval in seconds
CALL_ERRORS = (RayError, RayServeException, EngineDeadError, NotThereError)
_MOST_MISSED = 8  # times HEARD_EVERY seconds without an answer before a replica is lost
_AGAIN_AFTER = 0.5  # seconds before a lost replica is contacted again


class Following:
    """The connections to all replicas to which Serve would send requests (the candidates).

    A replica whose stream is being read is a member of `placement`.

    take: called with the name of a replica and its updates. lost: called with the name of a replica
    whose updates will no longer be read. is_idle: returns True if a replica has no requests left.
    All methods except `note` must run in the thread of `loop`.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        loop: asyncio.AbstractEventLoop,
        take: Callable[..., None],
        lost: Callable[[str], None],
        is_idle: Callable[[str], bool],
    ) -> None:
        self.name = uuid4().hex[:12]  # identifies this ingress to the replicas
        self.placement: Placement  # set by `open`
        self._is_paused = False  # if True, replicas are paused when they join
        self._handle, self._loop = handle, loop
        self._streams, self._own_name = handle.options(stream=True), pickle.dumps(self.name)
        self._take, self._lost, self._is_idle = take, lost, is_idle
        self._candidates: set[str] = set()  # replicas to which Serve would send requests
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        self._is_open = False

    def pause(self, is_paused: bool) -> None:
        """Set whether replicas that join later are paused; members receive separate messages."""
        self._is_paused = is_paused

    async def describe(self) -> Any:
        """Return the arguments of `EngineFront`, from any replica.

        From now on, Serve's router reports the candidates.
        """
        first = FirstCall(b"", self.note)
        return pickle.loads(await self._handle.describe.remote(first))

    async def open(self, placement: Placement) -> None:
        """Start following all candidates; return when a replica is available."""
        self.placement, self._is_open = placement, True
        self._update(self._candidates)
        while not self.is_any_there:
            await asyncio.sleep(A_MOMENT)

    async def close(self) -> None:
        """Stop following; the replicas abort the remaining requests of this ingress."""
        self._is_open = False
        tasks = [*self._followers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_any_there(self) -> bool:
        """True if a request can be sent."""
        return bool(self.placement.members.keys() & self._candidates)

    def note(self, names: set[str]) -> None:
        """Set the current candidates; called in the thread of Serve's router."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the fleet has ended
            self._loop.call_soon_threadsafe(self._update, names)

    def lose(self, name: str) -> None:
        """Remove a replica, whose updates are no longer read. Idempotent."""
        if name in self.placement.members:
            self.placement.leave(name)
            self._lost(name)

    def leave_if_done(self, name: str | None) -> None:
        """Stop following a replica that is being stopped and has finished its requests."""
        is_stopping = name in self._followers and name not in self._candidates
        if name is not None and is_stopping and self._is_idle(name):
            self._followers[name].cancel()

    async def reach(self, name: str, method: str, content: bytes) -> Any:
        """Call a method of a replica and return its result; None if the replica is lost."""
        response = getattr(self._handle, method).remote(Call(content, name))
        outcome = asyncio.ensure_future(_outcome(response))
        try:
            while not (await asyncio.wait({outcome}, timeout=HEARD_EVERY))[0]:
                if name not in self.placement.members:
                    return None
            return outcome.result()
        except NotThereError:
            return None
        except CALL_ERRORS as error:
            logger.warning("the call of %s in replica %s has failed: %r", method, name, error)
            return None
        finally:
            cancel(response)
            outcome.cancel()

    def _update(self, names: set[str]) -> None:
        self._candidates = names
        if self._is_open:
            for name in names - self._followers.keys():
                self._followers[name] = self._loop.create_task(self._follow(name))
            for name in self._followers.keys() - names:
                self.leave_if_done(name)

    async def _follow(self, name: str) -> None:
        """Read the updates of a replica until its stream ends or fails."""
        stream: Any = self._streams.listen.remote(Call(self._own_name, name))
        try:
            num_kv_blocks, blocks = pickle.loads(await anext(stream))
            number = self.placement.join(name, num_kv_blocks).number
            logger.info("replica %d is available: %s", number, name)
            self._heartbeats[name] = self._loop.create_task(self._send_heartbeats(name))
            if self._is_paused:
                await self.reach(name, "pause", pickle.dumps(True))
            if blocks is not None:
                self.placement.note_blocks(name, blocks, ())
            async for content in stream:
                self._take(name, *pickle.loads(content))
        except CALL_ERRORS as error:
            logger.warning("replica %s is lost: %r", name, error)
        except StopAsyncIteration:
            logger.warning("replica %s has ended its stream", name)
        finally:
            cancel(stream)
            if name in self._heartbeats:
                self._heartbeats.pop(name).cancel()
            self.lose(name)
            del self._followers[name]
            # A replica that is still a candidate is contacted again.
            self._loop.call_later(_AGAIN_AFTER, lambda: self._update(self._candidates))

    async def _send_heartbeats(self, name: str) -> None:
        """Send heartbeats to a replica, so that it knows that this ingress waits for its results.

        A replica that does not answer is no longer followed.
        """
        while True:
            began = time.monotonic()
            answer = asyncio.ensure_future(self.reach(name, "heartbeat", self._own_name))
            try:
                # Counts waits instead of seconds: while this process and the replicas are stopped
                # together, as on a suspended machine, only one wait passes.
                for _ in range(_MOST_MISSED):
                    if (await asyncio.wait({answer}, timeout=HEARD_EVERY))[0]:
                        break
                else:
                    seconds = time.monotonic() - began
                    logger.warning("replica %s has not answered for %.0f s", name, seconds)
                    self._followers[name].cancel()
                    return
            finally:
                answer.cancel()
            others = answer.result()
            if others is not None:
                self.placement.note_others(name, *others)
            await asyncio.sleep(HEARD_EVERY)


def cancel(response: Any) -> None:
    """Cancel a Serve call unless it has ended. Errors of a failed call are suppressed."""
    with contextlib.suppress(*CALL_ERRORS):
        response.cancel()


async def _outcome(response: Any) -> Any:
    """Return the result of a Serve call; None if it was cancelled."""
    with contextlib.suppress(RequestCancelledError):
        return await response
