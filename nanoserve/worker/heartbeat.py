"""Whether a worker lives that says nothing: its beats, and what the system knows of it.

A process that ends closes its pipes, and is noticed at once. One that is stopped (SIGSTOP, a
debugger), or that waits for ever while it holds Python's lock, keeps them open and is silent. A
busy one looks the same from afar: compiled code may hold the lock for as long as it computes. But
it uses processor time, which Linux counts.
"""

import time
from collections.abc import Callable
from pathlib import Path

BEAT = 0.5  # seconds from one beat to the next


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


def _processor_time(pid: int) -> list[str] | None:
    """In user mode and in the kernel, in clock ticks; None where the system does not tell."""
    try:
        # The second field is the command in brackets, which may itself contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[11:13]
