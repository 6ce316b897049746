"""Compare simulated latencies with measured ones, below and above saturation.

    python benchmarks/predicted.py                         the bundled model
    python benchmarks/predicted.py --shape qwen3-0.6b-8l   random weights of that shape

A step time is fitted to chosen steps (`nanoserve.cli.simulate.calibrate`), or with `--fit NAME` to
one workload. They are measured before and after each run of another workload, and predict that run.
Each workload is first served at once, which measures how many requests a
second the engine can serve at most, and then at shares of that rate. Every request arrives at the
same time, with the same tokens, in the real and in the simulated run. Measure on an idle machine: a
step that another process disturbs is in no prediction. Each real run is repeated: no prediction can
be closer than two measurements are to each other. The table has percentages: of the prediction, and
in parentheses of the repetition, relative to the first run.
"""

import json
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from nanoserve import LLM
from nanoserve.cli.bench.hardware import describe
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.cli.bench.workloads import WORKLOADS, length_range
from nanoserve.cli.simulate.calibrate import measure_steps
from nanoserve.cli.simulate.fit import MeasuredStep, fit_step_time
from nanoserve.cli.simulate.fleet import Fleet
from nanoserve.cli.simulate.real import CpuClock, Measured, serve_for_real
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.traffic import Workload
from nanoserve.engine.guard import GuardedEngine

SHOWN = ("output_tokens_per_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
SHARES = (0.5, 0.8, 1.5)  # of the highest rate; above 1 the queue grows until the last arrival


def workload(name: str, vocab_size: int, rate: float | None, num_seqs: int) -> Workload:
    settings: dict[str, Any] = WORKLOADS[name] | {"num_seqs": num_seqs}
    for length in ("input_len", "output_len"):
        settings[length] = length_range(settings[length])
    settings = {k: v for k, v in settings.items() if k not in ("shape", "temperature")}
    return Workload.draw(**settings, vocab_size=vocab_size, rate=rate)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: the bundled model")
    parser.add_argument("--fit", default="calibration", choices=["calibration", *WORKLOADS])
    parser.add_argument("--longest", type=int, default=1536, help="prompt of the calibration")
    parser.add_argument("--test", nargs="+", default=["shared-prefix", "long-prompt", "chat"])
    parser.add_argument("--num-seqs", type=int, default=96)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--json", type=Path)
    help_ = "measure processor time, in which other processes do not count (see CpuClock)"
    parser.add_argument("--cpu-time", action="store_true", help=help_)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": args.max_num_seqs}
        model = "tiny-qwen3"
        if args.shape is not None:
            model = folder
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
            options["load_format"] = "dummy"
        with LLM(model, max_model_len=2048, **options) as llm:
            clock = CpuClock() if args.cpu_time else None
            print(f"{describe('cpu')}\n\n| workload | share | {' | '.join(SHOWN)} |")
            print(f"|{'---|' * (len(SHOWN) + 2)}")
            rows = compare(engine_of(llm, clock), args, clock.wait if clock else time.sleep)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": describe("cpu"), "rows": rows}, indent=1))


def engine_of(llm: LLM, clock: CpuClock | None) -> GuardedEngine:
    """Return the engine, or another one with its executor that reads `clock`."""
    engine = llm.engine
    if clock is None:
        return engine
    return GuardedEngine(engine.config, engine.model_config, engine.executor, None, clock)


def compare(engine: GuardedEngine, args: Any, wait: Any) -> list[dict[str, Any]]:
    vocab_size = engine.model_config.vocab_size - 1

    def serve(name: str, rate: float | None, num_seqs: int) -> tuple[Measured, Workload]:
        engine.reset_prefix_cache()
        traffic = workload(name, vocab_size, rate, num_seqs)
        return serve_for_real(engine, traffic, wait), traffic

    def steps_to_fit() -> list[MeasuredStep]:
        """Chosen steps, or those of a workload: all requests at once, and one by one."""
        if args.fit == "calibration":
            return measure_steps(engine, args.longest, wait=wait)
        at_once, _ = serve(args.fit, None, args.num_seqs // 2)
        rate = 0.5 * at_once.results.summary()["request_rate"]
        return at_once.steps + serve(args.fit, rate, args.num_seqs // 2)[0].steps

    serve("random", None, 16)  # compiles, warms up
    rows: list[dict[str, Any]] = []
    before = steps_to_fit()
    for name in args.test:
        highest = serve(name, None, args.num_seqs)[0].results.summary()["request_rate"]
        for share in SHARES:
            measured, traffic = serve(name, share * highest, args.num_seqs)
            again, _ = serve(name, share * highest, args.num_seqs)
            after = steps_to_fit()
            # A machine's speed drifts: the steps are those just before and just after the run.
            fit = fit_step_time(before + after, args.fit)
            before = after
            setup = Setup(
                engine.config, engine.model_config, engine.executor.num_kv_blocks, fit.step_time
            )
            runs = {"measured": measured.results, "again": again.results}
            runs["predicted"] = Fleet(setup).run(traffic)
            summaries = {kind: results.summary() for kind, results in runs.items()}
            rows.append({"workload": name, "share": share, **summaries, "fit": fit.describe()})
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a line of a Markdown table."""
    cells = [row["workload"], f"{row['share']:g}"]
    for column in SHOWN:
        first = row["measured"][column]
        predicted, again = (row[kind][column] / first - 1 for kind in ("predicted", "again"))
        cells.append(f"{first:.4g}: {predicted:+.0%} ({again:+.0%})")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
