"""Ctrl-C between steps, never inside one."""

import signal
import threading


class DeferredInterrupt:
    """Holds a Ctrl-C back until the block that it falls into is over; a second one goes through.

    Inside a block, an exception could strike between two lines that belong together, such as
    taking a block from the free queue and noting who has it. Only Python's own handler is
    replaced, and only in the main thread, where signals arrive.
    """

    num_held = 0  # blocks of this process that hold one back now; whoever makes them wait may look

    def __enter__(self) -> "DeferredInterrupt":
        self._requested = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._holds = (
            in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._holds:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, signum: int, frame: object) -> None:
        self._requested = True
        DeferredInterrupt.num_held += 1
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        DeferredInterrupt.num_held -= self._requested
        if self._requested and exc_type is None:
            raise KeyboardInterrupt
