"""Run nano-vllm's workload on one engine, in a separate process with a time limit.

    python benchmarks/gpu_peers.py --engine vllm --peers FOLDER [--fallback] [--in-process]
    python benchmarks/gpu_peers.py --engine nano-vllm --peers FOLDER --limit 100
    python benchmarks/gpu_peers.py --engine nanoserve --options '{"max_num_batched_tokens": 16384}'
    python benchmarks/gpu_peers.py --prepare        only writes nano-vllm's weights, on the CPU
    python benchmarks/gpu_peers.py --engine nanoserve --tiny        on a CPU, as a check

FOLDER is the unpacked output of pack_peers.py; without --peers, vLLM and nano-vllm must be
installed. Each measurement is a line of JSON, printed and appended to --out, so that one file can
have all engines. After --limit seconds, and when it has ended, the engine's process is killed with
all its children, so that the GPU is free.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

BEGAN = time.perf_counter()
ROOT = Path(__file__).resolve().parents[1]
TEMPERATURE = 0.6
TIMED_OUT = 124  # as of `timeout`
_TERMINATED = 143  # by SIGTERM, as in shells
Tokens = list[list[int]]
_VLLM_SETTINGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def load(name: str) -> ModuleType:
    """Load a module of nanoserve/cli/bench without nanoserve, which would configure threads."""
    spec = importlib.util.spec_from_file_location(
        f"_{name}", ROOT / f"nanoserve/cli/bench/{name}.py"
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"nanoserve/cli/bench has no {name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tell(args: Namespace, what: str, **found: Any) -> None:
    line = json.dumps({"engine": args.engine, "label": args.label, "what": what, **found})
    print(line, flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write(line + "\n")


# ---------------------------------------------------------------- models


def model_folder(args: Namespace, has_weights: bool = False) -> Path:
    shape = "tiny" if args.tiny else "qwen3-0.6b"
    folder = args.models / (shape + ("-weights" if has_weights else ""))
    folder.mkdir(parents=True, exist_ok=True)
    dtype = "float32" if args.tiny else "bfloat16"
    config = load("shapes").SHAPES[shape]
    config = config | {"dtype": dtype, "attention_bias": False, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    if has_weights:
        write_weights(folder, config)
    return folder


def weight_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the `config.json` of a Qwen3 model with tied embeddings."""
    hidden, head, inner = (config[k] for k in ("hidden_size", "head_dim", "intermediate_size"))
    queries, keys = (config[f"num_{k}_heads"] * head for k in ("attention", "key_value"))
    yield "model.embed_tokens", (config["vocab_size"], hidden)
    yield "model.norm", (hidden,)
    layer = {"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}
    layer |= {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
    layer |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    layer["mlp.down_proj"] = (hidden, inner)
    norms = {f"self_attn.{name}_norm": (head,) for name in "qk"}
    norms |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    for number in range(config["num_hidden_layers"]):
        for name, shape in (layer | norms).items():
            yield f"model.layers.{number}.{name}", shape


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write weights for nano-vllm, which cannot create any; repeated values do not affect times."""
    import torch
    from safetensors.torch import save_file

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "nanoserve/checkpoint/tiny_qwen3/model" / name, folder)
    file = folder / "model.safetensors"
    if file.exists():
        return
    dtype = getattr(torch, config["dtype"])
    block = torch.randn(2**24).mul_(0.02).to(dtype)
    tensors = {}
    for name, shape in weight_shapes(config):
        size = torch.Size(shape).numel()
        values = torch.ones(size, dtype=dtype)
        if len(shape) == 2:
            values = block.repeat(-(-size // len(block)))[:size]
        tensors[f"{name}.weight"] = values.reshape(shape).contiguous()
    save_file(tensors, folder / "unfinished")
    (folder / "unfinished").rename(file)


# ---------------------------------------------------------------- engines


class Engine(Protocol):
    facts: dict[str, Any]

    def generate(self, prompts: Tokens, output_lens: list[int]) -> list[int]:
        """Return the number of tokens of each output."""


class Nanoserve:
    def __init__(self, args: Namespace) -> None:
        import torch

        import nanoserve

        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        if args.tiny:
            options |= {"device": "cpu", "dtype": "float32", "num_kv_blocks": 500}
        else:
            options |= {"device": "cuda", "dtype": "bfloat16"}
        self.llm = nanoserve.LLM(str(model_folder(args)), **options | args.options)
        self.params = nanoserve.SamplingParams
        engine = self.llm.engine
        self.facts = {"torch": torch.__version__, "options": args.options}
        self.facts["KV blocks"] = engine.executor.num_kv_blocks
        self.facts["tokens a step"] = engine.config.max_num_batched_tokens

    def generate(self, prompts: Tokens, output_lens: list[int]) -> list[int]:
        params = [
            self.params(max_tokens=n, temperature=TEMPERATURE, ignore_eos=True) for n in output_lens
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class Vllm:
    def __init__(self, args: Namespace) -> None:
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.in_process else {}
        for name, value in (_VLLM_SETTINGS | more).items():
            os.environ.setdefault(name, value)
        import torch
        import vllm._C

        tell(args, "import vllm._C", seconds=time.perf_counter() - BEGAN)
        import vllm

        tell(args, "import vllm", seconds=time.perf_counter() - BEGAN)
        options = {"max_num_seqs": 256, "max_model_len": 4096} | args.options
        if args.fallback:
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        common = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
        common |= {"seed": 0, "generation_config": "vllm"}
        self.llm = vllm.LLM(str(model_folder(args)), **common, **options)
        self.params = vllm.SamplingParams
        self.facts = {"vllm": vllm.__version__, "torch": torch.__version__, "options": options}
        self.facts["engine core"] = "in this process" if args.in_process else "its own process"
        config = self.llm.llm_engine.vllm_config
        self.facts["tokens a step"] = config.scheduler_config.max_num_batched_tokens
        self.facts["KV blocks"] = config.cache_config.num_gpu_blocks

    def generate(self, prompts: Tokens, output_lens: list[int]) -> list[int]:
        common = {"temperature": TEMPERATURE, "ignore_eos": True, "detokenize": False}
        params = [self.params(max_tokens=n, **common) for n in output_lens]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class _NoText:
    """Replace the tokenizer: only tokens are timed, as for the other engines."""

    def decode(self, token_ids: list[int]) -> str:
        return ""


class NanoVllm:
    """nano-vllm with its own defaults: 512 sequences, 16,384 tokens a step, lengths to 4,096."""

    def __init__(self, args: Namespace) -> None:
        start = time.perf_counter()
        folder = model_folder(args, has_weights=True)
        tell(args, "weights", seconds=time.perf_counter() - start)
        from importlib.metadata import version

        import nanovllm
        import torch

        tell(args, "import nanovllm", seconds=time.perf_counter() - BEGAN)
        self.llm = nanovllm.LLM(str(folder), **args.options)
        self.llm.tokenizer = _NoText()
        self.params = nanovllm.SamplingParams
        self.facts = {"nano-vllm": version("nano-vllm"), "torch": torch.__version__}
        self.facts |= {"attention": "vLLM's FlashAttention 3", "decodes texts": False}
        self.facts["KV blocks"] = self.llm.model_runner.config.num_kvcache_blocks

    def generate(self, prompts: Tokens, output_lens: list[int]) -> list[int]:
        params = [
            self.params(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True) for n in output_lens
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]


ENGINES = {"nanoserve": Nanoserve, "vllm": Vllm, "nano-vllm": NanoVllm}


# ---------------------------------------------------------------- measurements


def workload(is_tiny: bool) -> tuple[Tokens, list[int]]:
    workloads = load("workloads")
    if is_tiny:
        return workloads.draw_workload(4, (5, 20), (4, 8), 2048)
    settings = workloads.WORKLOADS["nano-vllm"]
    lengths = (workloads.length_range(settings[name]) for name in ("input_len", "output_len"))
    return workloads.draw_workload(settings["num_seqs"], *lengths, 151_936)


def other(prompts: Tokens, number: int, is_tiny: bool) -> Tokens:
    """Return prompts of the same lengths that are in no prefix cache."""
    modulus = 2048 if is_tiny else 10_001
    return [[(token + number) % modulus for token in prompt] for prompt in prompts]


def timed(engine: Engine, prompts: Tokens, output_lens: list[int]) -> float:
    start = time.perf_counter()
    lens = engine.generate(prompts, output_lens)
    seconds = time.perf_counter() - start
    if lens != list(output_lens):
        raise RuntimeError("an output does not have the requested length")
    return seconds


def run_workload(args: Namespace, engine: Engine) -> None:
    prompts, output_lens = workload(args.tiny)
    warm = other(prompts, 77, args.tiny)
    start = time.perf_counter()
    timed(engine, warm[:4], [8] * len(warm[:4]))
    timed(engine, warm[4:24], [5 + i % 8 for i in range(len(warm[4:24]))])
    tell(args, "warm-up", seconds=time.perf_counter() - start)
    for run in range(args.runs):
        seconds = timed(engine, other(prompts, run, args.tiny), output_lens)
        rate = sum(output_lens) / seconds
        tell(args, "workload", run=run + 1, seconds=seconds, **{"tok/s": rate})


def run_few_rows(args: Namespace, engine: Engine, num_rows: int) -> None:
    """Time 128 tokens in and 256 out; the rate excludes the time of the first token."""
    num_in, num_out = (8, 4) if args.tiny else (128, 256)
    count = iter(range(1000))

    def generate(n: int) -> float:
        first = next(count) * num_rows
        prompts = [[(first + row) * 7 + i for i in range(num_in)] for row in range(num_rows)]
        return timed(engine, other(prompts, 1000 * num_rows, args.tiny), [n] * num_rows)

    generate(num_out)
    to_first = statistics.median(generate(1) for _ in range(3))
    seconds = [generate(num_out) for _ in range(3)]
    step = (min(seconds) - to_first) / (num_out - 1)
    found = {"rows": num_rows, "seconds": seconds, "to first token ms": to_first * 1e3}
    tell(args, "few rows", **found, **{"step ms": step * 1e3, "tok/s": num_rows / step})


def measure(args: Namespace) -> None:
    start = time.perf_counter()
    engine: Engine = ENGINES[args.engine](args)
    tell(args, "start", seconds=time.perf_counter() - start, **engine.facts)
    run_workload(args, engine)
    if not args.no_rows:
        for num_rows in (1, 8):
            run_few_rows(args, engine, num_rows)
    tell(args, "end", seconds=time.perf_counter() - BEGAN)
    sys.stdout.flush()
    os._exit(0)  # the other process kills what is left


# ---------------------------------------------------------------- the process around it


def environment(args: Namespace) -> dict[str, str]:
    peers = [args.peers] if args.peers else []
    paths = {"vllm": peers, "nano-vllm": [*(each / "nano" for each in peers), *peers]}
    paths["nanoserve"] = [ROOT]
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    found = os.pathsep.join([*map(str, paths[args.engine]), *before])
    return os.environ | {"PYTHONPATH": found, "PYTHONUNBUFFERED": "1"}


def supervise(args: Namespace, arguments: list[str]) -> int:
    """Run the process; kill its whole group after the limit, or the rest of it at the end."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--child"]
    child = subprocess.Popen(command, env=environment(args), start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        rc = child.wait(args.limit)
    except subprocess.TimeoutExpired:
        rc = TIMED_OUT
        tell(args, "stopped", seconds=args.limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if rc not in (0, TIMED_OUT):
        tell(args, "failed", rc=rc)
    return rc


def parse_args(arguments: list[str]) -> Namespace:
    parser = ArgumentParser(description="nano-vllm's workload on one engine.")
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="nano-vllm", help="%(default)s")
    add("--options", type=json.loads, default={}, metavar="JSON", help="options of the engine")
    add("--label", default="", help="label in each line")
    add("--peers", type=Path, metavar="FOLDER", help="vLLM and nano-vllm, from pack_peers.py")
    models = Path(tempfile.gettempdir()) / "nanoserve-peers"
    add(
        "--models",
        type=Path,
        default=models,
        metavar="FOLDER",
        help="folder for weights, which is kept (default %(default)s)",
    )
    add("--out", type=Path, metavar="FILE", help="file to which lines are appended")
    add("--runs", type=int, default=2, help="runs of the workload (default %(default)s)")
    add("--limit", type=float, default=240, help="seconds (%(default)s)")
    add("--no-rows", action="store_true", help="only the workload")
    add("--fallback", action="store_true", help="vLLM without torch.compile")
    add("--in-process", action="store_true", help="vLLM's core in this process")
    add("--tiny", action="store_true", help="a tiny model and workload, in float32 on a CPU")
    add("--prepare", action="store_true", help="write nano-vllm's weights and end")
    add("--child", action="store_true", help=SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    if args.prepare:
        model_folder(args, has_weights=True)
        return 0
    if args.child:
        measure(args)
    return supervise(args, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
