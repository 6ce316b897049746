"""A fleet of replicas, which owns the engines of an `AsyncLLM` that has several.

It sends each request to a replica through Ray Serve, and posts the results. A replica may fail at
any moment. Its requests without output are then computed by another replica. Requests with output
end with an error, because the client has already received the beginning of an output that another
replica would not continue in the same way. Serve starts a new replica, which joins when it reports
itself.
"""

import asyncio
import contextlib
import logging
import pickle
import random
import threading
import time
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.serve.engine_process import EngineFront
from nanoserve.serve.engine_thread import Done, EngineDeadError, News
from nanoserve.serve.replicas.discovery import A_MOMENT, CALL_ERRORS, Following, cancel
from nanoserve.serve.replicas.messages import Order
from nanoserve.serve.replicas.output_queue import news_of
from nanoserve.serve.replicas.routing import Placement
from nanoserve.serve.token_stream import NewTokens

logger = logging.getLogger(__name__)

_LATE = 5.0  # seconds that the last output of a request may take after the end of its call
_LONGEST_ABSENCE = 600.0  # seconds without any replica before waiting requests fail
_MOST_FAILURES = 2  # replicas that may fail with a request, which may be the cause, before it fails


class Fleet:
    """Owns the engines of `handle`, with the interface of `EngineThread`.

    See `EngineThread` for `post` and the methods without a docstring. All work is done in one
    thread with its own event loop.
    """

    def __init__(self, handle: DeploymentHandle, post: Callable[[News | None], None]) -> None:
        self.error: BaseException | None = None
        self.is_running = True
        self.stall: str | None = None  # always None: Serve stops a replica that hangs
        self._handle, self._post = handle, post
        self._orders: dict[str, Order] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}  # by replica: keeps its calls in order
        self._loop = asyncio.new_event_loop()
        ours = self._loop, self._take, self._lose, self._is_idle
        self._following = Following(handle, *ours)
        self._thread = threading.Thread(target=self._run, name="nanoserve fleet", daemon=True)
        self._thread.start()
        try:
            self.engine = EngineFront(*self._wait_for(self._following.describe()))
            self._rng = random.Random(self.engine.config.seed)
            self._placement = Placement(self.engine.config)
            self._wait_for(self._following.open(self._placement))
        except BaseException:
            self.stop()
            raise
        self._soon(lambda: self._start(self._watch_absence()))

    @property
    def name(self) -> str:
        """The name of this ingress, different from the names of all other ingresses."""
        return self._following.name

    @property
    def backlog(self) -> int:
        return self._placement.backlog

    @property
    def replicas(self) -> dict[int, str]:
        """Serve's names of the available replicas, by their numbers, which users see."""
        members = dict(self._placement.members)
        return {member.number: name for name, member in members.items()}

    def add(self, request: Request, is_followed: bool) -> None:
        params = request.params
        if params.seed in (None, -1):  # drawn here: all replicas would draw the same seeds
            params.seed = self._rng.getrandbits(64)
        clocks = time.perf_counter(), time.time()
        content = pickle.dumps((self.name, clocks, request, is_followed))
        self._soon(self._add, Order(request, content, self._placement.choose))

    def abort(self, request_id: str) -> None:
        self._soon(self._abort, request_id)

    def pause(self, is_paused: bool) -> None:
        self._following.pause(is_paused)
        self._soon(self._call_all, "pause", pickle.dumps(is_paused), _ignore)

    def call(self, function: Callable[[GuardedEngine], Any], done: Done) -> None:
        """Call `function` in the engines of all replicas; `done` gets {number: result}."""
        self._soon(self._call_all, "call", pickle.dumps(function), done)

    def call_one(self, number: int, function: Callable[[GuardedEngine], Any], done: Done) -> None:
        """Call `function` in one replica; `done` gets a `ValueError` if it does not exist."""
        self._soon(self._call_one, number, pickle.dumps(function), done)

    def stop(self) -> None:
        self._soon(self._stop)

    def join(self) -> None:
        self._thread.join()

    # The methods below run in the fleet's own thread.

    def _soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        # In a new context: within the context of a request that Serve has delivered, Serve takes
        # every call for that same request, and sends only one of two concurrent ones.
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments, context=Context())

    def _wait_for(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self.is_running = False
            self._loop.close()
            self._post(None)

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the event loop itself keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    def _stop(self) -> None:
        self.is_running = False
        self._loop.create_task(self._end([*self._tasks]))

    async def _end(self, tasks: list["asyncio.Task[None]"]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._following.close()
        self._loop.stop()

    # ---------------------------------------------------------------- requests

    def _add(self, order: Order) -> None:
        self._orders[order.request.request_id] = order
        self._placement.hash(order)
        self._start(self._carry(order))

    def _abort(self, request_id: str) -> None:
        order = self._orders.get(request_id)
        if order is not None:
            order.is_aborted = True
            if order.response is not None:
                cancel(order.response)

    async def _carry(self, order: Order) -> None:
        """Send a request to a replica, and after a failure to another, until it has ended."""
        error: Exception | None = None
        while not (order.is_over or order.is_aborted):
            order.response = self._handle.generate.remote(order)
            try:
                await order.response
                error = None
                break
            except CALL_ERRORS as raised:
                error = raised
            except asyncio.CancelledError:
                cancel(order.response)
                raise
            if order.is_aborted or not self._may_try_again(order, error):
                break
            while not (order.is_over or order.is_aborted or self._following.is_any_there):
                await asyncio.sleep(A_MOMENT)
        if error is None or order.is_aborted:
            await self._wait_for_end(order)
        if not order.is_over and order.is_aborted:
            indexes = range(order.num_sequences)
            aborted = [CompletionOutput(index, "", [], "abort") for index in indexes]
            self._finish(order, aborted, None)
        elif not order.is_over:
            self._give_up(order, "the replica that computed this request has failed; try again")

    def _may_try_again(self, order: Order, error: Exception) -> bool:
        """Return True if a request may be sent again after an error.

        A failed replica receives no requests until it reports itself again.
        """
        name = order.replica
        if name is None:
            return True  # the replica was lost before it had the request
        if isinstance(error, RayTaskError) and not isinstance(error, EngineDeadError):
            logger.error("replica %s has rejected a request", name, exc_info=error)
            return False
        self._following.lose(name)
        self._placement.release(order)
        order.num_failures += 1
        return not order.num_tokens and order.num_failures < _MOST_FAILURES

    async def _wait_for_end(self, order: Order) -> None:
        """Wait for the last output, which may arrive by the stream after the call has ended."""
        end = time.monotonic() + _LATE
        while not order.is_over and order.replica is not None and time.monotonic() < end:
            await asyncio.sleep(A_MOMENT)

    def _lose(self, name: str) -> None:
        """Cancel the calls to a replica that has terminated or stopped sending."""
        for order in self._orders.values():
            if order.replica == name and order.response is not None:
                cancel(order.response)

    async def _watch_absence(self) -> None:
        """End all requests with an error if there is no replica for too long."""
        last_seen = time.monotonic()
        while True:
            if self._placement.members:
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > _LONGEST_ABSENCE:
                for order in list(self._orders.values()):
                    problem = f"no replica has been available for {_LONGEST_ABSENCE:.0f} seconds"
                    self._give_up(order, problem)
            await asyncio.sleep(1)

    def _give_up(self, order: Order, problem: str) -> None:
        self._finish(order, [], EngineDeadError(problem))

    def _finish(
        self, order: Order, outputs: list[CompletionOutput], error: Exception | None
    ) -> None:
        """End a request whose end no replica has reported."""
        request = order.request
        metrics = request.sequences[0].metrics
        whole = request.request_id, request.prompt, request.prompt_token_ids, outputs, True, metrics
        self._close(order)
        self._post(News([], [RequestOutput(*whole, error=error)]))
        if order.response is not None:
            cancel(order.response)

    def _close(self, order: Order) -> None:
        order.is_over = True
        name = order.replica
        self._placement.release(order)
        del self._orders[order.request.request_id]
        self._following.leave_if_done(name)

    def _take(
        self,
        name: str,
        tokens: list[Any],
        outputs: list[RequestOutput],
        stored: list[bytes],
        removed: list[bytes],
    ) -> None:
        """Process the updates of a replica, except for requests that moved to another replica."""
        received, is_here = news_of(tokens, outputs), partial(self._is_at, name)
        news = News([*filter(is_here, received.tokens)], [*filter(is_here, received.outputs)])
        for new in news.tokens:
            self._placement.note_tokens(self._orders[new.request_id], len(new.token_ids))
        for output in news.outputs:
            order = self._orders[output.request_id]
            if output.finished:
                self._close(order)
            else:
                num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
                self._placement.note_tokens(order, num_tokens)
        if stored or removed:
            self._placement.note_blocks(name, stored, removed)
        if any(news):
            self._post(news)

    def _is_at(self, name: str, item: NewTokens | RequestOutput) -> bool:
        order = self._orders.get(item.request_id)
        return order is not None and order.replica == name

    def _is_idle(self, name: str) -> bool:
        return all(order.replica != name for order in self._orders.values())

    # ---------------------------------------------------------------- calls to the engines

    def _call_all(self, method: str, content: bytes, done: Done) -> None:
        self._start(self._gather(method, content, done))

    def _call_one(self, number: int, content: bytes, done: Done) -> None:
        self._start(self._call_replica(number, content, done))

    async def _gather(self, method: str, content: bytes, done: Done) -> None:
        replicas = self.replicas
        calls = (self._in_turn(name, method, content) for name in replicas.values())
        answers = dict(zip(replicas, await asyncio.gather(*calls), strict=True))
        results = {number: answer for number, answer in answers.items() if answer is not None}
        errors = [error for _, error in results.values() if error is not None]
        values = {number: value for number, (value, _) in results.items()}
        done(values, errors[0] if errors else None)

    async def _call_replica(self, number: int, content: bytes, done: Done) -> None:
        replicas = self.replicas
        if number not in replicas:
            done(None, ValueError(f"replica={number} must be one of {sorted(replicas)}"))
            return
        result = await self._in_turn(replicas[number], "call", content)
        done(*result or (None, EngineDeadError(f"replica {number} has failed")))

    async def _in_turn(self, name: str, method: str, content: bytes) -> Any:
        """Call a method of a replica, in the order of the calls; return (value, error).

        Returns None if the replica has terminated.
        """
        async with self._turns.setdefault(name, asyncio.Lock()):
            while any(one.is_aborted and one.replica == name for one in self._orders.values()):
                await asyncio.sleep(A_MOMENT)  # earlier aborts are executed before this call
            result = await self._following.reach(name, method, content)
            return None if result is None else pickle.loads(result)


def _ignore(value: Any, error: Exception | None) -> None:
    """Ignore the result of a call."""
