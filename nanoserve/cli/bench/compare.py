"""Compare the speed of nanoserve with other engines (`engines/`) and the hardware's limit.

nanoserve bench                                     the bundled model, all requests at once
nanoserve bench --shape qwen3-0.6b --repeat 3       a real model's size, three pairs of runs
nanoserve bench --workload single                   one stream: decoded tokens per second
nanoserve bench --request-rate 2,4,8                requests arrive one by one: latencies, goodput
nanoserve bench --engine nanoserve,nanoserve:batching=static --max-num-seqs 8
nanoserve bench --engine nanoserve:quantization=int8,vllm:quantization=int8       int8 weights
nanoserve bench --workload nano-vllm --engine nanoserve,vllm,nanovllm                 on a GPU

A throughput means little without a comparison. Every engine gets the same
prompts, weights, data type, device and threads, each in a separate process (`child.py`), and the
engines take turns. No engine is faster than memory and matrix products allow (`roofline.py`). The
share of the limit is this minimum time divided by the measured time. Options after an engine's name
apply to that engine only.
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

_ROOT = Path(__file__).resolve().parents[3]  # the folder that contains this nanoserve
CHILD = Path(__file__).with_name("child.py")
# Settings of the benchmark that may be overridden for one engine, as in nanoserve:batching=static;
# any other option after an engine's name is passed to the engine.
COMMON = ("batching", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "hf_batch_size",
          "attention_backend", "enforce_eager", "enable_prefix_caching")  # fmt: skip


def parse_engine(label: str) -> tuple[str, dict[str, Any]]:
    """Read "name:option=value:..." as the name, and the entries of the spec that it overrides."""
    name, *pairs = label.split(":")
    if name not in SOURCES:
        raise SystemExit(f"--engine {label}: the name must be one of {', '.join(SOURCES)}")
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
    """Return what the child measured, or the reason for no result: "missing" or "failed".

    Weights are made in a child, too: this process imports no torch and stays small, because on
    Linux the peak memory of a child is at least that of its parent when it was started.
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
    """Return the child's environment, in which it can import this nanoserve.

    Another interpreter has separate packages and need not have nanoserve. An installed nanoserve
    gets no path, because the packages installed next to it would shadow the standard library.
    """
    environment = dict(os.environ)
    if python == sys.executable and _ROOT.name not in ("site-packages", "dist-packages"):
        paths = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def prepare(args: Namespace, scratch: Path) -> dict[str, Any]:
    """Return the spec that all children share, with workload, weights and device."""
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
    """Return the model's folder or GGUF file. Nothing is downloaded, as every engine reads it."""
    try:
        model = local_checkpoint(name)
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None
    if model is None or not (model.is_file() or (model / "config.json").is_file()):
        raise SystemExit(
            f"--model {name} is not a checkpoint: neither a GGUF file nor a folder with config.json"
        )
    return model


def vocab_size_of(model: Path) -> int:
    if model.is_file():
        return ModelConfig.from_checkpoint(model).vocab_size
    return json.loads((model / "config.json").read_text())["vocab_size"]


def stored_bits(model: Path) -> float | None:
    """Return the bits per weight of a GGUF file, including scales, or None for a folder."""
    if not model.is_file():
        return None
    from nanoserve.checkpoint.gguf.container import BLOCKS, GGUFFile

    counts = [(prod(t.shape), *BLOCKS[t.type]) for t in GGUFFile.open(model).tensors.values()]
    num_bytes = sum(n // per_block * block_bytes for n, per_block, block_bytes in counts)
    return 8 * num_bytes / sum(n for n, _, _ in counts)


def limits_of(
    spec: dict[str, Any], max_num_seqs: int | None, engines: list[str]
) -> tuple[roofline.Limit | None, dict[str, roofline.Limit]]:
    """Return the workload's roofline, and the rooflines of engines with another precision.

    max_num_seqs: the batch size, or None for the default of `EngineConfig`.
    """
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
    """Measure every engine at one batch size and request rate, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in args.engine}
    for number in range(1, args.repeat + 1):
        for label in args.engine:
            name, own = parse_engine(label)
            run = run_child(name, spec | own, args.python.get(name, sys.executable))
            runs[label].append(run)
            if "failed" in run:
                print(f"{label} FAILED: {run['failed']}", flush=True)
            else:
                is_missing = "missing" in run
                text = f"not measured: {run['missing']}" if is_missing else round(run["seconds"], 3)
                print(f"run {number}, {label}: {text}", flush=True)
    return runs


def compare(args: Namespace, scratch: Path) -> bool:
    """Measure at every batch size and rate, and report. Returns True if no run failed."""
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
    parser = Parser(
        "nanoserve bench", description="Measure nanoserve and other engines on this machine."
    )
    add = parser.add_argument
    engines = (
        f"NAME[:OPTION=VALUE...],... of engines that run in turns: {', '.join(SOURCES)}. "
        "Default: %(default)s."
    )
    add("--engine", default="nanoserve,transformers", help=engines)
    url = "Measure this server over HTTP instead; see `--url URL --help`. Default: none."
    add("--url", default=SUPPRESS, help=url)
    python = "Interpreter for one engine, with that engine installed. Default: this interpreter."
    add("--python", action="append", default=[], metavar="NAME=PATH", help=python)
    add("--model", help="Folder, GGUF file or name of a local model. Default: tiny-qwen3.")
    shape = "Shape of a model with random weights, instead of --model. Default: none."
    add("--shape", choices=SHAPES, help=shape)
    add_workload(parser)
    arrivals = "Request rates in requests per second, a run for each. Default: all at once."
    add("--request-rate", type=rates, default=[None], metavar="R,...", help=arrivals)
    batching = "Batching of requests. Default: %(default)s."
    add("--batching", choices=("continuous", "static"), default="continuous", help=batching)
    sizes = "Maximum numbers of running sequences, a run for each. Default: the engine's."
    add("--max-num-seqs", type=counts, default=[None], metavar="N,...", help=sizes)
    budget = "Token budget of a step. Default: the engine's."
    add("--max-num-batched-tokens", type=whole_number, metavar="N", help=budget)
    length = "Longest sequence in tokens. Default: the engine's."
    add("--max-model-len", type=length_or_auto, metavar="N", help=length)
    caching, name = "Disable prefix caching. Default: the engine's.", "enable_prefix_caching"
    add("--no-prefix-caching", dest=name, action="store_const", const=False, help=caching)
    backend = "Attention backend of nanoserve. Default: the engine's."
    add("--attention-backend", metavar="NAME", help=backend)
    eager = "Use no CUDA graphs. Default: the engine's."
    add("--enforce-eager", action="store_const", const=True, help=eager)
    static = "Size of the static batches of transformers. Default: 16."
    add("--hf-batch-size", type=int, metavar="N", help=static)
    dtype = "Data type of weights and activations. Default: %(default)s."
    add("--dtype", choices=DTYPES, default="bfloat16", help=dtype)
    device = "Device; auto is an NVIDIA GPU if there is one. Default: %(default)s."
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
    threads = "Number of CPU threads. Default: as torch chooses; 1 for the bundled model."
    add("--threads", type=int, help=threads)
    args = parse_with_workload(parser, arguments)
    args.model = args.model or (None if args.shape else "tiny-qwen3")
    args.shape = None if args.model else args.shape
    if args.threads is None and args.model == "tiny-qwen3":
        args.threads = 1  # a small model gains nothing from more, and loses on a busy machine
    args.engine = args.engine.split(",")
    args.python = dict(pair.split("=", 1) for pair in args.python)
    for label in args.engine:
        parse_engine(label)
    if args.batching == "static" and args.request_rate != [None]:
        parser.error("--batching static waits for whole batches; remove --request-rate")
    return args


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if compare(args, Path(scratch)) else 1
