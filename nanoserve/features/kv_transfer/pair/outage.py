"""Outages of a prefill server, in which no request waits for it."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds


class Outage:
    """After a failure the server is not used for a while, which becomes longer with each failure.

    Methods may be called in any thread. clock: returns seconds.
    """

    def __init__(self, server: str, clock: Callable[[], float]) -> None:
        self._server, self._clock = server, clock
        self._lock = threading.Lock()
        self._pause = 0.0  # no outage
        self._since = self._until = clock()

    def may_try(self) -> bool:
        """Return True if the server may be used; in an outage, once after each pause."""
        with self._lock:
            if not self._pause:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause
            return True

    def note_failure(self, began: float, error: Exception) -> None:
        """Note that what `began` at this time has failed."""
        with self._lock:
            if self._pause and began < self._since:
                return  # it began before the last failure, which counts for both
            if not self._pause:
                logger.warning(
                    "prompts are computed here, because the prefill server %s cannot be used: %s",
                    self._server,
                    error,
                )
            self._pause = min(2 * self._pause or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._since = self._clock()
            self._until = self._since + self._pause

    def note_success(self) -> None:
        with self._lock:
            if self._pause:
                logger.warning("the prefill server %s is used again", self._server)
            self._pause = 0.0
