"""How fast is nanoserve, beside transformers' own `generate`?

python bench.py                                      random weights, about a minute
python bench.py --shape qwen3-0.6b --repeat 3        a real model's size, three pairs of runs
python bench.py --num-seqs 256 --input-len 100-1024 --output-len 100-1024      nano-vllm's workload

A throughput says little without another one beside it. Every engine gets the same prompts, weights,
data type and threads, each in a process of its own, and they take turns.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from nanoserve.checkpoints import bundled_checkpoint
from nanoserve.config import DTYPES

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

    llm = LLM(spec.model, dtype=spec.dtype, skip_tokenizer_init=True)

    def generate(prompts: Tokens, output_lens: list[int]) -> tuple[Tokens, str]:
        before = vars(llm.stats)
        common = {"temperature": spec.temperature, "ignore_eos": True}
        params = [SamplingParams(max_tokens=n, **common) for n in output_lens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        did = {name: total - before[name] for name, total in vars(llm.stats).items()}
        hit_rate = did["prefix_cache_hits"] / did["prefix_cache_queries"]
        note = f"{llm.engine.executor.num_kv_blocks} KV blocks, {did['num_steps']} steps, "
        note += f"{did['num_preemptions']} preemptions, prefix-cache hit rate {hit_rate:.1%}"
        return [output.outputs[0].token_ids for output in outputs], note

    return generate


def load_transformers(spec: Namespace) -> Generate:
    """transformers at the best that static batches allow: sorted by output length.

    A batch runs until its longest output is complete. What the other rows generate meanwhile was
    not asked for and does not count: that is what static batching costs. Sorting, for which one
    must know every length in advance, keeps the cost as small as it can be.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=getattr(torch, spec.dtype))
    sampling = {"do_sample": True, "temperature": spec.temperature, "top_k": 0}
    # In place of the checkpoint's own, whose EOS would end outputs early.
    model.generation_config = GenerationConfig(
        eos_token_id=None, pad_token_id=0, **(sampling if spec.temperature else {})
    )

    def generate(prompts: Tokens, output_lens: list[int]) -> tuple[Tokens, str]:
        order = sorted(range(len(prompts)), key=output_lens.__getitem__)
        outputs, num_generated, size = [[]] * len(prompts), 0, spec.hf_batch_size
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            longest = output_lens[batch[-1]]
            rows = [torch.tensor(prompts[i]) for i in batch]
            # Left padding, so that all rows go on at the same column; positions count the mask.
            ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
            inputs = {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
            tokens = model.generate(**inputs, max_new_tokens=longest)[:, ids.shape[1] :].tolist()
            num_generated += len(batch) * longest
            for i, row in zip(batch, tokens, strict=True):
                outputs[i] = row[: output_lens[i]]
        return outputs, f"static batches of {size}, {num_generated} tokens generated"

    return generate


ENGINES = {"nanoserve": load_nanoserve, "transformers": load_transformers}


def measure(name: str, spec: Namespace) -> dict[str, Any]:
    """Load, warm up, run the workload: the whole work of an engine's process."""
    import torch

    if spec.threads:
        torch.set_num_threads(spec.threads)
    started = time.perf_counter()
    generate = ENGINES[name](spec)
    loaded = time.perf_counter()
    generate([[1] * 8, [2] * 4], [4, 4])  # what is set up on first use is set up now
    warm = time.perf_counter()
    outputs, note = generate(spec.prompts, spec.output_lens)
    seconds = time.perf_counter() - warm
    if [len(tokens) for tokens in outputs] != spec.output_lens:
        raise RuntimeError("an output has not the length that was asked for")
    versions = f"{name} {import_module(name).__version__}, torch {torch.__version__}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": seconds,
        "load": loaded - started,
        "mib": peak / (2**20 if sys.platform == "darwin" else 2**10),  # bytes or KiB
        "note": f"{versions}, threads {torch.get_num_threads()}: {note}",
    }


def write_weights(spec: Namespace) -> dict[str, Any]:
    """Fill the folder `spec.model`, which has a config.json, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(spec.model)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(spec.model)
    return {}


def run_child(job: str, spec_file: Path) -> dict[str, Any] | None:
    """What the child measured; None if it failed, and then its reason is printed.

    Weights, too, are a child's job: this process imports no torch and stays small, because on
    Linux a child's peak memory is at least what its parent had when it started the child.
    """
    command = [sys.executable, __file__, "--run-engine", job, "--spec", str(spec_file)]
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
    print("\n| engine | output tok/s | total tok/s | seconds | load s | peak RSS MiB | runs |")
    print("|---|---|---|---|---|---|---|")
    for name, measured in done.items():
        columns = [[run[key] for run in measured] for key in ("seconds", "load", "mib")]
        s, load, mib = map(statistics.median, columns)
        speeds = f"{num_out / s:.1f} | {(num_in + num_out) / s:.1f}"
        print(f"| {name} | {speeds} | {s:.2f} | {load:.2f} | {mib:.0f} | {len(measured)} |")
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

    print(f"{cpu_model()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"{title}, {args.dtype}, temperature {args.temperature}")
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


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else "unknown CPU"


def length_range(text: str) -> tuple[int, int]:
    low, high = map(int, text.split("-"))
    if not 1 <= low <= high:
        raise ValueError(text)
    return low, high


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Tokens per second of nanoserve and its peers.")
    add = parser.add_argument
    add("--engine", default="nanoserve,transformers", help="which to run, in turns (%(default)s)")
    add("--shape", choices=SHAPES, default="qwen3-0.6b-8l", help="random weights (%(default)s)")
    add("--model", help="a checkpoint, instead of random weights")
    add("--num-seqs", type=int, default=64, help="prompts (%(default)s)")
    add("--input-len", type=length_range, default="16-256", metavar="LO-HI", help="%(default)s")
    add("--output-len", type=length_range, default="16-128", metavar="LO-HI", help="%(default)s")
    add("--temperature", type=float, default=0.0, help="%(default)s, which is greedy")
    add("--dtype", choices=DTYPES, default="bfloat16", help="%(default)s")
    add("--threads", type=int, help="if not given, torch chooses")
    add("--hf-batch-size", type=int, default=16, help="transformers' static batch (%(default)s)")
    add("--repeat", type=int, default=1, help="runs of each engine (%(default)s)")
    add("--run-engine", help=SUPPRESS)  # a child's job: an engine, or "weights"
    add("--spec", help=SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.run_engine:
        spec = Namespace(**json.loads(Path(args.spec).read_text()))
        is_engine = args.run_engine != "weights"
        print(json.dumps(measure(args.run_engine, spec) if is_engine else write_weights(spec)))
        return 0
    engines = args.engine.split(",")
    if not set(engines) <= ENGINES.keys():
        raise SystemExit(f"--engine {args.engine}: known are {', '.join(ENGINES)}")
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if compare(args, engines, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
