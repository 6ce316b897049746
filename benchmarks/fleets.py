"""Simulate services of 1 to 10,000 GPUs: chats, agents and batches on replicas in cells.

    python benchmarks/fleets.py                          minutes on two cores
    python benchmarks/fleets.py --seconds 30 --cells 2   to see that it runs

Replicas of qwen3-8b on one H100 each, whose times are the data sheet's at an efficiency of 70 % and
2 ms per step: not calibrated. The real scheduler, block manager and router compute every plan and
every choice. Cells of 1 and 8 replicas are simulated, a sample of each; services of 64 to 10,000
GPUs are cells of 8.
"""

import json
import time
from argparse import ArgumentParser
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from nanoserve.cli.simulate.cells import CellSettings, simulate_cells
from nanoserve.cli.simulate.gpus import RooflineTime, gpu_named, num_kv_blocks
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.replica import Setup
from nanoserve.config import EngineConfig

RATES = {
    "chat": 8.0,
    "agents": 3.0,
    "batch": 4.0,
}  # requests per second and GPU; of batches, in all
GOALS = {"chat": Goal(0.5, 0.02), "agents": Goal(1.0, 0.03), "batch": Goal(3600.0, 1.0)}
SHOWN = ("request_rate", "goodput", "output_tokens_per_s", "ttft_p50", "ttft_p99", "itl_p50")
SHOWN += ("itl_p99", "hit_rate", "busy")


def setup() -> Setup:
    model_config = model_config_of("qwen3-8b")
    options: dict[str, Any] = {"async_scheduling": False, "prefix_cache_seed": 0}
    config = EngineConfig("qwen3-8b", max_model_len=16_384, **options).for_device("cuda")
    gpu = gpu_named("h100")
    step_time = RooflineTime(model_config, gpu, efficiency=0.7, fixed=0.002)
    return Setup(config, model_config, num_kv_blocks(model_config, gpu, config), step_time)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=[*RATES], choices=RATES)
    parser.add_argument("--seconds", type=float, default=200.0, help="of traffic in each cell")
    parser.add_argument("--warm-up", type=float, default=40.0)
    parser.add_argument("--cells", type=int, default=3, help="sampled, of each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8], help="replicas of a cell")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for kind in args.kinds:
        for size in args.sizes:
            rows.append(run(kind, size, args))
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1))


def run(kind: str, size: int, args: Any) -> dict[str, Any]:
    warm_up = args.warm_up if kind != "batch" else 0.0
    goal = Goal(GOALS[kind].slo_ttft, GOALS[kind].slo_itl, warm_up=warm_up)
    rate = RATES[kind] * size
    settings = CellSettings(
        setup(), args.cells, size, kind, rate, args.seconds, args.cells, goal, longest=16_000
    )
    start = time.process_time()
    results = simulate_cells(settings, args.processes)
    seconds = time.process_time() - start
    each = {name: value / args.cells for name, value in results.summary.items()}
    shown = ", ".join(
        f"{name} {each[name] if name in SHOWN[:3] else results.summary[name]:.4g}" for name in SHOWN
    )
    print(f"{kind}, {size} replicas a cell: {shown}", flush=True)
    cost = 1000 * seconds / results.num_requests
    memory = getrusage(RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"    {results.num_requests} requests, {cost:.2f} ms each, at most {memory:.2f} GB",
        flush=True,
    )
    return {
        "kind": kind, "size": size, "cells": args.cells, "summary": results.summary,
        "num_requests": results.num_requests, "cpu_seconds": seconds, "gigabytes": memory,
    }  # fmt: skip


if __name__ == "__main__":
    main()
