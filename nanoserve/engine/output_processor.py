"""What a step brought -> what the user gets: text, log-probabilities, `RequestOutput`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nanoserve.engine.detokenizer import Detokenizer, Tokenizer
from nanoserve.engine.executor import StepResult
from nanoserve.engine.scheduler import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from nanoserve.sampling_params import RequestOutputKind, SamplingParams


@dataclass(eq=False)
class Request:
    """The sequences of one prompt, and what has been collected for them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    completions: dict[int, CompletionOutput] = field(default_factory=dict)  # latest, by index
    num_sent: dict[int, int] = field(default_factory=dict)  # tokens handed out as deltas
    logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)  # by index
    cumulative_logprobs: dict[int, float] = field(default_factory=dict)  # by index
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return all(seq.finished for seq in self.sequences)


class OutputProcessor:
    """Keeps every request until its last completion is handed out."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.requests: dict[str, Request] = {}
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r} is already in use")
        self.requests[request.request_id] = request

    def process(
        self,
        plan: Plan,
        result: StepResult,
        advanced: list[Sequence],
        finish: Callable[[Sequence, str, str], None],
    ) -> list[RequestOutput]:
        """Outputs of the requests that finished or stream.

        `finish(seq, reason, stop_reason)` ends a sequence that has run into a stop string, which
        only its text shows.
        """
        if plan.prompt_logprobs:
            self._collect_prompt_logprobs(plan, result.prompt_logprobs)
        if result.logprobs is not None:
            self._collect_logprobs(advanced, result.logprobs)
        outputs = []
        progressed: dict[Request, list[CompletionOutput]] = {}
        for seq in advanced:
            is_final_only = seq.params.output_kind is RequestOutputKind.FINAL_ONLY
            if is_final_only and not seq.finished and not seq.params.stop:
                continue  # nobody looks at it now, and this is by far the most common case
            stop_string = self._detokenizer.advance(seq)
            if stop_string is not None and seq.finished:  # by its length, on this very token
                seq.finish_reason, seq.stop_reason = "stop", stop_string
            elif stop_string is not None:
                finish(seq, "stop", stop_string)
            if seq.finished or not is_final_only:
                request = self.requests[seq.request_id]
                progressed.setdefault(request, []).append(self._complete(request, seq))
        for request, completions in progressed.items():
            kind = request.params.output_kind
            if request.finished or kind is not RequestOutputKind.FINAL_ONLY:
                is_delta = kind is RequestOutputKind.DELTA
                outputs.append(self._output(request, completions if is_delta else None))
        return outputs

    def abort(
        self, request_id: str, finish: Callable[[Sequence, str, None], None]
    ) -> RequestOutput | None:
        request = self.requests.get(request_id)
        if request is None:
            return None
        aborted = []
        for seq in request.sequences:
            if not seq.finished:
                finish(seq, "abort", None)
                aborted.append(self._complete(request, seq))
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        return self._output(request, aborted if is_delta else None)

    def _output(
        self, request: Request, completions: list[CompletionOutput] | None = None
    ) -> RequestOutput:
        """All completions of `request` so far, or those given; the last output forgets it."""
        if request.finished:
            del self.requests[request.request_id]
        if completions is None:
            completions = [request.completions[i] for i in sorted(request.completions)]
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            completions,
            request.finished,
            request.sequences[0].metrics,
            request.prompt_logprobs,
        )

    def _complete(self, request: Request, seq: Sequence) -> CompletionOutput:
        """The completion as it stands, or what is new in it."""
        logprobs = request.logprobs.get(seq.index)
        first_new = 0
        if seq.params.output_kind is RequestOutputKind.DELTA:
            first_new = request.num_sent.get(seq.index, 0)
            request.num_sent[seq.index] = seq.num_tokens - seq.num_prompt_tokens
        completion = CompletionOutput(
            index=seq.index,
            text=self._detokenizer.text(seq),
            token_ids=seq.token_ids[seq.num_prompt_tokens + first_new :],
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if logprobs is None else logprobs[first_new:],
            cumulative_logprob=request.cumulative_logprobs.get(seq.index),
        )
        request.completions[seq.index] = completion
        return completion

    def _collect_logprobs(self, advanced: list[Sequence], rows: TokenLogprobs) -> None:
        asked = [seq for seq in advanced if seq.params.logprobs is not None]
        for row, seq in enumerate(asked):
            request, index = self.requests[seq.request_id], seq.index
            collected = request.logprobs.setdefault(index, [])
            total = request.cumulative_logprobs.setdefault(index, 0.0)
            if len(collected) < seq.num_tokens - seq.num_prompt_tokens:  # not for a stop token
                candidates = self._candidates(rows, row, seq.params.logprobs)
                collected.append(candidates)
                chosen = candidates[seq.token_ids[-1]]
                request.cumulative_logprobs[index] = total + chosen.logprob

    def _collect_prompt_logprobs(self, plan: Plan, rows: TokenLogprobs) -> None:
        row = 0
        for seq, n in plan.prompt_logprobs.items():
            request, end = self.requests[seq.request_id], seq.num_computed_tokens
            if end == n:  # the first chunk, perhaps once more after a preemption
                request.prompt_logprobs = [None]
            for _ in range(end - n + 1, min(end + 1, seq.num_prompt_tokens)):
                candidates = self._candidates(rows, row, seq.params.prompt_logprobs)
                request.prompt_logprobs.append(candidates)
                row += 1

    def _candidates(self, rows: TokenLogprobs, row: int, k: int) -> dict[int, Logprob]:
        """The row's own token and the k most likely ones."""
        token_ids = rows.token_ids[row, : k + 1].tolist()
        logprobs = rows.logprobs[row, : k + 1].tolist()
        ranks = [int(rows.ranks[row]), *range(1, len(token_ids))]
        candidates: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True):
            candidates.setdefault(token_id, Logprob(logprob, rank, self._decode(token_id)))
        return candidates

    def _decode(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode([token_id], False)
