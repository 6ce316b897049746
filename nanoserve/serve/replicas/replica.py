"""A replica is an engine in a process of Ray Serve, shared by any number of ingresses.

An ingress sends each request with a call that lasts as long as the request. Serve counts these
calls, scales the number of replicas by them, waits for their end before it stops a replica, and
cancels the call of a client that has disconnected. An ingress reads the results of all its requests
from a single stream. Sending a message through Ray takes 0.5 ms on either side, so a stream per
request would cost more than a small model; instead, the updates of 10 ms share one message.
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
from nanoserve.serve.engine_thread import EngineDeadError, EngineThread, News
from nanoserve.serve.replicas.block_events import BlockEvents
from nanoserve.serve.replicas.messages import expected_output
from nanoserve.serve.replicas.output_queue import Outbox

logger = logging.getLogger(__name__)

HEARD_EVERY = 1.0  # seconds between two heartbeats of an ingress
_LOST_AFTER = 15.0  # seconds without a heartbeat before the requests of an ingress are aborted
_INTERVAL = 0.01  # least time between two messages, in seconds


class Ingress:
    """An ingress as a replica sees it, with its running requests and its output queue."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self._silence, self._looked = 0.0, time.monotonic()
        self.num_listeners = 0
        # Each request, and a future that is done when the request has ended.
        self.running: dict[str, tuple[Request, asyncio.Future[None]]] = {}

    def heartbeat(self) -> None:
        """Record a heartbeat of the ingress."""
        self._silence, self._looked = 0.0, time.monotonic()

    def is_lost(self) -> bool:
        """Return True if there was no heartbeat for too long. Called about once a second.

        Between two calls, at most two seconds are counted: after a longer time, this process itself
        was stopped, possibly together with the ingress.
        """
        now = time.monotonic()
        self._silence += min(now - self._looked, 2 * HEARD_EVERY)
        self._looked = now
        return self._silence > _LOST_AFTER

    @property
    def work(self) -> tuple[int, int]:
        """The number of running sequences, and their expected number of tokens."""
        requests = [request for request, _ in self.running.values()]
        num_tokens = sum(len(one.prompt_token_ids) + expected_output(one) for one in requests)
        return sum(len(one.sequences) for one in requests), num_tokens


class Replica:
    """A replica of an engine. It takes `model` and `options` like `LLM`.

    measure: called with the engine before the first request. is_exact: if True, the cache and evict
    events of the prefix cache are sent to all ingresses. plan: description of the application,
    returned by the method `plan`.

    All methods except `check_health` take the content of a `Call`.
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
        self._blocks: set[bytes] = set()  # cached blocks according to all events sent so far
        measure(self._engine)
        gc.collect()
        gc.freeze()  # loaded objects stay alive; each full collection would scan them for 200 ms
        self._ingresses: dict[str, Ingress] = {}
        self._ingress_of: dict[str, Ingress] = {}  # by request
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posted: deque[News | None] = deque()  # not delivered yet
        self._is_woken = False
        self._thread = EngineThread(llm, self._post)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine has failed or a step hangs.

        Serve calls this periodically, except for replicas that are being stopped. It also aborts
        the requests of ingresses without heartbeats.
        """
        self._check_is_running()
        if self._thread.stall is not None:
            raise EngineDeadError(self._thread.stall)
        for name, ingress in list(self._ingresses.items()):
            if ingress.is_lost():
                self._abort_all(ingress)
                if not ingress.num_listeners and not ingress.running:
                    del self._ingresses[name]

    async def describe(self, content: bytes) -> bytes:
        """Return the pickled arguments of `EngineFront`, which an ingress needs for requests."""
        engine = self._engine
        front = (engine.config, engine.model_config, engine.tokenizer)
        return pickle.dumps((*front, engine.input_processor.max_model_len))

    async def plan(self, content: bytes) -> str:
        """Return the description of the application, see `nanoserve.serve.replicas.app.plan_of`."""
        return self._plan

    async def generate(self, content: bytes) -> None:
        """Compute a request; return when its last output is in the queue of its ingress."""
        self._check_is_running()
        name, clocks, request, is_followed = pickle.loads(content)
        request_id, ingress = request.request_id, self._join(name)
        if request_id in self._ingress_of:
            raise RuntimeError(f"request_id={request_id!r} is already running in this replica")
        # Monotonic clocks of different machines have different origins; the time of day has not.
        shift = (time.perf_counter() - time.time()) - (clocks[0] - clocks[1])
        request.sequences[0].metrics.arrival_time += shift
        is_over = asyncio.get_running_loop().create_future()
        ingress.running[request_id] = request, is_over
        self._ingress_of[request_id] = ingress
        self._thread.add(request, is_followed)
        try:
            await is_over
        except asyncio.CancelledError:
            self._thread.abort(request_id)  # its last output is sent as usual
            raise

    async def listen(self, content: bytes) -> AsyncIterator[bytes]:
        """Yield the updates of an ingress's requests, until the ingress stops reading.

        The first item is the number of KV blocks and, for exact routing, the cached blocks.
        """
        ingress = self._join(pickle.loads(content))
        ingress.num_listeners += 1
        try:
            blocks = None if self._events is None else list(self._blocks)
            yield pickle.dumps((self._engine.scheduler.block_manager.num_blocks, blocks))
            # Ends for a lost ingress: Serve waits for open streams before it stops a replica.
            while ingress.running or not ingress.is_lost():
                if await ingress.outbox.wait(1):
                    yield pickled(ingress.outbox.take())
                    await asyncio.sleep(_INTERVAL)
        finally:
            ingress.num_listeners -= 1
            if not ingress.num_listeners:
                self._abort_all(ingress)

    async def heartbeat(self, content: bytes) -> tuple[int, int]:
        """Record a heartbeat of an ingress; return the load of all other ingresses here.

        The load is a number of sequences and their expected number of tokens.
        """
        own = self._join(pickle.loads(content))
        own.heartbeat()
        others = [one.work for one in self._ingresses.values() if one is not own]
        return sum(number for number, _ in others), sum(work for _, work in others)

    async def pause(self, content: bytes) -> bytes:
        self._thread.pause(pickle.loads(content))
        return pickle.dumps((None, None))

    async def call(self, content: bytes) -> bytes:
        """Call a pickled function with the engine; return the pickled (value, error)."""
        self._check_is_running()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[bytes] = loop.create_future()

        def done(value: Any, error: Exception | None) -> None:
            loop.call_soon_threadsafe(_settle, result, pickled((value, error)))

        self._thread.call(partial(_call, content), done)
        answer = await result
        self._send_blocks()  # the function may have reset the prefix cache
        return answer

    def _check_is_running(self) -> None:
        if not self._thread.is_running:
            raise EngineDeadError(f"the engine has failed: {self._thread.error!r}")

    def _join(self, name: str) -> Ingress:
        self._loop = asyncio.get_running_loop()  # Serve runs all methods in one event loop
        return self._ingresses.setdefault(name, Ingress())

    def _abort_all(self, ingress: Ingress) -> None:
        if ingress.running:
            logger.warning("an ingress is lost: its %d requests are aborted", len(ingress.running))
        for request_id in ingress.running:
            self._thread.abort(request_id)

    def _post(self, news: News | None) -> None:
        """Receive the updates of a step, in the engine's thread; None is the end of all updates."""
        self._posted.append(news)
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: the loop below may miss updates that are posted from now on
        while self._posted:
            news = self._posted.popleft()
            if news is None:
                self._note_end()
                return
            for new in news.tokens:
                self._ingress_of[new.request_id].outbox.add_tokens(new)
            for output in news.outputs:
                self._hand_out(output)
        self._send_blocks()

    def _send_blocks(self) -> None:
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
        """Fail all calls, because the engine has failed; Serve starts another replica."""
        for ingress in self._ingresses.values():
            for _, is_over in ingress.running.values():
                if not is_over.done():
                    is_over.set_exception(EngineDeadError("the engine has failed"))


def _call(function: bytes, engine: GuardedEngine) -> Any:
    """Unpickle and call a function of the engine.

    Unpickling happens here, so that its errors are reported like any other error of the call.
    """
    return pickle.loads(function)(engine)


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)
