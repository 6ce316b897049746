"""Prometheus metrics under vLLM's names, so that dashboards made for vLLM work.

A step observer and request listener collects them in the engine's thread. The engine loop itself
contains no metrics code, and only a server loads this module.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AbstractSequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.listeners import RequestListener
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Request
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.features.kv_transfer.counters import counters
from nanoserve.features.speculative.extension import Speculation
from nanoserve.outputs import EngineStats, RequestOutput

if TYPE_CHECKING:
    from nanoserve.engine.sequence import Sequence

# vLLM's buckets, in seconds or tokens.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_NUM_COMPLETIONS = (1, 2, 5, 10, 20)
_REASONS = ("stop", "length", "abort", "error")
_HISTOGRAMS = {
    "time_to_first_token_seconds": _FIRST_TOKEN,
    "inter_token_latency_seconds": _BETWEEN_TOKENS,
    "e2e_request_latency_seconds": _LATENCY,
    "request_queue_time_seconds": _LATENCY,
    "request_inference_time_seconds": _LATENCY,
    "request_prefill_time_seconds": _LATENCY,
    "request_decode_time_seconds": _LATENCY,
    "iteration_tokens_total": _STEP_TOKENS,
    "request_params_n": _NUM_COMPLETIONS,
}
_TOKEN_HISTOGRAMS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
)


class Metrics(RequestListener):
    """The metrics of one engine. `registry` collects them when it is read."""

    def __init__(self, engine: GuardedEngine, model_name: str, prefix: str = "vllm:") -> None:
        self._engine, self._prefix = engine, prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {name: Histogram(bounds) for name, bounds in _HISTOGRAMS.items()}
        bounds = _one_two_five(engine.input_processor.max_model_len)
        self._histograms |= {name: Histogram(bounds) for name in _TOKEN_HISTOGRAMS}
        self._num_prompt_tokens = self._num_generated = 0
        self._num_finished = dict.fromkeys(_REASONS, 0)
        # Output tokens so far, and the time of the last one.
        self._progress: dict[Sequence, tuple[int, float | None]] = {}
        self._requests: dict[str, Request] = {}  # unfinished requests
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def __call__(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        """Update the metrics after a step.

        These are its batch size, time to first token, inter-token latency, and requests that ended.
        """
        intervals: list[float] = []
        self._histograms["iteration_tokens_total"].observe(batch.header.num_tokens)
        for row in plan.sampled:
            seq = row.seq
            if row.start + row.n == seq.num_prompt_tokens:
                self._note_first_token(seq)
                num_before, before = 0, None
            elif seq in self._progress:
                num_before, before = self._progress[seq]
            else:
                continue  # with async scheduling: it had ended before this step's update
            num_tokens, now = seq.num_output_tokens, seq.last_token_time
            if num_tokens > num_before and before is not None and now is not None:
                intervals.append(now - before)
            self._num_generated += num_tokens - num_before
            self._progress[seq] = num_tokens, now
            if seq.finished:
                self._note_end(seq)
        self._histograms["inter_token_latency_seconds"].observe_all(intervals)
        if len(self._progress) > 2 * self._engine.config.max_num_seqs:  # some were aborted
            alive = {seq: seen for seq, seen in self._progress.items() if not seq.finished}
            self._progress = alive

    def on_start(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def on_finish(self, output: RequestOutput) -> None:
        request = self._requests.pop(output.request_id, None)
        for completion in output.outputs:
            if completion.finish_reason in ("abort", "error"):
                self._num_finished[completion.finish_reason] += 1
        times = output.metrics
        first, scheduled = times.first_token_time, times.first_scheduled_time
        if output.pooled is not None:  # it has no first token, and ends with its prompt
            self._num_finished["stop"] += 1
            self._num_prompt_tokens += len(output.prompt_token_ids)
            first = times.finished_time
        if request is None or first is None or scheduled is None:
            return  # aborted before its first token, or started before these metrics
        params = request.params
        last = times.last_token_time or first
        values = {
            "e2e_request_latency_seconds": times.total_time,
            "request_queue_time_seconds": times.queue_time,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": last - first,
            "request_inference_time_seconds": last - scheduled,
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": times.num_output_tokens,
            "request_max_num_generation_tokens": _longest_completion(request),
            "request_params_n": params.n,
            "request_params_max_tokens": params.max_tokens,
        }
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics. Called by prometheus-client."""
        scheduler, stats = self._engine.scheduler, self._engine.stats
        num_blocks = scheduler.block_manager.num_blocks
        used = 1 - scheduler.block_manager.num_free_blocks / num_blocks
        yield self._gauge("num_requests_running", "Running sequences.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Waiting sequences.", len(scheduler.waiting))
        yield self._gauge("kv_cache_usage_perc", "Fraction of KV blocks in use, 0 to 1.", used)
        yield self._cache_config(num_blocks)
        yield from self._counters(
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in it.", stats.prefix_cache_hits),
            ("prompt_tokens", "Prompt tokens, including cached ones.", self._num_prompt_tokens),
            ("generation_tokens", "Output tokens.", self._num_generated),
        )
        # Jump-forward tokens of a grammar also count as drafts, even without the option.
        if self._engine.config.speculative_config is not None or stats.num_drafts:
            yield from self._speculation(stats)
        yield from self._counters(*counters(self._engine.extensions))
        yield self._finished_by_reason()
        for name, histogram in self._histograms.items():
            meaning = name.replace("_", " ").capitalize() + "."
            family = HistogramMetricFamily(self._prefix + name, meaning, labels=[*self._labels])
            family.add_metric([*self._labels.values()], *histogram.read())
            yield family

    def _note_first_token(self, seq: "Sequence") -> None:
        if seq.index == 0:  # the other completions share this prompt and these times
            self._num_prompt_tokens += seq.num_prompt_tokens
            seconds = seq.metrics.time_to_first_token
            if seconds is not None:  # None if the request has failed
                self._histograms["time_to_first_token_seconds"].observe(seconds)

    def _note_end(self, seq: "Sequence") -> None:
        del self._progress[seq]
        if seq.finish_reason in ("stop", "length"):  # `on_finish` counts "abort" and "error"
            self._num_finished[seq.finish_reason] += 1

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(self._prefix + name, meaning, labels=[*self._labels])
        gauge.add_metric([*self._labels.values()], value)
        return gauge

    def _counter(self, name: str, meaning: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(self._prefix + name, meaning, labels=[*self._labels, *labels])

    def _finished_by_reason(self) -> Metric:
        counter = self._counter("request_success", "Completions that ended.", "finished_reason")
        for reason, number in self._num_finished.items():
            counter.add_metric([*self._labels.values(), reason], number)
        return counter

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        for name, meaning, value in (
            ("num_drafts", "Rows with draft tokens.", stats.num_drafts),
            ("num_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens),
            ("num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens),
        ):
            counter = self._counter(f"spec_decode_{name}", meaning)
            counter.add_metric([*self._labels.values()], value)
            yield counter
        name = "spec_decode_num_accepted_tokens_per_pos"
        meaning = "Draft tokens accepted, by position."
        counter = self._counter(name, meaning, "position")
        per_pos, options = stats.num_accepted_tokens_per_pos, self._engine.config.speculative_config
        num_missing = 0 if options is None else options.num_speculative_tokens - len(per_pos)
        for position, value in enumerate([*per_pos, *[0] * num_missing]):
            counter.add_metric([*self._labels.values(), str(position)], value)
        yield counter
        for extension in self._engine.extensions:
            if isinstance(extension, Speculation) and extension.goodput is not None:
                meaning = "Tokens of steps with drafts, relative to plain steps in the same time."
                yield self._gauge("spec_decode_gain", meaning, extension.goodput.gain)

    def _counters(self, *rows: tuple[str, str, float]) -> Iterator[Metric]:
        """Yield a counter for each row: its name, its meaning and its value."""
        for name, meaning, value in rows:
            counter = self._counter(name, meaning)
            counter.add_metric([*self._labels.values()], value)
            yield counter

    def _cache_config(self, num_blocks: int) -> Metric:
        """Return a gauge that is always 1, with the cache configuration in its labels."""
        config = self._engine.config
        about = {
            "block_size": config.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "num_gpu_blocks": num_blocks,
        }
        labels = self._labels | {name: str(value) for name, value in about.items()}
        gauge = GaugeMetricFamily(
            self._prefix + "cache_config_info", "KV cache configuration.", labels=[*labels]
        )
        gauge.add_metric([*labels.values()], 1)
        return gauge


def start_metrics(model_name: str, prefix: str, engine: GuardedEngine) -> None:
    """Start to collect metrics of `engine`."""
    metrics = Metrics(engine, model_name, prefix)
    engine.observers.append(metrics)
    engine.listeners.append(metrics)


def metrics_of(engine: GuardedEngine) -> list[Metrics]:
    """Return the metrics of `engine`, in the order in which they were started."""
    return [observer for observer in engine.observers if isinstance(observer, Metrics)]


def exposition(engine: GuardedEngine) -> bytes:
    """Return the metrics that were started last, in Prometheus' text format."""
    return generate_latest(metrics_of(engine)[-1].registry)


def _longest_completion(request: Request) -> int:
    """Return the length in tokens of the longest completion that ended by itself; 0 without one."""
    ended = [seq for seq in request.sequences if seq.finish_reason in ("stop", "length")]
    return max((seq.num_output_tokens for seq in ended), default=0)


def _one_two_five(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return bounds


class Histogram:
    """A histogram with cumulative buckets, i.e. counts of values at or below each bound.

    bounds: in ascending order.

    One thread may read it while another fills it. At worst, the reader sees the counts of a step
    without its sum.
    """

    def __init__(self, bounds: AbstractSequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = np.zeros(len(self._bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Observe many values at once. 256 values take about 10 us instead of 150 us one by one."""
        array = np.fromiter(values, dtype=np.float64)
        places = np.searchsorted(self._bounds, array)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(array.sum())

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative buckets with their upper bounds, and the sum of all values.

        The format is that of prometheus-client.
        """
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        return list(zip(names, accumulate(self._counts.tolist()), strict=True)), self._sum
