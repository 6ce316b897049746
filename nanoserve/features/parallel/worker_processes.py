"""Start, communicate with, and shut down the worker processes of the other ranks.

They are started as `python -m nanoserve.features.parallel.tp_worker`, so that a plain script needs
no `if __name__ == "__main__"`. Pipes and shared memory have no names, so the workers inherit their
file descriptors.
"""

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ExecutorDeadError
from nanoserve.engine.interrupts import DeferredInterrupt
from nanoserve.features.parallel.heartbeat import BEAT, Pulse

T = TypeVar("T")

# Numbers that no step has.
PING = 2**32 - 1  # a worker replies when it waits for steps
LOAD_WEIGHTS = 2**32 - 2  # with the folder
USE_WEIGHTS = 2**32 - 3
DROP_WEIGHTS = 2**32 - 4
CALL_FUNCTION = 2**32 - 5  # with the number of the call and its order
CHECK_WEIGHTS = 2**32 - 6  # with the folder
REPLACE_WEIGHTS = 2**32 - 7  # with the folder
COPY_BLOCKS = 2**32 - 8  # with the `KVTransfers` of the step that is announced next
TAKE_EMBEDS = 2**32 - 9  # with the `StepEmbeds` of the step that is announced next
USE_ADAPTERS = 2**32 - 10  # with the `AdapterRows` of the step that is announced next
WEIGHT_ORDERS = (CHECK_WEIGHTS, LOAD_WEIGHTS, REPLACE_WEIGHTS, USE_WEIGHTS, DROP_WEIGHTS)
_GRACE = 5.0  # seconds for a worker to exit by itself
_HURRY = 2.0  # limit of silence in seconds while the caller waits for the end
_FOR_EVER = 1e9  # seconds


class WorkerError(ExecutorDeadError):
    """Another rank failed or died, so the engine is no longer usable. The message says why."""


class Workers:
    """Starts, monitors and shuts down the processes of ranks 1, 2, ...

    Each has three pipes. `steps` carries the number of the step to run next, or an order with the
    size of its content and the content. Nothing is written on `life`, which is closed when this
    process terminates. On `status` the worker writes lines of JSON with the state it has reached or
    an error; an empty line is a heartbeat. A worker that sends no heartbeat for `timeout` seconds
    is considered hung, and killed.
    """

    def __init__(
        self,
        size: int,
        job: dict[str, Any],
        files: dict[str, int],
        num_threads: int,
        timeout: float,
    ) -> None:
        """`files` are descriptors of memory that all ranks share, by name."""
        self.failure: str | None = None  # reason why the workers cannot be used any more
        self._on_failure: Callable[[], None] = lambda: None
        # Start and end of each step of a traced pipeline, by (step, rank).
        self.spans: dict[tuple[int, int], list[float]] = {}
        self._messages: queue.Queue[tuple[int, str]] = queue.Queue()  # (rank, state)
        self.refusals: dict[int, str] = {}  # by rank, why it could not load the last weights
        self._num_calls = 0
        self._answers: dict[tuple[int, int], dict[str, Any]] = {}  # by number of the call and rank
        self._timeout = timeout
        self._is_closing = False
        self.are_built = False
        self._processes: list[Any] = []  # `subprocess.Popen`, or an object with its methods
        self._steps: list[int] = []
        self._statuses: dict[int, int] = {}  # file descriptor -> rank
        try:
            self._start_all(size, job, files, num_threads)
            threading.Thread(target=self._listen, daemon=True).start()
        except BaseException:
            self.close()
            for fd in self._statuses:
                self._close_status(fd)
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Call `function` once when the workers fail."""
        self._on_failure = function

    def wait_for(self, state: str, timeout: float) -> None:
        """Wait until every worker has reported `state`. Raises `WorkerError` if one does not."""
        late = self._late(state, timeout)
        if late:
            self.fail(f"ranks {late} have not reported {state!r} after {timeout:.0f} seconds")
            self.check()
        if state == "built":
            self.are_built = True

    def watch(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and return its result.

        Raises `WorkerError` as soon as a worker fails, since `work` may wait for it.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while True:
            try:
                return future.result(timeout=0.02)
            except FutureTimeoutError:
                self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise WorkerError(self.failure)
        if self._is_closing:
            raise WorkerError("the ranks of this engine have been closed")

    def announce(self, batch: Batch) -> None:
        """Make every worker run the step of `batch`, which is packed in shared memory."""
        self.check()
        self._send_number(batch.step.to_bytes(4, "little"))

    def send_order(self, order: int, content: bytes = b"") -> None:
        """Make every worker follow an order, such as `LOAD_WEIGHTS`, after the announced steps."""
        self.check()
        self.refusals.clear()
        size = len(content).to_bytes(4, "little")
        self._send_number(order.to_bytes(4, "little") + size + content)

    def send_call(self, order: bytes) -> None:
        """Make every worker call a function after the announced steps; see `answers`."""
        self._num_calls += 1
        self._answers.clear()
        self.send_order(CALL_FUNCTION, self._num_calls.to_bytes(8, "little") + order)

    def answers(self, timeout: float | None) -> dict[int, dict[str, Any]]:
        """Wait up to `timeout` seconds for the answers to the last call; return those that came.

        None waits without a limit. Raises `WorkerError` if a worker fails. An answer that comes
        after `timeout` is dropped.
        """
        self._late(f"called {self._num_calls}", _FOR_EVER if timeout is None else timeout)
        answers = list(self._answers.items())
        return {rank: answer for (call, rank), answer in answers if call == self._num_calls}

    def _send_number(self, message: bytes) -> None:
        for fd in self._steps:
            try:
                left = memoryview(message)
                while left:  # a signal may end a long write
                    left = left[os.write(fd, left) :]
            except BrokenPipeError:
                self.explain()
                self.check()

    def explain(self, timeout: float = 2.0) -> None:
        """Wait up to `timeout` seconds for the reason of a failure to arrive."""
        deadline = time.monotonic() + timeout
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def are_waiting(self, timeout: float) -> bool:
        """Return True if all workers finish the announced steps within `timeout` seconds.

        A busy worker replies when it has finished. A worker that waits for rank 0 in a step that
        rank 0 has left does not reply. Returns False after a failure, too.
        """
        with contextlib.suppress(queue.Empty):
            while True:  # discard late replies to an earlier ping
                self._messages.get_nowait()
        try:
            self.check()
            self._send_number(PING.to_bytes(4, "little"))
            return not self._late("waiting", timeout)
        except WorkerError:
            return False

    def fail(self, reason: str) -> None:
        """Record why the workers cannot be used any more, and wake waiting threads.

        Only the first reason is kept.
        """
        if self.failure is None:
            self.failure = f"the ranks of this engine: {reason}"
            self._messages.put((0, "failed"))  # wakes a thread that waits for a state
            self._on_failure()

    def close(self) -> None:
        """End all workers. Workers that wait for a step exit by themselves; others are killed."""
        if self._is_closing:
            return
        self._is_closing = True
        try:
            self._close_steps()
            # Until its model is built, a worker does not read steps.
            self._join(_GRACE if self.are_built and not self.failure else 0.0)
        finally:
            self._end_lives()
            try:
                self._join(_GRACE)
            finally:
                for process in self._processes:
                    process.kill()
                    process.wait()

    def forget(self) -> None:
        """Close the descriptors that keep the workers alive, in a fork of the owning process."""
        self._is_closing = True
        self.failure = "this engine belongs to another process; use spawn instead of fork"
        self._close_steps()
        self._end_lives()
        for fd in self._statuses:
            with contextlib.suppress(OSError):  # closed before the fork
                os.close(fd)

    def _late(self, state: str, timeout: float) -> list[int]:
        """Return the ranks that have not reported `state` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        waiting = set(range(1, len(self._processes) + 1))
        while waiting:
            self.check()
            try:
                left = max(0.0, deadline - time.monotonic())
                rank, reached = self._messages.get(timeout=left)
            except queue.Empty:
                break
            if reached == state:
                waiting.discard(rank)
        return sorted(waiting)

    def _close_steps(self) -> None:
        while self._steps:
            os.close(self._steps.pop())

    def _join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _end_lives(self) -> None:
        """Close the `life` pipe, whose end makes workers exit immediately."""
        with contextlib.suppress(OSError):  # closed before the fork
            os.close(self._life)

    def _start_all(
        self, size: int, job: dict[str, Any], files: dict[str, int], num_threads: int
    ) -> None:
        """Start all workers, and enter each in `_processes`, `_steps` and `_statuses`."""
        life, self._life = os.pipe()
        try:
            for rank in range(1, size):
                self._start(job | {"rank": rank}, {"life": life, **files}, num_threads)
        finally:
            os.close(life)

    def _start(self, job: dict[str, Any], shared: dict[str, int], num_threads: int) -> None:
        steps_there, steps_here = os.pipe()
        status_here, status_there = os.pipe()
        self._steps.append(steps_here)
        self._statuses[status_here] = job["rank"]
        fds = shared | {"steps": steps_there, "status": status_there}
        package = str(Path(__file__).parents[3])
        search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        settings = {"PYTHONPATH": search, "OMP_NUM_THREADS": str(num_threads)}
        settings["PYTHONSAFEPATH"] = "1"  # modules in the current folder must not shadow others
        arguments = json.dumps(job | {"fds": fds}, default=str)
        command = [sys.executable, "-m", "nanoserve.features.parallel.tp_worker", arguments]
        try:
            process = subprocess.Popen(
                command,
                env=os.environ | settings,
                pass_fds=list(fds.values()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal must reach only the caller
            )
            self._processes.append(process)
        finally:
            os.close(steps_there)
            os.close(status_there)

    def _listen(self) -> None:
        """Read the reports of workers until all have ended. This runs in a separate thread."""
        with selectors.DefaultSelector() as selector:
            unread = dict.fromkeys(self._statuses, b"")
            pulses: dict[int, Pulse] = {}  # by rank, from its first heartbeat on
            reporting: set[int] = set()
            for fd in self._statuses:
                selector.register(fd, selectors.EVENT_READ)
            looked = time.monotonic()
            while unread:
                for key, _ in selector.select(BEAT):
                    fd, rank = key.fd, self._statuses[key.fd]
                    data = self._read(fd)
                    *lines, unread[fd] = (unread[fd] + data).split(b"\n")
                    for line in filter(None, lines):
                        self._receive(rank, json.loads(line))
                    if data:
                        reporting.add(rank)
                        pulses.setdefault(rank, self._pulse(rank))
                        continue
                    selector.unregister(fd)
                    self._close_status(fd)
                    del unread[fd]
                    pulses.pop(rank, None)
                    self._note_end(rank)
                elapsed = time.monotonic() - looked
                if elapsed >= BEAT:
                    for rank, pulse in pulses.items():
                        pulse.look(elapsed, rank in reporting)
                        self._judge(rank, pulse)
                    looked += elapsed
                    reporting.clear()

    def _pulse(self, rank: int) -> Pulse:
        return Pulse(self.pids[rank - 1])

    def _judge(self, rank: int, pulse: Pulse) -> None:
        """Kill a worker that has been silent for too long."""
        is_awaited = self._is_closing or len(DeferredInterrupt.holding) > 0
        # Silence starts up to two beats late; subtracted so that it is found within the given time.
        if pulse.silence < (_HURRY if is_awaited else self._timeout - 2 * BEAT):
            return
        if not self._is_closing:
            self.fail(
                f"rank {rank}, process {pulse.pid}, has sent no heartbeat for "
                f"{pulse.silence:.0f} seconds, as if it were stopped, and was killed"
            )
        self._processes[rank - 1].kill()

    def _close_status(self, fd: int) -> None:
        os.close(fd)

    def _read(self, fd: int) -> bytes:
        return os.read(fd, 1 << 16)

    def _receive(self, rank: int, message: dict[str, Any]) -> None:
        if "error" in message:
            self.fail(f"rank {rank} failed:\n{message['error']}")
        elif "answer" in message:
            self._answers[message["call"], rank] = message["answer"]
        elif "refusal" in message:
            self.refusals[rank] = message["refusal"]
        elif "span" in message:
            self.spans[message["step"], rank] = message["span"]
        else:
            self._messages.put((rank, message["state"]))

    def _note_end(self, rank: int) -> None:
        if not self._is_closing:
            status = self._processes[rank - 1].wait()
            status_text = (
                f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
            )
            self.fail(f"rank {rank} {status_text}")
