"""A pause of an engine: no step runs, and requests keep their state."""

import threading

from nanoserve.utils.checks import check_choice, require

_POLL_SECONDS = 0.05


class Pause:
    """The state of an engine's pause, in which a paused `step` waits for a moment.

    A paused step returns nothing, after a moment, instead of waiting for the end of the pause. So a
    loop of steps in another thread waits, receives the last outputs of requests that are aborted
    meanwhile, and ends when no request is left.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._is_over.set()
        self._thread: int | None = None  # that has paused the engine

    @property
    def is_on(self) -> bool:
        return not self._is_over.is_set()

    @property
    def is_by_this_thread(self) -> bool:
        """True if the calling thread has paused the engine, and so would wait for itself."""
        return self.is_on and self._thread == threading.get_ident()

    def begin(self, in_step: bool) -> None:
        """Begin a pause. in_step: True if the calling thread is in a step, and will wait later."""
        self._thread = None if in_step else threading.get_ident()
        self._is_over.clear()

    def end(self) -> None:
        self._is_over.set()

    def wait_for_a_moment(self) -> None:
        """Wait until the pause ends, but not longer than 50 ms; Ctrl-C is raised."""
        self._is_over.wait(_POLL_SECONDS)


def check_pause_options(mode: str, wait_for_inflight_requests: bool | None) -> None:
    """Raise `ValueError` for arguments of `pause_generation` that are not supported."""
    check_choice("mode", mode, ("abort", "keep"))
    require(
        not wait_for_inflight_requests,
        "wait_for_inflight_requests=True is not supported; await the requests, then pause",
    )
