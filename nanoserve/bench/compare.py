"""How fast is nanoserve, beside other engines (`benchmarks/engines/`) and beside the hardware?

python bench.py                                     the bundled model, at once
python bench.py --shape qwen3-0.6b --repeat 3       a real model's size, three pairs of runs
python bench.py --workload single                   one stream: decoded tokens per second
python bench.py --request-rate 2,4,8                requests come one by one: latencies, goodput
python bench.py --engine nanoserve,nanoserve:batching=static --max-num-seqs 8
python bench.py --engine nanoserve:quantization=int8,vllm:quantization=int8          fewer bits
python bench.py --workload nano-vllm --engine nanoserve,vllm,nanovllm                 for a GPU

A throughput says little without another one beside it. Every engine gets the same prompts, weights,
data type, device and threads, each in a process of its own (`benchmarks/child.py`), and they take
turns. And no engine is faster than memory and matrix products (`benchmarks/roofline.py`): that time
over the measured one is the share of the limit. Options after an engine's name are its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import DTYPES, EngineConfig

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import roofline  # noqa: E402
from engines import SOURCES  # noqa: E402
from latency import poisson_arrivals  # noqa: E402
from precision import precision_of  # noqa: E402
from report import Point, as_json, print_report  # noqa: E402
from shapes import SHAPES  # noqa: E402

Tokens = list[list[int]]
WORKLOADS: dict[str, dict[str, Any]] = {
    "random": {"num_seqs": 64, "input_len": "16-256", "output_len": "16-128"},
    "nano-vllm": {"num_seqs": 256, "input_len": "100-1024", "output_len": "100-1024"}
    | {"shape": "qwen3-0.6b", "temperature": 0.6},
    "shared-prefix": {"num_seqs": 64, "input_len": "32-32", "output_len": "32-32"}
    | {"shared_len": 512},
    "long-prompt": {"num_seqs": 16, "input_len": "1024-1536", "output_len": "16-32"},
    "chat": {"num_seqs": 64, "input_len": "16-64", "output_len": "16-128"}
    | {"shared_len": 64, "turns": 4},
    "single": {"num_seqs": 1, "input_len": "128-128", "output_len": "256-256"},
}
# What an engine may have otherwise than the others, as in nanoserve:batching=static; any other
# option after an engine's name is handed to the engine.
COMMON = ("batching", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "hf_batch_size")
COMMON += ("attention_backend", "enforce_eager", "enable_prefix_caching")


def draw_workload(
    num_seqs: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocab_size: int,
    shared_len: int = 0,
    turns: int = 1,
) -> tuple[Tokens, list[int]]:
    """All prompts, then all output lengths, from one generator: nano-vllm's, draw for draw.

    A small vocabulary wraps ids only after they are drawn, so lengths are the same for all models.
    All prompts begin with the same `shared_len` tokens. With `turns`, a prompt repeats that of its
    conversation's turn before, and made-up tokens as its answer, before it says something new.
    """
    rng = Random(0)

    def draw(num_tokens: int) -> list[int]:
        return [rng.randint(0, 10_000) % vocab_size for _ in range(num_tokens)]

    messages = [draw(rng.randint(*input_len)) for _ in range(num_seqs)]
    output_lens = [rng.randint(*output_len) for _ in range(num_seqs)]
    shared, prompts, num_conversations = draw(shared_len), [], max(1, num_seqs // turns)
    for message in messages:
        before = len(prompts) - num_conversations
        history = shared if before < 0 else prompts[before] + draw(output_lens[before])
        prompts.append(history + message)
    return prompts, output_lens


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
    command = [python, str(ROOT / "benchmarks" / "child.py"), job, str(spec_file), str(result_file)]
    environment = dict(os.environ)
    if python == sys.executable:  # another one has packages of its own, and need not have ours
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        child = subprocess.run(command, capture_output=True, text=True, env=environment)
    except OSError as error:
        return {"failed": str(error)}
    if child.returncode == 0:
        return json.loads(result_file.read_text())
    sys.stderr.write(child.stderr)
    last_words = child.stderr.strip().splitlines()[-1:] or ["it left no message"]
    return {"failed": f"{last_words[0]} (exit status {child.returncode})"}


def prepare(args: Namespace, scratch: Path) -> dict[str, Any]:
    """The spec that all children share: what to run, on which weights, on which device."""
    model, title = scratch, f"{args.shape} with random weights"
    if args.shape:
        (model / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    else:
        model, title = bundled_checkpoint(args.model) or Path(args.model), args.model
        if not (model / "config.json").is_file():
            raise SystemExit(f"--model {args.model} is no checkpoint: it has no config.json")
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
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
    steps = [*roofline.planned_steps(config, spec["prompts"], spec["output_lens"])]
    limits = {}
    for label in engines:
        name, own = parse_engine(label)
        precision = precision_of(name, own["options"], spec["dtype"])
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
        from plots import plot_points

        plot_points(points, sum(spec["output_lens"]), args.plot)
    return not any("failed" in run for p in points for runs in p.runs.values() for run in runs)


def length_range(text: str) -> tuple[int, int]:
    low, high = map(int, text.split("-"))
    if not 1 <= low <= high:
        raise ValueError(text)
    return low, high


def counts(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def rates(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def milliseconds(text: str) -> float:
    return float(text) / 1000


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Speed of nanoserve and its peers.")
    add = parser.add_argument
    engines = "NAME[:OPTION=VALUE...],... run in turns (%(default)s); known: " + ", ".join(SOURCES)
    add("--engine", default="nanoserve,transformers", help=engines)
    python = "run that engine with another interpreter, whose environment has it"
    add("--python", action="append", default=[], metavar="NAME=PATH", help=python)
    add("--model", help="a checkpoint's folder (the bundled tiny-qwen3)")
    add("--shape", choices=SHAPES, help="random weights of that shape, instead")
    add("--workload", choices=WORKLOADS, default="random", help="sets the defaults of what follows")
    add("--num-seqs", type=int, metavar="N", help="prompts (%(default)s)")
    add("--input-len", type=length_range, metavar="LO-HI", help="tokens of a prompt (%(default)s)")
    add("--output-len", type=length_range, metavar="LO-HI", help="%(default)s")
    add("--shared-len", type=int, default=0, metavar="N", help="tokens that all prompts begin with")
    add("--turns", type=int, default=1, metavar="N", help="of a conversation, that repeat it")
    add("--temperature", type=float, default=0.0, help="%(default)s, which is greedy")
    add("--request-rate", type=rates, default=[None], metavar="R,...", help="requests a second")
    add(
        "--slo-ttft",
        type=milliseconds,
        default="1000",
        metavar="MS",
        help="goodput's (%(default)s)",
    )
    add("--slo-itl", type=milliseconds, default="100", metavar="MS", help="%(default)s")
    add("--batching", choices=("continuous", "static"), default="continuous", help="%(default)s")
    add("--max-num-seqs", type=counts, default=[None], metavar="N,...", help="batch sizes")
    add("--max-num-batched-tokens", type=int, metavar="N", help="token budget of a step")
    add("--max-model-len", type=int, metavar="N")
    add("--no-prefix-caching", dest="enable_prefix_caching", action="store_const", const=False)
    add("--attention-backend", metavar="NAME", help="nanoserve's option")
    add("--enforce-eager", action="store_const", const=True, help="no CUDA graphs")
    add("--hf-batch-size", type=int, metavar="N", help="transformers' static batch (16)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="%(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="%(default)s")
    add("--threads", type=int, help="if not given, torch chooses; 1 for the bundled model")
    add("--repeat", type=int, default=1, help="runs of each engine (%(default)s)")
    add("--json", metavar="FILE", help="all that was measured")
    add("--plot", metavar="FILE.png", help="needs matplotlib (extra: bench)")
    parser.set_defaults(**WORKLOADS[parser.parse_known_args()[0].workload])  # what is given wins
    args = parser.parse_args()
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
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'nanoserve[bench]'")
    return args


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if compare(args, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
