"""Measure the memory of loading a model in each precision, compared with llama.cpp.

    python benchmarks/peak_memory.py                           0.6B with random weights, as Markdown
    python benchmarks/peak_memory.py --llama-cpp PYTHON        PYTHON has llama-cpp-python and gguf
    python benchmarks/peak_memory.py --shape qwen3-0.6b-8l --kv-tokens 1536 --precisions int8

Each row is a separate process, which imports, loads, and answers a prompt of 512 tokens with 32
more. Meanwhile this process, which stays small, reads the other's /proc/PID/status once a
millisecond. Linux distinguishes the pages of a process:

    own      anonymous memory (RssAnon): weights, KV cache, compiled code
    files    pages of mapped files (RssFile): libraries, and checkpoints as far as they are mapped.
             The system can drop them at any time, and does when memory is short

"Imports" is the memory before the model is loaded: Python, torch, numba and the engine's own
modules. The peaks are the kernel's own (VmHWM, reset before each phase), so none is missed between
two reads.

llama.cpp reads GGUF files with the same weights: bfloat16, Q8_0 and Q4_0. Its KV cache has as many
tokens as nanoserve's; both write zeros to all of it when they load. MB are 10^6 bytes.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from select import select
from typing import Any

_BENCH = Path(__file__).resolve().parents[1] / "nanoserve" / "cli" / "bench"
_PRECISIONS = {"bfloat16": None, "int8": "q8_0", "int4": "q4_0"}  # ours: llama.cpp's
_PROMPT, _OUTPUT = 512, 32  # tokens
_FIELDS = {"VmRSS": "total", "RssAnon": "own", "RssFile": "files", "VmHWM": "peak"}
_COLUMNS = ("imports", "load", "run")


def memory_of(process: int) -> dict[str, int]:
    """Return bytes by the names of `_FIELDS`; nothing if the process has ended."""
    found = {}
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(value.split()[0]) * 1024
    return found


def watch(command: list[str], environment: dict[str, str]) -> dict[str, dict[str, int]]:
    """Run a child; return, by phase, its memory at the end, and `peak` and `peak_own` within it.

    The child prints the name of each phase when it is over, and waits for a line to go on.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, bufsize=0) as child:
        phases: dict[str, dict[str, int]] = {}
        peak_own = 0
        while True:
            is_over = bool(select([child.stdout], [], [], 0.001)[0])
            now = memory_of(child.pid)
            peak_own = max(peak_own, now.get("own", 0))
            if not is_over:
                continue
            name = child.stdout.readline().decode().strip()
            if not name:
                break
            phases[name] = now | {"peak_own": peak_own}
            peak_own = 0
            Path(f"/proc/{child.pid}/clear_refs").write_text("5")  # resets VmHWM
            child.stdin.write(b"go on\n")
    if child.returncode or tuple(phases) != _COLUMNS:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}, after {list(phases)}")
    return phases


def end_phase(name: str) -> None:
    """Report the end of a phase, in a child process."""
    print(name, flush=True)
    sys.stdin.readline()


def run_nanoserve(spec: Namespace) -> None:
    import torch

    from nanoserve import LLM, SamplingParams

    torch.set_num_threads(spec.threads)
    # Modules that an engine imports late.
    late = ["numba", "engine.llm_engine", "models.quantization.cpu_method"]
    late += ["kernels.cpu.float_linear", "attention.numba", "models.layers.numba_ops"]
    for module in (*late, "worker.compile_ahead"):
        import_module(module if module == "numba" else f"nanoserve.{module}")
    end_phase("imports")
    llm = LLM(
        spec.model,
        dtype=spec.dtype,
        device="cpu",
        skip_tokenizer_init=True,
        quantization=None if spec.precision == spec.dtype else spec.precision,
        kv_cache_memory_bytes=spec.kv_bytes,
        max_model_len=spec.max_model_len,
    )
    end_phase("load")
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0, ignore_eos=True)
    llm.generate(spec.prompts, params, use_tqdm=False)
    end_phase("run")


def run_llama_cpp(spec: Namespace) -> None:
    sys.path.insert(0, str(_BENCH))
    from engines.llama_cpp_engine import LlamaCppEngine

    end_phase("imports")
    engine = LlamaCppEngine(spec, spec.options)
    end_phase("load")
    engine.generate(spec.prompts, spec.output_lens)
    end_phase("run")
    engine.close()


def prepare_llama_cpp(spec: Namespace) -> None:
    sys.path.insert(0, str(_BENCH))
    from engines.llama_cpp_engine import LlamaCppEngine

    LlamaCppEngine.prepare(spec)


CHILDREN = {
    "nanoserve": run_nanoserve,
    "llama.cpp": run_llama_cpp,
    "prepare": prepare_llama_cpp,
}


def row(label: str, phases: dict[str, dict[str, int]]) -> str:
    """Return a number of bytes in MB."""
    before, loaded = phases["imports"], phases["load"]
    numbers = [before["own"], before["files"]]
    numbers += [loaded["peak"], loaded["peak"] - before["total"], loaded["peak_own"]]
    numbers += [loaded["own"], loaded["files"], phases["run"]["peak"] - before["total"]]
    cells = [f"{number / 1e6:.0f}" for number in numbers]
    cells[3] = f"**{cells[3]}**"
    return f"| {label} | " + " | ".join(cells) + " |"


def measure(args: Namespace, folder: Path) -> None:
    from nanoserve.checkpoint.checkpoint import bundled_checkpoint
    from nanoserve.cli.bench.compare import run_child
    from nanoserve.cli.bench.shapes import SHAPES

    shape = SHAPES[args.shape]
    (folder / "config.json").write_text(json.dumps(shape))
    rng = random.Random(0)
    prompt = [rng.randrange(5, shape["vocab_size"]) for _ in range(_PROMPT)]
    token_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    spec: dict[str, Any] = {
        "model": str(folder), "scratch": str(folder), "dtype": "bfloat16", "device": "cpu",
        "tokenizer": str(bundled_checkpoint("tiny-qwen3")), "threads": args.threads,
        "kv_bytes": args.kv_tokens * token_bytes, "max_model_len": min(args.kv_tokens // 2, 4096),
        "prompts": [prompt], "output_lens": [_OUTPUT], "temperature": 0, "max_num_seqs": 1,
        "max_num_batched_tokens": None, "options": {},
    }  # fmt: skip
    if not (folder / "model.safetensors").exists():
        failed = run_child("weights", spec).get("failed")
        if failed:
            raise SystemExit(failed)
    engines = {"nanoserve": sys.executable}
    if args.llama_cpp:
        engines["llama.cpp"] = args.llama_cpp
    kv = f"{args.kv_tokens} tokens of KV cache ({spec['kv_bytes'] / 1e6:.0f} MB)"
    print(f"{args.shape}, {kv}, {args.threads} threads; MB\n")
    print(
        "| | imports: own | imports: files | peak of loading | beside imports | of it own | "
        "loaded: own | loaded: files | peak of a prompt, beside imports |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    file = folder / "memory.json"
    for precision in args.precisions.split(","):
        for name, python in engines.items():
            own = spec | {"precision": precision}
            kind = _PRECISIONS[precision]
            if name == "llama.cpp":
                own["options"] = {"n_ctx": args.kv_tokens}
                own["options"] |= {"quantization": kind} if kind else {}
            file.write_text(json.dumps(own))
            environment = dict(os.environ)
            if python == sys.executable:
                environment["PYTHONPATH"] = str(_BENCH.parents[2])
            command = [python, __file__, "--child"]
            if name == "llama.cpp":
                prepare = [*command, "prepare", "--spec", str(file)]
                subprocess.run(prepare, check=True, stderr=subprocess.DEVNULL)
            else:  # what numba compiles is kept in a file: not what this measures
                watch([*command, name, "--spec", str(file)], environment)
            phases = watch([*command, name, "--spec", str(file)], environment)
            label = f"{name}, {precision if name == 'nanoserve' else kind or precision}"
            print(row(label, phases), flush=True)


def main() -> None:
    parser = ArgumentParser(description="Peak memory of loading.")
    parser.add_argument("--shape", default="qwen3-0.6b", help="%(default)s")
    parser.add_argument("--precisions", default=",".join(_PRECISIONS), help="%(default)s")
    parser.add_argument("--kv-tokens", type=int, default=9216, help="%(default)s, 1 GiB of 0.6B")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--llama-cpp", metavar="PYTHON", help="interpreter that has llama-cpp-python"
    )
    parser.add_argument("--folder", type=Path, help="folder of the weights, which is kept")
    parser.add_argument("--child", choices=CHILDREN, help="what this script starts")
    parser.add_argument("--spec", type=Path, help="for --child")
    args = parser.parse_args()
    if args.kv_tokens < 1536:  # the library has room for two sequences, each a multiple of 256
        parser.error(f"--kv-tokens {args.kv_tokens}: at least 1536, because of the prompt")
    if args.child:
        CHILDREN[args.child](Namespace(**json.loads(args.spec.read_text())))
        return
    if args.folder:
        args.folder.mkdir(exist_ok=True)
        measure(args, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
