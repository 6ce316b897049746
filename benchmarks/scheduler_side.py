"""Measure a step without its model, in two versions of the engine that take turns.

    python benchmarks/scheduler_side.py OLD NEW                           two source trees
    python benchmarks/scheduler_side.py OLD NEW --loads guided,ngram --seqs 1,32 --whole

Each round starts a process per tree, with the tree as PYTHONPATH, and the next round swaps them: a
machine's speed drifts. A process measures decode steps of so many sequences with the bundled model,
cut to one layer of random weights; of each step, all but the time of the executor (launching the
model and the sampler, and waiting for both): planning, packing, output processing, and the time
between them. `--whole` shows the time of whole steps instead, which is what counts for grammars and
drafts: masks are filled while the executor samples.

A cell is the median over rounds of a process's median step, in microseconds; the ratio, new over
old, is the median of the ratios of the rounds, and its range.

Loads: plain (outputs at the end only), stream (an output for each token), guided (a regular
expression without jump-forward tokens), ngram (speculation, never adaptive).
"""

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

LOADS = ("plain", "stream", "guided", "ngram")
PROMPT_LENGTH = 48  # more than any row has with drafts
MOST_SEQUENCES_A_STEP = 2048


def measure(load: str, num_seqs: int, num_steps: int) -> dict[str, float]:
    """Return the medians of a decode step, in seconds: without the executor, and whole."""
    import nanoserve  # of the tree that is measured

    options: dict[str, Any] = {
        "load_format": "dummy",
        "hf_overrides": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(MOST_SEQUENCES_A_STEP, 5 * num_seqs),
        "max_model_len": 640,
        "num_kv_blocks": 40 * num_seqs,
    }
    if load == "ngram":
        drafts = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
        options["speculative_config"] = drafts
    kind = nanoserve.RequestOutputKind.DELTA
    given: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 580}
    given["output_kind"] = kind if load == "stream" else nanoserve.RequestOutputKind.FINAL_ONLY
    if load == "guided":
        given["structured_outputs"] = {"regex": "[a-z ]{2000,}"}
    steps: list[tuple[float, float]] = []
    seen: list[Any] = []  # (header, times) of the steps that have ended
    with nanoserve.LLM("tiny-qwen3", **options) as llm:
        engine = llm.engine
        # Between the first two and the last one, versions differ in what they pass.
        engine.observers.append(lambda plan, batch, *more: seen.append((batch.header, more[-1])))
        for i in range(num_seqs):
            prompt = [3 + (7 * i + 13 * token) % 2000 for token in range(PROMPT_LENGTH)]
            engine.add_request(str(i), prompt, nanoserve.SamplingParams(**given))
        while len(steps) < num_steps:
            seen.clear()
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            is_decode = len(seen) == 1 and seen[0][0].max_query_len < PROMPT_LENGTH
            if is_decode and seen[0][0].num_rows == num_seqs:
                steps.append((seconds - seen[0][1].execute, seconds))
            elif steps:
                raise RuntimeError(f"{load}, {num_seqs}: after {len(steps)} steps, other rows")
    own, whole = zip(*steps[num_steps // 5 :], strict=True)  # the first ones set up
    return {"own": statistics.median(own), "whole": statistics.median(whole)}


def measure_tree(tree: Path, args: Namespace) -> dict[str, dict[str, float]]:
    """Return the results of a separate process, by load and number of sequences."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", str(tree)]
    for name in ("loads", "seqs", "steps"):
        value = getattr(args, name)
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        command += [f"--{name}", text]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_child(tree: Path, args: Namespace) -> None:
    import nanoserve

    found = Path(nanoserve.__file__).parent.parent
    if found != tree:
        sys.exit(f"nanoserve was imported from {found}, not from {tree}")
    measured = {}
    for load in args.loads:
        for num_seqs in args.seqs:
            measured[f"{load} {num_seqs}"] = measure(load, num_seqs, args.steps)
    print(json.dumps(measured))


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Cost of a step besides the model, old against new.")
    add = parser.add_argument
    add("trees", type=Path, nargs="*", help="two source trees, old and new")
    add("--loads", type=lambda text: text.split(","), default=["plain"], help=", ".join(LOADS))
    add("--seqs", type=lambda text: [int(n) for n in text.split(",")], default=[16, 64, 256, 1024])
    add("--steps", type=int, default=80, help="of each number of sequences (%(default)s)")
    add("--rounds", type=int, default=5, help="%(default)s")
    add("--whole", action="store_true", help="show whole steps, with the executor's time")
    add("--child", type=Path, metavar="TREE", help="measure in this process, and print JSON")
    args = parser.parse_args()
    if args.child is None and len(args.trees) != 2:
        parser.error("two trees are compared: the old one and the new one")
    if not set(args.loads) <= set(LOADS):
        parser.error(f"--loads {','.join(args.loads)}: known are {', '.join(LOADS)}")
    if args.steps > 100:
        parser.error(f"--steps {args.steps}: at most 100, which have room behind the prompts")
    return args


def main() -> None:
    args = parse_args()
    if args.child is not None:
        run_child(args.child, args)
        return
    old, new = (tree.resolve() for tree in args.trees)
    rounds: list[tuple[Any, Any]] = []
    for number in range(args.rounds):
        if number % 2 == 0:
            before = measure_tree(old, args)
            after = measure_tree(new, args)
        else:
            after = measure_tree(new, args)
            before = measure_tree(old, args)
        rounds.append((before, after))
    part = "whole" if args.whole else "own"
    print("| load | sequences | old us | new us | new / old | range |\n|---|---|---|---|---|---|")
    for load in args.loads:
        for num_seqs in args.seqs:
            key = f"{load} {num_seqs}"
            pairs = [(before[key][part], after[key][part]) for before, after in rounds]
            medians = [1e6 * statistics.median(side) for side in zip(*pairs, strict=True)]
            ratios = sorted(n / o for o, n in pairs)
            cells = f"{medians[0]:.0f} | {medians[1]:.0f} | {statistics.median(ratios):.3f}"
            print(f"| {load} | {num_seqs} | {cells} | {ratios[0]:.3f} - {ratios[-1]:.3f} |")


if __name__ == "__main__":
    main()
