"""One replica: an engine in a process of Ray Serve's, for any number of ingresses.

An ingress gives it requests, each with a call that lasts as long as the request: Serve counts them,
scales by them, lets them end before it stops a replica, and cancels the one whose client has gone.
What comes of all its requests an ingress reads from one stream. To send a token through Ray takes
0.5 ms on either side, so a stream for each request would cost more than a small model itself; here
it is one message for all that has come within 10 ms.
"""

import asyncio
import gc
import logging
import pickle
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.llm import LLM
from nanoserve.outputs import RequestOutput
from nanoserve.serve.engine_process import LOG_FORMAT, pickled
from nanoserve.serve.engine_thread import EngineThread, News
from nanoserve.serve.replicas.block_events import BlockEvents
from nanoserve.serve.replicas.messages import expected_output
from nanoserve.serve.replicas.output_queue import Outbox
from nanoserve.serve.response_stream import EngineDeadError

logger = logging.getLogger(__name__)

HEARD_EVERY = 1.0  # seconds between two signs of life of an ingress
_LOST_AFTER = 15.0  # seconds without one, and what it wanted is aborted
_INTERVAL = 0.01  # seconds between two messages, at least


class Ingress:
    """Somebody who gives requests."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self._silence, self._looked = 0.0, time.monotonic()
        self.num_listeners = 0
        self.running: dict[str, tuple[Request, asyncio.Future[None]]] = {}  # done when it has ended

    def hear(self) -> None:
        """It has said something."""
        self._silence, self._looked = 0.0, time.monotonic()

    def is_lost(self) -> bool:
        """Tell whether it has been silent for too long. Called about once a second.

        From one look to the next, no more than two seconds count: if it was longer, this process
        was stopped itself, perhaps together with the ingress.
        """
        now = time.monotonic()
        self._silence += min(now - self._looked, 2 * HEARD_EVERY)
        self._looked = now
        return self._silence > _LOST_AFTER

    @property
    def work(self) -> tuple[int, int]:
        """Sequences, and about how many tokens they are."""
        requests = [request for request, _ in self.running.values()]
        num_tokens = sum(len(one.prompt_token_ids) + expected_output(one) for one in requests)
        return sum(len(one.sequences) for one in requests), num_tokens


class Replica:
    """`model` and `options` are those of `LLM`; `measure` gets the engine before any request.

    `is_exact`: tell all ingresses which blocks the prefix cache gains and loses. `plan` is told to
    who asks for it. All methods but `check_health` take what a `Call` has as its content.
    """

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        measure: Callable[[GuardedEngine], None],
        is_exact: bool,
        plan: str = "",
    ) -> None:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        llm = LLM(model, **options)
        self._engine, self._plan = llm.engine, plan
        blocks = self._engine.scheduler.block_manager
        self._events = BlockEvents(blocks) if is_exact else None
        self._blocks: set[bytes] = set()  # all that was told of them
        measure(self._engine)
        gc.collect()
        gc.freeze()  # what is loaded stays; to look through all of it again would take 200 ms
        self._ingresses: dict[str, Ingress] = {}
        self._ingress_of: dict[str, Ingress] = {}  # by request
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posted: deque[News | None] = deque()  # and not delivered yet
        self._is_woken = False
        self._thread = EngineThread(llm, self._post)

    async def check_health(self) -> None:
        """Serve asks this again and again, of all but those that it is about to stop; and of those
        an ingress is not heard any more. Raises `EngineDeadError`, too, for a step that hangs."""
        self._check_is_running()
        if self._thread.stall is not None:
            raise EngineDeadError(self._thread.stall)
        for name, ingress in list(self._ingresses.items()):
            if ingress.is_lost():
                self._abort_all(ingress)
                if not ingress.num_listeners and not ingress.running:
                    del self._ingresses[name]

    async def describe(self, content: bytes) -> bytes:
        """What an ingress must know to make requests: what an `EngineFront` is made of."""
        engine = self._engine
        told = (engine.config, engine.model_config, engine.tokenizer)
        return pickle.dumps((*told, engine.input_processor.max_model_len))

    async def plan(self, content: bytes) -> str:
        """What it was made of: see `nanoserve.serve.replicas.app.plan_of`."""
        return self._plan

    async def generate(self, content: bytes) -> None:
        """Take a request, and return when the last of it is on its way to its ingress."""
        self._check_is_running()
        name, clocks, request, is_followed = pickle.loads(content)
        request_id, ingress = request.request_id, self._join(name)
        if request_id in self._ingress_of:
            raise RuntimeError(f"{request_id} is here already")
        # Elsewhere, a monotonic clock has another beginning; the time of day has not.
        shift = (time.perf_counter() - time.time()) - (clocks[0] - clocks[1])
        request.sequences[0].metrics.arrival_time += shift
        is_over = asyncio.get_running_loop().create_future()
        ingress.running[request_id] = request, is_over
        self._ingress_of[request_id] = ingress
        self._thread.add(request, is_followed)
        try:
            await is_over
        except asyncio.CancelledError:
            self._thread.abort(request_id)  # its last output comes as ever
            raise

    async def listen(self, content: bytes) -> AsyncIterator[bytes]:
        """Yield what comes of an ingress's requests, until it does not want to know any more.

        First the size of the KV pool and, where that is to be exact, all blocks that are cached.
        """
        ingress = self._join(pickle.loads(content))
        ingress.num_listeners += 1
        try:
            blocks = None if self._events is None else list(self._blocks)
            yield pickle.dumps((self._engine.scheduler.block_manager.num_blocks, blocks))
            # Where the ingress is no more, Serve would wait for this before it stops the replica.
            while ingress.running or not ingress.is_lost():
                if await ingress.outbox.wait(1):
                    yield pickled(ingress.outbox.take())
                    await asyncio.sleep(_INTERVAL)
        finally:
            ingress.num_listeners -= 1
            if not ingress.num_listeners:
                self._abort_all(ingress)

    async def hear(self, content: bytes) -> tuple[int, int]:
        """An ingress lives. What the others have here: sequences, and tokens of work."""
        own = self._join(pickle.loads(content))
        own.hear()
        others = [one.work for one in self._ingresses.values() if one is not own]
        return sum(number for number, _ in others), sum(work for _, work in others)

    async def pause(self, content: bytes) -> bytes:
        self._thread.pause(pickle.loads(content))
        return pickle.dumps((None, None))

    async def call(self, content: bytes) -> bytes:
        """What a pickled function of the engine has returned, or raised: (value, error)."""
        self._check_is_running()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[bytes] = loop.create_future()

        def done(value: Any, error: Exception | None) -> None:
            loop.call_soon_threadsafe(_settle, result, pickled((value, error)))

        self._thread.call(partial(_call, content), done)
        told = await result
        self._tell_blocks()  # it may have been a reset of the cache
        return told

    def _check_is_running(self) -> None:
        if not self._thread.is_running:
            raise EngineDeadError(f"the engine has died: {self._thread.error!r}")

    def _join(self, name: str) -> Ingress:
        self._loop = asyncio.get_running_loop()  # all methods run in this one
        return self._ingresses.setdefault(name, Ingress())

    def _abort_all(self, ingress: Ingress) -> None:
        if ingress.running:
            logger.warning("nobody waits for %d requests any more", len(ingress.running))
        for request_id in ingress.running:
            self._thread.abort(request_id)

    def _post(self, news: News | None) -> None:
        """In the engine's thread: a step has brought this, or it was the last one."""
        self._posted.append(news)
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: what is posted from here on may be overlooked below
        while self._posted:
            news = self._posted.popleft()
            if news is None:
                self._note_end()
                return
            for new in news.tokens:
                self._ingress_of[new.request_id].outbox.add_tokens(new)
            for output in news.outputs:
                self._hand_out(output)
        self._tell_blocks()

    def _tell_blocks(self) -> None:
        if self._events is not None:
            stored, removed = self._events.take()
            self._blocks.update(stored)
            self._blocks.difference_update(removed)
            for ingress in self._ingresses.values():
                ingress.outbox.add_blocks(stored, removed)

    def _hand_out(self, output: RequestOutput) -> None:
        ingress = self._ingress_of[output.request_id]
        ingress.outbox.add_output(output)
        if output.finished:
            del self._ingress_of[output.request_id]
            _, is_over = ingress.running.pop(output.request_id)
            _settle(is_over, None)

    def _note_end(self) -> None:
        """The engine has died: Serve will start another replica, and this one's calls fail."""
        for ingress in self._ingresses.values():
            for _, is_over in ingress.running.values():
                if not is_over.done():
                    is_over.set_exception(EngineDeadError("the engine has died"))


def _call(function: bytes, engine: GuardedEngine) -> Any:
    """Unpickled only here, so that one that cannot be is an error like others."""
    return pickle.loads(function)(engine)


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)
