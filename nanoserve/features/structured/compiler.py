"""Compile grammars in background threads, with a cache that requests share."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from nanoserve.features.structured.check_process import start_thread
from nanoserve.features.structured.grammar import Backend, CompiledGrammar, Source

_NUM_THREADS = 2
_STACK = 64 * 2**20  # bytes per thread; see `limits.py`
_MOST_BYTES = 256 * 2**20  # size of the cache of compiled grammars, used or not

_Orders = SimpleQueue[Callable[[], None] | None]


class Compiler:
    """Compiles grammars in daemon threads, so that no step waits for a compilation.

    The backend is made when the first grammar is compiled.
    """

    def __init__(self, make_backend: Callable[[], Backend], most_bytes: int = _MOST_BYTES) -> None:
        self._make_backend, self._most_bytes = make_backend, most_bytes
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._kept: OrderedDict[Source, CompiledGrammar] = OrderedDict()  # latest use last (LRU)
        self._num_bytes = 0
        self._under_way: dict[Source, Future[CompiledGrammar]] = {}
        self._orders: _Orders = SimpleQueue()
        self._num_threads = 0
        # The threads refer to the queue only, so a compiler without other references is freed.
        self._end = weakref.finalize(self, _end, self._orders)

    def compile(self, source: Source) -> "Future[CompiledGrammar]":
        """Return the future of a compiled grammar, which is done at once if the grammar is cached.

        If the grammar cannot be compiled, the future's exception is a `ValueError`.
        """
        with self._lock:
            if source in self._under_way:
                return self._under_way[source]
            future: Future[CompiledGrammar] = Future()
            if source in self._kept:
                self._kept.move_to_end(source)
                future.set_result(self._kept[source])
                return future
            self._under_way[source] = future
            self._orders.put(partial(self._compile, source, future))
            if self._num_threads < min(_NUM_THREADS, len(self._under_way)):
                self._num_threads += 1
                start_thread(_run, (self._orders,), _STACK, "nanoserve grammars")
        return future

    def close(self) -> None:
        """Let the threads end once all queued grammars are compiled. Idempotent."""
        self._end()

    def _compile(self, source: Source, future: "Future[CompiledGrammar]") -> None:
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


def _run(orders: _Orders) -> None:
    while (order := orders.get()) is not None:
        order()
        del order  # it refers to the compiler, which this thread must not keep alive


def _end(orders: _Orders) -> None:
    for _ in range(_NUM_THREADS):
        orders.put(None)
