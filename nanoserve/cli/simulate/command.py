"""Run the scheduler in virtual time, to predict its speed or to compare it with a trace.

nanoserve simulate --replay run.jsonl                     compute a trace again, and compare
nanoserve simulate tiny-qwen3 --fit run.jsonl             times as in a trace, other requests
nanoserve simulate qwen3-8b --gpu h100 --request-rate 5,10,20 --replicas 4
nanoserve simulate qwen3-8b --gpu h100 --policy mine.py:ShortestFirst     yours and the default

No model is loaded and no GPU is needed. Without --fit, times are those of the GPU's data sheet, and
not calibrated. With --replay, the exit status is 1 if the runs differ.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.workloads import (
    WORKLOADS,
    count,
    length_range,
    milliseconds,
    positive,
    rates,
)
from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.parser import Parser, add_model, model_of
from nanoserve.cli.simulate.fit import fit_step_time, steps_of_trace
from nanoserve.cli.simulate.fleet import Fleet, FleetSettings
from nanoserve.cli.simulate.gpus import GPUS, RooflineTime, gpu_named, num_kv_blocks
from nanoserve.cli.simulate.laboratory import load_extension, load_policy
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.replay import Replay, counts, first_difference
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import table
from nanoserve.cli.simulate.step_time import StepTime
from nanoserve.cli.simulate.traffic import TraceTraffic, Traffic, Workload
from nanoserve.compat.options import engine_config
from nanoserve.config import EngineConfig
from nanoserve.features.trace.reader import read_trace
from nanoserve.utils.checks import require

_SEED_OF_HASHES = 0  # of the prefix caches of all replicas and their router


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    if args.replay is not None:
        return _replay(args.replay, model_of(args))
    setup, source = setup_of(args)
    print(source)
    variants = _variants(setup, args)
    rows: dict[str, dict[str, Any]] = {}
    for rate in args.request_rate or [None]:
        traffic = traffic_of(args, setup.model_config, rate)
        for name, variant in variants.items():
            label = name if rate is None else f"{name} {rate:g}/s"
            settings = FleetSettings(args.replicas, args.router, seed=args.seed)
            results = Fleet(variant, settings).run(traffic)
            rows[label.strip()] = results.summary(args.slo_ttft, args.slo_itl)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"times": source, "results": rows}, indent=1))
    if args.plot is not None:
        from nanoserve.cli.simulate.plots import plot_summaries  # needs matplotlib

        plot_summaries(rows, str(args.plot))
    return 0


def _replay(path: Path, model: str | None) -> int:
    """Compute a trace again and print the counts of both runs."""
    trace = read_trace(path)
    with TemporaryDirectory() as folder:
        again = Replay(trace, Path(folder) / "again.jsonl", model).run()
    recorded, simulated = counts(trace), counts(again)
    print(f"{'':<16}{'recorded':>10}{'simulated':>11}")
    for name, value in recorded.items():
        print(f"{name:<16}{value:>10}{simulated[name]:>11}")
    difference = first_difference(trace, again)
    print("both runs are equal, step by step" if difference is None else difference)
    return int(difference is not None)


def setup_of(args: argparse.Namespace) -> tuple[Setup, str]:
    """Return the engine that the flags describe, and where its times come from.

    Raises `ValueError` if there is nothing to predict times from.
    """
    name = model_of(args, "tiny-qwen3")
    traces = [read_trace(path) for path in args.fit]
    recorded = traces[0].header if traces else {}
    options = engine_options(args)
    for option in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"):
        if option in recorded:
            options.setdefault(option, recorded[option])
    options.setdefault("async_scheduling", False)
    options.setdefault("prefix_cache_seed", _SEED_OF_HASHES)
    require(
        bool(traces) or args.gpu is not None,
        "there is nothing to predict times from: pass --fit with a trace that LLM(..., trace=...) "
        f"has recorded, or --gpu with one of {', '.join(GPUS)}",
    )
    config = engine_config(name, options).for_device("cpu" if traces else "cuda")
    model_config = model_config_of(name, config.dtype)
    if traces:
        steps = [step for trace in traces for step in steps_of_trace(trace, model_config)]
        fit = fit_step_time(steps, ", ".join(str(path) for path in args.fit))
        num_blocks = config.num_kv_blocks or recorded["num_kv_blocks"]
        setup = Setup(config, model_config, num_blocks, fit.step_time)
        return setup, f"times {fit.step_time.description}; {fit.describe()}"
    return _setup_of_gpu(config, model_config, args)


def _setup_of_gpu(
    config: EngineConfig, model_config: ModelConfig, args: argparse.Namespace
) -> tuple[Setup, str]:
    gpu, num_gpus = gpu_named(args.gpu), config.tensor_parallel_size
    step_time: StepTime = RooflineTime(
        model_config, gpu, num_gpus, args.efficiency, args.fixed_time
    )
    num_blocks = config.num_kv_blocks or num_kv_blocks(model_config, gpu, config, num_gpus)
    # One simulated device stands for all ranks.
    config = replace(config, tensor_parallel_size=1)
    source = (
        f"times of {num_gpus} x {args.gpu}: {step_time.description}; efficiency {args.efficiency:g}"
        f", {1000 * args.fixed_time:g} ms a step; {num_blocks:,} KV blocks of {config.block_size}"
    )
    return Setup(config, model_config, num_blocks, step_time), source


def _variants(setup: Setup, args: argparse.Namespace) -> dict[str, Setup]:
    """Return the setups to compare: the default, and the one with the reader's own parts."""
    if args.policy is None and not args.extension:
        return {"": setup}
    policy = setup.config.scheduler_cls if args.policy is None else load_policy(args.policy)
    extensions = tuple(load_extension(location) for location in args.extension)
    own = replace(setup, config=replace(setup.config, scheduler_cls=policy), extensions=extensions)
    return {"default": setup, "yours": own}


def traffic_of(args: argparse.Namespace, model_config: ModelConfig, rate: float | None) -> Traffic:
    """Return the requests that the flags describe."""
    if args.requests is not None:
        return TraceTraffic(read_trace(args.requests), 1.0 if rate is None else 1.0 / rate)
    chosen = WORKLOADS[args.workload] | {
        name: value
        for name in ("num_seqs", "input_len", "output_len", "shared_len", "turns")
        if (value := getattr(args, name)) is not None
    }
    lengths = {"input_len", "output_len"}
    settings: dict[str, Any] = {
        name: length_range(value) if name in lengths and isinstance(value, str) else value
        for name, value in chosen.items()
        if name not in ("shape", "temperature")
    }
    # The last token of the vocabulary is the simulation's stop token.
    vocab_size = model_config.vocab_size - 1
    return Workload.draw(**settings, vocab_size=vocab_size, rate=rate, seed=args.seed)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nanoserve simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = "Model as for LLM(), or a shape of nanoserve bench. Default: tiny-qwen3."
    add_model(parser, shown)
    add = parser.add_argument
    text = "Trace to compute again; all other flags but the model are ignored."
    add("--replay", type=Path, metavar="run.jsonl", help=text)
    add_times(parser)
    add_traffic(parser)
    text = "Scheduler class to compare with the default: FILE.py:Class or module:Class."
    add("--policy", metavar="LOCATION", help=text)
    text = "Extension class to compare with none, as --policy. May be repeated."
    add("--extension", action="append", default=[], metavar="LOCATION", help=text)
    add("--json", type=Path, metavar="FILE", help="File for all results, in JSON. Default: none.")
    text = "File for a plot; needs matplotlib (nanoserve[bench]). Default: none."
    add("--plot", type=Path, metavar="FILE.png", help=text)
    add_engine_flags(parser, but=("trace",))
    return parser


def add_times(parser: argparse.ArgumentParser) -> None:
    """Add the flags from which the times of steps are predicted."""
    add = parser.add_argument
    text = "Recorded traces to whose steps the times are fitted. Default: none."
    add("--fit", type=Path, nargs="+", default=[], metavar="run.jsonl", help=text)
    text = f"GPU whose data sheet the times are computed from: {', '.join(GPUS)}."
    add("--gpu", metavar="NAME", help=text)
    text = "Part of the data sheet's rates that is reached, with --gpu. Default: %(default)s."
    add("--efficiency", type=positive, default=1.0, help=text)
    text = "Time of each step for launching, with --gpu, in milliseconds. Default: %(default)s."
    add("--fixed-time", type=_zero_or_milliseconds, default=0.0, metavar="MS", help=text)


def add_traffic(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests, replicas and objectives."""
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="random", help="Default: %(default)s.")
    text = "Trace whose requests arrive instead, 1 / --request-rate as far apart. Default: none."
    add("--requests", type=Path, metavar="run.jsonl", help=text)
    own = "Default: the workload's."
    add("--num-seqs", type=count, metavar="N", help=f"Number of requests. {own}")
    text = f"Range of prompt lengths in tokens. {own}"
    add("--input-len", type=length_range, metavar="LO-HI", help=text)
    text = f"Range of output lengths in tokens. {own}"
    add("--output-len", type=length_range, metavar="LO-HI", help=text)
    add("--shared-len", type=int, metavar="N", help=f"Tokens that all prompts begin with. {own}")
    add("--turns", type=count, metavar="N", help=f"Turns of a conversation. {own}")
    text = "Requests per second, several with commas. Default: all requests at once."
    add("--request-rate", type=rates, metavar="RATES", help=text)
    add("--replicas", type=count, default=1, metavar="N", help="Default: %(default)s.")
    text = "How the router tracks cached blocks: approximate or exact. Default: %(default)s."
    add("--router", default="approximate", help=text)
    add("--traffic-seed", dest="seed", type=int, default=0, help="Default: %(default)s.")
    text = "Limit of the time to first token for goodput, in milliseconds. Default: %(default)s."
    add("--slo-ttft", type=milliseconds, default="1000", metavar="MS", help=text)
    text = "Limit of the inter-token latency for goodput, in milliseconds. Default: %(default)s."
    add("--slo-itl", type=milliseconds, default="100", metavar="MS", help=text)


def _zero_or_milliseconds(text: str) -> float:
    return 0.0 if float(text) == 0 else milliseconds(text)
