"""The thread that owns an engine: it takes orders, steps, and posts what has come of it."""

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

_NUM_TRIES = 2  # of a step, before the requests in it are given up
_MOST_FAILURES = 6  # one after another, before the engine is

# Orders that are obeyed between two steps, where there is work: who orders without end must not
# keep all others from their tokens. A call may take milliseconds; another order takes microseconds.
_MOST_ORDERS = 1024
_MOST_CALLS = 1

Done = Callable[[Any, Exception | None], None]  # is told what a call has returned, or raised


class News(NamedTuple):
    """What a step has brought: tokens of requests that are followed, and outputs."""

    tokens: list[NewTokens]
    outputs: list[RequestOutput]


class EngineThread:
    """Nobody else touches the engine while this thread runs; what they order is done in order,
    between two steps.

    `post` gets the news of a step, all at once, and is called once more, with None, when the thread
    has ended. A step that raises has not happened, so it is tried again; if it raises once more,
    the requests in it end with that error, and the others go on. If those fare no better, and their
    successors neither, `error` says what the engine has died of. An executor that is dead is the
    end at once, also between two steps: another thread looks after it, and at how long a step or a
    call takes.
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
        # A daemon, so that a program that forgets to shut down can still end.
        self._thread = threading.Thread(target=self._run, name="nanoserve engine", daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, name="nanoserve watch", daemon=True)
        self._watcher.start()

    @property
    def stall(self) -> str | None:
        """Why the step or the call under way is taken for hung; None if it is not."""
        return self._work.stall

    @property
    def backlog(self) -> int:
        """Sequences that wait, less those for whom the next step has a slot; below 0 is room."""
        scheduler = self.engine.scheduler
        num_slots = scheduler.max_num_seqs - len(scheduler.running)
        return len(scheduler.waiting) + self._orders.qsize() - num_slots

    def add(self, request: Request, is_followed: bool) -> None:
        """Queue a request; where it is followed, its tokens are posted as they come."""
        self._orders.put(partial(self._add, request, is_followed))

    def abort(self, request_id: str) -> None:
        """End a request; its last output is posted. An id that is unknown is no error."""
        self._orders.put(partial(self._abort, request_id))

    def pause(self, is_paused: bool) -> None:
        """Take no step from here on, or go on. Requests keep what they have, and new ones wait."""
        self._orders.put(partial(self._pause, is_paused))

    def call(self, function: Callable[[GuardedEngine], Any], done: Done) -> None:
        """Call `function(engine)`, and `done` with what it has returned, or raised."""
        self._orders.put(partial(self._call, function, done))

    def stop(self) -> None:
        """Obey what was ordered before, abort what is left, and close the engine."""
        # Nobody may wait for that, as if the collector stops it; but a program that ends must not
        # tear torch down under it.
        atexit.register(self.join)
        self._orders.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end, at most `timeout` seconds, and not for a step that hangs.

        Returns whether it has ended.
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
            logger.critical("the engine has died", exc_info=error)
        finally:
            self.is_running = False
            if self.error is not None:  # nobody should wait for what is left of the executor
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
        """In another thread: notice a step that hangs, and an executor that dies while idle."""
        looked, is_told = time.monotonic(), False
        while not self._has_ended.wait(BEAT):
            now = time.monotonic()
            self._work.look(now - looked)
            looked = now
            # Only executors of several processes have it.
            failure = getattr(self.engine.executor, "failure", None)
            if failure is not None and not is_told:
                self._orders.put(partial(self._die, failure))
                is_told = True

    def _die(self, failure: str) -> None:
        raise ExecutorDeadError(failure)

    def _take_orders(self) -> bool:
        """Obey what there is, within bounds; without other work, wait for some.

        False: it is time to stop.
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
            del order  # else the last one would be kept alive until the next one comes
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
            logger.exception("a step has failed, the %d. in a row", self._num_failures)
            was_last = self._num_failures % _NUM_TRIES == 0
            outputs = self._give_up(error) if was_last else []
        else:
            self._num_failures = 0
        self._hand_out(outputs)

    def _give_up(self, error: Exception) -> list[RequestOutput]:
        """End the requests whose step has raised `error`."""
        aborted = map(self.engine.abort_request, getattr(error, "request_ids", ()))
        return [replace(output, error=error) for output in aborted if output is not None]

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        news = News(self._feed.take(), outputs)
        if any(news):
            self._post(news)
