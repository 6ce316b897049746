"""Readers, each of which collects the outputs of some requests for one task."""

import asyncio
from typing import TYPE_CHECKING, Union

from nanoserve.engine.request import Request
from nanoserve.features.streams import merged_deltas
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.serve.engine_thread import EngineDeadError, EngineThread
from nanoserve.serve.token_stream import FollowedRequest, NewTokens, can_follow
from nanoserve.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from nanoserve.serve.engine_process import EngineProcess

EngineOwner = Union[EngineThread, "EngineProcess"]


class OutputReader:
    """Holds the unread outputs of some requests for the one task that reads them.

    A task that reads late finds at most one output per request, into which later outputs were
    merged.
    A reader that is closed or dropped aborts its unfinished requests.

    The task is woken when a request has its first token, has ended, or has `stream_interval` more
    tokens than were read.
    """

    def __init__(
        self,
        owner: EngineOwner,
        requests: list[Request],
        detokenizer: Detokenizer | None,
        stream_interval: int,
    ) -> None:
        self._owner = owner
        delta = RequestOutputKind.DELTA
        self._are_deltas = {r.request_id: r.params.output_kind is delta for r in requests}
        self._followed = {
            request.request_id: FollowedRequest(request, detokenizer)
            for request in requests
            if detokenizer is not None and can_follow(request)
        }
        self._unread: dict[str, RequestOutput | FollowedRequest] = {}
        self._interval = stream_interval
        self._num_tokens = dict.fromkeys(self._are_deltas, 0)
        self._num_due = dict.fromkeys(self._are_deltas, 1)  # token count at which to wake the task
        self._is_due = False
        self._waiter: asyncio.Future[None] | None = None

    def follows(self, request: Request) -> bool:
        """Return True if this reader makes the outputs of `request` from its tokens alone."""
        return request.request_id in self._followed

    @property
    def is_over(self) -> bool:
        """True once every request has finished and all outputs have been read."""
        return not self._unread and not self._are_deltas

    async def read(self) -> list[RequestOutput]:
        """Wait until an output is due, or for `wake`; return one output per request with updates.

        Raises `EngineDeadError` if the engine has ended and nothing is unread.
        """
        if not self._is_due and self._are_deltas:
            if self._owner.is_running:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            elif not self._unread:
                raise EngineDeadError from self._owner.error
        unread, self._unread, self._is_due = self._unread, {}, False
        for request_id in unread:
            self._num_due[request_id] = self._num_tokens[request_id] + self._interval
        return [
            self._output_of(request_id, one) if isinstance(one, FollowedRequest) else one
            for request_id, one in unread.items()
        ]

    def _output_of(self, request_id: str, followed: FollowedRequest) -> RequestOutput:
        """Return the output of a followed request; if making its text fails, abort the request."""
        output = followed.output()
        if followed.error is not None and self._are_deltas.pop(request_id, None) is not None:
            self._owner.abort(request_id)
        return output

    def take(self, output: RequestOutput) -> None:
        """Store an output until it is read."""
        request_id = output.request_id
        followed, earlier = self._followed.get(request_id), self._unread.get(request_id)
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        if followed is not None:
            if followed.error is not None:
                return  # making its text failed, so it has ended here already
            followed.end(output)
        elif self._are_deltas.get(request_id):
            num_tokens += self._num_tokens[request_id]
            if isinstance(earlier, RequestOutput):
                output = merged_deltas(earlier, output)
        self._unread[request_id] = followed or output
        if output.finished:
            self._are_deltas.pop(request_id, None)
        self._note(request_id, num_tokens, output.finished)

    def take_tokens(self, new: NewTokens) -> None:
        """Store tokens until they are read; they are converted to text only then."""
        followed = self._followed[new.request_id]
        if followed.error is not None:
            return  # making its text failed, so it has ended here already
        followed.add(new)
        self._unread[new.request_id] = followed
        num_tokens = self._num_tokens[new.request_id] + len(new.token_ids)
        self._note(new.request_id, num_tokens, new.finish_reason is not None)

    def _note(self, request_id: str, num_tokens: int, is_over: bool) -> None:
        """Record the token count of a request, and wake the task if an output is due."""
        self._num_tokens[request_id] = num_tokens
        if is_over or num_tokens >= self._num_due[request_id]:
            self._is_due = True
            self.wake()

    def wake(self) -> None:
        """End the wait of the reading task."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Abort the unfinished requests. Idempotent; also called by the garbage collector."""
        while self._are_deltas:
            request_id, _ = self._are_deltas.popitem()
            self._owner.abort(request_id)
            if request_id in self._followed:
                self._followed[request_id].forget()

    __del__ = close
