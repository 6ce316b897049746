"""Serve requests that arrive one by one, and measure their latencies.

TTFT, the time to first token, counts from the time at which a request was due to arrive. It thus
includes the time in which the request waits for a busy engine to end its step. A benchmark without
this time has the error known as coordinated omission.
"""

import time
from itertools import pairwise
from random import Random
from typing import Protocol

import numpy as np

PERCENTILES = (50, 90, 99)
Tokens = list[list[int]]


class OnlineEngine(Protocol):
    """An engine that accepts requests while others run."""

    def add(self, index: int, prompt: list[int], output_len: int) -> None: ...

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        """Return new tokens by request, if any, after about `seconds` at most.

        An engine that is driven step by step runs one step instead, however long it takes.
        """
        ...


def poisson_arrivals(rate: float, num_requests: int, seed: int = 0) -> list[float]:
    """Return the arrival times in seconds of a Poisson process of `rate` requests per second.

    With the same seed, another rate scales the same pattern.
    """
    rng, now, arrivals = Random(seed), 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(1.0) / rate
        arrivals.append(now)
    return arrivals


def serve(
    engine: OnlineEngine, prompts: Tokens, output_lens: list[int], arrivals: list[float]
) -> tuple[Tokens, list[list[float]]]:
    """Serve all requests. Returns each request's tokens, and their times since the start in s."""
    outputs: Tokens = [[] for _ in prompts]
    token_times: list[list[float]] = [[] for _ in prompts]
    num_added = num_finished = 0
    start = time.perf_counter()
    while num_finished < len(prompts):
        now = time.perf_counter() - start
        while num_added < len(prompts) and arrivals[num_added] <= now:
            engine.add(num_added, prompts[num_added], output_lens[num_added])
            num_added += 1
        until_next = arrivals[num_added] - now if num_added < len(prompts) else 1.0
        if num_added == num_finished:
            time.sleep(until_next)
            continue
        new_tokens = engine.poll(until_next)
        now = time.perf_counter() - start
        for index, token_ids in new_tokens:
            outputs[index] += token_ids
            token_times[index] += [now] * len(token_ids)
            if len(outputs[index]) > output_lens[index]:
                raise RuntimeError(f"request {index} got more tokens than {output_lens[index]}")
            num_finished += len(token_ids) > 0 and len(outputs[index]) == output_lens[index]
    return outputs, token_times


def latencies(
    arrivals: list[float],
    token_times: list[list[float]],
    slo_ttft: float,
    slo_itl: float,
    num_tokens: list[int] | None = None,
    seconds: float | None = None,
) -> dict[str, float]:
    """Return means and percentiles in milliseconds, and rates per second, of one run.

    Each request has a TTFT (time to first token), a TPOT (mean time per token after the first) and
    an E2E latency (until its last token). ITL (inter-token latency) has the gaps between times of
    all requests. num_tokens: the number of tokens of each request, for a server that may send
    several at a time; by default one per time. seconds: the duration of the run, if it did
    not end with a token.

    Goodput (Zhong et al. 2024, arXiv 2401.09670) is the rate of the requests that met both
    objectives: the first token within `slo_ttft` seconds, and a TPOT of `slo_itl` at most.
    """
    ttfts = [times[0] - arrival for arrival, times in zip(arrivals, token_times, strict=True)]
    e2es = [times[-1] - arrival for arrival, times in zip(arrivals, token_times, strict=True)]
    gaps = [later - earlier for times in token_times for earlier, later in pairwise(times)]
    counts = num_tokens or [len(times) for times in token_times]
    after_first = [times[-1] - times[0] for times in token_times]
    tpots = [rest / max(1, n - 1) for rest, n in zip(after_first, counts, strict=True)]
    met = [ttft <= slo_ttft and tpot <= slo_itl for ttft, tpot in zip(ttfts, tpots, strict=True)]
    seconds = seconds or max(times[-1] for times in token_times)
    found = {"request_rate": len(arrivals) / seconds, "goodput": sum(met) / seconds}
    several = [tpot for tpot, n in zip(tpots, counts, strict=True) if n > 1]
    waits = {"ttft": ttfts, "itl": gaps or [0.0], "tpot": several or [0.0], "e2e": e2es}
    for name, values in waits.items():
        found[f"{name}_mean"] = 1000 * float(np.mean(values))
        found |= {f"{name}_p{p}": 1000 * float(np.percentile(values, p)) for p in PERCENTILES}
    return found
