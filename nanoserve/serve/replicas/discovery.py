"""Which replicas are there: an ingress follows what each of them tells."""

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

from nanoserve.serve.replicas.messages import Call, FirstCall, NotThereError
from nanoserve.serve.replicas.replica import HEARD_EVERY
from nanoserve.serve.replicas.routing import Placement
from nanoserve.serve.response_stream import EngineDeadError

logger = logging.getLogger(__name__)

A_MOMENT = 0.02  # seconds between two looks whether something has happened
CALL_ERRORS = (RayError, RayServeException, EngineDeadError, NotThereError)
_MOST_MISSED = 8  # times HEARD_EVERY seconds that a replica may leave a question unanswered
_AGAIN_AFTER = 0.5  # seconds before a replica that was lost is asked again


class Following:
    """Of all replicas that Serve would send to. One that tells is a member of `placement`.

    take: called with the name of a replica and what it has told. lost: with the name of one from
    which nothing will be taken any more. is_idle: whether nothing is left to come from one.
    All methods but `note` are for the thread of one event loop.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        loop: asyncio.AbstractEventLoop,
        take: Callable[..., None],
        lost: Callable[[str], None],
        is_idle: Callable[[str], bool],
    ) -> None:
        self.name = uuid4().hex[:12]  # by which replicas tell ingresses apart
        self.placement: Placement  # from `open` on
        self._is_paused = False  # replicas that join are paused, too
        self._handle, self._loop = handle, loop
        self._streams, self._own_name = handle.options(stream=True), pickle.dumps(self.name)
        self._take, self._lost, self._is_idle = take, lost, is_idle
        self._candidates: set[str] = set()  # that Serve would send to
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._hearing: dict[str, asyncio.Task[None]] = {}
        self._is_open = False

    def pause(self, is_paused: bool) -> None:
        """Pause replicas that join from now on, or no longer; members get messages of their own."""
        self._is_paused = is_paused

    async def describe(self) -> Any:
        """What anybody says of the engines. From here on, Serve's router tells who is there."""
        first = FirstCall(b"", self.note)
        return pickle.loads(await self._handle.describe.remote(first))

    async def open(self, placement: Placement) -> None:
        """Begin, and return when a replica is there."""
        self.placement, self._is_open = placement, True
        self._update(self._candidates)
        while not self.is_any_there:
            await asyncio.sleep(A_MOMENT)

    async def close(self) -> None:
        """What is left at the replicas is aborted."""
        self._is_open = False
        tasks = [*self._followers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_any_there(self) -> bool:
        """Whether a request can be sent."""
        return bool(self.placement.members.keys() & self._candidates)

    def note(self, names: set[str]) -> None:
        """In the thread of Serve's router: these are the candidates at present."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self._update, names)

    def lose(self, name: str) -> None:
        """Nothing that comes from there is taken any more. Idempotent."""
        if name in self.placement.members:
            self.placement.leave(name)
            self._lost(name)

    def leave_if_done(self, name: str | None) -> None:
        """A replica that is being stopped may finish what it has, and is then left."""
        is_stopping = name in self._followers and name not in self._candidates
        if is_stopping and self._is_idle(name):
            self._followers[name].cancel()

    async def reach(self, name: str, method: str, content: bytes) -> Any:
        """What a replica's method returns; None if it is gone."""
        response = getattr(self._handle, method).remote(Call(content, name))
        told = asyncio.ensure_future(_outcome(response))
        try:
            while not (await asyncio.wait({told}, timeout=HEARD_EVERY))[0]:
                if name not in self.placement.members:
                    return None
            return told.result()
        except NotThereError:
            return None
        except CALL_ERRORS as error:
            logger.warning("replica %s could not be asked: %r", name, error)
            return None
        finally:
            cancel(response)
            told.cancel()

    def _update(self, names: set[str]) -> None:
        self._candidates = names
        if self._is_open:
            for name in names - self._followers.keys():
                self._followers[name] = self._loop.create_task(self._follow(name))
            for name in self._followers.keys() - names:
                self.leave_if_done(name)

    async def _follow(self, name: str) -> None:
        """Take what a replica tells, as long as it does."""
        stream = self._streams.listen.remote(Call(self._own_name, name))
        try:
            num_kv_blocks, blocks = pickle.loads(await anext(stream))
            number = self.placement.join(name, num_kv_blocks).number
            logger.info("replica %d is there: %s", number, name)
            self._hearing[name] = self._loop.create_task(self._keep_hearing(name))
            if self._is_paused:
                await self.reach(name, "pause", pickle.dumps(True))
            if blocks is not None:
                self.placement.note_blocks(name, blocks, ())
            async for content in stream:
                self._take(name, *pickle.loads(content))
        except CALL_ERRORS as error:
            logger.warning("replica %s is lost: %r", name, error)
        except StopAsyncIteration:
            logger.warning("replica %s has nothing to tell", name)
        finally:
            cancel(stream)
            if name in self._hearing:
                self._hearing.pop(name).cancel()
            self.lose(name)
            del self._followers[name]
            # If it still is a candidate, it may be there again.
            self._loop.call_later(_AGAIN_AFTER, lambda: self._update(self._candidates))

    async def _keep_hearing(self, name: str) -> None:
        """Tell a replica again and again that somebody waits for what it computes."""
        while True:
            began = time.monotonic()
            asked = asyncio.ensure_future(self.reach(name, "hear", self._own_name))
            try:
                # Waits are counted: whoever was stopped together with all replicas, as on a
                # machine that slept, has waited once, however long that took.
                for _ in range(_MOST_MISSED):
                    if (await asyncio.wait({asked}, timeout=HEARD_EVERY))[0]:
                        break
                else:
                    seconds = time.monotonic() - began
                    logger.warning("replica %s has not answered for %.0f s", name, seconds)
                    self._followers[name].cancel()
                    return
            finally:
                asked.cancel()
            told = asked.result()
            if told is not None:
                self.placement.note_others(name, *told)
            await asyncio.sleep(HEARD_EVERY)


def cancel(response: Any) -> None:
    """End a call of Serve's, if it has not ended; one that has failed would raise here."""
    with contextlib.suppress(*CALL_ERRORS):
        response.cancel()


async def _outcome(response: Any) -> Any:
    """Of a call of Serve's; one that nobody waits for any more is no error."""
    with contextlib.suppress(RequestCancelledError):
        return await response
