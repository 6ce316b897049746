"""The outputs of a request, with vLLM's names."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


class RequestOutputKind(Enum):
    """The kind of outputs that `LLMEngine.step` returns for an unfinished request."""

    CUMULATIVE = "cumulative"  # after every step, all text so far
    DELTA = "delta"  # after every step, only the new text and tokens
    FINAL_ONLY = "final_only"  # no output before the end


@dataclass
class RequestMetrics:
    """Timings and counts of a request. Times are readings of one monotonic clock, in seconds.

    None means "not yet". A request for n completions has one such object for all completions;
    times between tokens are measured within each completion.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None  # the first sample, even if it was EOS
    last_token_time: float | None = None  # of tokens that belong to the output
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_intervals: int = 0  # from a token to the next one of the same completion
    interval_seconds: float = 0.0  # sum of these intervals
    # Taken from the prefix cache at first admission; None without `enable_prompt_tokens_details`.
    num_cached_prompt_tokens: int | None = 0
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds between arrival and the first step that worked on the request."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def time_to_first_token(self) -> float | None:
        """TTFT: seconds between arrival and the first token."""
        return _difference(self.first_token_time, self.arrival_time)

    @property
    def inter_token_time(self) -> float | None:
        """Mean seconds between two tokens; None with fewer than two of them."""
        return self.interval_seconds / self.num_intervals if self.num_intervals else None

    @property
    def total_time(self) -> float | None:
        """End-to-end latency: seconds between arrival and the end, EOS included."""
        return _difference(self.finished_time, self.arrival_time)


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities of some rows: first the row's token, then the k most likely tokens.

    token_ids and logprobs are [num_rows, 1 + k], ranks is [num_rows]; rank 1 is the most likely.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def take(self, rows: list[int]) -> "TokenLogprobs":
        """Return some of the rows."""
        return TokenLogprobs(self.token_ids[rows], self.logprobs[rows], self.ranks[rows])


@dataclass(frozen=True)
class Logprob:
    """One token at one position: its log-probability, its rank (1 is best) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One completion. `token_ids` and `text` end before the EOS or stop token that ended them.

    finish_reason: None while it runs; "stop" (EOS, a stop token or a stop string), "length",
        "abort", or "error": see `RequestOutput.error`.
    stop_reason: the stop token's id or the stop string; None for the model's own EOS.
    logprobs: for each token the requested candidates, by token id; the sampled one is among them.
    cumulative_logprob: the sum over the sampled tokens.
    weights_versions: (index in `token_ids`, version) of the first token that each version of the
        weights has made, in order; one pair unless the weights were replaced while it ran. See
        `LLM.update_weights`.
    routed_experts: integers [num_tokens - 1, num_layers, top_k] (`enable_return_routed_experts`):
        the experts that computed each token of the prompt and the output, in each layer; zeros in
        layers without experts. The last token was sampled and not computed; it may be the stop
        token that `token_ids` does not have. None until the completion has ended.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    weights_versions: list[tuple[int, int | str]] = field(default_factory=list)
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The output of a request so far; `prompt` is None when token ids were given.

    prompt_logprobs: for each token of the prompt the requested candidates, by token id; None for
        the first token, which no logits predict.
    error: the error that ended the request with all its completions: an exception of its own logits
        processor or of decoding its text; a `ValueError` if its constraints, or processors, left no
        token to sample; a `FloatingPointError` if the model computed logits that are NaN or
        infinite.
    pooled: the result of a pooling request, float32: a vector, or with pooling type ALL a vector
        for each token. Such a request has one completion, without tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: Exception | None = None
    pooled: np.ndarray | None = field(default=None, compare=False)

    @property
    def num_cached_tokens(self) -> int | None:
        """vLLM's name for `metrics.num_cached_prompt_tokens`."""
        return self.metrics.num_cached_prompt_tokens

    def __getitem__(self, name: str) -> Any:
        """Return "text" or "token_ids" of the first completion, as in nano-vllm's dictionaries."""
        if name not in ("text", "token_ids"):
            raise KeyError(
                f"{name!r}: as a dictionary, an output has only 'text' and 'token_ids'; use its "
                f"attributes"
            )
        return getattr(self.outputs[0], name)


@dataclass
class EngineStats:
    """Totals since the engine started."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of finished requests
    num_output_tokens: int = 0  # of finished requests
    num_computed_tokens: int = 0  # through the model, recomputation included
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_drafts: int = 0  # rows with draft tokens
    num_draft_tokens: int = 0  # draft tokens that were computed
    num_accepted_tokens: int = 0  # draft tokens that were accepted
    num_accepted_tokens_per_pos: tuple[int, ...] = ()  # by position of the draft token in its row

    def count(self, num_computed_tokens: int, outputs: Iterable[RequestOutput]) -> None:
        """Count one more step and the outputs that it returned."""
        self.num_steps += 1
        self.num_computed_tokens += num_computed_tokens
        for output in outputs:
            if output.finished:
                self.num_prompt_tokens += len(output.prompt_token_ids)
                self.num_output_tokens += output.metrics.num_output_tokens

    def count_drafts(self, accepted_of_drafts: Iterable[tuple[int, int]]) -> None:
        """Count rows with draft tokens: (accepted, computed) of each."""
        per_pos = list(self.num_accepted_tokens_per_pos)
        for num_accepted, num_drafts in accepted_of_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted
            per_pos += [0] * (num_drafts - len(per_pos))
            for position in range(num_accepted):
                per_pos[position] += 1
        self.num_accepted_tokens_per_pos = tuple(per_pos)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Fraction of looked-up tokens that were found, 0 to 1."""
        return self.prefix_cache_hits / max(1, self.prefix_cache_queries)


@dataclass
class PoolingOutput:
    """The result of `LLM.encode`: a torch tensor, [size], or [num_tokens, size] for type ALL."""

    data: Any


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions, which a request may have reduced."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """`probs` are probabilities of the classes, or logits with `use_activation=False`."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """`score` is a probability or a logit of a classifier, or the cosine of two embeddings."""

    score: float


@dataclass
class PoolingRequestOutput:
    """The output of a pooling request; subclasses differ in the class of `outputs`."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = 0


class EmbeddingRequestOutput(PoolingRequestOutput):
    outputs: EmbeddingOutput


class ClassificationRequestOutput(PoolingRequestOutput):
    outputs: ClassificationOutput


class ScoringRequestOutput(PoolingRequestOutput):
    outputs: ScoringOutput
