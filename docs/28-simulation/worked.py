"""Chapter 28's numbers: the engine's own simulator in small settings, and formulas to check it by.

Nothing here is measured: every number is computed in virtual time, and equal on any machine. The
service is Qwen3-8B on one H100 per replica, with 70 % of the data sheet's rates and 2 ms per step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import policies
from tables import table

from nanoserve.cli.simulate.fit import non_negative_least_squares
from nanoserve.cli.simulate.fleet import Fleet
from nanoserve.cli.simulate.gpus import RooflineTime, gpu_named, num_kv_blocks
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.planner import Design, Goal, Plan, find_plan
from nanoserve.cli.simulate.replay import Replay, counts, first_difference
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import Results
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival, Workload
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.plan import Plan as StepPlan
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.features.trace.reader import read_trace

RECORDED = Path(__file__).parents[1] / "07-preemption" / "preemption.jsonl"
NUM_SLOTS = 64
_VOCAB_SIZE = 150_000
_LENGTHS = (200, 1500), (50, 250)  # of prompts and outputs
_NUM_REQUESTS = 500  # of a run of `at_share`
SERVICE = 0.01  # seconds of a request in the queues of the formulas


# ---------------------------------------------------------------- saturation


def workload(num_requests: int, rate: float | None) -> Workload:
    """Return requests as a Poisson process, or all at once; at each rate the same ones."""
    return replace(_drawn(num_requests), rate=rate)


@cache
def _drawn(num_requests: int) -> Workload:
    return Workload.draw(num_requests, *_LENGTHS, _VOCAB_SIZE)


@cache
def highest_rate() -> float:
    """Return the requests a second that one replica finishes if all of them wait from the start."""
    results = _serve(workload(_NUM_REQUESTS, None))
    return results.summary()["request_rate"]


@cache
def at_share(share: float) -> dict[str, float]:
    """Return the summary of one replica at a share of its highest rate."""
    results = _serve(workload(_NUM_REQUESTS, share * highest_rate()))
    summary = results.summary(slo_ttft=0.2, slo_itl=0.016)
    return summary | {"in_engine": in_system(results)}


def slots_in_use(share: float) -> float:
    """Return what Little's law says of the same run: requests a second x mean seconds of each."""
    found = at_share(share)
    return _NUM_REQUESTS / found["seconds"] * found["e2e_mean"] / 1000


def in_system(results: Results) -> float:
    """Return how many requests were in the engine on average, counted over its whole run."""
    done = results.finished.columns()
    times = np.concatenate((done["arrival"], done["end"]))
    changes = np.repeat([1, -1], len(done["end"]))
    order = np.argsort(times, kind="stable")
    number = np.cumsum(changes[order])[:-1]
    return float((number * np.diff(times[order])).sum() / np.ptp(times))


def saturation_table(shares: Sequence[float]) -> str:
    """Return latencies, and requests in the engine, over the rate."""
    rows = []
    for share in shares:
        found = at_share(share)
        rows.append(
            (
                *(f"{share:.0%}", f"{share * highest_rate():.1f}"),
                *(f"{found['ttft_p50']:,.0f} ms", f"{found['ttft_p99']:,.0f} ms"),
                f"{found['itl_p50']:.1f} ms",
                f"{found['in_engine']:.0f}",
                f"{found['attainment']:.0%}",
            )
        )
    head = ("of the highest rate", "requests/s", "TTFT p50", "TTFT p99", "ITL p50")
    return table((*head, "in the engine", "within the objectives"), rows)


def _serve(traffic: Workload) -> Results:
    return Fleet(policies.setup(max_num_seqs=NUM_SLOTS, enable_prefix_caching=False)).run(traffic)


# ---------------------------------------------------------------- the clock


@dataclass(frozen=True)
class Listed:
    """Traffic from a list."""

    listed: list[Arrival]

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.listed)


def small_setup(step_time: LinearTime, **options: Any) -> Setup:
    """Return an engine of the bundled model's shape with 64 blocks."""
    given = {"async_scheduling": False, "max_model_len": 1000, "enable_prefix_caching": False}
    config = EngineConfig("tiny", **{**given, **options}).for_device("cpu")
    return Setup(config, model_config_of("tiny"), 64, step_time)


class _Steps:
    """An observer that notes when steps of a simulated engine end, and what they compute."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, dict[str, int]]] = []
        self.fleet: Fleet | None = None

    def observe(self, plan: StepPlan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        tokens = {row.seq.request_id: row.n for row in plan.rows}
        self.rows.append((self.fleet.replicas["0"].clock.now, tokens))


def timeline(requests: Sequence[tuple[float, int, int]]) -> list[tuple[float, dict[str, int]]]:
    """Return end and tokens by request of each step, for (arrival, prompt, output) in ms, tokens.

    A step takes 10 ms, and 1 ms for each of its tokens.
    """
    listed = [Arrival(t / 1e3, [1] * n, [2] * out, out) for t, n, out in requests]
    steps = _Steps()
    steps.fleet = Fleet(small_setup(LinearTime(fixed=0.01, per_token=0.001)))
    steps.fleet.replicas["0"].engine.observers.append(steps.observe)
    steps.fleet.run(Listed(listed))
    return steps.rows


def timeline_table(requests: Sequence[tuple[float, int, int]]) -> str:
    """Return the steps of `timeline`, with what the clock does at each."""
    rows, last = [], 0.0
    for end, tokens in timeline(requests):
        num_tokens = sum(tokens.values())
        start = end - (0.01 + 0.001 * num_tokens)
        jump = f"{1e3 * last:.0f} → {1e3 * start:.0f} ms" if start > last + 1e-9 else ""
        what = ", ".join(f"{chr(65 + int(name))}: {n}" for name, n in tokens.items())
        rows.append((f"{1e3 * start:.0f} ms", what, f"{1e3 * end:.0f} ms", jump))
        last = end
    return table(("step begins", "tokens", "clock moves to", "idle before"), rows)


# ---------------------------------------------------------------- step times


def fits(steps: Sequence[tuple[int, float]]) -> dict[str, np.ndarray]:
    """Return (fixed, per token) in ms of fits to steps of (tokens, ms), with relative errors."""
    tokens, measured = np.array(steps, dtype=np.float64).T
    matrix = np.column_stack([np.ones(len(tokens)), tokens]) / measured[:, None]
    ones = np.ones(len(tokens))
    return {
        "ordinary": np.linalg.lstsq(matrix, ones, rcond=None)[0],
        "non-negative": non_negative_least_squares(matrix, ones),
    }


def fit_table(steps: Sequence[tuple[int, float]], unseen: int) -> str:
    """Return both fits, the errors of each step, and the time of a step of `unseen` tokens."""
    head = ("least squares", "fixed", "per token", *(f"{n} tokens: {ms:g} ms" for n, ms in steps))
    rows = []
    for name, (fixed, per_token) in fits(steps).items():
        errors = [f"{(fixed + per_token * n) / ms - 1:+.0%}" for n, ms in steps]
        predicted = f"{fixed + per_token * unseen:.2f} ms"
        rows.append((name, f"{fixed:.2f} ms", f"{per_token:.4f} ms", *errors, predicted))
    return table((*head, f"{unseen} tokens"), rows)


# ---------------------------------------------------------------- what is exact


@cache
def replayed(long_prefill_token_threshold: int = 0) -> tuple[dict[str, int], str | None]:
    """Replay chapter 7's run; returns the totals, and the first step that differs."""
    recorded = read_trace(RECORDED)
    header = recorded.header | {"long_prefill_token_threshold": long_prefill_token_threshold}
    with TemporaryDirectory() as folder:
        again = Replay(replace(recorded, header=header), Path(folder) / "again.jsonl").run()
    return counts(again), first_difference(recorded, again)


def replay_table() -> str:
    """Return the totals of the recorded run and of the replayed one."""
    recorded, (again, _) = counts(read_trace(RECORDED)), replayed()
    names = ("steps", "computed tokens", "sampled tokens", "cached tokens", "preemptions")
    rows = [(name, *(f"{totals[name]:,}" for totals in (recorded, again))) for name in names]
    return table(("", "recorded: a model", "replayed: none"), rows)


@cache
def leaps(leaps: bool) -> tuple[Results, int]:
    """Return the results of 100 requests at 30 % of the highest rate, and the steps one by one."""
    fleet = Fleet(replace(policies.setup(max_num_seqs=NUM_SLOTS), leaps=leaps))
    results = fleet.run(workload(100, 0.3 * highest_rate()))
    return results, fleet.replicas["0"].engine.stats.num_steps


def leap_table() -> str:
    rows = []
    for name, is_leaping in (("every step", False), ("leaps", True)):
        results, num_steps = leaps(is_leaping)
        total = f"{sum(results.finished.end):.12f} s"
        rows.append((name, f"{results.stats.num_steps:,}", f"{num_steps:,}", total))
    return table(("", "steps", "of them one by one", "sum of all ends"), rows)


# ---------------------------------------------------------------- queues


def lindley(times: Sequence[float], service: float) -> list[float]:
    """Return the wait of each request: W' = max(0, W + service - time to the next arrival)."""
    waits = [0.0]
    for this, following in pairwise(times):
        waits.append(max(0.0, waits[-1] + service - (following - this)))
    return waits


def poisson(load: float, num_requests: int, seed: int) -> list[float]:
    """Return the times of a Poisson process, scaled so that the load is exact."""
    rng, now, times = Random(seed), 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(1.0)
        times.append(now)
    scale = num_requests * SERVICE / load / now
    return [scale * time for time in times]


def engine_waits(times: Sequence[float]) -> np.ndarray:
    """Return the waits of the real scheduler with one slot, and requests of one step."""
    setup = small_setup(LinearTime(fixed=SERVICE), max_num_seqs=1)
    listed = [Arrival(time, [1], [2], max_tokens=1) for time in times]
    done = Fleet(setup).run(Listed(listed)).finished.columns()
    return done["first_scheduled"] - done["arrival"]


def md1_wait(load: float, service: float = SERVICE) -> float:
    """Return the mean wait of M/D/1: load x service / (2 (1 - load))."""
    return load * service / (2 * (1 - load))


@cache
def queue(load: float) -> dict[str, float]:
    """Return mean waits of the engine, of Lindley's recursion, and of the formula."""
    few = poisson(load, 1500, 1)
    engine, same = engine_waits(few), np.array(lindley(few, SERVICE))
    return {
        "engine": float(engine.mean()),
        "difference": float(np.abs(engine - same).max()),
        "many": float(np.mean(lindley(poisson(load, 400_000, 2), SERVICE))),
        "formula": md1_wait(load),
    }


def off_by_chance(load: float) -> float:
    """Return how far the mean wait of the engine's 1,500 requests is from the formula."""
    return queue(load)["engine"] / queue(load)["formula"] - 1


def queue_table(loads: Sequence[float]) -> str:
    rows = []
    for load in loads:
        found = queue(load)
        is_equal = "none" if found["difference"] < 1e-9 else f"{found['difference']:.1e} s"
        few, many, exact = (f"{1e3 * found[x]:.2f} ms" for x in ("engine", "many", "formula"))
        off = f"{off_by_chance(load):+.1%}", f"{found['many'] / found['formula'] - 1:+.1%}"
        rows.append((f"{load:.0%}", exact, few, off[0], is_equal, many, off[1]))
    head = ("load", "M/D/1", "scheduler, 1,500 requests", "off by", "difference to Lindley's")
    return table((*head, "Lindley, 400,000", "off by"), rows)


def amplified(load: float, error: float) -> float:
    """Return how much longer requests wait in M/D/1 if each takes `error` longer, relatively."""
    return md1_wait(load * (1 + error), SERVICE * (1 + error)) / md1_wait(load) - 1


def amplified_table(loads: Sequence[float], errors: Sequence[float]) -> str:
    rows = []
    for load in loads:
        rows.append((f"{load:.0%}", *(f"{amplified(load, error):+.0%}" for error in errors)))
    return table(("load", *(f"service {error:.0%} longer" for error in errors)), rows)


# ---------------------------------------------------------------- a plan

PLANNED_RATE = 60.0
GOAL = Goal(slo_ttft=0.2, slo_itl=0.016, attainment=0.95, warm_up=1.0)


@cache
def plan(num_gpus: int, num_slots: int) -> Plan:
    """Return the fewest replicas of `num_gpus` GPUs that serve 60 requests a second."""
    base = policies.setup(max_num_seqs=num_slots)
    gpu = gpu_named("h100")
    step_time = RooflineTime(base.model_config, gpu, num_gpus, efficiency=0.7, fixed=0.002)
    blocks = num_kv_blocks(base.model_config, gpu, base.config, num_gpus)
    setup = replace(base, step_time=step_time, num_kv_blocks=blocks)
    design = Design(f"{num_gpus}", setup, num_gpus)
    traffic = workload(360, PLANNED_RATE)
    return find_plan(design, lambda: traffic, GOAL, most_replicas=8)


def plan_table(designs: Sequence[tuple[int, int]]) -> str:
    """Return the plans of (GPUs per replica, slots)."""
    rows = []
    for num_gpus, num_slots in designs:
        found = plan(num_gpus, num_slots)
        summary = found.summary
        times = f"{summary['ttft_p99']:.0f} ms", f"{summary['tpot_p99']:.1f} ms"
        size = found.num_replicas, f"**{found.num_gpus}**"
        rows.append((num_gpus, num_slots, *size, *times, found.limit))
    head = ("GPUs a replica", "slots", "replicas", "GPUs", "TTFT p99", "time a token p99")
    return table((*head, "with a replica less"), rows)


# ---------------------------------------------------------------- experiments


@cache
def experiment(name: str) -> dict[str, dict[str, float]]:
    """Return the rows of an experiment of `benchmarks/policies.py`, with its 600 requests."""
    return policies.EXPERIMENTS[name](600)


def experiment_table(name: str) -> str:
    rows = experiment(name)
    columns = list(next(iter(rows.values())))
    cells = [(policy, *(_cell(key, row[key]) for key in columns)) for policy, row in rows.items()]
    return table(("policy", *columns), cells)


def _cell(name: str, value: float) -> str:
    if name == "hit rate":
        return f"{value:.0%}"
    return f"{value:,.0f}" if name == "computed tokens" else f"{value:.2f} s"
