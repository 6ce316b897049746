"""What Prometheus gets: vLLM's names, and numbers that add up."""

import asyncio
import random
import re
from bisect import bisect_left
from pathlib import Path

import pytest
from serving import wait_until

from nanoserve import LLM, AsyncLLM, RequestOutputKind, SamplingParams

pytest.importorskip("prometheus_client", reason="metrics need pip install 'nanoserve[serve]'")
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nanoserve.features.metrics import Histogram, Metrics, metrics_of
from nanoserve.serve.replicas.merged_metrics import merged

# What the Grafana dashboard of vLLM's repository asks for, and its documentation lists.
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
)
HOST_COUNTERS = (  # with `kv_offloading_size`
    *("external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("kv_offload_stored_blocks", "kv_offload_loaded_blocks", "kv_offload_evicted_blocks"),
)
CONNECTOR_COUNTERS = (  # with a KV connector
    *("kv_connector_stored_blocks", "kv_connector_missed_blocks", "kv_connector_loaded_blocks"),
    *("kv_connector_late_loads", "kv_connector_failed_calls"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "iteration_tokens_total"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
    "request_params_max_tokens",
)


def read(metrics: Metrics) -> dict[str, dict[tuple, float]]:
    """By name and labels, as a Prometheus server would parse it."""
    values: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for name, labels, value, *_ in family.samples:
            labels = {k: v for k, v in labels.items() if k not in ("model_name", "engine")}
            values.setdefault(name, {})[tuple(labels.values())] = value
    return values


@pytest.fixture
def measured():
    llm = AsyncLLM("tiny-qwen3", dtype="float32", num_kv_blocks=30, max_num_seqs=8, block_size=4)
    metrics = Metrics(llm.engine, "tiny")
    llm.engine.observers.append(metrics)
    llm.engine.listeners.append(metrics)
    yield llm, metrics
    llm.shutdown()


def test_every_name_of_vllms_is_there_with_its_labels(measured) -> None:
    _, metrics = measured
    text = generate_latest(metrics.registry).decode()
    for name in (*GAUGES, *COUNTERS, "cache_config_info"):
        assert f"\nvllm:{name}{{" in text, name
    for name in HISTOGRAMS:
        for part in ("_bucket", "_sum", "_count"):
            assert f"\nvllm:{name}{part}{{" in text, name
    for line in text.splitlines():
        if line.startswith("vllm:"):
            assert 'model_name="tiny"' in line and 'engine="0"' in line
    other = Metrics(measured[0].engine, "tiny", prefix="ours_")
    assert "\nours_num_requests_running{" in generate_latest(other.registry).decode()


def test_counts_are_those_of_the_requests(measured) -> None:
    """With preemptions, several completions, ends of every kind, and prefixes that are shared."""
    llm, metrics = measured
    rng, outputs = random.Random(5), []

    async def ask(number: int) -> None:
        params = SamplingParams(
            n=rng.choice([1, 1, 3]),
            temperature=1,
            seed=number,
            max_tokens=rng.randint(1, 30),
            ignore_eos=bool(number % 3),
            output_kind=rng.choice([RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]),
        )
        last = None
        async for output in llm.generate([1, 2, 3, 4, 5, 6, number], params):
            last = output
            if number % 7 == 0 and not output.finished:
                llm.abort(output.request_id)
        outputs.append((last, params))

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, range(60)))

    asyncio.run(ask_all())
    wait_until(lambda: not llm.engine.has_unfinished_requests())
    values, stats = read(metrics), llm.engine.stats

    def one(name: str) -> float:
        (value,) = values[f"vllm:{name}"].values()
        return value

    assert stats.num_preemptions and stats.prefix_cache_hits  # or this shows too little
    assert one("num_preemptions_total") == stats.num_preemptions
    assert one("prefix_cache_queries_total") == stats.prefix_cache_queries
    assert one("prefix_cache_hits_total") == stats.prefix_cache_hits
    total = sum(output.metrics.num_output_tokens for output, _ in outputs)
    assert one("generation_tokens_total") == total
    reasons = {labels[0]: n for labels, n in values["vllm:request_success_total"].items()}
    assert sum(reasons.values()) == sum(params.n for _, params in outputs)
    assert reasons["abort"] and reasons["length"] and not reasons["error"]
    times = [output.metrics for output, _ in outputs if output.metrics.first_token_time]
    assert one("prompt_tokens_total") == 7 * len(times)
    for name, expected in (
        ("time_to_first_token_seconds", [m.time_to_first_token for m in times]),
        ("e2e_request_latency_seconds", [m.total_time for m in times]),
        ("request_queue_time_seconds", [m.queue_time for m in times]),
        ("request_generation_tokens", [m.num_output_tokens for m in times]),
    ):
        assert one(f"{name}_count") == len(times), name
        assert one(f"{name}_sum") == pytest.approx(sum(expected)), name
    intervals = sum(m.num_intervals for m in times)
    assert one("inter_token_latency_seconds_count") == intervals
    seconds = sum(m.interval_seconds for m in times)
    assert one("inter_token_latency_seconds_sum") == pytest.approx(seconds)
    assert one("iteration_tokens_total_sum") == stats.num_computed_tokens
    assert one("iteration_tokens_total_count") == stats.num_steps
    assert one("kv_cache_usage_perc") == one("num_requests_running") == 0
    assert not metrics._requests
    assert all(seq.finished for seq in metrics._progress)


def test_the_host_tier_is_counted() -> None:
    """Two prompts in turns, in a pool that holds one of them: 20 of 21 tokens come back."""
    options = {"skip_tokenizer_init": True, "num_kv_blocks": 6, "block_size": 4}
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM("tiny-qwen3", kv_offloading_size=0.01, disable_log_stats=False, **options) as llm:
        for first in (100, 200, 100):
            llm.generate([[*range(first, first + 21)]], one, use_tqdm=False)
        (metrics,) = metrics_of(llm.engine)
    values = read(metrics)
    found = {name: values[f"vllm:{name}_total"] for name in HOST_COUNTERS}
    assert found == {
        "external_prefix_cache_queries": {(): 63},
        "external_prefix_cache_hits": {(): 20},
        "kv_offload_stored_blocks": {(): 10},
        "kv_offload_loaded_blocks": {(): 5},
        "kv_offload_evicted_blocks": {(): 0},
    }
    assert values["vllm:prefix_cache_hits_total"] == {(): 20}  # those of the host are among them
    of_two = merged({number: generate_latest(metrics.registry) for number in range(2)}).decode()
    for name in HOST_COUNTERS:
        assert len(re.findall(rf"^vllm:{name}_total{{replica=\"[01]\",", of_two, re.M)) == 2, name


def test_what_a_connector_stores_and_loads_is_counted(tmp_path: Path) -> None:
    """An engine that starts again loads 20 of 21 tokens, and stores no block twice."""
    options = {"skip_tokenizer_init": True, "num_kv_blocks": 6, "block_size": 4}
    options["disable_log_stats"] = False
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found = []
    for _ in range(2):
        with LLM("tiny-qwen3", kv_offloading_path=tmp_path, **options) as llm:
            llm.generate([[*range(100, 121)]], one, use_tqdm=False)
            (metrics,) = metrics_of(llm.engine)
        values = read(metrics)  # the thread that stores has ended with the engine
        names = ("external_prefix_cache_hits", *CONNECTOR_COUNTERS)
        found.append([values[f"vllm:{name}_total"][()] for name in names])
    assert found == [[0, 5, 0, 0, 0, 0], [20, 0, 0, 5, 0, 0]]


def test_without_a_host_tier_and_a_connector_there_are_no_counters_of_them(measured) -> None:
    _, metrics = measured
    parts = ("external", "offload", "connector")
    assert not [name for name in read(metrics) if any(part in name for part in parts)]


def test_the_longest_completion_of_a_request_is_counted() -> None:
    """Also if the request ends before the step that it ends in is observed."""
    with LLM("tiny-qwen3", num_kv_blocks=60, disable_log_stats=False) as llm:
        for max_tokens in (3, 5):
            params = SamplingParams(n=2, max_tokens=max_tokens, ignore_eos=True)
            llm.generate([[1, 2, 3]], params, use_tqdm=False)
        (metrics,) = metrics_of(llm.engine)
    values = read(metrics)
    assert values["vllm:request_max_num_generation_tokens_sum"] == {(): 8}
    assert values["vllm:request_generation_tokens_sum"] == {(): 16}
    assert values["vllm:request_success_total"][("length",)] == 4


def test_a_histogram_is_prometheus_own() -> None:
    """One by one, and many at once, as the library's histogram counts."""
    from prometheus_client import CollectorRegistry
    from prometheus_client import Histogram as Theirs

    bounds = [0.1, 0.5, 1, 2.5]
    theirs = Theirs("h", "h", buckets=bounds, registry=(registry := CollectorRegistry()))
    ours, rng = Histogram(bounds), random.Random(1)
    values = [rng.choice([0, 0.1, 0.5, 2.5, 3, rng.random()]) for _ in range(500)]
    ours.observe_all(values[:400])
    ours.observe_all([])
    for value in values[400:]:
        ours.observe(value)
    for value in values:
        theirs.observe(value)
    buckets, total = ours.read()
    assert total == pytest.approx(sum(values))
    for bound, count in buckets:
        assert registry.get_sample_value("h_bucket", {"le": bound}) == count
    assert bisect_left(bounds, 0.1) == 0  # a value on a border belongs below it


def test_guesses_are_counted_under_vllms_names() -> None:
    guesses = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}

    async def ask_twice(llm: AsyncLLM) -> None:
        for number in range(2):  # the second answer is the first one's
            params = SamplingParams(temperature=0, max_tokens=30)
            async for _ in llm.generate("What is a KV cache?", params, str(number)):
                pass

    llm = AsyncLLM("tiny-qwen3", dtype="float32", speculative_config=guesses)
    metrics = Metrics(llm.engine, "tiny")
    llm.engine.observers.append(metrics)
    llm.engine.listeners.append(metrics)
    try:
        asyncio.run(ask_twice(llm))
        values, stats = read(metrics), llm.engine.stats
    finally:
        llm.shutdown()

    def one(name: str) -> float:
        (value,) = values[f"vllm:spec_decode_{name}_total"].values()
        return value

    assert one("num_drafts") == stats.num_drafts > 2
    assert one("num_draft_tokens") == stats.num_draft_tokens
    assert one("num_accepted_tokens") == stats.num_accepted_tokens > 5
    per_position = values["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert per_position == {(str(i),): n for i, n in enumerate(stats.num_accepted_tokens_per_pos)}
    assert values["vllm:generation_tokens_total"] == {(): stats.num_output_tokens}


def test_whoever_fails_at_its_first_token_fails_alone(measured) -> None:
    """There is no time to a first token then, and no reason for a step to fail."""
    llm, metrics = measured
    nothing = SamplingParams(allowed_token_ids=[67], bad_words=["a"], max_tokens=4)
    good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    async def end_of(params):
        try:
            async for output in llm.generate([1, 2, 3], params):
                last = output
        except ValueError as error:
            return error
        return last.outputs[0].finish_reason

    async def ask_all():
        return await asyncio.gather(*(end_of(p) for p in [*[nothing] * 20, good]))

    *failed, ended = asyncio.run(ask_all())
    assert all(isinstance(error, ValueError) for error in failed) and ended == "length"
    assert llm.is_running and llm.owner._num_failures == 0
    values = read(metrics)
    assert values["vllm:time_to_first_token_seconds_count"][()] == 1
    assert values["vllm:request_success_total"][("error",)] == 20
