"""How fast is nanoserve, beside other engines (`benchmarks/peers.py`) and beside the hardware?

python bench.py                                      random weights, about a minute
python bench.py --shape qwen3-0.6b --repeat 3        a real model's size, three pairs of runs
python bench.py --workload nano-vllm --engine nanoserve,transformers-cb            for a GPU

A throughput says little without another one beside it. Every engine gets the same prompts, weights,
data type, device and threads, each in a process of its own, and they take turns. And a decode step
must at least read the weights and the KV of its sequences: how long that takes is the limit.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nanoserve.checkpoints import bundled_checkpoint
from nanoserve.config import DTYPES

if TYPE_CHECKING:
    from nanoserve.engine.batch import Batch
    from nanoserve.engine.llm_engine import LLMEngine

QWEN3 = json.loads("""{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
  "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
  "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
  "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": true}""")
TINY = json.loads("""{"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 448,
  "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}""")
EIGHT_LAYERS = {"num_hidden_layers": 8, "vocab_size": 16_000}
SHAPES = {"tiny": QWEN3 | TINY, "qwen3-0.6b-8l": QWEN3 | EIGHT_LAYERS, "qwen3-0.6b": QWEN3}

Tokens = list[list[int]]
# Prompts and output lengths in; every output's tokens and a line for the report out.
Generate = Callable[[Tokens, list[int]], tuple[Tokens, str]]

NANO_VLLM = {"num_seqs": 256, "input_len": "100-1024", "output_len": "100-1024"}
WORKLOADS = {"nano-vllm": NANO_VLLM | {"shape": "qwen3-0.6b", "temperature": 0.6}}
NANOSERVE_OPTIONS = (
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs"),
    *("attention_backend", "enforce_eager"),
)


def draw_workload(
    num_seqs: int, input_len: tuple[int, int], output_len: tuple[int, int], vocab_size: int
) -> tuple[Tokens, list[int]]:
    """All prompts, then all output lengths, from one generator: nano-vllm's, draw for draw.

    A small vocabulary wraps ids only after they are drawn, so lengths are the same for all models.
    """
    rng = Random(0)
    prompts = [
        [rng.randint(0, 10_000) % vocab_size for _ in range(rng.randint(*input_len))]
        for _ in range(num_seqs)
    ]
    return prompts, [rng.randint(*output_len) for _ in range(num_seqs)]


def load_nanoserve(spec: Namespace) -> Generate:
    from nanoserve import LLM, SamplingParams

    chosen = {name: getattr(spec, name) for name in NANOSERVE_OPTIONS}
    options = {name: value for name, value in chosen.items() if value}
    llm = LLM(spec.model, dtype=spec.dtype, device=spec.device, skip_tokenizer_init=True, **options)
    num_bytes = count_bytes(llm.engine)

    def generate(prompts: Tokens, output_lens: list[int]) -> tuple[Tokens, str]:
        before = vars(llm.stats)
        common = {"temperature": spec.temperature, "ignore_eos": True}
        params = [SamplingParams(max_tokens=n, **common) for n in output_lens]
        num_bytes.clear()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, limit = time.perf_counter() - start, sum(num_bytes) / spec.bandwidth
        did = {name: total - before[name] for name, total in vars(llm.stats).items()}
        hit_rate = did["prefix_cache_hits"] / did["prefix_cache_queries"]
        note = "".join(f"{name}={value}, " for name, value in options.items())
        note += f"{llm.engine.executor.num_kv_blocks} KV blocks, {did['num_steps']} steps, "
        note += f"{did['num_preemptions']} preemptions, prefix-cache hit rate {hit_rate:.1%}\n"
        note += f"roofline: {limit:.1f} s of weights and KV at {spec.bandwidth / 1e9:.0f} GB/s, "
        note += f"{limit / seconds:.0%} of the limit"
        return [output.outputs[0].token_ids for output in outputs], note

    return generate


def count_bytes(engine: "LLMEngine") -> list[int]:
    """A list that gets, step by step, the bytes of all weights and of the KV of its sequences."""
    model = engine.executor.model
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        weights -= model.model.embed_tokens.weight.nbytes  # of which a step reads a few rows only
    kv_bytes_per_token, steps = engine.model_config.kv_bytes_per_token(), []

    def observe(_plan: object, batch: "Batch", _times: object) -> None:
        context_lens = batch.context_lens[: batch.header_dict()["num_rows"]]
        steps.append(weights + kv_bytes_per_token * int(context_lens.sum()))

    engine.observers.append(observe)
    return steps


def beside(name: str) -> ModuleType:
    """The module of that name in benchmarks/, which is no package."""
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    return import_module(name)


def probe(spec: Namespace) -> dict[str, Any]:
    """The device that `--device` means, its name and the speed of its memory."""
    import torch

    if spec.threads:
        torch.set_num_threads(spec.threads)
    hardware = beside("hardware")
    device = hardware.choose_device(spec.device)
    bandwidth, name = hardware.copy_bandwidth(device), hardware.describe(device)
    return {"device": device, "bandwidth": bandwidth, "name": name}


def measure(name: str, spec: Namespace) -> dict[str, Any]:
    """Load, warm up, run the workload: the whole work of an engine's process."""
    import torch

    if spec.threads:
        torch.set_num_threads(spec.threads)
    started = time.perf_counter()
    generate = (load_nanoserve if name == "nanoserve" else beside("peers").PEERS[name])(spec)
    loaded = time.perf_counter()
    generate([[1] * 8, [2] * 4], [4, 4])  # what is set up on first use is set up now
    warm = time.perf_counter()
    outputs, note = generate(spec.prompts, spec.output_lens)
    seconds = time.perf_counter() - warm
    if [len(tokens) for tokens in outputs] != spec.output_lens:
        raise RuntimeError("an output has not the length that was asked for")
    package = name.partition("-")[0]
    versions = f"{name} {import_module(package).__version__}, torch {torch.__version__}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = {
        "seconds": seconds,
        "load": loaded - started,
        "mib": peak / (2**20 if sys.platform == "darwin" else 2**10),  # bytes or KiB
        "note": f"{versions}, threads {torch.get_num_threads()}: {note}",
    }
    if spec.device == "cuda":
        run["gpu_mib"] = torch.cuda.max_memory_reserved() / 2**20
    return run


def run_child(job: str, spec_file: Path) -> dict[str, Any] | None:
    """What the child measured; None if it failed, and then its reason is printed.

    Weights, too, are a child's job: this process imports no torch and stays small, because on
    Linux a child's peak memory is at least what its parent had when it started the child.
    """
    command = [sys.executable, __file__, "--run-child", job, "--spec", str(spec_file)]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1])
    sys.stderr.write(child.stderr)
    last_words = child.stderr.strip().splitlines()[-1:] or ["it left no message"]
    print(f"{job} FAILED: {last_words[0]} (exit status {child.returncode})", flush=True)
    return None


def report(runs: dict[str, list[dict[str, Any] | None]], num_in: int, num_out: int) -> None:
    """Medians over each engine's runs; ratios pair by pair, of runs that were neighbours."""
    done = {name: [run for run in tried if run] for name, tried in runs.items() if any(tried)}
    for measured in done.values():
        print(measured[-1]["note"])
    on_gpu = any("gpu_mib" in run for measured in done.values() for run in measured)
    memory = {"mib": "peak RSS MiB"} | ({"gpu_mib": "peak GPU MiB"} if on_gpu else {})
    titles = ["engine", "output tok/s", "total tok/s", "seconds", "load s", *memory.values()]
    print(f"\n| {' | '.join(titles)} | runs |\n{'|---' * (len(titles) + 1)}|")
    for name, measured in done.items():
        columns = [[run[key] for run in measured] for key in ("seconds", "load", *memory)]
        s, load, *mibs = map(statistics.median, columns)
        speeds = f"{num_out / s:.1f} | {(num_in + num_out) / s:.1f}"
        peaks = " | ".join(f"{mib:.0f}" for mib in mibs)
        print(f"| {name} | {speeds} | {s:.2f} | {load:.2f} | {peaks} | {len(measured)} |")
    print()
    for peer in (name for name in done if name != "nanoserve"):
        pairs = zip(runs.get("nanoserve", []), runs[peer], strict=False)
        ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in pairs if ours and theirs]
        if ratios:
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}, pairs of runs: {len(ratios)}"
            print(f"nanoserve / {peer}: {statistics.median(ratios):.2f} ({spread})")


def compare(args: Namespace, engines: list[str], scratch: Path) -> bool:
    """Run every engine `args.repeat` times, in turns, and report; True if no run failed."""
    model, title = scratch, f"{args.shape} with random weights"
    if args.model:
        model, title = bundled_checkpoint(args.model) or Path(args.model), args.model
        if not (model / "config.json").is_file():
            raise SystemExit(f"--model {args.model} is no checkpoint: it has no config.json")
    else:
        (model / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts, lens = draw_workload(args.num_seqs, args.input_len, args.output_len, vocab_size)
    num_in, num_out = sum(map(len, prompts)), sum(lens)
    spec = vars(args) | {"model": str(model), "prompts": prompts, "output_lens": lens}
    spec_file = scratch / "spec.json"
    spec_file.write_text(json.dumps(spec))

    device = run_child("probe", spec_file)
    if device is None:
        return False
    spec_file.write_text(json.dumps(spec | device))
    speed = f"copies at {device['bandwidth'] / 1e9:.0f} GB/s"
    print(f"{device['name']}, {speed}, Python {sys.version.split()[0]}")
    print(f"{title}, {args.dtype}, temperature {args.temperature}, on {device['device']}")
    counts = f"{num_in} prompt tokens, {num_out} output tokens"
    print(f"{args.num_seqs} sequences, {counts}", flush=True)
    if not args.model and run_child("weights", spec_file) is None:
        return False
    runs: dict[str, list[dict[str, Any] | None]] = {name: [] for name in engines}
    for _ in range(args.repeat):
        for name in engines:
            runs[name].append(run_child(name, spec_file))
    report(runs, num_in, num_out)
    return all(all(tried) for tried in runs.values())


def length_range(text: str) -> tuple[int, int]:
    low, high = map(int, text.split("-"))
    if not 1 <= low <= high:
        raise ValueError(text)
    return low, high


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Tokens per second of nanoserve and its peers.")
    add = parser.add_argument
    add("--engine", default="nanoserve,transformers", help="which to run, in turns (%(default)s)")
    add("--workload", choices=WORKLOADS, help="sets --num-seqs, lengths, shape and temperature")
    add("--shape", choices=SHAPES, default="qwen3-0.6b-8l", help="random weights (%(default)s)")
    add("--model", help="a checkpoint, instead of random weights")
    add("--num-seqs", type=int, default=64, help="prompts (%(default)s)")
    add("--input-len", type=length_range, default="16-256", metavar="LO-HI", help="%(default)s")
    add("--output-len", type=length_range, default="16-128", metavar="LO-HI", help="%(default)s")
    add("--temperature", type=float, default=0.0, help="%(default)s, which is greedy")
    add("--dtype", choices=DTYPES, default="bfloat16", help="%(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="%(default)s")
    add("--threads", type=int, help="if not given, torch chooses")
    add("--hf-batch-size", type=int, default=16, help="transformers' static batch (%(default)s)")
    for name in NANOSERVE_OPTIONS[:3]:
        add("--" + name.replace("_", "-"), type=int, metavar="N", help="nanoserve's option")
    add("--attention-backend", metavar="NAME", help="nanoserve's option")
    add("--enforce-eager", action="store_true", help="nanoserve without CUDA graphs")
    add("--repeat", type=int, default=1, help="runs of each engine (%(default)s)")
    add("--run-child", help=SUPPRESS)  # its job: "probe", "weights" or an engine
    add("--spec", help=SUPPRESS)
    chosen = parser.parse_known_args()[0].workload
    parser.set_defaults(**WORKLOADS.get(chosen, {}))  # what is given beside it wins
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.run_child:
        spec = Namespace(**json.loads(Path(args.spec).read_text()))
        jobs = {"probe": probe, "weights": lambda spec: beside("peers").write_weights(spec)}
        job = jobs.get(args.run_child, partial(measure, args.run_child))
        print(json.dumps(job(spec)))
        return 0
    engines = args.engine.split(",")
    known = ["nanoserve", *beside("peers").PEERS]
    if not set(engines) <= set(known):
        raise SystemExit(f"--engine {args.engine}: known are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if compare(args, engines, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
