"""Who gets which output, where several readers share one engine."""

import weakref
from collections import deque
from collections.abc import Iterator

from nanoserve.engine.interrupts import DeferredInterrupt
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import RequestOutput


class Streams:
    """Several streams may be read in turn: whichever is asked first runs the engine for all."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._unread: dict[str, deque[RequestOutput]] = {}  # by request
        self._readers: dict[str, weakref.ref[Iterator[RequestOutput]]] = {}

    def drop_dead(self) -> None:
        """End the requests of streams that a Ctrl-C has ended before they could do so."""
        for request_id, reader in list(self._readers.items()):
            stream = reader()
            if stream is None or stream.gi_frame is None:
                self._close(request_id)

    def check_others(self) -> None:
        """Raise `ValueError` if the engine has requests that no stream will read."""
        self.drop_dead()
        if not set(self._engine.output_processor.requests) <= set(self._unread):
            raise ValueError("requests are unfinished: step the engine to its end first")

    def open(self, request: Request) -> Iterator[RequestOutput]:
        """Queue `request` and yield its outputs. Dropping the stream, even unread, aborts it."""
        stream = self._read(request)
        self._readers[request.request_id] = weakref.ref(stream)
        next(stream)  # as far as the bare `yield`: from here on, its `finally` will run
        return stream

    def _read(self, request: Request) -> Iterator[RequestOutput]:
        request_id, engine = request.request_id, self._engine
        unread = self._unread[request_id] = deque()
        try:
            engine.add(request)
            yield  # to `open`
            finished = False
            while not finished:
                is_over = False
                while not unread:
                    if is_over:
                        return  # aborted by somebody else, or the engine is closed
                    # Its last output may wait in the engine, because the step that brought it has
                    # raised: the next one hands it out.
                    is_over = request_id not in engine.output_processor.requests
                    if engine.has_unfinished_requests():
                        self._advance()
                    elif not is_over:
                        raise RuntimeError(f"request {request_id!r} was lost: see earlier errors")
                output = unread.popleft()
                finished = output.finished
                yield output
                if output.error is not None:
                    raise output.error
        finally:
            self._close(request_id)

    def _close(self, request_id: str) -> None:
        """Nothing of the request is left. Idempotent."""
        self._engine.withdraw([request_id])
        self._unread.pop(request_id, None)
        self._readers.pop(request_id, None)

    def _advance(self) -> None:
        """Step the engine: each stream gets its own, the rest waits for whoever else steps it."""
        streams = set(self._unread)
        with DeferredInterrupt(gives_way=False):  # or outputs of others would be lost
            for output in self._engine.step():
                unread = self._unread.get(output.request_id)
                if unread is not None:
                    unread.append(output)
                elif output.request_id not in streams:  # else it was collected just now
                    self._engine.hand_back([output])
