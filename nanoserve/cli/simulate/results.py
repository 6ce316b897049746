"""The results of a simulated run: latencies, throughput and goodput."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanoserve.cli.simulate.replica import Replica, TokenTimes
from nanoserve.outputs import EngineStats, RequestOutput

PERCENTILES = (50, 90, 99)
COLUMNS = {  # of tables: name in a summary, heading; latencies in milliseconds
    "request_rate": "requests/s",
    "goodput": "goodput/s",
    "output_tokens_per_s": "tokens/s",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "hit_rate": "hit rate",
    "num_preemptions": "preempted",
    "busy": "busy",
}
_SUMS = (
    *("num_steps", "num_computed_tokens", "num_preemptions", "prefix_cache_queries"),
    *("prefix_cache_hits", "num_draft_tokens", "num_accepted_tokens"),
)


@dataclass
class Finished:
    """Finished requests, one entry per request in each array; times in seconds.

    request: the number of the request, in the order of arrival.
    """

    request: array = field(default_factory=lambda: array("q"))
    arrival: array = field(default_factory=lambda: array("d"))
    first_scheduled: array = field(default_factory=lambda: array("d"))
    first_token: array = field(default_factory=lambda: array("d"))
    last_token: array = field(default_factory=lambda: array("d"))
    end: array = field(default_factory=lambda: array("d"))
    num_prompt_tokens: array = field(default_factory=lambda: array("q"))
    num_output_tokens: array = field(default_factory=lambda: array("q"))

    def add(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self.request.append(int(output.request_id))
        self.arrival.append(metrics.arrival_time)
        self.first_scheduled.append(metrics.first_scheduled_time)
        self.first_token.append(metrics.first_token_time)
        last = metrics.last_token_time
        self.last_token.append(metrics.first_token_time if last is None else last)
        self.end.append(metrics.finished_time)
        self.num_prompt_tokens.append(len(output.prompt_token_ids))
        self.num_output_tokens.append(metrics.num_output_tokens)

    def __len__(self) -> int:
        return len(self.arrival)

    def columns(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(values) for name, values in vars(self).items()}


@dataclass
class Results:
    """The results of a run. `seconds` is the virtual time at which its last request ended."""

    finished: Finished
    token_times: list[TokenTimes]
    stats: EngineStats
    seconds: float
    busy_seconds: list[float]  # by replica
    num_failed: int = 0  # requests that ended with an error
    waited_for: dict[str, float] = field(default_factory=dict)  # seconds: see `Replica`

    @classmethod
    def of(
        cls, finished: Finished, replicas: Iterable[Replica], seconds: float, num_failed: int
    ) -> "Results":
        replicas = list(replicas)
        each = [replica.stats for replica in replicas]
        stats = EngineStats(**{name: sum(getattr(s, name) for s in each) for name in _SUMS})
        stats.num_prompt_tokens = sum(finished.num_prompt_tokens)
        stats.num_output_tokens = sum(finished.num_output_tokens)
        times = [replica.token_times for replica in replicas]
        busy = [replica.busy_seconds for replica in replicas]
        waits = [replica.waited_for for replica in replicas]
        waited_for = {name: sum(one[name] for one in waits) for name in waits[0]}
        return cls(finished, times, stats, seconds, busy, num_failed, waited_for)

    @classmethod
    def of_engine(
        cls,
        finished: Finished,
        token_times: TokenTimes,
        before: EngineStats,
        after: EngineStats,
        seconds: float,
        busy_seconds: float,
    ) -> "Results":
        """Return the results of a real engine between two readings of its statistics."""
        names = (*_SUMS, "num_prompt_tokens", "num_output_tokens")
        stats = EngineStats(**{n: getattr(after, n) - getattr(before, n) for n in names})
        return cls(finished, [token_times], stats, seconds, [busy_seconds])

    def counts(self) -> dict[str, int]:
        """Return the totals that do not depend on times alone."""
        names = (*_SUMS[:5], "num_prompt_tokens", "num_output_tokens")
        return {"num_requests": len(self.finished)} | {n: getattr(self.stats, n) for n in names}

    def summary(
        self, slo_ttft: float = 1.0, slo_itl: float = 0.1, warm_up: float = 0.0
    ) -> dict[str, float]:
        """Return rates per second, and latencies in milliseconds, as `nanoserve bench` does.

        Requests that arrived in the first `warm_up` seconds are left out, but their inter-token
        latencies and hits are not.

        Goodput is the rate of the requests whose first token came within `slo_ttft` seconds, and
        whose mean time per further token is `slo_itl` seconds at most.
        """
        done = self.finished.columns()
        done = {name: values[done["arrival"] >= warm_up] for name, values in done.items()}
        if not len(done["arrival"]):
            raise ValueError(
                f"no request that arrived after {warm_up:g} s has finished: simulate for longer"
            )
        ttft, tpot = _ttft_and_tpot(done)
        met = int(((ttft <= slo_ttft) & (tpot <= slo_itl)).sum())
        seconds = max(1e-9, self.seconds - warm_up)
        found = {
            "seconds": self.seconds,
            "request_rate": len(ttft) / seconds,
            "goodput": met / seconds,
            "attainment": met / (len(ttft) + self.num_failed),
            "output_tokens_per_s": float(done["num_output_tokens"].sum()) / seconds,
            "busy": float(np.mean(self.busy_seconds)) / max(1e-9, self.seconds),
            "hit_rate": self.stats.prefix_cache_hit_rate,
            "num_preemptions": self.stats.num_preemptions,
        }
        several = tpot[done["num_output_tokens"] > 1]
        waits = {"queue": done["first_scheduled"] - done["arrival"], "ttft": ttft}
        waits |= {"tpot": several, "e2e": done["end"] - done["arrival"]}
        for name, values in waits.items():
            found |= _spread(name, values, np.ones(len(values)))
        intervals = [np.asarray(times.seconds) for times in self.token_times]
        counts = [np.asarray(times.counts) for times in self.token_times]
        return found | _spread("itl", np.concatenate(intervals), np.concatenate(counts))


def _ttft_and_tpot(done: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the time to first token, and the mean time per further token, of each request."""
    after_first = done["last_token"] - done["first_token"]
    tpot = after_first / np.maximum(1, done["num_output_tokens"] - 1)
    return done["first_token"] - done["arrival"], tpot


def _spread(name: str, seconds: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Return mean and percentiles in milliseconds of values that occurred `counts` times."""
    if not len(seconds):
        seconds, counts = np.zeros(1), np.ones(1)
    found = {f"{name}_mean": 1000 * float(np.average(seconds, weights=counts))}
    order = np.argsort(seconds)
    ranks, total = np.cumsum(counts[order]), counts.sum()
    for percentile in PERCENTILES:
        # Linear between the two nearest ranks, as numpy's percentile of the values one by one.
        place = percentile / 100 * (total - 1)
        low, high = np.searchsorted(ranks, [np.floor(place), np.ceil(place)], side="right")
        below, above = seconds[order[low]], seconds[order[high]]
        value = below + (place - np.floor(place)) * (above - below)
        found[f"{name}_p{percentile}"] = 1000 * float(value)
    return found


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a text table of summaries by name, with the columns that decide most often."""
    width = max(len(name) for name in rows)
    lines = [" ".join([" " * width, *(f"{head:>10}" for head in COLUMNS.values())])]
    for name, row in rows.items():
        cells = [_cell(column, row[column]) for column in COLUMNS]
        lines.append(" ".join([f"{name:<{width}}", *(f"{cell:>10}" for cell in cells)]))
    return "\n".join(lines)


def _cell(column: str, value: float) -> str:
    if column in ("hit_rate", "busy"):
        return f"{value:.1%}"
    return f"{value:.0f}" if value >= 1000 or column == "num_preemptions" else f"{value:.4g}"
