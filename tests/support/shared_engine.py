"""One engine for several tests: the processes of its ranks take seconds to start."""

from collections.abc import Callable
from typing import Any

from nanoserve import LLM


class SharedEngine:
    """Gives the engine of certain options, which lives until somebody asks for other ones.

    Whoever gets it finds no cached prefix, no request and no observer of earlier tests; its
    statistics go on, so that tests look at differences.
    """

    def __init__(self, make: Callable[..., LLM]) -> None:
        self._make, self._asked, self._llm = make, None, None
        self._observers: list[Any] = []

    def __call__(self, *args: Any, **options: Any) -> LLM:
        """`make` of these arguments, or what it has returned for them before."""
        asked = args, options
        # A test that has failed may have left requests.
        if self._llm is None or asked != self._asked or self._llm.engine.has_unfinished_requests():
            self.close()
            self._llm, self._asked = self._make(*args, **options), asked
            self._observers = [*self._llm.engine.observers]
        self._llm.engine.observers[:] = self._observers
        self._llm.reset_prefix_cache()
        return self._llm

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.close()
