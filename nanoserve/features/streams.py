"""Streams: several readers of one engine, each of which gets the outputs of its request."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import RequestOutput


def merged_deltas(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two outputs of one request, both of what was new then, as one; `earlier` is used up for it.

    So whoever does not read for a while has one output waiting, however many there were.
    """
    completions = {completion.index: completion for completion in earlier.outputs}
    for new in later.outputs:
        before = completions.setdefault(new.index, new)
        if before is not new:
            before.token_ids += new.token_ids
            if before.logprobs is not None and new.logprobs is not None:
                before.logprobs += new.logprobs
            completions[new.index] = replace(
                new,
                text=before.text + new.text,
                token_ids=before.token_ids,
                logprobs=before.logprobs,
            )
    return replace(later, outputs=[completions[index] for index in sorted(completions)])


class Streams:
    """Several streams may be read in turn, or in threads: whoever waits runs the engine for all."""

    def __init__(self, engine: GuardedEngine) -> None:
        self._engine = engine
        self._readers: dict[str, weakref.ref[Iterator[RequestOutput]]] = {}  # by request

    def drop_dead(self) -> None:
        """End the requests of streams that a Ctrl-C has ended before they could do so."""
        for request_id, reader in list(self._readers.items()):
            stream = reader()
            if stream is None or stream.gi_frame is None:
                self._close(request_id)

    def check_others(self) -> None:
        """Raise `ValueError` if the engine has requests that no stream will read."""
        self.drop_dead()
        requests = self._engine.output_processor.requests
        for request_id in list(requests):
            # In other threads, streams may begin and end: they subscribe before, and end after.
            if not self._engine.is_subscribed(request_id) and request_id in requests:
                raise ValueError("requests are unfinished: step the engine to its end first")

    def open(self, request: Request) -> Iterator[RequestOutput]:
        """Queue `request` and yield its outputs. Dropping the stream, even unread, aborts it."""
        stream = self._read(request)
        self._readers[request.request_id] = weakref.ref(stream)
        next(stream)  # as far as the bare `yield`: from here on, its `finally` will run
        return stream

    def _read(self, request: Request) -> Iterator[RequestOutput]:
        request_id, engine = request.request_id, self._engine
        unread = engine.subscribe(request_id)
        try:
            engine.add(request)
            yield  # to `open`
            finished = False
            while not finished:
                while not unread:
                    # Another thread may step meanwhile. To ask whether there is work waits for its
                    # end: what was over before has left its last output by then.
                    is_over = request_id not in engine.output_processor.requests
                    has_work = engine.has_unfinished_requests()
                    if is_over and not unread:
                        return  # aborted by somebody else, or the engine is closed
                    if not has_work and request_id in engine.output_processor.requests:
                        raise RuntimeError(f"request {request_id!r} was lost: see earlier errors")
                    engine.step(fetch=False)
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
        self._readers.pop(request_id, None)
