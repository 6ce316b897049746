"""Streams of text, made where they are read and not where the engine steps.

For the engine, a request that streams is one of those that want nothing before their end: it
decodes no token of it and makes no output. An observer of the steps picks up the new tokens, which
takes less than a microsecond for each, and whoever reads makes text of them: once for all that has
come since.
"""

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.listeners import RequestListener
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)


class NewTokens(NamedTuple):
    """What a step has brought to one sequence."""

    request_id: str
    index: int  # which completion of its prompt
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


def can_follow(request: Request) -> bool:
    """Whether tokens are enough to make its outputs of: stop strings and log-probabilities are
    found where the engine is."""
    params = request.params
    is_delta = params.output_kind is RequestOutputKind.DELTA
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    return is_delta and params.detokenize and not params.stop and not has_logprobs


class TokenFeed(RequestListener):
    """Collects, in the engine's thread, the new tokens of the requests that are followed.

    It is an observer of the steps, too. The last output of a request has all of its tokens, so it
    does not matter which of the two is called first when it ends.
    """

    def __init__(self) -> None:
        self._num_sent: dict[Sequence, int] = {}
        self._sequences: dict[str, list[Sequence]] = {}  # of each request
        self._new: list[NewTokens] = []

    def follow(self, request: Request) -> None:
        """From its first token on. It is not queued yet."""
        request.params.output_kind = RequestOutputKind.FINAL_ONLY
        self._sequences[request.request_id] = request.sequences
        self._num_sent.update(dict.fromkeys(request.sequences, 0))

    def __call__(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        """A step is over."""
        for row in plan.sampled:
            seq = row.seq
            num_sent = self._num_sent.get(seq)
            if num_sent is None:
                continue
            new = seq.token_ids[seq.num_prompt_tokens + num_sent :]
            self._num_sent[seq] = num_sent + len(new)
            if seq.finish_reason is not None:
                del self._num_sent[seq]
            end = seq.finish_reason, seq.stop_reason
            self._new.append(NewTokens(seq.request_id, seq.index, new, *end))

    def on_finish(self, output: RequestOutput) -> None:
        for seq in self._sequences.pop(output.request_id, ()):
            self._num_sent.pop(seq, None)

    def take(self) -> list[NewTokens]:
        """What is new since the last time."""
        new, self._new = self._new, []
        return new


@dataclass
class _Completion:
    seq: Sequence  # a likeness of the engine's, which only its own thread may look at
    num_told: int = 0  # tokens
    is_told: bool = False  # its end, too


class FollowedRequest:
    """A request's tokens, and the text that they become, where they are read.

    What its text raises is its `error`: it has ended with that, and nothing more is made of it.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self.error: Exception | None = None
        self._request, self._detokenizer = request, detokenizer
        params = replace(request.params, output_kind=RequestOutputKind.DELTA)
        # Of the prompt, only the end matters to the text of the output.
        context = detokenizer.context(request.prompt_token_ids, params)
        self._completions = [
            _Completion(Sequence(request.request_id, [*context], params, 2**31, index=index))
            for index in range(params.n)
        ]
        self._last: RequestOutput | None = None

    def add(self, new: NewTokens) -> None:
        seq = self._completions[new.index].seq
        seq.token_ids += new.token_ids
        if new.finish_reason is not None:
            _end(seq, new.finish_reason, new.stop_reason)

    def end(self, output: RequestOutput) -> None:
        """The engine's last output of it, which has everything once more."""
        self._last = output
        for completion in output.outputs:
            seq = self._completions[completion.index].seq
            seq.token_ids += completion.token_ids[seq.num_output_tokens :]
            _end(seq, completion.finish_reason, completion.stop_reason)

    def output(self) -> RequestOutput:
        """All that is new since the last time."""
        request, last, outputs = self._request, self._last, []
        for completion in self._completions:
            seq, num_told = completion.seq, completion.num_told
            if completion.is_told or (seq.num_output_tokens == num_told and not seq.finished):
                continue
            completion.num_told, completion.is_told = seq.num_output_tokens, seq.finished
            text = self._text(seq)
            outputs.append(
                CompletionOutput(
                    seq.index,
                    text,
                    seq.token_ids[seq.num_prompt_tokens + num_told :],
                    seq.finish_reason,
                    seq.stop_reason,
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
            # In another process than the engine's, these stand still until it sends its own.
            request.sequences[0].metrics if last is None else last.metrics,
            error=self.error if last is None else last.error or self.error,
        )

    def forget(self) -> None:
        """Nobody reads it to its end: the detokenizer need not remember where it was."""
        for completion in self._completions:
            del completion.seq.token_ids[completion.seq.num_prompt_tokens :]
            self._detokenizer.restart(completion.seq)

    def _text(self, seq: Sequence) -> str:
        """The new text of `seq`, unless there is none to be had any more."""
        if self.error is None:
            try:
                self._detokenizer.advance(seq)
                return self._detokenizer.text(seq)
            except Exception as error:
                logger.error("request %r failed", seq.request_id, exc_info=error)
                self.error = error
        return ""

    def _failed(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The last outputs of a request whose text has raised: of all that had not ended before."""
        new = {output.index: output for output in outputs}
        for completion in self._completions:
            if completion.seq.index in new or not completion.is_told:
                _end(completion.seq, "error", None)
                completion.is_told = True
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
