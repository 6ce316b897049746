"""Prefill and decode on different replicas (Zhong et al. 2024, DistServe), in simulation.

A request first runs on a prefill replica, which computes its prompt and its first token. Then its
KV blocks are sent to a decode replica, which generates the rest. So prompts delay no decode step,
but each pool has its own GPUs, and a transfer takes time. No KV connector is simulated: the decode
replica's scheduler admits the prompt as usual, with its blocks and its token budget, and only the
time of its computation is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanoserve.cli.simulate.fleet import Fleet, FleetSettings
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import Results
from nanoserve.cli.simulate.step_time import Number, StepSize, StepTime
from nanoserve.cli.simulate.traffic import Arrival, Traffic
from nanoserve.utils.checks import check_int, check_number, require


@dataclass(frozen=True)
class DecodeTime:
    """The times of steps in which prompts take none: their K and V have been received."""

    inner: StepTime

    @property
    def description(self) -> str:
        return f"{self.inner.description}, without prompts"

    def seconds(self, size: StepSize) -> Number:
        decodes = size._replace(num_tokens=size.num_rows, num_admitted=0, pairs=0.0 * size.pairs)
        return self.inner.seconds(decodes)


@dataclass(frozen=True)
class PairSettings:
    """The sizes of both pools, and the bytes per second at which KV is sent; checked."""

    num_prefill: int
    num_decode: int
    bandwidth: float

    def __post_init__(self) -> None:
        check_int("num_prefill", self.num_prefill, 1)
        check_int("num_decode", self.num_decode, 1)
        check_number("bandwidth", self.bandwidth, 0, excludes_low=True)


@dataclass(frozen=True)
class PairResults:
    """The results of both pools, request by request in the order of arrival.

    ttft, tpot: in seconds; a request of one token has a tpot of 0. ends: times of the last tokens.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    ends: np.ndarray
    prefill: Results
    decode: Results | None

    def summary(self, goal: Goal) -> dict[str, Any]:
        """Return rates, and percentiles in milliseconds, under the names of other summaries."""
        met = (self.ttft <= goal.slo_ttft) & (self.tpot <= goal.slo_itl)
        seconds = float(self.ends.max())
        found = {
            "request_rate": len(met) / seconds,
            "goodput": int(met.sum()) / seconds,
            "attainment": float(met.mean()),
        }
        for name, values in (("ttft", self.ttft), ("tpot", self.tpot)):
            for percentile in (50, 90, 99):
                found[f"{name}_p{percentile}"] = 1000 * float(np.percentile(values, percentile))
        return found


@dataclass(frozen=True)
class _Listed:
    requests: list[Arrival]

    def arrivals(self) -> Iterator[Arrival]:
        return iter(sorted(self.requests, key=lambda arrival: arrival.time))


def simulate_pairs(setup: Setup, traffic: Traffic, settings: PairSettings) -> PairResults:
    """Run the prompts on the prefill pool, and then the outputs on the decode pool.

    Both pools have the engine of `setup`. The decode pool does not slow down the prefill pool:
    prompts whose decode replica is full wait there, not here. Raises `ValueError` for sessions,
    whose requests depend on the ends of others.
    """
    requests = sorted(traffic.arrivals(), key=lambda arrival: arrival.time)
    require(bool(requests), "there are no requests")
    require(
        all(arrival.conversation is None for arrival in requests),
        "sessions wait for answers, and pairs are simulated one pool after the other: use Workload",
    )
    prompts = [replace(arrival, max_tokens=1, output=arrival.output[:1]) for arrival in requests]
    pool = FleetSettings(settings.num_prefill)
    prefill = Fleet(setup, pool).run(_Listed(prompts))
    first_tokens = _by_request(prefill, "first_token", len(requests))
    token_bytes = setup.model_config.kv_bytes_per_token(setup.config.kv_cache_dtype)
    handed: list[Arrival] = []
    indices: list[int] = []
    for index, arrival in enumerate(requests):
        if len(arrival.output) > 1:
            sent = len(arrival.prompt) * token_bytes / settings.bandwidth
            handed.append(_after_first(arrival, float(first_tokens[index]) + sent))
            indices.append(index)
    ends, decode = first_tokens.copy(), None
    if handed:
        decode, last = _decode(setup, handed, settings.num_decode)
        ends[indices] = last
    arrivals = np.array([arrival.time for arrival in requests])
    further = np.array([max(1, len(arrival.output) - 1) for arrival in requests])
    tpot = (ends - first_tokens) / further
    return PairResults(first_tokens - arrivals, tpot, ends, prefill, decode)


def _decode(setup: Setup, handed: list[Arrival], num_replicas: int) -> tuple[Results, np.ndarray]:
    """Run the decode pool; returns its results, and the time of each request's last token."""
    decode_setup = replace(setup, step_time=DecodeTime(setup.step_time))
    results = Fleet(decode_setup, FleetSettings(num_replicas)).run(_Listed(handed))
    last = np.empty(len(handed))
    order = sorted(range(len(handed)), key=lambda i: handed[i].time)
    last[order] = _by_request(results, "last_token", len(handed))
    return results, last


def _after_first(arrival: Arrival, time: float) -> Arrival:
    """Return the request that a decode replica gets: the first token is part of its prompt."""
    prompt = [*arrival.prompt, arrival.output[0]]
    limit = None if arrival.max_tokens is None else arrival.max_tokens - 1
    rest = arrival.output[1:]
    return replace(arrival, time=time, prompt=prompt, output=rest, max_tokens=limit)


def _by_request(results: Results, name: str, number: int) -> np.ndarray:
    """Return a column in the order of arrival. Raises `RuntimeError` if a request is missing."""
    columns = results.finished.columns()
    if len(columns["request"]) != number:
        raise RuntimeError(f"{number} requests were sent, and {len(columns['request'])} finished")
    return columns[name][np.argsort(columns["request"])]
