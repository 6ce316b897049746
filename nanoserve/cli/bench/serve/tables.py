"""Print tables of a server's results, with medians over the runs at each load."""

import statistics
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanoserve.cli.bench.latency import PERCENTILES
from nanoserve.cli.bench.report import print_table

Run = dict[str, Any]  # see `figures.figures`
WAITS = ("ttft", "itl", "tpot", "e2e")
_COLUMNS = ("mean", *(f"p{p}" for p in PERCENTILES))


@dataclass(frozen=True)
class Point:
    """The runs at one load, i.e. a request rate per second or a number of waiting clients."""

    request_rate: float | None
    concurrency: int | None
    runs: list[Run] = field(default_factory=list)

    def title(self) -> str:
        if self.request_rate is None:
            return f"{self.concurrency} at a time"
        return "all at once" if self.request_rate == float("inf") else f"{self.request_rate:g}/s"

    def answered(self) -> list[Run]:
        return [run for run in self.runs if run["ok"]]


def line(run: Run) -> str:
    return f"{run['seconds']:.3f} s, {run['ok']} answered, {run['failed']} failed"


def print_report(points: list[Point], args: Namespace) -> None:
    print_table([_rates(point, args) for point in points])
    waits = [row for point in points if point.answered() for row in _waits(point)]
    if waits:
        print_table(waits)
    for note in notes([run for point in points for run in point.runs]):
        print(note)


def notes(runs: list[Run]) -> list[str]:
    """Return notes on how tokens were counted, on the client's own load, and on errors."""
    chunks, tokens = (sum(run[name] for run in runs) for name in ("chunks", "output_tokens"))
    answered, counted = (sum(run[name] for run in runs) for name in ("ok", "with_usage"))
    full = sum(run["full_length"] for run in runs)
    found = []
    if answered:
        by = "the server's usage" if counted == answered else "chunks, each counted as a token"
        if 0 < counted < answered:
            by = f"the server's usage for {counted} answers, and by chunks for the rest"
        found += [
            f"tokens are counted by {by}; {full} of {answered} answers have the requested length",
            f"ITL is the time between chunks with content, of {tokens / chunks:.2f} tokens each; "
            "TPOT is (E2E - TTFT) / (tokens - 1)",
        ]
    cached = sum(run["cached_tokens"] for run in runs)
    if cached:
        found.append(f"{cached} prompt tokens were in the server's prefix cache")
    late = max(run["client"]["late_ms_max"] for run in runs)
    core = max(run["client"]["core"] for run in runs)
    found.append(f"the client used at most {core:.0%} of a core and was at most {late:.1f} ms late")
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run["errors"])
    for message, times in errors.most_common(1):
        found.append(f"{errors.total()} failed, most often ({times}): {message}")
    return found


def _rates(point: Point, args: Namespace) -> dict[str, str]:
    """Return the row of rates, i.e. answered requests over the whole duration of a run."""
    runs = point.runs

    def middle(value: Any) -> float:
        return statistics.median(value(run) for run in runs)

    objectives = f"{1000 * args.slo_ttft:.0f}, {1000 * args.slo_itl:.0f} ms"
    speeds = [run["output_tokens"] / run["seconds"] for run in runs]
    return {
        "load": point.title(),
        "answered": str(sum(run["ok"] for run in runs)),
        "failed": str(sum(run["failed"] for run in runs)),
        "seconds": f"{middle(lambda run: run['seconds']):.2f}",
        "requests/s": f"{middle(lambda run: run['ok'] / run['seconds']):.2f}",
        "input tok/s": f"{middle(lambda run: run['input_tokens'] / run['seconds']):.1f}",
        "output tok/s": f"{statistics.median(speeds):.1f}",
        "from - to": f"{min(speeds):.1f} - {max(speeds):.1f}",
        f"goodput/s ({objectives})": f"{middle(_goodput):.2f}",
        "share": f"{middle(lambda run: run.get('goodput_share', 0)):.0%}",
        "runs": str(len(runs)),
    }


def _goodput(run: Run) -> float:
    return run["latencies"]["goodput"] if run["ok"] else 0.0


def _waits(point: Point) -> list[dict[str, str]]:
    rows = []
    for name in WAITS:
        row = {"load": point.title(), "ms": name.upper()}
        for column in _COLUMNS:
            values = [run["latencies"][f"{name}_{column}"] for run in point.answered()]
            row[column] = f"{statistics.median(values):.1f}"
        rows.append(row)
    return rows


def as_json(points: list[Point], args: Namespace, model: str) -> dict[str, Any]:
    """Return all results as JSON, without the API key and paths of this machine."""
    left_out = ("api_key", "json", "plot", "request_rate", "concurrency", "shape")
    spec = {name: value for name, value in vars(args).items() if name not in left_out}
    results = [
        {"load": p.title(), "request_rate": _number(p), "concurrency": p.concurrency}
        | {"runs": p.runs}
        for p in points
    ]
    return {"spec": spec | {"model": model}, "points": results}


def _number(point: Point) -> float | str | None:
    return "inf" if point.request_rate == float("inf") else point.request_rate  # JSON has none
