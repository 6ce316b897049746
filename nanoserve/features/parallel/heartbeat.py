"""Whether a worker lives that says nothing: its beats, and what the system knows of it.

A process that ends closes its pipes, and is noticed at once. One that is stopped (SIGSTOP, a
debugger), or that waits for ever while it holds Python's lock, keeps them open and is silent. A
busy one looks the same from afar: compiled code may hold the lock for as long as it computes. But
it uses processor time, which Linux counts.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT = 0.5  # seconds from one beat to the next
# Work is taken for hung after IDLE_LIMIT seconds without processor time, or WORK_LIMIT in all. The
# first compilation of a kernel or a long prompt on a slow CPU takes minutes, but it computes.
IDLE_LIMIT = 30.0
WORK_LIMIT = 300.0
_BUSY_SHARE = 0.02  # of a processor; a thread that only polls uses less


def beat_for_ever(send: Callable[[], None]) -> None:
    """In a worker, in a thread of its own; until rank 0 is gone, which another thread looks to."""
    try:
        while True:
            send()
            time.sleep(BEAT)
    except OSError:
        return


class Pulse:
    """For how many seconds a process has shown no sign of life: `silence`.

    Time passes from look to look, but never more than two beats at once: if the last look was
    longer ago, then whoever looks was stopped itself, perhaps together with the whole machine, and
    the other must have time to beat again.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.silence = pid, 0.0
        self._processor_time = _processor_time(pid)

    def look(self, elapsed: float, heard: bool) -> None:
        """`elapsed` seconds after the look before, since when something was `heard`, or not."""
        processor_time = _processor_time(self.pid)
        is_alive = heard or processor_time != self._processor_time
        self._processor_time = processor_time
        self.silence = 0.0 if is_alive else self.silence + min(elapsed, 2 * BEAT)


class WorkWatch:
    """Measures how long the work that a thread has begun has not ended.

    `work` is entered by the thread that is watched, around each piece; `look` is called by another
    thread, again and again. `age` are the seconds that the piece under way has taken, `idle` how
    many of the last ones it has used no processor time. Time passes as in `Pulse`: a process that
    was stopped, or a machine that slept, is not taken for hung when it goes on.
    """

    def __init__(self) -> None:
        self.age = self.idle = 0.0
        self._count = self._seen_count = 0  # of beginnings and ends: odd while something is done
        self._clock: int | None = None  # of the thread's processor time
        self._seen_time = 0.0

    @contextmanager
    def work(self) -> Iterator[None]:
        if self._clock is None and hasattr(time, "pthread_getcpuclockid"):  # macOS has it not
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._count += 1
        try:
            yield
        finally:
            self._count += 1

    def look(self, elapsed: float) -> None:
        """`elapsed` seconds after the look before."""
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
        """Why the work is taken for hung; None if it is not."""
        if self.idle >= IDLE_LIMIT:
            return f"the engine's step has computed nothing for {self.idle:.0f} seconds"
        if self.age >= WORK_LIMIT:
            return f"the engine's step has not ended after {self.age:.0f} seconds"
        return None


def _processor_time(pid: int) -> list[str] | None:
    """In user mode and in the kernel, in clock ticks; None where the system does not tell."""
    try:
        # The second field is the command in brackets, which may itself contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[11:13]
