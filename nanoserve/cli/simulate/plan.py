"""Plan how many GPUs serve a load within its objectives, and with which options.

nanoserve plan qwen3-8b --gpu h100 --traffic chat --request-rate 40 --slo-ttft 500 --slo-itl 30
nanoserve plan llama-3.1-8b --gpu l40s --traffic agents --request-rate 5 --price 1.1 --plot plan.png
nanoserve plan qwen3-8b --fit run.jsonl --request-rate 3 --slo-ttft 2000

Times are the data sheet's, corrected by --efficiency and --fixed-time, or fitted to a trace of one
of the replicas. The goal is that a part of the requests (--attainment) meets both objectives.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoserve.cli.bench.workloads import count, milliseconds, positive
from nanoserve.cli.engine_flags import add_engine_flags
from nanoserve.cli.parser import Parser, add_model, model_of
from nanoserve.cli.simulate.command import add_times, setup_of
from nanoserve.cli.simulate.gpus import RooflineTime, gpu_named, num_kv_blocks
from nanoserve.cli.simulate.planner import Design, Goal, Plan, best_plan, find_plan
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import table
from nanoserve.cli.simulate.sessions import KINDS, Sessions
from nanoserve.cli.simulate.traffic import Traffic

_RANKS = (1, 2, 4, 8)
_BUDGETS = (1024, 2048, 8192)  # tokens of a step


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    setup, source = setup_of(args)
    goal = Goal(args.slo_ttft, args.slo_itl, args.attainment, args.warm_up)
    print(f"{model_of(args, 'tiny-qwen3')}: {source}\n{_described(args)}")
    make_traffic = _traffic(args, setup)
    plans = []
    for design in designs_of(setup, args):
        plans.append(find_plan(design, make_traffic, goal, args.most_replicas))
        print(_line(plans[-1], args.price), flush=True)
    best = best_plan(plans)
    if best is not None:
        print("\nbest:", _line(best, args.price))
        print(f"with a replica less: {best.limit}")
    else:
        print(f"\nno plan reaches the goal with {args.most_replicas} replicas: {plans[0].limit}")
    rows = {plan.design.name: plan.summary for plan in plans}
    print("\n" + table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([_as_json(plan) for plan in plans], indent=1))
    if args.plot is not None:
        from nanoserve.cli.simulate.plots import plot_summaries  # needs matplotlib

        plot_summaries(rows, str(args.plot))
    return int(best is None)


def designs_of(setup: Setup, args: argparse.Namespace) -> list[Design]:
    """Return the ways to use the GPUs: by ranks per replica and by token budget.

    Raises `ValueError` if the model fits on no number of GPUs of a replica.
    """
    is_set = "max_num_batched_tokens" in args
    budgets = [setup.config.max_num_batched_tokens] if is_set else _BUDGETS
    designs, problem = [], ""
    for ranks in _RANKS:
        for budget in budgets:
            config = replace(
                setup.config, max_num_batched_tokens=max(budget, setup.config.max_num_seqs)
            )
            name = f"{ranks} GPU{'s' if ranks > 1 else ''}, {budget} tokens"
            if args.fit:
                designs.append(Design(f"{budget} tokens", replace(setup, config=config)))
                continue
            try:
                designs.append(Design(name, _on_gpus(config, setup, args, ranks), ranks))
            except ValueError as error:
                problem = str(error)
        if args.fit or "tensor_parallel_size" in args:
            break
    if not designs:
        raise ValueError(problem)
    return designs


def _on_gpus(config: Any, setup: Setup, args: argparse.Namespace, ranks: int) -> Setup:
    gpu, model_config = gpu_named(args.gpu), setup.model_config
    step_time = RooflineTime(model_config, gpu, ranks, args.efficiency, args.fixed_time)
    blocks = config.num_kv_blocks or num_kv_blocks(model_config, gpu, config, ranks)
    return replace(setup, config=config, num_kv_blocks=blocks, step_time=step_time)


def _traffic(args: argparse.Namespace, setup: Setup) -> Callable[[], Traffic]:
    vocab_size = setup.model_config.vocab_size - 1
    longest = setup.config.max_model_len or setup.model_config.max_position_embeddings
    longest = min(args.longest, longest)

    def make() -> Traffic:
        return Sessions(
            args.traffic, args.request_rate, args.seconds, vocab_size, args.seed, longest
        )

    return make


def _described(args: argparse.Namespace) -> str:
    return (
        f"{args.traffic} at {args.request_rate:g} requests/s for {args.seconds:g} s; goal: "
        f"{args.attainment:.1%} with TTFT within {1000 * args.slo_ttft:g} ms and "
        f"{1000 * args.slo_itl:g} ms per further token"
    )


def _line(plan: Plan, price: float | None) -> str:
    if plan.num_replicas is None:
        return f"{plan.design.name}: not reached, {plan.summary['attainment']:.1%}"
    cost = "" if price is None else f", {price * plan.num_gpus:.2f} an hour"
    return (
        f"{plan.design.name}: {plan.num_replicas} replicas, {plan.num_gpus} GPUs{cost}, "
        f"{plan.summary['attainment']:.1%} within the objectives"
    )


def _as_json(plan: Plan) -> dict[str, Any]:
    config = plan.design.setup.config
    return {
        "design": plan.design.name,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "gpus_per_replica": plan.design.gpus_per_replica,
        "num_kv_blocks": plan.design.setup.num_kv_blocks,
        "num_replicas": plan.num_replicas,
        "num_gpus": plan.num_gpus,
        "limit": plan.limit,
        "summary": plan.summary,
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nanoserve plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "Model as for LLM(), or a shape of nanoserve bench. Default: tiny-qwen3.")
    add_times(parser)
    _add_load(parser)
    add = parser.add_argument
    text = "Most replicas that are tried. Default: %(default)s."
    add("--most-replicas", type=count, default=64, metavar="N", help=text)
    text = "Price of a GPU per hour, in any currency. Default: none."
    add("--price", type=positive, help=text)
    add("--json", type=Path, metavar="FILE", help="File for all plans, in JSON. Default: none.")
    text = "File for a plot; needs matplotlib (nanoserve[bench]). Default: none."
    add("--plot", type=Path, metavar="FILE.png", help=text)
    add_engine_flags(parser, but=("trace",))
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the flags of traffic and objectives."""
    add = parser.add_argument
    text = "Kind of traffic: see nanoserve/cli/simulate/sessions.py. Default: %(default)s."
    add("--traffic", choices=KINDS, default="chat", help=text)
    text = "Requests per second, of all replicas together."
    add("--request-rate", type=positive, required=True, metavar="RATE", help=text)
    text = "Virtual seconds of traffic. Default: %(default)s."
    add("--seconds", type=positive, default=120.0, help=text)
    text = "First seconds, whose requests do not count. Default: %(default)s."
    add("--warm-up", type=float, default=20.0, metavar="SECONDS", help=text)
    text = "Most tokens of a request. Default: %(default)s, or --max-model-len."
    add("--longest", type=count, default=16_000, metavar="N", help=text)
    text = "Objective of the time to first token, in milliseconds. Default: %(default)s."
    add("--slo-ttft", type=milliseconds, default="1000", metavar="MS", help=text)
    text = "Objective of the mean time per further token, in ms. Default: %(default)s."
    add("--slo-itl", type=milliseconds, default="100", metavar="MS", help=text)
    text = "Part of the requests that must meet both. Default: %(default)s."
    add("--attainment", type=float, default=0.95, help=text)
    add("--traffic-seed", dest="seed", type=int, default=0, help="Default: %(default)s.")
