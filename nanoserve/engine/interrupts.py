"""What must not be left half done: Ctrl-C waits for its end, and so does whoever else wants in."""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class DeferredInterrupt:
    """Holds a Ctrl-C back until the block that it falls into is over.

    Inside a block, an exception could strike between two lines that belong together, such as
    taking a block from the free queue and noting who has it. A block that may take long
    `gives_way` to a second one. Only Python's own handler is replaced, and only in the main
    thread, where signals arrive. Blocks may be nested: each hands over to the one around it.
    """

    # Blocks of this process that hold one back now; whoever makes them wait may look. A second
    # Ctrl-C may strike in any line below, and a block that is gone must not be counted for ever.
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


@contextmanager
def recovery(engine: Any) -> Iterator[list[Any]]:
    """Whatever breaks out of this block, an `LLMEngine` is left at the end of its last step.

    A plan that the block makes goes on the list at once, for it may never be launched.
    """
    planned: list[Any] = []
    try:
        yield planned
    except BaseException as error:
        with DeferredInterrupt(gives_way=False):
            from nanoserve.engine.recovery import recover

            recover(engine, error, planned)
        raise


class Turns:
    """One at a time inside: threads wait for each other, and nobody is interrupted.

    Whoever is inside may come in again, as an observer does that adds a request. What must not wait
    and must not disturb either goes through `soon`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._due: deque[Callable[[], Any]] = deque()

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is."""
        return self._lock._is_owned()  # which is what `threading.Condition` asks

    @contextmanager
    def turn(self, gives_way: bool = False) -> Iterator[None]:
        if self.is_inside:
            yield
            return
        try:
            # In this order: a Ctrl-C may end the wait for somebody else's turn.
            with self._lock, DeferredInterrupt(gives_way):
                yield
        finally:
            self._look_again()

    def soon(self, action: Callable[[], T], late: Callable[[], Any] | None = None) -> T | None:
        """What `action` returns, at once; if anybody is inside, `late` is done when they are out.

        It never waits, so a finalizer may call it: in any thread, at any moment.
        """
        result = None
        with DeferredInterrupt(gives_way=False):
            try:
                if not self.is_inside and self._lock.acquire(blocking=False):
                    try:
                        result = action()
                    finally:
                        self._lock.release()
                else:
                    self._due.append(late or action)
            finally:
                self._look_again()
        return result

    def do_due(self) -> None:
        """What has been asked for in the meantime; for those who are inside."""
        while self._due:
            self._due.popleft()()

    def _look_again(self) -> None:
        """Whoever comes out does what is due, or leaves it to whoever is inside by now."""
        while self._due and not self.is_inside:
            with DeferredInterrupt(gives_way=False):
                if not self._lock.acquire(blocking=False):
                    return
                try:
                    self.do_due()
                finally:
                    self._lock.release()
