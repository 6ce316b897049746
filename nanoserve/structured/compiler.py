"""Grammars, compiled aside and kept: requests with the same schema share one."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from nanoserve.structured.grammar import Backend, CompiledGrammar
from nanoserve.structured.source import Source

_NUM_THREADS = 2
_MOST_BYTES = 256 * 2**20  # of compiled grammars that nobody may need any more


class Compiler:
    """Compiles in threads of its own, which keep neither a program from its end nor a step waiting.

    The backend is made when the first grammar is asked for.
    """

    def __init__(self, make_backend: Callable[[], Backend], most_bytes: int = _MOST_BYTES) -> None:
        self._make_backend, self._most_bytes = make_backend, most_bytes
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._kept: OrderedDict[Source, CompiledGrammar] = OrderedDict()  # the last used last
        self._num_bytes = 0
        self._under_way: dict[Source, Future[CompiledGrammar]] = {}
        self._orders: SimpleQueue[tuple[Source, Future[CompiledGrammar]] | None] = SimpleQueue()
        self._num_threads = 0

    def compile(self, source: Source) -> "Future[CompiledGrammar]":
        """It is done at once if this grammar was compiled lately, or ends with a `ValueError`."""
        with self._lock:
            if source in self._under_way:
                return self._under_way[source]
            future: Future[CompiledGrammar] = Future()
            if source in self._kept:
                self._kept.move_to_end(source)
                future.set_result(self._kept[source])
                return future
            self._under_way[source] = future
            self._orders.put((source, future))
            if self._num_threads < min(_NUM_THREADS, len(self._under_way)):
                self._num_threads += 1
                threading.Thread(target=self._run, name="nanoserve grammars", daemon=True).start()
        return future

    def close(self) -> None:
        for _ in range(_NUM_THREADS):
            self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            source, future = order
            try:
                with self._making:
                    if self._backend is None:
                        self._backend = self._make_backend()
                compiled = self._backend.compile(source)
            except Exception as error:
                self._note(source, None)
                future.set_exception(error)
            else:
                self._note(source, compiled)
                future.set_result(compiled)

    def _note(self, source: Source, compiled: CompiledGrammar | None) -> None:
        with self._lock:
            del self._under_way[source]
            if compiled is None or compiled.num_bytes > self._most_bytes:
                return
            self._kept[source] = compiled
            self._num_bytes += compiled.num_bytes
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
