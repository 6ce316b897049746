"""Critical sections, at whose end Ctrl-C takes effect, and for which other threads wait."""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class DeferredInterrupt:
    """Defers Ctrl-C until the end of the block during which it arrives.

    Inside a block, an exception could strike between two lines that belong together, such as taking
    a block from the free queue and counting its reference. With `gives_way=True`, for blocks that
    may take long, a second Ctrl-C interrupts the block. Only Python's own handler is replaced, and
    only in the main thread, where signals arrive. Blocks may be nested: an inner one passes the
    Ctrl-C on to the outer one.
    """

    # Blocks of this process that hold a Ctrl-C back now; code in which they wait reads this set.
    # The references are weak: a second Ctrl-C may strike at any line below, and a block that it
    # has ended must not stay in the set.
    holding: ClassVar["WeakSet[DeferredInterrupt]"] = WeakSet()

    def __init__(self, gives_way: bool = True) -> None:
        self._gives_way = gives_way
        self._requested = False
        self._before: Any = None

    def __enter__(self) -> "DeferredInterrupt":
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if in_main_thread else None
        is_ours = isinstance(getattr(before, "__self__", None), DeferredInterrupt)
        if before is signal.default_int_handler or is_ours:
            self._before = before
            signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, signum: int, frame: object) -> None:
        DeferredInterrupt.holding.add(self)
        self._requested = True
        if self._gives_way:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        DeferredInterrupt.holding.discard(self)
        if self._requested and exc_type is None:
            signal.raise_signal(signal.SIGINT)


class EngineLock:
    """Lets one thread at a time into an engine, and defers calls that must not wait.

    The thread that is inside may enter again, for example an observer that adds a request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that is inside
        self._deferred: deque[Callable[[], Any]] = deque()

    @property
    def is_inside(self) -> bool:
        """True if the calling thread is inside."""
        return self._owner == threading.get_ident()

    @contextmanager
    def turn(self, gives_way: bool = False) -> Iterator[None]:
        """Wait until no other thread is inside. Ctrl-C is raised at the end of the block."""
        if self.is_inside:
            yield
            return
        try:
            # In this order, a Ctrl-C can interrupt the wait for another thread.
            with self._lock, DeferredInterrupt(gives_way):
                try:
                    self._owner = threading.get_ident()
                    yield
                finally:
                    self._owner = None
        finally:
            self._run_what_is_left()

    def call_soon(
        self, action: Callable[[], T], deferred: Callable[[], Any] | None = None
    ) -> T | None:
        """Call `action` and return its result; defer it and return None if a thread is inside.

        The thread inside then calls `deferred`, or `action` without one, at the end of its turn.
        This never waits, so a finalizer may call it in any thread at any time.
        """
        result = None
        with DeferredInterrupt(gives_way=False):
            try:
                if not self.is_inside and self._lock.acquire(blocking=False):
                    result = self._call(action)
                else:
                    self._deferred.append(deferred or action)
            finally:
                self._run_what_is_left()
        return result

    def run_deferred(self) -> None:
        """Run the deferred calls; only for the thread that is inside."""
        while self._deferred:
            self._deferred.popleft()()

    def _call(self, action: Callable[[], T]) -> T:
        """Call `action` as the thread inside, and release the lock that the caller has acquired."""
        try:
            self._owner = threading.get_ident()
            return action()
        finally:
            self._owner = None
            self._lock.release()

    def _run_what_is_left(self) -> None:
        """Run calls deferred in the meantime, or leave them to a thread that is inside by now."""
        while self._deferred and not self.is_inside:
            with DeferredInterrupt(gives_way=False):
                if not self._lock.acquire(blocking=False):
                    return
                self._call(self.run_deferred)
