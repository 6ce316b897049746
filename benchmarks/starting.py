"""Measure the seconds until a new process has loaded a model and its first token, by scheme.

    python benchmarks/starting.py [--shape qwen3-0.6b] [--repeat 5]

"Cold" begins with the caches of compiled functions and of measured products empty, as after an
installation; "warm" is the next start. The checkpoint was read before, so that the disk does not
matter. Schemes take turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.cli.bench.compare import CHILD
from nanoserve.cli.bench.hardware import describe
from nanoserve.cli.bench.shapes import SHAPES

SCHEMES: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16, KV int8": {"kv_cache_dtype": "int8"},
    "bfloat16, attention of torch": {"attention_backend": "torch"},
}
PARTS = ("import", "load", "first token")
_START = """
import json, sys, time
times = [time.perf_counter()]
from nanoserve import LLM, SamplingParams
times.append(time.perf_counter())
llm = LLM(sys.argv[1], kv_cache_memory_bytes=2**28, **json.loads(sys.argv[2]))
times.append(time.perf_counter())
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
llm.generate([[*range(100, 228)]], params, use_tqdm=False)
times.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""


def write_weights(spec: dict[str, str], scratch: Path) -> None:
    (spec_file := scratch / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, str(CHILD), "weights", str(spec_file), str(scratch / "written.json")]
    subprocess.run(command, check=True)


def start(model: Path, scheme: str, caches: Path) -> dict[str, float]:
    """Return the seconds of each part, measured in a separate process."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(caches), "XDG_CACHE_HOME": str(caches)}
    command = [sys.executable, "-c", _START, str(model), json.dumps(SCHEMES[scheme])]
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return dict(zip(PARTS, json.loads(output.splitlines()[-1]), strict=True))


def measure(model: Path, schemes: list[str], repeat: int, scratch: Path) -> None:
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(repeat):
        for scheme in schemes:
            with tempfile.TemporaryDirectory(dir=scratch) as caches:
                for state in ("cold", "warm"):
                    found = start(model, scheme, Path(caches))
                    runs.setdefault((scheme, state), []).append(found)
    print(f"| scheme | caches | {' | '.join(PARTS)} | all | from - to |")
    print("|---|---|" + "---|" * (len(PARTS) + 2))
    for (scheme, state), of in runs.items():
        parts = [statistics.median(found[part] for found in of) for part in PARTS]
        sums = sorted(sum(found.values()) for found in of)
        cells = [f"{seconds:.2f}" for seconds in (*parts, statistics.median(sums))]
        print(f"| {scheme} | {state} | {' | '.join(cells)} | {sums[0]:.2f} - {sums[-1]:.2f} |")


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Seconds until a new process has its first token.")
    parser.add_argument("--shape", choices=SHAPES, help="random weights (the bundled model)")
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="all")
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    bundled = bundled_checkpoint("tiny-qwen3")
    with tempfile.TemporaryDirectory() as folder:
        scratch, model = Path(folder), bundled
        if args.shape:
            model = scratch / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SHAPES[args.shape]))
            spec = {"model": str(model), "dtype": "bfloat16", "device": "cpu"}
            write_weights(spec | {"tokenizer": str(bundled)}, scratch)
        print(f"{args.shape or 'tiny-qwen3'}, {describe('cpu')}")
        measure(model, args.scheme or list(SCHEMES), args.repeat, scratch)


if __name__ == "__main__":
    main()
