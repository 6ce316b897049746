"""Tune engine options for a workload in virtual time, and verify the best ones on the real engine.

nanoserve tune tiny-qwen3 --fit run.jsonl --requests run.jsonl             the requests of a trace
nanoserve tune tiny-qwen3 --fit run.jsonl --workload chat --request-rate 8 --verify 2
nanoserve tune qwen3-8b --gpu h100 --request-rate 30 --grid max_num_seqs=64,256 --replicas 4

The goal is the highest goodput: requests per second within --slo-ttft and --slo-itl. Among equals,
latencies decide. --verify loads the model and serves the same requests with the best options found,
and with the present ones, in real time.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from nanoserve.cli.engine_flags import add_engine_flags
from nanoserve.cli.parser import Parser, add_model, json_or_text, model_of
from nanoserve.cli.simulate.command import add_times, add_traffic, setup_of, traffic_of
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import table
from nanoserve.cli.simulate.traffic import Traffic
from nanoserve.cli.simulate.tuner import Options, Trial, candidates_of, halve, score, with_options
from nanoserve.utils.checks import require

# The options that decide most often, with values around those that engines have by default.
_GRID: dict[str, list[Any]] = {
    "max_num_seqs": [4, 8, 16, 32, 64, 128, 256],
    "max_num_batched_tokens": [128, 256, 512, 1024, 2048, 8192],
    "long_prefill_token_threshold": [0, 128],
}


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    grid = _grid(args.grid) or _GRID
    setup, source = setup_of(args)
    print(source)
    rates = args.request_rate or [None]
    require(len(rates) == 1, f"--request-rate has {len(rates)} values: options are tuned for one")
    traffic = traffic_of(args, setup.model_config, rates[0])
    num_requests = len(list(traffic.arrivals()))
    require(num_requests > 0, "there are no requests: record a trace that has some")
    goal = Goal(args.slo_ttft, args.slo_itl)
    candidates = [{}, *candidates_of(grid)]  # the present options first
    trials = halve(setup, candidates, traffic, num_requests, goal, args.replicas)
    rows = {trial.describe(): trial.summary for trial in trials[: args.show]}
    print(table(rows))
    measured = {}
    if args.verify:
        measured = verify(args, setup, [trial.options for trial in trials[: args.verify]], traffic)
        print("\nmeasured on the real engine:\n" + table(measured))
        best = max(measured, key=lambda name: score(measured[name], goal))
        print(f"best: {best}")
    if args.json is not None:
        found = {"times": source, "predicted": rows, "measured": measured}
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def verify(
    args: argparse.Namespace, setup: Setup, chosen: list[Options], traffic: Traffic
) -> dict[str, dict[str, Any]]:
    """Serve the requests with a real engine, with each of the options and with the present ones."""
    require(args.replicas == 1, "--verify has one engine: leave out --replicas")
    require(args.gpu is None, "--verify compares with this machine: use --fit instead of --gpu")
    from nanoserve import LLM  # imports torch
    from nanoserve.cli.engine_flags import engine_options
    from nanoserve.cli.simulate.real import serve_for_real

    measured: dict[str, dict[str, Any]] = {}
    for options in [*chosen, {}] if {} not in chosen else chosen:
        candidate = with_options(setup, options)
        given: dict[str, Any] = engine_options(args)
        given |= {name: getattr(candidate.config, name) for name in {*_GRID, *options}}
        given |= {"num_kv_blocks": candidate.num_kv_blocks, "skip_tokenizer_init": True}
        model = model_of(args, "tiny-qwen3")
        with LLM(model, **given) as llm:
            serve_for_real(llm.engine, traffic)  # warms up, and compiles what is compiled
            llm.engine.reset_prefix_cache()
            results = serve_for_real(llm.engine, traffic).results
        name = Trial(options, {}, 0).describe()
        measured[name] = results.summary(args.slo_ttft, args.slo_itl)
    return measured


def _grid(texts: list[str]) -> dict[str, list[Any]]:
    """Read "name=value,value" for each option. Raises `ValueError` for another form."""
    grid = {}
    for text in texts:
        name, equals, values = text.partition("=")
        require(
            bool(name and equals and values),
            f"--grid {text!r} must be an option with its values, as max_num_seqs=8,16,32",
        )
        grid[name.replace("-", "_")] = [json_or_text(value) for value in values.split(",")]
    return grid


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nanoserve tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "Model as for LLM(), or a shape of nanoserve bench. Default: tiny-qwen3.")
    add_times(parser)
    add_traffic(parser)
    add = parser.add_argument
    shown = ", ".join(f"{name} {values}" for name, values in _GRID.items())
    text = f"Values of an option, as max_num_seqs=8,16. May be repeated. Default: {shown}."
    add("--grid", action="append", default=[], metavar="NAME=VALUES", help=text)
    text = "Candidates to serve for real, of the best ones. Default: none."
    add("--verify", type=int, default=0, metavar="N", help=text)
    text = "Rows of the table. Default: %(default)s."
    add("--show", type=int, default=10, metavar="N", help=text)
    add("--json", type=Path, metavar="FILE", help="File for all results, in JSON. Default: none.")
    add_engine_flags(parser, but=("trace",))
    return parser
