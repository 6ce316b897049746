"""A thread that owns an engine, executes commands and steps, and posts tokens and outputs."""

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from nanoserve.engine.executor import ExecutorDeadError
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.features.parallel.heartbeat import BEAT, WorkWatch
from nanoserve.llm import LLM
from nanoserve.outputs import RequestOutput
from nanoserve.serve.token_stream import NewTokens, TokenFeed

logger = logging.getLogger(__name__)

_NUM_TRIES = 2  # attempts at a step before the requests in it are aborted
_MOST_FAILURES = 6  # consecutive failed steps before the engine is stopped

# Limits on the commands executed between two steps while there is work, so that a client that
# sends commands without end does not starve other clients. A call may take milliseconds, any other
# command microseconds.
_MOST_ORDERS = 1024
_MOST_CALLS = 1

Done = Callable[[Any, Exception | None], None]  # receives the result of a call, or its error


class EngineDeadError(RuntimeError):
    """Raised if the engine has failed or was shut down. Its error, if any, is the cause."""

    def __init__(self, message: str = "the engine is not running") -> None:
        super().__init__(message)


class EngineAsleepError(RuntimeError):
    """Raised for a request to an engine that sleeps; its message says which parts are missing."""


class News(NamedTuple):
    """The updates of a step: new tokens of followed requests (see `TokenFeed`), and outputs."""

    tokens: list[NewTokens]
    outputs: list[RequestOutput]


class EngineThread:
    """Owns an engine in this process, as a thread that has exclusive access to it.

    Commands from other threads are executed in order, between two steps.

    `post` is called once per step with its updates, and with None when the thread has ended. A step
    that raises leaves the engine unchanged, so it is repeated; if it raises again, the requests in
    it end with that error and the other requests continue. After six consecutive failed steps the
    engine is stopped, and `error` is the cause. A dead executor stops the engine at once, even
    between two steps, because a second thread monitors the executor and the duration of steps and
    calls.
    """

    def __init__(self, llm: LLM, post: Callable[[News | None], None]) -> None:
        self.error: BaseException | None = None
        self.is_running = True
        self.engine = llm.engine
        self._llm, self._post = llm, post
        self._feed = TokenFeed()
        self.engine.observers.append(self._feed)
        self.engine.listeners.append(self._feed)
        self._orders: SimpleQueue[partial[None] | None] = SimpleQueue()
        self._num_failures = 0
        self._is_paused = False
        self._work, self._has_ended = WorkWatch(), threading.Event()
        # A daemon, so that a program that does not call `shutdown` can still exit.
        self._thread = threading.Thread(target=self._run, name="nanoserve engine", daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, name="nanoserve watch", daemon=True)
        self._watcher.start()

    @property
    def stall(self) -> str | None:
        """Reason why the current step or call is considered hung; None if it is not."""
        return self._work.stall

    @property
    def backlog(self) -> int:
        """Number of waiting sequences minus free slots of the next step; may be negative."""
        scheduler = self.engine.scheduler
        num_slots = scheduler.max_num_seqs - len(scheduler.running)
        return len(scheduler.waiting) + self._orders.qsize() - num_slots

    def add(self, request: Request, is_followed: bool) -> None:
        """Queue a request; if it is followed, its new tokens are posted after each step."""
        self._orders.put(partial(self._add, request, is_followed))

    def abort(self, request_id: str) -> None:
        """Abort a request; its last output is posted. An unknown id is ignored."""
        self._orders.put(partial(self._abort, request_id))

    def pause(self, is_paused: bool) -> None:
        """Stop or resume stepping. During a pause, requests keep their state and new ones wait."""
        self._orders.put(partial(self._pause, is_paused))

    def call(self, function: Callable[[GuardedEngine], Any], done: Done) -> None:
        """Call `function(engine)`, and then `done` with its result or its error."""
        self._orders.put(partial(self._call, function, done))

    def call_llm(self, function: Callable[[LLM], Any], done: Done) -> None:
        """Call `function(llm)` as `call` does, for methods that only the engine's `LLM` has."""
        self.call(lambda _: function(self._llm), done)

    def stop(self) -> None:
        """Execute earlier commands, abort the remaining requests, and close the engine."""
        # The caller may be the garbage collector, which does not wait; but the interpreter must not
        # tear torch down while this thread runs.
        atexit.register(self.join)
        self._orders.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end, at most `timeout` seconds; do not wait for a hung step.

        Returns True if it has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._thread.is_alive() and self.stall is None:
            left = BEAT if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            self._thread.join(min(left, BEAT))
        if self._thread.is_alive():
            return False
        self._watcher.join()
        return True

    def _add(self, request: Request, is_followed: bool) -> None:
        if is_followed:
            self._feed.follow(request)
        self.engine.add(request)

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort_request(request_id)
        if output is not None:
            self._hand_out([output])

    def _pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _call(self, function: Callable[[GuardedEngine], Any], done: Done) -> None:
        try:
            with self._work.work():
                result = function(self.engine)
        except Exception as error:
            done(None, error)
        else:
            done(result, None)

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._step()
        except BaseException as error:
            self.error = error
            logger.critical("the engine has failed and is stopped", exc_info=error)
        finally:
            self.is_running = False
            if self.error is not None:  # readers must not wait until a broken executor is closed
                self._post(None)
            try:
                with self._work.work():
                    self._llm.close()
            finally:
                if self.error is None:
                    self._post(None)
                self._has_ended.set()
                atexit.unregister(self.join)

    def _watch(self) -> None:
        """Detect a step that hangs and an executor that dies while idle, in a separate thread."""
        looked, is_reported = time.monotonic(), False
        while not self._has_ended.wait(BEAT):
            now = time.monotonic()
            self._work.look(now - looked)
            looked = now
            # Only executors with several processes have this attribute.
            failure = getattr(self.engine.executor, "failure", None)
            if failure is not None and not is_reported:
                self._orders.put(partial(self._die, failure))
                is_reported = True

    def _die(self, failure: str) -> None:
        raise ExecutorDeadError(failure)

    def _take_orders(self) -> bool:
        """Execute queued commands, within limits; if there is no other work, wait for one.

        Returns False if the thread is to stop.
        """
        num_orders = num_calls = 0
        while not (is_busy := self._has_work()) or not self._orders.empty():
            if is_busy and (num_orders >= _MOST_ORDERS or num_calls >= _MOST_CALLS):
                break
            order = self._orders.get()
            if order is None:
                return False
            num_orders += 1
            num_calls += order.func == self._call
            order()
            del order  # otherwise its objects stay alive until the next command arrives
        return is_busy

    def _has_work(self) -> bool:
        return not self._is_paused and self.engine.has_unfinished_requests()

    def _step(self) -> None:
        try:
            with self._work.work():
                outputs = self.engine.step()
        except ExecutorDeadError:
            raise
        except Exception as error:
            self._num_failures += 1
            if self._num_failures == _MOST_FAILURES:
                raise
            logger.exception("a step has failed (consecutive failures: %d)", self._num_failures)
            was_last = self._num_failures % _NUM_TRIES == 0
            outputs = self._give_up(error) if was_last else []
        else:
            self._num_failures = 0
        self._hand_out(outputs)

    def _give_up(self, error: Exception) -> list[RequestOutput]:
        """Abort the requests of the step that raised `error`; return their last outputs."""
        aborted = map(self.engine.abort_request, getattr(error, "request_ids", ()))
        return [replace(output, error=error) for output in aborted if output is not None]

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        news = News(self._feed.take(), outputs)
        if any(news):
            self._post(news)
