"""Detect workers that hang, by heartbeats and the CPU time that the system reports.

A process that ends closes its pipes, which is noticed at once. A process that is stopped (SIGSTOP,
a debugger), or that waits forever while it holds the GIL, keeps its pipes open and is silent. A
busy process may look the same, because compiled code may hold the GIL for as long as it computes.
But a busy process uses CPU time, which Linux counts.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT = 0.5  # seconds from one beat to the next
# Work is considered hung after IDLE_LIMIT seconds without processor time, or WORK_LIMIT in total.
# The first compilation of a kernel or a long prompt on a slow CPU takes minutes, but uses processor
# time.
IDLE_LIMIT = 30.0
WORK_LIMIT = 300.0
_BUSY_SHARE = 0.02  # fraction of a processor; a thread that only polls uses less


def beat_for_ever(send: Callable[[], None]) -> None:
    """Send heartbeats from a thread of a worker, until the connection to rank 0 is broken.

    Another thread ends the worker when rank 0 terminates.
    """
    try:
        while True:
            send()
            time.sleep(BEAT)
    except OSError:
        return


class Pulse:
    """Counts the seconds since the last heartbeat of a process (`silence`).

    Time is counted from check to check, but never more than two beats at once. If the last check is
    longer ago, this process itself was stopped, perhaps together with the whole machine, and the
    other process must have time to send heartbeats again.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.silence = pid, 0.0
        self._processor_time = _processor_time(pid)

    def look(self, elapsed: float, received: bool) -> None:
        """Update `silence`, `elapsed` seconds after the last call.

        received: True if data has arrived since then.
        """
        processor_time = _processor_time(self.pid)
        is_alive = received or processor_time != self._processor_time
        self._processor_time = processor_time
        self.silence = 0.0 if is_alive else self.silence + min(elapsed, 2 * BEAT)


class WorkWatch:
    """A stopwatch that measures how long the current piece of one thread's work has been running.

    The watched thread enters `work` around each piece. Another thread calls `look` repeatedly.
    `age` is the number of seconds that the current piece has taken so far. `idle` is the number of
    seconds since it last used CPU time. Time is counted as in `Pulse`, so a process is not
    considered hung when it continues after it was stopped or the machine slept.
    """

    def __init__(self) -> None:
        self.age = self.idle = 0.0
        self._count = self._seen_count = 0  # starts and ends; odd while a piece of work is running
        self._clock: int | None = None  # of the thread's processor time
        self._seen_time = 0.0

    @contextmanager
    def work(self) -> Iterator[None]:
        if self._clock is None and hasattr(time, "pthread_getcpuclockid"):  # macOS does not have it
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._count += 1
        try:
            yield
        finally:
            self._count += 1

    def look(self, elapsed: float) -> None:
        """Update `age` and `idle`, `elapsed` seconds after the last call."""
        count, elapsed = self._count, min(elapsed, 2 * BEAT)
        now = None
        if self._clock is not None:
            with suppress(OSError):  # the thread has ended
                now = time.clock_gettime(self._clock)
        is_same = count % 2 == 1 and count == self._seen_count
        is_idle = now is not None and now - self._seen_time < _BUSY_SHARE * elapsed
        self.age = self.age + elapsed if is_same else 0.0
        self.idle = self.idle + elapsed if is_same and is_idle else 0.0
        self._seen_count, self._seen_time = count, now or 0.0

    @property
    def stall(self) -> str | None:
        """The reason why the work is considered hung, or None."""
        if self.idle >= IDLE_LIMIT:
            return f"the engine's step has computed nothing for {self.idle:.0f} seconds"
        if self.age >= WORK_LIMIT:
            return f"the engine's step has not ended after {self.age:.0f} seconds"
        return None


def _processor_time(pid: int) -> list[str] | None:
    """Return user and kernel time of a process in clock ticks, or None if it is not available."""
    try:
        # The second field is the command in brackets, which may itself contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[11:13]
