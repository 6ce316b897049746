"""Print tables of measurements, with medians over runs and ratios of consecutive runs."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.cli.bench.latency import PERCENTILES
from nanoserve.cli.bench.roofline import Limit

Run = dict[str, Any]  # of `child.measure`, or {"failed": reason} or {"missing": reason}


@dataclass(frozen=True)
class Point:
    """The runs at one batch size (None: the default) and one request rate (None: all at once)."""

    max_num_seqs: int | None
    request_rate: float | None
    limit: Limit | None
    runs: dict[str, list[Run]]  # by the engine's label
    limits: dict[str, Limit] = field(default_factory=dict)  # of engines with another precision

    def limit_of(self, label: str) -> Limit | None:
        return self.limits.get(label, self.limit)

    def done(self) -> dict[str, list[Run]]:
        done = {
            label: [run for run in runs if "seconds" in run] for label, runs in self.runs.items()
        }
        return {label: runs for label, runs in done.items() if runs}

    def missing(self) -> dict[str, str]:
        """Return the reason for each engine that has no measurement."""
        without = self.runs.keys() - self.done().keys()
        reasons = {label: runs[-1] for label, runs in self.runs.items() if label in without}
        return {
            label: run["missing"] if "missing" in run else f"failed: {run['failed']}"
            for label, run in reasons.items()
        }

    def title(self) -> str:
        parts = [f"max_num_seqs {self.max_num_seqs}"] if self.max_num_seqs else []
        parts += [f"{self.request_rate:g} requests per second"] if self.request_rate else []
        return ", ".join(parts)


def print_report(points: list[Point], spec: dict[str, Any]) -> None:
    for point in points:
        print(f"\n{point.title()}".rstrip())
        for label, runs in point.done().items():
            versions = ", ".join(
                f"{name} {version}" for name, version in runs[-1]["versions"].items()
            )
            facts = ", ".join(f"{name} {value}" for name, value in runs[-1]["facts"].items())
            print(f"{label}: {versions}: {facts}")
        if point.limit is not None:
            print(f"roofline: {describe_limit(point.limit, spec, 'matmul_rate')}")
        for label, limit in point.limits.items():
            print(f"roofline of {label}: {describe_limit(limit, spec, 'integer_rate')}")
        print_table((online_table if point.request_rate else offline_table)(point, spec))
        print_comparison(point, spec)


def describe_limit(limit: Limit, spec: dict[str, Any], rate: str) -> str:
    return (
        f"{limit.seconds:.2f} s for {limit.num_bytes / 1e9:.1f} GB at "
        f"{spec['bandwidth'] / 1e9:.1f} GB/s and {limit.num_operations / 1e12:.2f} TFLOP at "
        f"{spec[rate] / 1e12:.2f} TFLOP/s, in {limit.num_steps} steps"
    )


def offline_table(point: Point, spec: dict[str, Any]) -> list[dict[str, str]]:
    num_in, num_out = sum(map(len, spec["prompts"])), sum(spec["output_lens"])
    rows = []
    for label, runs in point.done().items():
        seconds = [run["seconds"] for run in runs]
        s = statistics.median(seconds)
        row = {"engine": label, "output tok/s": f"{num_out / s:.1f}"}
        row["total tok/s"] = f"{(num_in + num_out) / s:.1f}"
        if "first_token" in runs[0]:
            decode = [run["seconds"] - run["first_token"] for run in runs]
            row["decode tok/s"] = f"{(num_out - 1) / statistics.median(decode):.1f}"
        row["seconds"] = f"{s:.2f}"
        row["from - to"] = f"{min(seconds):.2f} - {max(seconds):.2f}"
        limit = point.limit_of(label)
        if limit is not None:
            row["of the limit"] = f"{limit.seconds / s:.0%}"
        rows.append(row | common_columns(runs))
    return rows + missing_rows(point)


def online_table(point: Point, spec: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for label, runs in point.done().items():
        found = {
            name: statistics.median(run["latencies"][name] for run in runs)
            for name in runs[0]["latencies"]
        }
        percentiles = "/".join(f"p{p}" for p in PERCENTILES)
        row = {"engine": label, "requests/s": f"{found['request_rate']:.2f}"}
        for name in ("ttft", "itl"):
            values = " / ".join(f"{found[f'{name}_p{p}']:.0f}" for p in PERCENTILES)
            row[f"{name.upper()} ms {percentiles}"] = values
        objectives = f"{1000 * spec['slo_ttft']:.0f}, {1000 * spec['slo_itl']:.0f} ms"
        row[f"goodput/s ({objectives})"] = f"{found['goodput']:.2f}"
        rows.append(row | common_columns(runs))
    return rows + missing_rows(point)


def common_columns(runs: list[Run]) -> dict[str, str]:
    columns = {"load s": f"{statistics.median(run['load'] for run in runs):.2f}"}
    columns["peak RSS MiB"] = f"{statistics.median(run['mib'] for run in runs):.0f}"
    if "gpu_mib" in runs[0]:
        columns["peak GPU MiB"] = f"{statistics.median(run['gpu_mib'] for run in runs):.0f}"
    return columns | {"runs": str(len(runs))}


def missing_rows(point: Point) -> list[dict[str, str]]:
    return [{"engine": label, "reason": why} for label, why in point.missing().items()]


def print_table(rows: list[dict[str, str]]) -> None:
    """Print a table. An engine without measurements has a row with the reason."""
    measured = dict.fromkeys(title for row in rows for title in row if title != "reason")
    titles = [*measured] if len(measured) > 1 else ["engine", "reason"]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for row in rows:
        if "reason" in row:
            cells = [row["engine"], row["reason"], *[""] * (len(titles) - 2)]
        else:
            cells = [row.get(title, "") for title in titles]
        print(f"| {' | '.join(cells)} |")
    print()


def print_comparison(point: Point, spec: dict[str, Any]) -> None:
    """Print ratios of times and agreement of outputs of the first and each other engine."""
    done = point.done()
    first = next(iter(point.runs))
    for label in (label for label in done if label != first and first in done):
        if point.request_rate is None:
            pairs = zip(point.runs[first], point.runs[label], strict=True)
            ratios = [
                b["seconds"] / a["seconds"] for a, b in pairs if "seconds" in a and "seconds" in b
            ]
            if ratios:
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}, pairs of runs: {len(ratios)}"
                print(f"{first} / {label}: {statistics.median(ratios):.2f} ({spread})")
        if not spec["temperature"]:
            text = agreement(done[first][-1]["outputs"], done[label][-1]["outputs"])
            print(f"{label}, greedy: {text} as {first}")


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """Return the agreement of outputs as text.

    With 16-bit data types, near-ties may be resolved differently, after which all tokens differ.
    """
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        equal = [a == b for a, b in zip(mine, other, strict=True)]
        same += [*equal, False].index(False)
    first = sum(mine[0] == other[0] for mine, other in zip(ours, theirs, strict=True))
    total = sum(map(len, ours))
    return f"{first} of {len(ours)} first tokens, {same} of {total} up to each first difference,"


def as_json(points: list[Point], spec: dict[str, Any]) -> dict[str, Any]:
    """Return all measurements as JSON, without tokens and without paths of this machine."""
    left_out = ("prompts", "output_lens", "scratch", "tokenizer", "python", "json", "plot")
    kept = {name: value for name, value in spec.items() if name not in left_out}
    kept["model"] = spec["shape"] or Path(spec["model"]).name
    kept["num_prompt_tokens"] = sum(map(len, spec["prompts"]))
    kept["num_output_tokens"] = sum(spec["output_lens"])
    results = []
    for point in points:
        limit = None if point.limit is None else vars(point.limit)
        runs = {
            label: [{k: v for k, v in run.items() if k != "outputs"} for run in tried]
            for label, tried in point.runs.items()
        }
        where = {"max_num_seqs": point.max_num_seqs, "request_rate": point.request_rate}
        limits = {label: vars(limit) for label, limit in point.limits.items()}
        results.append(where | {"limit": limit, "limits": limits, "runs": runs})
    return {"spec": kept, "points": results}
