"""What one task reads of what an engine puts out."""

import asyncio
from typing import TYPE_CHECKING, Union

from nanoserve.engine.request import Request
from nanoserve.features.streams import merged_deltas
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.serve.engine_thread import EngineThread
from nanoserve.serve.token_stream import FollowedRequest, NewTokens, can_follow
from nanoserve.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from nanoserve.serve.engine_process import EngineProcess

EngineOwner = Union[EngineThread, "EngineProcess"]


class EngineDeadError(RuntimeError):
    """The engine has failed for good, or was shut down. What it has died of is the cause."""

    def __init__(self, told: str = "the engine is not running") -> None:
        super().__init__(told)


class OutputReader:
    """What is new of some requests, for the one task that reads it.

    However late that reads, at most one output of each request waits for it. A reader that is
    closed or dropped aborts those of its requests that have not ended.

    Whoever reads is woken when one of the requests has brought its first token, `stream_interval`
    more than were read of it, or its end.
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
        self._num_due = dict.fromkeys(self._are_deltas, 1)  # tokens at which it is to be read
        self._is_due = False
        self._waiter: asyncio.Future[None] | None = None

    def follows(self, request: Request) -> bool:
        """Whether tokens are enough, of which outputs are made here."""
        return request.request_id in self._followed

    @property
    def is_over(self) -> bool:
        """Whether every request has ended, and all that came of them was read."""
        return not self._unread and not self._are_deltas

    async def read(self) -> list[RequestOutput]:
        """Wait for something new: an output of each request that has one. `wake` ends the wait."""
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
        """Return the news of a request whose text is made here; an error of it ends the request."""
        output = followed.output()
        if followed.error is not None and self._are_deltas.pop(request_id, None) is not None:
            self._owner.abort(request_id)
        return output

    def take(self, output: RequestOutput) -> None:
        """Keep an output until it is read."""
        request_id = output.request_id
        followed, earlier = self._followed.get(request_id), self._unread.get(request_id)
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        if followed is not None:
            if followed.error is not None:
                return  # it has ended here before
            followed.end(output)
        elif self._are_deltas.get(request_id):
            num_tokens += self._num_tokens[request_id]
            if earlier is not None:
                output = merged_deltas(earlier, output)
        self._unread[request_id] = followed or output
        if output.finished:
            self._are_deltas.pop(request_id, None)
        self._note(request_id, num_tokens, output.finished)

    def take_tokens(self, new: NewTokens) -> None:
        """Keep tokens until they are read, and become text only then."""
        followed = self._followed[new.request_id]
        if followed.error is not None:
            return  # it has ended here before
        followed.add(new)
        self._unread[new.request_id] = followed
        num_tokens = self._num_tokens[new.request_id] + len(new.token_ids)
        self._note(new.request_id, num_tokens, new.finish_reason is not None)

    def _note(self, request_id: str, num_tokens: int, is_over: bool) -> None:
        """A request has that many tokens by now."""
        self._num_tokens[request_id] = num_tokens
        if is_over or num_tokens >= self._num_due[request_id]:
            self._is_due = True
            self.wake()

    def wake(self) -> None:
        """End the wait of whoever reads."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Idempotent, and what the garbage collector does."""
        while self._are_deltas:
            request_id, _ = self._are_deltas.popitem()
            self._owner.abort(request_id)
            if request_id in self._followed:
                self._followed[request_id].forget()

    __del__ = close
