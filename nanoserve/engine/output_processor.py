"""The output processor turns a step's tokens into text, log-probabilities and `RequestOutput`s."""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nanoserve.engine.executor import StepResult
from nanoserve.engine.logprobs import PromptLogprobsCollector, collect_logprobs
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.request import Completion, Request
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from nanoserve.text.detokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FINAL_ONLY = RequestOutputKind.FINAL_ONLY  # read once: an enum lookup takes as long as a row

# Receives the results of a head for one row: (request, row, all results of the head, index of the
# row's first output in them). Returns an exception if the request must end with it; a request also
# ends if its collector has set `Request.pooled`.
Collector = Callable[[Request, Row, Any, int], Exception | None]
# Ends a sequence from outside: (seq, finish_reason, stop_reason).
Finish = Callable[[Sequence, str, str | None], None]


class OutputProcessor:
    """Keeps every request until its last output has been returned.

    Without a tokenizer all text is empty.
    """

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        self.requests: dict[str, Request] = {}
        self.weights_version: int | str = 0
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._text_of_token: Callable[[int], str] = (
            _no_text if self._detokenizer is None else self._detokenizer.text_of_token
        )
        # Collectors by head name (`nanoserve.worker.heads`); features may add their own.
        self.collectors: dict[str, Collector] = {
            "prompt_logprobs": PromptLogprobsCollector(self._text_of_token)
        }

    def add(self, request: Request) -> None:
        """Keep a queued request, and let stop strings end its sequences."""
        self.requests[request.request_id] = request
        request.begin_weights(self.weights_version)
        if request.params.stop and self._detokenizer is not None:
            for seq in request.sequences:
                seq.stop_conditions.append(self._stop_at_string)

    def begin_weights(self, version: int | str) -> None:
        """Note in all requests that the next tokens are made by the weights `version`."""
        self.weights_version = version
        for request in self.requests.values():
            request.begin_weights(version)

    def forget(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Drop the requests whose last output is among `outputs`; returns these last outputs."""
        return [
            output
            for output in outputs
            if output.finished and self.requests.pop(output.request_id, None) is not None
        ]

    def note_admitted(self, plan: Plan, now: float) -> None:
        """Record the time at which each request was first scheduled."""
        for seq in plan.admitted:
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = now

    def process(
        self, plan: Plan, result: StepResult, joined: list[int], finish: Finish, now: float
    ) -> list[RequestOutput]:
        """Return the outputs of requests that have finished or are streamed.

        joined: by row that caught up, how many of its tokens were appended, from
        `Scheduler.update`. finish: ends the remaining sequences of a failed request.
        """
        progressed = self._collect(plan, result, joined)
        for row, num_new, new_ids in zip(plan.sampled, joined, result.token_ids, strict=True):
            seq = row.seq
            if num_new < 0 or not new_ids:
                continue  # the sequence had ended before, or its request has failed
            _note_tokens(seq, num_new, now)
            is_final_only = seq.params.output_kind is _FINAL_ONLY
            if is_final_only and not seq.finished:
                continue  # by far the most common case: no output is needed before the end
            request = self.requests[seq.request_id]
            completions = progressed.setdefault(request, [])
            if seq.finished:
                seq.metrics.finished_time = now
            if seq.finished or request.error is None:
                completion = request.completions[seq.index]
                text = self._text(request, completion)
                # An unfinished sequence of a failed request is completed below, and only once.
                if seq.finished or request.error is None:
                    completions.append(self._complete(completion, text))
        for request, completions in progressed.items():
            if request.error is not None or request.pooled is not None:
                reason = "stop" if request.error is None else "error"
                completions += self._end(request, reason, finish, now)
        return [
            self._output(request, completions)
            for request, completions in progressed.items()
            if request.finished or request.params.output_kind is not _FINAL_ONLY
        ]

    def _collect(
        self, plan: Plan, result: StepResult, joined: list[int]
    ) -> dict[Request, list[CompletionOutput]]:
        """Collect the results of heads and the log-probabilities.

        Returns the requests that end with them, or with an error, each with no completions yet.
        """
        rows, ended = plan.sampled, {}
        if result.of_heads:
            ended = self._collect_from_heads(plan, result.of_heads)
        if result.logprobs is not None:
            ended |= collect_logprobs(self.requests, rows, joined, result, self._text_of_token)
        for index, error in result.errors.items():
            if joined[index] >= 0:  # otherwise the sequence had ended, under async scheduling
                ended.setdefault(self.requests[rows[index].seq.request_id], error)
        for request, reason in ended.items():
            _note_error(request, reason)
        return {request: [] for request in ended}

    def end(
        self, request: Request, error: Exception | None, finish: Finish, now: float
    ) -> RequestOutput:
        """End a request with an error, or without one as aborted; returns its last output."""
        request.error = error
        reason = "abort" if error is None else "error"
        return self._output(request, self._end(request, reason, finish, now))

    def revert_tokens(self, plan: Plan) -> None:
        """Remove the tokens of a step that were already appended, and undo their effects."""
        for seq, start, n, _, num_sampled in plan.sampled:
            request = self.requests.get(seq.request_id)
            if request is None or seq not in request.sequences:
                continue  # it was aborted, and another request may use its id
            if not (
                seq.finished and seq.num_pending
            ):  # otherwise it had ended before this step's tokens
                num_tokens = start + n - (num_sampled - 1)  # without draft tokens
                self._revert(request, request.completions[seq.index], num_tokens)

    def revert_ends(self) -> None:
        """Undo aborts and failures that were interrupted before their output was stored."""
        for request in self.requests.values():
            for completion in request.completions:
                seq = completion.seq
                if request.pooled is not None or seq.finish_reason in ("abort", "error"):
                    self._revert(request, completion, seq.num_tokens)
            request.error = request.pooled = None

    def _collect_from_heads(
        self, plan: Plan, of_heads: dict[str, Any]
    ) -> dict[Request, Exception | None]:
        """Call each collector with its head's results, row by row.

        Returns the requests that end, with the error for which they do, if there is one.
        """
        ended: dict[Request, Exception | None] = {}
        for name, values in of_heads.items():
            first = 0
            for row in plan.rows:
                count = row.num_outputs - row.num_sampled
                if not count or row.seq.prompt_head != name:
                    continue
                request = self.requests.get(row.seq.request_id)
                # Skipped if it has ended in the meantime, even if another request uses its id.
                if request is not None and row.seq in request.sequences:
                    try:
                        error = self.collectors[name](request, row, values, first)
                    except Exception as raised:  # it must not affect other requests
                        error = raised
                    if error is not None or request.pooled is not None:
                        ended[request] = error
                first += count
        return ended

    def _revert(self, request: Request, completion: Completion, num_tokens: int) -> None:
        """Reset a completion to its first `num_tokens` tokens, its text included."""
        completion.revert(num_tokens)
        if self._detokenizer is not None:
            self._detokenizer.restart(completion.seq)
        counts = [seq.num_output_tokens for seq in request.sequences]
        request.sequences[0].metrics.num_output_tokens = sum(counts)
        request.sequences[0].metrics.num_intervals = sum(max(0, count - 1) for count in counts)

    def _stop_at_string(self, seq: Sequence) -> tuple[str, str | None] | None:
        """Return ("stop", string) if the text contains a stop string; a stop condition of `seq`."""
        try:
            stop_string = self._detokenizer.advance(seq)
        except Exception as error:  # concerns this text only: other requests continue
            _note_error(self.requests[seq.request_id], error)
            return "error", None
        return None if stop_string is None else ("stop", stop_string)

    def _text(self, request: Request, completion: Completion) -> str:
        """Return the text of the next output; an exception marks the request as failed."""
        seq = completion.seq
        if self._detokenizer is None or not seq.params.detokenize:
            return ""
        try:
            self._detokenizer.advance(seq)
            return self._detokenizer.text(seq)
        except Exception as error:  # concerns this text only: other requests continue
            _note_error(request, error)
            if seq.finished:
                self._detokenizer.forget(seq)
                seq.finish_reason, seq.stop_reason = "error", None
        if seq.params.output_kind is RequestOutputKind.DELTA or completion.latest is None:
            return ""
        return completion.latest.text

    def _end(
        self, request: Request, reason: str, finish: Finish, now: float
    ) -> list[CompletionOutput]:
        """End all unfinished completions of a request; returns their last outputs."""
        ended = []
        for completion in request.completions:
            seq = completion.seq
            if not seq.finished:
                finish(seq, reason, None)
                seq.metrics.finished_time = now
                ended.append(self._complete(completion, self._text(request, completion)))
        return ended

    def _output(self, request: Request, completions: list[CompletionOutput]) -> RequestOutput:
        """Return the output of `request`: all completions so far, or the given ones as deltas."""
        if request.params.output_kind is not RequestOutputKind.DELTA:
            completions = [c.latest for c in request.completions if c.latest is not None]
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            completions,
            request.finished,
            request.sequences[0].metrics,
            request.prompt_logprobs,
            request.error,
            request.pooled,
        )

    def _complete(self, completion: Completion, text: str) -> CompletionOutput:
        """Return the completion so far, or for a delta only its new part."""
        seq, logprobs, first_new = completion.seq, completion.logprobs, 0
        if seq.params.output_kind is RequestOutputKind.DELTA:
            first_new, completion.num_sent = completion.num_sent, seq.num_output_tokens
        completion.latest = CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=seq.token_ids[seq.num_prompt_tokens + first_new :],
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if logprobs is None else logprobs[first_new:],
            cumulative_logprob=completion.cumulative_logprob,
            weights_versions=completion.versions_from(first_new),
            routed_experts=completion.routed_experts,
        )
        return completion.latest


def _note_error(request: Request, error: Exception | None) -> None:
    """Store and log the error, if any, that ends `request`; only the first one counts."""
    if error is not None and request.error is None:
        logger.error("request %r failed", request.request_id, exc_info=error)
        request.error = error


def _no_text(token_id: int) -> str:
    """Return "": there is no tokenizer."""
    return ""


def _note_tokens(seq: Sequence, num_new: int, now: float) -> None:
    """Update the metrics for a step that yielded tokens, of which `num_new` are output."""
    metrics = seq.metrics
    if metrics.first_token_time is None:
        metrics.first_token_time = now
    if num_new:
        if seq.last_token_time is None:
            metrics.num_intervals += num_new - 1
        else:
            metrics.num_intervals += num_new
            metrics.interval_seconds += now - seq.last_token_time
        metrics.num_output_tokens += num_new
        metrics.last_token_time = seq.last_token_time = now
