"""Compare the options that `nanoserve tune` finds with the best ones of a grid on the real engine.

    python benchmarks/tuned.py                         the bundled model
    python benchmarks/tuned.py --shape qwen3-0.6b-8l --rate 1 --slo-ttft 4000 --slo-itl 400 \\
        --num-seqs 16 --max-num-seqs 2 4 8 --max-num-batched-tokens 64 256 1024

A step time is fitted to one workload. With it the tuner searches a grid for the highest goodput of
another workload. Then each candidate of the grid serves the same requests on the real engine.
"""

import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from nanoserve import LLM
from nanoserve.cli.bench.hardware import describe
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.cli.simulate.fit import fit_step_time
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.real import serve_for_real
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.traffic import Workload
from nanoserve.cli.simulate.tuner import Options, candidates_of, halve, score

GRID = {"max_num_seqs": [2, 4, 8, 16, 32], "max_num_batched_tokens": [64, 128, 256, 1024]}


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="default: the bundled model")
    add("--num-seqs", type=int, default=120)
    add("--rate", type=float, default=40.0, help="requests a second (%(default)s)")
    add("--slo-ttft", type=float, default=150.0, help="milliseconds (%(default)s)")
    add("--slo-itl", type=float, default=10.0, help="milliseconds (%(default)s)")
    for name, values in GRID.items():
        add(f"--{name.replace('_', '-')}", type=int, nargs="+", default=values)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


def compare(args: Namespace, folder: Path) -> None:
    model: dict[str, Any] = {"model": "tiny-qwen3", "skip_tokenizer_init": True}
    if args.shape is not None:
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        model |= {"model": str(folder), "load_format": "dummy"}
    model |= {"max_model_len": 1024, "num_kv_blocks": 1000, "async_scheduling": False}
    goal = Goal(args.slo_ttft / 1000, args.slo_itl / 1000)
    with LLM(**model, max_num_seqs=32) as llm:
        config, model_config = llm.engine.config, llm.engine.model_config
        vocab_size = model_config.vocab_size - 1
        lengths = {"input_len": (20, 200), "output_len": (10, 60), "vocab_size": vocab_size}
        serve_for_real(llm.engine, Workload.draw(16, **lengths))
        steps = []
        for rate in (None, args.rate / 2):
            at_rate = Workload.draw(args.num_seqs // 2, **lengths, rate=rate, seed=1)
            steps += serve_for_real(llm.engine, at_rate).steps
    traffic = Workload.draw(
        args.num_seqs, (10, 400), (5, 80), vocab_size=vocab_size, rate=args.rate, seed=2
    )
    setup = Setup(config, model_config, 1000, fit_step_time(steps, "requests").step_time)
    grid = {name: getattr(args, name) for name in GRID}
    began, candidates = time.perf_counter(), candidates_of(grid)
    trials = halve(setup, candidates, traffic, args.num_seqs, goal)
    tuned = time.perf_counter() - began
    chosen, measured = trials[0], {}
    began = time.perf_counter()
    for options in candidates:
        measured[str(options)] = goal.summary(served(model | options, traffic))
    report(args, chosen.options, chosen.summary, measured, goal)
    print(f"\n{tuned:.1f} s to tune, {time.perf_counter() - began:.1f} s for the grid")


def served(options: Options, traffic: Workload) -> Any:
    with LLM(**options) as llm:
        serve_for_real(llm.engine, traffic)  # warms up
        llm.engine.reset_prefix_cache()
        return serve_for_real(llm.engine, traffic).results


def report(
    args: Namespace,
    chosen: Options,
    predicted: dict[str, Any],
    measured: dict[str, dict[str, Any]],
    goal: Goal,
) -> None:
    names = sorted(measured, key=lambda name: score(measured[name], goal), reverse=True)
    print(f"{describe('cpu')}; {args.num_seqs} requests, {args.rate:g} a second, goal {goal}\n")
    print("| place | options | goodput | TTFT p99, ms | TPOT p99, ms |\n|---:|---|---:|---:|---:|")
    for place, name in enumerate(names, 1):
        row, tuned = measured[name], " **tuned**" if name == str(chosen) else ""
        print(
            f"| {place} | {name}{tuned} | {row['goodput']:.2f} | {row['ttft_p99']:.1f} | "
            f"{row['tpot_p99']:.2f} |"
        )
    print(f"\nthe tuner predicted a goodput of {predicted['goodput']:.2f}")


if __name__ == "__main__":
    main()
