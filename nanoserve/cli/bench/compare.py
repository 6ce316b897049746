"""How fast is nanoserve, beside other engines (`engines/`) and beside the hardware?

nanoserve bench                                     the bundled model, at once
nanoserve bench --shape qwen3-0.6b --repeat 3       a real model's size, three pairs of runs
nanoserve bench --workload single                   one stream: decoded tokens per second
nanoserve bench --request-rate 2,4,8                requests come one by one: latencies, goodput
nanoserve bench --engine nanoserve,nanoserve:batching=static --max-num-seqs 8
nanoserve bench --engine nanoserve:quantization=int8,vllm:quantization=int8          fewer bits
nanoserve bench --workload nano-vllm --engine nanoserve,vllm,nanovllm                 for a GPU

A throughput says little without another one beside it. Every engine gets the same prompts, weights,
data type, device and threads, each in a process of its own (`child.py`), and they take
turns. And no engine is faster than memory and matrix products (`roofline.py`): that time
over the measured one is the share of the limit. Options after an engine's name are its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, Namespace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.checkpoint import bundled_checkpoint, local_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench import roofline
from nanoserve.cli.bench.engines import SOURCES
from nanoserve.cli.bench.latency import poisson_arrivals
from nanoserve.cli.bench.precision import precision_of
from nanoserve.cli.bench.report import Point, as_json, print_report
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.cli.bench.workloads import (
    add_workload,
    counts,
    draw_workload,
    parse_with_workload,
    rates,
)
from nanoserve.cli.parser import Parser, length_or_auto, whole_number
from nanoserve.config import DTYPES, EngineConfig

_ROOT = Path(__file__).resolve().parents[3]  # where this nanoserve was found
CHILD = Path(__file__).with_name("child.py")
# What an engine may have otherwise than the others, as in nanoserve:batching=static; any other
# option after an engine's name is handed to the engine.
COMMON = ("batching", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "hf_batch_size")
COMMON += ("attention_backend", "enforce_eager", "enable_prefix_caching")


def parse_engine(label: str) -> tuple[str, dict[str, Any]]:
    """ "name:option=value:..." -> the name, and what its spec has otherwise than the others."""
    name, *pairs = label.split(":")
    if name not in SOURCES:
        raise SystemExit(f"--engine {label}: known are {', '.join(SOURCES)}")
    own: dict[str, Any] = {"options": {}}
    for pair in pairs:
        option, _, text = pair.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        (own if option in COMMON else own["options"])[option] = value
    return name, own


def run_child(job: str, spec: dict[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """What the child measured, or why there is nothing: "missing" or "failed".

    Weights, too, are a child's job: this process imports no torch and stays small, because on
    Linux a child's peak memory is at least what its parent had when it started the child.
    """
    spec_file, result_file = (Path(spec["scratch"]) / name for name in ("spec.json", "result.json"))
    spec_file.write_text(json.dumps(spec))
    command = [python, str(CHILD), job, str(spec_file), str(result_file)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, env=_environment(python))
    except OSError as error:
        return {"failed": str(error)}
    if child.returncode == 0:
        return json.loads(result_file.read_text())
    sys.stderr.write(child.stderr)
    last_words = child.stderr.strip().splitlines()[-1:] or ["it left no message"]
    return {"failed": f"{last_words[0]} (exit status {child.returncode})"}


def _environment(python: str) -> dict[str, str]:
    """With this nanoserve where it can be imported, if the child has this interpreter.

    Another one has packages of its own, and need not have ours. What is installed needs no path,
    and gets none: all that is installed beside it would come before the standard library.
    """
    environment = dict(os.environ)
    if python == sys.executable and _ROOT.name not in ("site-packages", "dist-packages"):
        paths = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def prepare(args: Namespace, scratch: Path) -> dict[str, Any]:
    """The spec that all children share: what to run, on which weights, on which device."""
    model, title = scratch, f"{args.shape} with random weights"
    if args.shape:
        (model / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    else:
        model, title = find_model(args.model), args.model
    vocab_size = vocab_size_of(model)
    lengths = (args.num_seqs, args.input_len, args.output_len)
    prompts, lens = draw_workload(*lengths, vocab_size, args.shared_len, args.turns)
    spec = vars(args) | {"model": str(model), "prompts": prompts, "output_lens": lens}
    spec |= {"scratch": str(scratch), "tokenizer": str(bundled_checkpoint("tiny-qwen3"))}
    spec |= run_child("probe", spec)
    if "failed" not in spec and args.shape:
        spec |= run_child("weights", spec)
    if "failed" in spec:
        raise SystemExit(spec["failed"])
    speeds = f"{spec['bandwidth'] / 1e9:.1f} GB/s, {spec['matmul_rate'] / 1e12:.2f} TFLOP/s"
    print(f"{spec['hardware']}; {speeds} in {args.dtype}; Python {sys.version.split()[0]}")
    where = f"on {spec['device']}, threads {spec['threads']}"
    print(f"{title}, {args.dtype}, temperature {args.temperature}, {where}")
    tokens = f"{sum(map(len, prompts))} prompt tokens, {sum(lens)} output tokens"
    print(f"{args.num_seqs} sequences, {tokens}", flush=True)
    return spec


def find_model(name: str) -> Path:
    """Return the folder or the GGUF file; none is fetched, since every engine is to read it."""
    try:
        model = local_checkpoint(name)
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None
    if model is None or not (model.is_file() or (model / "config.json").is_file()):
        raise SystemExit(
            f"--model {name} is no checkpoint: it is no GGUF file and has no config.json"
        )
    return model


def vocab_size_of(model: Path) -> int:
    if model.is_file():
        return ModelConfig.from_checkpoint(model).vocab_size
    return json.loads((model / "config.json").read_text())["vocab_size"]


def stored_bits(model: Path) -> float | None:
    """Return how many bits a GGUF file has for a weight, scales included; None of a folder."""
    if not model.is_file():
        return None
    from nanoserve.checkpoint.gguf.container import BLOCKS, GGUFFile

    counts = [(prod(t.shape), *BLOCKS[t.type]) for t in GGUFFile.open(model).tensors.values()]
    num_bytes = sum(n // per_block * block_bytes for n, per_block, block_bytes in counts)
    return 8 * num_bytes / sum(n for n, _, _ in counts)


def limits_of(
    spec: dict[str, Any], max_num_seqs: int | None, engines: list[str]
) -> tuple[roofline.Limit | None, dict[str, roofline.Limit]]:
    """The workload's roofline in so large batches, and that of engines with fewer bits, if any."""
    budget = spec["max_num_batched_tokens"]
    chosen = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    try:
        config = EngineConfig("none", **{name: n for name, n in chosen.items() if n is not None})
        config = config.for_device(spec["device"])
        model_config = ModelConfig.from_checkpoint(Path(spec["model"]), spec["dtype"])
    except ValueError as error:
        print(f"no roofline: {error}")
        return None, {}
    stored = stored_bits(Path(spec["model"]))
    steps = [*roofline.planned_steps(config, spec["prompts"], spec["output_lens"])]
    limits = {}
    for label in engines:
        name, own = parse_engine(label)
        precision = precision_of(name, own["options"], spec["dtype"], stored)
        if precision != precision_of(name, {}, spec["dtype"]):
            rate = spec["integer_rate" if precision.is_integer else "matmul_rate"]
            limits[label] = roofline.limit(model_config, steps, spec["bandwidth"], rate, precision)
    common = roofline.limit(model_config, steps, spec["bandwidth"], spec["matmul_rate"])
    return common, limits


def measure_point(args: Namespace, spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Every engine's runs, at one batch size and one rate. The engines take turns."""
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in args.engine}
    for number in range(1, args.repeat + 1):
        for label in args.engine:
            name, own = parse_engine(label)
            run = run_child(name, spec | own, args.python.get(name, sys.executable))
            runs[label].append(run)
            if "failed" in run:
                print(f"{label} FAILED: {run['failed']}", flush=True)
            else:
                told = f"not measured: {run['missing']}" if "missing" in run else ""
                print(f"run {number}, {label}: {told or round(run['seconds'], 3)}", flush=True)
    return runs


def compare(args: Namespace, scratch: Path) -> bool:
    """Measure at every batch size and rate, report; True if no run failed."""
    spec, points = prepare(args, scratch), []
    for max_num_seqs, rate in product(args.max_num_seqs, args.request_rate):
        arrivals = poisson_arrivals(rate, args.num_seqs) if rate else None
        point_spec = spec | {"max_num_seqs": max_num_seqs, "arrivals": arrivals}
        limit, limits = (None, {}) if rate else limits_of(spec, max_num_seqs, args.engine)
        runs = measure_point(args, point_spec)
        points.append(Point(max_num_seqs, rate, limit, runs, limits))
    print_report(points, spec)
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(points, spec), indent=1))
    if args.plot:
        from nanoserve.cli.bench.plots import plot_points

        plot_points(points, sum(spec["output_lens"]), args.plot)
    return not any("failed" in run for p in points for runs in p.runs.values() for run in runs)


def parse_args(arguments: list[str]) -> Namespace:
    parser = Parser("nanoserve bench", description="Speed of nanoserve and its peers.")
    add = parser.add_argument
    engines = "NAME[:OPTION=VALUE...],... run in turns (%(default)s); known: " + ", ".join(SOURCES)
    add("--engine", default="nanoserve,transformers", help=engines)
    url = "measure a server over HTTP instead; `--url URL --help` has its options"
    add("--url", default=SUPPRESS, help=url)
    python = "run that engine with another interpreter, whose environment has it"
    add("--python", action="append", default=[], metavar="NAME=PATH", help=python)
    add("--model", help="a folder, GGUF file or name on this machine (the bundled tiny-qwen3)")
    add("--shape", choices=SHAPES, help="random weights of that shape, instead")
    add_workload(parser)
    add("--request-rate", type=rates, default=[None], metavar="R,...", help="requests a second")
    add("--batching", choices=("continuous", "static"), default="continuous", help="%(default)s")
    add("--max-num-seqs", type=counts, default=[None], metavar="N,...", help="batch sizes")
    budget = "token budget of a step"
    add("--max-num-batched-tokens", type=whole_number, metavar="N", help=budget)
    add("--max-model-len", type=length_or_auto, metavar="N")
    add("--no-prefix-caching", dest="enable_prefix_caching", action="store_const", const=False)
    add("--attention-backend", metavar="NAME", help="nanoserve's option")
    add("--enforce-eager", action="store_const", const=True, help="no CUDA graphs")
    add("--hf-batch-size", type=int, metavar="N", help="transformers' static batch (16)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="%(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="%(default)s")
    add("--threads", type=int, help="if not given, torch chooses; 1 for the bundled model")
    args = parse_with_workload(parser, arguments)
    args.model = args.model or (None if args.shape else "tiny-qwen3")
    args.shape = None if args.model else args.shape
    if args.threads is None and args.model == "tiny-qwen3":
        args.threads = 1  # so small a model gains nothing from more, and loses on a busy machine
    args.engine = args.engine.split(",")
    args.python = dict(pair.split("=", 1) for pair in args.python)
    for label in args.engine:
        parse_engine(label)
    if args.batching == "static" and args.request_rate != [None]:
        parser.error("--batching static waits for whole batches: it has no --request-rate")
    return args


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if compare(args, Path(scratch)) else 1
