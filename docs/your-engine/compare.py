"""Run the same requests on your engine and on nanoserve; compare tokens, steps, time and length.

    python docs/your-engine/compare.py

`--solution` uses the solution in place of your engine, `--requests` and `--seed` make other
requests. The exit status is 0 if all greedy outputs and all steps are equal.
"""

import os

# The model is tiny: more than one thread only makes it slower. Set before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# A pool that is too small for all requests, so that some are preempted; prompts of several chunks.
CONFIG = {"num_blocks": 36, "block_size": 4, "max_num_seqs": 6, "budget": 24, "threshold": 16}
QUESTIONS = ["What is a KV cache?", "What is preemption?", "What is a block table?", "23 + 45 ="]
CHECKPOINT = Path(find_spec("nanoserve").origin).parent / "checkpoint" / "tiny_qwen3" / "model"
ROOT = Path(__file__).parents[2]
_A = 67  # the token "a"


class Request(NamedTuple):
    prompt: str | list[int]
    arrival: int  # the step before which it is added
    max_tokens: int
    sampling: dict[str, Any]


class Step(NamedTuple):
    """Request -> (tokens computed before, tokens of this step); and the preempted requests."""

    rows: dict[int, tuple[int, int]]
    preempted: list[int]


class Run(NamedTuple):
    tokens: list[list[int]]  # the output of each request
    reasons: list[str]
    texts: list[str]
    steps: list[Step]
    seconds: float


def workload(num_requests: int = 50, seed: int = 0, sampled: bool = False) -> list[Request]:
    """Questions, and numbers after one of three common prefixes, some with a stop string."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(300, 2000) for _ in range(n)] for n in (9, 16, 26)]
    requests, arrival = [], 0
    for _ in range(num_requests):
        arrival += rng.choice([0, 0, 1, 2, 5])
        prompt: str | list[int] = rng.choice(beginnings) + [
            rng.randrange(300, 2000) for _ in range(rng.randint(1, 14))
        ]
        prompt.append(_A)  # so that the prompt ends with a complete character
        if rng.random() < 0.4:
            question = rng.choice(QUESTIONS)
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        sampling: dict[str, Any] = {"stop": (rng.choice(["token", " the ", "."]),)}
        if rng.random() < 0.7:
            sampling = {}
        if sampled:
            sampling |= {"temperature": rng.choice([0.7, 1.0]), "seed": rng.getrandbits(63)}
            sampling |= {"top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.9])}
        requests.append(Request(prompt, arrival, rng.randint(1, 40), sampling))
    return requests


def by_yours(file: ModuleType, requests: list[Request]) -> Run:
    """`file` is the module `your_engine` or `solution`."""
    return by_engine(file.Engine(CHECKPOINT, file.Config(**CONFIG)), requests)


def by_engine(engine: Any, requests: list[Request]) -> Run:
    """`engine` is one of yours, as `your_engine` or `your_features` makes it."""
    number: dict[Any, int] = {}
    sequences, steps = [], []
    schedule = engine.scheduler.schedule

    def recorded() -> Any:
        plan = schedule()
        rows = {number[row.seq]: (row.start, row.n) for row in plan.rows}
        steps.append(Step(rows, [number[seq] for seq in plan.preempted]))
        return plan

    engine.scheduler.schedule = recorded
    texts = [""] * len(requests)
    start, todo = time.perf_counter(), list(requests)
    while todo or not all(seq.finish_reason for seq in sequences):
        if len(steps) > 100 * len(requests):
            raise AssertionError(f"{len(steps)} steps, and {requests} have not all ended")
        while todo and todo[0].arrival == len(steps):
            prompt, _, max_tokens, sampling = todo.pop(0)
            seq = engine.add(prompt, max_tokens, **sampling)
            number[seq] = len(sequences)
            sequences.append(seq)
        for seq, piece in engine.step().items():
            texts[number[seq]] += piece
    seconds = time.perf_counter() - start
    tokens = [seq.token_ids[seq.num_prompt :] for seq in sequences]
    return Run(tokens, [seq.finish_reason for seq in sequences], texts, steps, seconds)


def by_nanoserve(requests: list[Request]) -> Run:
    from nanoserve import LLM, SamplingParams

    options = {"num_kv_blocks": CONFIG["num_blocks"], "block_size": CONFIG["block_size"]}
    options |= {"max_num_batched_tokens": CONFIG["budget"], "max_num_seqs": CONFIG["max_num_seqs"]}
    options |= {"long_prefill_token_threshold": CONFIG["threshold"], "num_threads": 1}
    # All that the pool holds, as in your engine; the model supports more.
    options |= {"max_model_len": CONFIG["num_blocks"] * CONFIG["block_size"]}
    options |= {"dtype": "float32", "attention_backend": "torch", "device": "cpu"}
    outputs: dict[str, Any] = {}
    steps: list[Step] = []

    def observe(plan: Any, batch: Any, result: Any, times: Any) -> None:
        rows = {int(row.seq.request_id): (row.start, row.n) for row in plan.rows}
        steps[-1] = Step(rows, [int(seq.request_id) for seq in plan.preempted])

    with LLM("tiny-qwen3", **options) as llm:
        llm.engine.observers.append(observe)
        start, todo, num_added = time.perf_counter(), list(requests), 0
        while todo or llm.engine.has_unfinished_requests():
            while todo and todo[0].arrival == len(steps):
                prompt, _, max_tokens, sampling = todo.pop(0)
                sampling = sampling | {"stop": list(sampling.get("stop", ()))}
                params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens} | sampling)
                llm.engine.add_request(str(num_added), prompt, params)
                num_added += 1
            steps.append(Step({}, []))  # `observe` replaces it, if anything runs
            outputs |= {output.request_id: output for output in llm.engine.step()}
        seconds = time.perf_counter() - start
    ends = [outputs[str(i)].outputs[0] for i in range(len(requests))]
    tokens = [list(end.token_ids) for end in ends]
    return Run(
        tokens, [end.finish_reason for end in ends], [end.text for end in ends], steps, seconds
    )


def first_difference(yours: list[Any], theirs: list[Any]) -> int | None:
    """The first index at which two lists differ."""
    for i in range(max(len(yours), len(theirs))):
        if yours[i : i + 1] != theirs[i : i + 1]:
            return i
    return None


def report(what: str, yours: list[Any], theirs: list[Any]) -> bool:
    """Print how many are equal, and the first that is not."""
    num_equal = sum(a == b for a, b in zip(yours, theirs, strict=False))
    print(f"{what}: {num_equal} of {len(theirs)} equal")
    i = first_difference(yours, theirs)
    if i is not None:
        print(f"  the first that is not, number {i}:")
        print(f"    yours     {yours[i : i + 1]}\n    nanoserve {theirs[i : i + 1]}")
    return i is None


def lengths(file: ModuleType) -> str:
    sys.path.append(str(ROOT / "benchmarks"))
    from reading import lines_of_code, stops

    path = [ROOT / stop.file for stop in stops()]
    everything = (ROOT / "nanoserve").rglob("*.py")
    yours = lines_of_code(Path(file.__file__))
    some, total = sum(map(lines_of_code, path)), sum(map(lines_of_code, everything))
    return f"{yours} of yours, {some:,} of nanoserve's reading path, {total:,} of all of it"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--solution", action="store_true", help="use the solution, not your engine")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    file = import_module("solution" if args.solution else "your_engine")
    requests = workload(args.requests, args.seed)
    for warm_up in (by_yours(file, requests[:2]), by_nanoserve(requests[:2])):
        assert warm_up.steps
    yours, theirs = by_yours(file, requests), by_nanoserve(requests)
    preempted = sum(len(step.preempted) for step in theirs.steps)
    print(f"{len(requests)} requests, {len(theirs.steps)} steps, {preempted} preemptions")
    same = [
        report("greedy tokens", yours.tokens, theirs.tokens),
        report("finish reasons", yours.reasons, theirs.reasons),
        report("texts", yours.texts, theirs.texts),
        report("steps", yours.steps, theirs.steps),
    ]
    drawn = workload(args.requests, args.seed, sampled=True)
    # Equal only if your noise is that of nanoserve, which is optional.
    report("sampled tokens (optional)", by_yours(file, drawn).tokens, by_nanoserve(drawn).tokens)
    print(f"time: {yours.seconds:.2f} s and {theirs.seconds:.2f} s, ratio ", end="")
    print(f"{yours.seconds / theirs.seconds:.1f}")
    print(f"lines of code: {lengths(file)}")
    return 0 if all(same) else 1


if __name__ == "__main__":
    raise SystemExit(main())
