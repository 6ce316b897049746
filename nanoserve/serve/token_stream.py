"""Detokenize streams in the reading task instead of in the engine's thread.

For a *followed* request, the engine itself produces no output before the end and converts no token
to text. A step observer collects the new tokens, at less than a microsecond each, and the task that
reads the stream converts to text all tokens that have arrived since its last read.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.listeners import RequestListener
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Completion, Request, versions_from
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)


class NewTokens(NamedTuple):
    """The new tokens of one sequence, and its finish reason if it has ended.

    weights_versions: as of the whole output up to now; None if it has not changed since the last
        tokens, which is so unless the weights were replaced.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # of the completion in its request; hides tuple.index
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    weights_versions: list[tuple[int, int | str]] | None = None

    def after(self, earlier: "NewTokens") -> "NewTokens":
        """Return these tokens together with `earlier` ones of the same sequence, not read yet."""
        versions = self.weights_versions or earlier.weights_versions
        token_ids = earlier.token_ids + self.token_ids
        return self._replace(token_ids=token_ids, weights_versions=versions)


def can_follow(request: Request) -> bool:
    """Return True if the outputs of `request` can be made from its tokens alone.

    Stop strings and log-probabilities need the engine.
    """
    params = request.params
    is_delta = params.output_kind is RequestOutputKind.DELTA
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    return is_delta and params.detokenize and not params.stop and not has_logprobs


class TokenFeed(RequestListener):
    """A step observer and request listener that collects the new tokens of followed requests.

    It runs in the engine's thread. The last output of a request contains all of its tokens, so it
    does not matter whether the observer or the listener is called first when a request ends.
    """

    def __init__(self) -> None:
        self._sent: dict[Sequence, _Sent] = {}
        self._sequences: dict[str, list[Sequence]] = {}  # of each request
        self._new: list[NewTokens] = []

    def follow(self, request: Request) -> None:
        """Collect the tokens of a request, which must not be queued yet."""
        request.params.output_kind = RequestOutputKind.FINAL_ONLY
        self._sequences[request.request_id] = request.sequences
        self._sent |= {each.seq: _Sent(each) for each in request.completions}

    def __call__(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        """Collect the new tokens of a finished step."""
        for row in plan.sampled:
            seq = row.seq
            sent = self._sent.get(seq)
            if sent is None:
                continue
            new = seq.token_ids[seq.num_prompt_tokens + sent.num_tokens :]
            sent.num_tokens += len(new)
            if seq.finish_reason is not None:
                del self._sent[seq]
            versions, current = None, sent.completion.weights_versions
            if sent.versions != current:
                sent.versions = versions = current.copy()
            end = seq.finish_reason, seq.stop_reason
            self._new.append(NewTokens(seq.request_id, seq.index, new, *end, versions))

    def on_finish(self, output: RequestOutput) -> None:
        for seq in self._sequences.pop(output.request_id, ()):
            self._sent.pop(seq, None)

    def take(self) -> list[NewTokens]:
        """Return the tokens collected since the last call."""
        new, self._new = self._new, []
        return new


@dataclass
class _Sent:
    """The part of a completion that has been collected."""

    completion: Completion
    num_tokens: int = 0
    versions: list[tuple[int, int | str]] | None = None


@dataclass
class _Completion:
    seq: Sequence  # a local copy: only the engine's thread may access the original
    weights_versions: list[tuple[int, int | str]] = field(default_factory=list)
    num_read: int = 0  # tokens in the outputs so far
    is_end_read: bool = False  # True once an output contained its finish reason


class FollowedRequest:
    """The tokens and text of a followed request, in the task that reads them.

    If detokenization raises, the request ends with that error in `error`.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self.error: Exception | None = None
        self._request, self._detokenizer = request, detokenizer
        params = replace(request.params, output_kind=RequestOutputKind.DELTA)
        # Only the end of the prompt affects the text of the output.
        context = detokenizer.context(request.prompt_token_ids, params)
        self._completions = [
            _Completion(Sequence(request.request_id, [*context], params, 2**31, index=index))
            for index in range(params.n)
        ]
        self._last: RequestOutput | None = None

    def add(self, new: NewTokens) -> None:
        completion = self._completions[new.index]
        seq = completion.seq
        seq.token_ids += new.token_ids
        completion.weights_versions = new.weights_versions or completion.weights_versions
        if new.finish_reason is not None:
            _end(seq, new.finish_reason, new.stop_reason)

    def end(self, output: RequestOutput) -> None:
        """Add the engine's last output of the request, which contains all of its tokens."""
        self._last = output
        for last in output.outputs:
            completion = self._completions[last.index]
            completion.weights_versions = last.weights_versions
            seq = completion.seq
            seq.token_ids += last.token_ids[seq.num_output_tokens :]
            _end(seq, last.finish_reason, last.stop_reason)

    def output(self) -> RequestOutput:
        """Return an output with everything that is new since the last call."""
        request, last, outputs = self._request, self._last, []
        for completion in self._completions:
            seq, num_read = completion.seq, completion.num_read
            if completion.is_end_read or (seq.num_output_tokens == num_read and not seq.finished):
                continue
            completion.num_read, completion.is_end_read = seq.num_output_tokens, seq.finished
            text = self._text(seq)
            outputs.append(
                CompletionOutput(
                    seq.index,
                    text,
                    seq.token_ids[seq.num_prompt_tokens + num_read :],
                    seq.finish_reason,
                    seq.stop_reason,
                    weights_versions=versions_from(completion.weights_versions, num_read),
                )
            )
        if self.error is not None:
            outputs = self._failed(outputs)
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            outputs,
            last is not None or self.error is not None,
            # With an engine process, the local metrics are not updated before the last output.
            request.sequences[0].metrics if last is None else last.metrics,
            error=self.error if last is None else last.error or self.error,
        )

    def forget(self) -> None:
        """Release the detokenizer state of a request that will not be read to its end."""
        for completion in self._completions:
            del completion.seq.token_ids[completion.seq.num_prompt_tokens :]
            self._detokenizer.restart(completion.seq)

    def _text(self, seq: Sequence) -> str:
        """Return the new text of `seq`; "" if detokenization has failed."""
        if self.error is None:
            try:
                self._detokenizer.advance(seq)
                return self._detokenizer.text(seq)
            except Exception as error:
                logger.error("request %r failed", seq.request_id, exc_info=error)
                self.error = error
        return ""

    def _failed(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """Return the last outputs after failed detokenization, for all unfinished completions."""
        new = {output.index: output for output in outputs}
        for completion in self._completions:
            if completion.seq.index in new or not completion.is_end_read:
                _end(completion.seq, "error", None)
                completion.is_end_read = True
                output = new.get(completion.seq.index) or CompletionOutput(
                    completion.seq.index, "", [], None, None
                )
                output.finish_reason, output.stop_reason = "error", None
                new[output.index] = output
        self.forget()
        return [new[index] for index in sorted(new)]


def _end(seq: Sequence, finish_reason: str | None, stop_reason: int | str | None) -> None:
    seq.status = SequenceStatus.FINISHED
    seq.finish_reason, seq.stop_reason = finish_reason, stop_reason
