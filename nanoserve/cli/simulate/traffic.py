"""Requests of simulated traffic: when they arrive, their prompts, and the outputs they get.

The tokens of an output are drawn with its request, so the next turn of a conversation can repeat
them in its prompt, and finds them in the prefix cache.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from nanoserve.cli.bench.latency import poisson_arrivals
from nanoserve.cli.bench.workloads import draw_workload
from nanoserve.cli.simulate.replay import lives_of
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import key_of_salt
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.features.trace.reader import Trace
from nanoserve.outputs import RequestMetrics, RequestOutputKind
from nanoserve.sampling_params import SamplingParams


@dataclass
class Arrival:
    """A request that arrives at `time`, in seconds.

    output: the tokens that it gets. max_tokens: the limit that the scheduler knows; None if the
        output ends with a stop token, which the scheduler cannot foresee.
    tenant: names a cache of its own, as a salt does. conversation: names the source of follow-ups.
    """

    time: float
    prompt: AbstractSequence[int]
    output: AbstractSequence[int]
    max_tokens: int | None = None
    priority: int = 0
    tenant: str | None = None
    conversation: "Conversation | None" = field(default=None, repr=False)

    def with_limit(self) -> "Arrival":
        """Return a request whose limit ends it, for a real model, which follows no script."""
        return replace(self, max_tokens=len(self.output))

    def script(self, stop_token_id: int) -> list[int]:
        """Return the output with the stop token that ends it, if one does."""
        return [*self.output, stop_token_id] if self.max_tokens is None else [*self.output]


class RequestMaker:
    """Makes the requests of arrivals, as `InputProcessor` does.

    Parameters are checked once for each limit, and not once for each of millions of requests. The
    last token of the vocabulary is the stop token.
    """

    def __init__(self, engine: LLMEngine | GuardedEngine) -> None:
        processor = engine.input_processor
        self.stop_token_id = processor.vocab_size - 1
        self._max_model_len, self._num_cached = processor.max_model_len, processor.num_cached
        self._params: dict[int | None, SamplingParams] = {}

    def make(self, request_id: str, arrival: Arrival, arrival_time: float) -> Request:
        """Return a request. Raises `ValueError` for a prompt that the engine would reject."""
        prompt, limit = [*arrival.prompt], self._max_model_len
        if not 0 < len(prompt) < limit:
            raise ValueError(
                f"the prompt of request {request_id} has {len(prompt)} tokens; max_model_len="
                f"{limit} leaves room for 1 to {limit - 1}: raise it, or shorten the prompts"
            )
        if min(prompt) < 0 or max(prompt) >= self.stop_token_id:
            raise ValueError(
                f"the prompt of request {request_id} has token ids of {min(prompt)} to "
                f"{max(prompt)}: they must be in [0, {self.stop_token_id})"
            )
        params = self._params_of(arrival.max_tokens)
        metrics = RequestMetrics(arrival_time, num_cached_prompt_tokens=self._num_cached)
        key = () if arrival.tenant is None else key_of_salt(arrival.tenant)
        seq = Sequence(
            request_id,
            prompt,
            params,
            limit,
            priority=arrival.priority,
            metrics=metrics,
            cache_key=key,
        )
        return Request(request_id, None, [*prompt], params, [seq])

    def _params_of(self, max_tokens: int | None) -> SamplingParams:
        if max_tokens not in self._params:
            self._params[max_tokens] = SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                stop_token_ids=[self.stop_token_id] if max_tokens is None else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
                temperature=0.0,
            )
        return self._params[max_tokens]


class Conversation(Protocol):
    """A source of requests that depend on the end of an earlier one."""

    def next(self, finished_at: float) -> Arrival | None:
        """Return the request that follows one that has ended at `finished_at`, or None."""


class Traffic(Protocol):
    """A source of requests, in the order of their times."""

    def arrivals(self) -> Iterable[Arrival]: ...


@dataclass(frozen=True)
class TraceTraffic:
    """The requests of a recorded trace, at the times at which they arrived, times `stretch`.

    A request for several completions becomes one for its first. An aborted request gets the tokens
    that it had got.
    """

    trace: Trace
    stretch: float = 1.0

    def arrivals(self) -> Iterator[Arrival]:
        arrivals = []
        for life in lives_of(self.trace).values():
            output = [token_id for token_id in life.output if token_id is not None]
            if life.is_ended_by_token and len(output) == len(life.output):
                output.pop()  # the stop token
            if life.arrival["index"] or not output:
                continue
            limit = len(output) if life.reason == "length" else None
            time, priority = self.stretch * life.arrival["time"], life.arrival["priority"]
            arrivals.append(Arrival(time, life.arrival["prompt"], output, limit, priority))
        return iter(sorted(arrivals, key=lambda arrival: arrival.time))


@dataclass(frozen=True)
class Workload:
    """The requests of a benchmark (`nanoserve.cli.bench.workloads`), as a Poisson process.

    rate: requests per second; None: all of them at once.
    """

    prompts: list[list[int]]
    output_lens: list[int]
    rate: float | None = None
    seed: int = 0
    vocab_size: int = 2048

    @classmethod
    def draw(
        cls,
        num_seqs: int,
        input_len: tuple[int, int],
        output_len: tuple[int, int],
        vocab_size: int,
        rate: float | None = None,
        shared_len: int = 0,
        turns: int = 1,
        seed: int = 0,
    ) -> "Workload":
        """Draw the same requests as `nanoserve bench` with these settings."""
        lengths = num_seqs, input_len, output_len, vocab_size
        prompts, output_lens = draw_workload(*lengths, shared_len, turns, seed)
        return cls(prompts, output_lens, rate, seed, vocab_size)

    def arrivals(self) -> Iterator[Arrival]:
        times = [0.0] * len(self.prompts)
        if self.rate is not None:
            times = poisson_arrivals(self.rate, len(self.prompts), self.seed)
        rng = Random(self.seed + 1)
        for time, prompt, n in zip(times, self.prompts, self.output_lens, strict=True):
            output = rng.choices(range(self.vocab_size), k=n)
            yield Arrival(time, prompt, output, max_tokens=n)
