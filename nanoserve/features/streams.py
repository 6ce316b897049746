"""Streams give several readers of one engine the outputs of their requests."""

import weakref
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput


def merged_deltas(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Merge two consecutive deltas of one request. `earlier` is modified and must not be reused.

    So at most one output waits for a slow reader, however many there were.
    """
    completions = {completion.index: completion for completion in earlier.outputs}
    for new in later.outputs:
        before = completions.setdefault(new.index, new)
        if before is not new:
            versions = _merged_versions(before, new)
            before.token_ids += new.token_ids
            if before.logprobs is not None and new.logprobs is not None:
                before.logprobs += new.logprobs
            completions[new.index] = replace(
                new,
                text=before.text + new.text,
                token_ids=before.token_ids,
                logprobs=before.logprobs,
                weights_versions=versions,
            )
    return replace(later, outputs=[completions[index] for index in sorted(completions)])


def _merged_versions(
    before: CompletionOutput, new: CompletionOutput
) -> list[tuple[int, int | str]]:
    """Return the `weights_versions` of two consecutive deltas together."""
    num_before, versions = len(before.token_ids), before.weights_versions.copy()
    for start, version in new.weights_versions:
        if versions and versions[-1][0] == num_before + start:
            versions.pop()  # it has made no token
        if not versions or versions[-1][1] != version:
            versions.append((num_before + start, version))
    return versions


_Stream = Generator[RequestOutput, None, None]


class Streams:
    """The streams of one engine, read in turn or in threads. A waiting reader steps it for all."""

    def __init__(self, engine: GuardedEngine) -> None:
        self._engine = engine
        self._readers: dict[str, weakref.ref[_Stream]] = {}  # by request

    def drop_dead(self) -> None:
        """End the requests of streams that Ctrl-C ended before they could clean up themselves."""
        for request_id, reader in list(self._readers.items()):
            stream: Any = reader()
            if stream is None or stream.gi_frame is None:
                self._close(request_id)

    def check_others(self) -> None:
        """Raise `ValueError` if the engine has requests that no stream will read."""
        self.drop_dead()
        requests = self._engine.output_processor.requests
        for request_id in list(requests):
            # Streams may begin and end in other threads: they subscribe before they add a request,
            # and unsubscribe after it has ended.
            if not self._engine.is_subscribed(request_id) and request_id in requests:
                raise ValueError(
                    "the engine has unfinished requests; step it until they finish, or abort them"
                )

    def open(self, request: Request) -> Iterator[RequestOutput]:
        """Queue `request` and return an iterator over its outputs. Dropping it aborts `request`."""
        stream = self._read(request)
        self._readers[request.request_id] = weakref.ref(stream)
        next(stream)  # run up to the bare `yield`, so that its `finally` will run
        return stream

    def _read(self, request: Request) -> "_Stream":
        request_id, engine = request.request_id, self._engine
        unread = engine.subscribe(request_id)
        try:
            engine.add(request)
            yield  # type: ignore[misc]  # to `open`, which drops it
            finished = False
            while not finished:
                while not unread:
                    # Another thread may be in a step. `has_unfinished_requests` waits for its end;
                    # a request that was over before it has its last output in the queue by then.
                    is_over = request_id not in engine.output_processor.requests
                    has_work = engine.has_unfinished_requests()
                    if is_over and not unread:
                        return  # aborted by another caller, or the engine is closed
                    if not has_work and request_id in engine.output_processor.requests:
                        raise RuntimeError(
                            f"request {request_id!r} was lost because of an earlier error"
                        )
                    if engine.pause.is_by_this_thread:
                        raise ValueError(
                            "this thread has paused generation, and would wait for itself to "
                            "resume it: call resume_generation() first"
                        )
                    engine.step(fetch=False)
                output = unread.popleft()
                finished = output.finished
                yield output
                if output.error is not None:
                    raise output.error
        finally:
            self._close(request_id)

    def _close(self, request_id: str) -> None:
        """Abort the request and remove its reader. Idempotent."""
        self._engine.withdraw([request_id])
        self._readers.pop(request_id, None)
