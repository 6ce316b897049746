"""Measure the parts of a step (schedule, pack, model, sample, update) by sequences and context.

    python benchmarks/steps.py --shape qwen3-0.6b                        on its own, as Markdown
    python benchmarks/steps.py --shape tiny --seqs 1,8,64 --plot steps.png

Every point is a pure decode step with a number of running sequences of one context length. Prompts
are scheduled and get blocks, but are not computed: while a step contains a prompt, the model is
left out and its tokens are made up, because with random weights the content of the KV cache does
not affect times. Points whose KV does not fit into `--kv-gib` are listed and left out.

The engine's own share is everything except the model (the transformer and its LM head).
"""

import json
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanoserve import LLM, RequestOutputKind, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.hardware import choose_device, describe, set_threads
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.cli.bench.step_timer import PARTS, StepParts, StepTimer
from nanoserve.config import DTYPES, EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import (
    Executor,
    ForwardInputs,
    SampleInputs,
    SlotUpdate,
    StepResult,
)


class PromptSkipper:
    """Wrapper of an executor that does not run steps with prompts: their tokens are 7."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._slot_updates: list[SlotUpdate] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Any:
        self._slot_updates += inputs.slot_updates
        header = batch.header
        if header.max_query_len > 1:
            return StepResult([[7]] * header.num_sampled)
        updates, self._slot_updates = self._slot_updates, []
        return self._executor.forward(batch, replace(inputs, slot_updates=updates))

    def sample(self, handle: Any, inputs: SampleInputs) -> None:
        if not isinstance(handle, StepResult):
            self._executor.sample(handle, inputs)

    def collect(self, handle: Any) -> StepResult:
        return handle if isinstance(handle, StepResult) else self._executor.collect(handle)


def load(args: Namespace, folder: Path) -> tuple[LLM, StepTimer]:
    """Return an engine, with random weights unless a checkpoint is given, that skips prompts."""
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    model = bundled_checkpoint(args.model or "") or Path(args.model or folder)
    # Steps in flight at the same time could not be distinguished.
    options: dict[str, Any] = {"max_num_seqs": max(args.seqs), "async_scheduling": False}
    config = EngineConfig("none", **options).for_device(choose_device(args.device))
    longest = longest_sequence(config, max(args.seqs), max(args.contexts), args.steps)
    limit = ModelConfig.from_checkpoint(model).max_position_embeddings
    options["max_model_len"] = min(longest, limit)
    options |= {"dtype": args.dtype, "device": args.device, "skip_tokenizer_init": True}
    options["kv_cache_dtype"] = args.kv_cache_dtype
    options["load_format"] = "auto" if args.model else "dummy"
    if args.kv_gib:
        options["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
    if args.attention_backend:
        options["attention_backend"] = args.attention_backend
    llm = LLM(model, **options)
    # Memory that was never written is a single page behind the scenes, and fast to read.
    for kv_cache in llm.engine.executor.kv_caches:
        kv_cache.fill_(0.01)
    timer = StepTimer(llm.engine)
    llm.engine.replace_executor(PromptSkipper(llm.engine.executor))
    return llm, timer


def longest_sequence(config: EngineConfig, num_seqs: int, context: int, num_steps: int) -> int:
    """Return prompt lengths; contexts grow while prompts are scheduled and steps measured."""
    return context + num_seqs * context // config.max_num_batched_tokens + num_steps + 8


def fits(llm: LLM, num_seqs: int, context: int, num_steps: int) -> bool:
    """Return True if no sequence of this point is rejected or preempted."""
    executor, config = llm.engine.executor, llm.engine.config
    length = longest_sequence(config, num_seqs, context, num_steps)
    blocks = num_seqs * -(-length // config.block_size)
    return length <= executor.max_model_len and blocks <= executor.num_kv_blocks


def measure(llm: LLM, timer: StepTimer, num_seqs: int, context: int, num_steps: int) -> StepParts:
    """Return medians by part over decode steps of `num_seqs` sequences around `context` tokens."""
    engine = llm.engine
    params = SamplingParams(
        max_tokens=None, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    timer.steps.clear()
    for i in range(num_seqs):
        prompt = [(i + token) % engine.model_config.vocab_size for token in range(context)]
        engine.add_request(f"{num_seqs}-{context}-{i}", prompt, params)
    while not (timer.steps and timer.steps[-1].is_decode and timer.steps[-1].num_rows == num_seqs):
        engine.step()
    for _ in range(num_steps + 1):  # and the first one sets up
        engine.step()
    for request_id in list(engine.output_processor.requests):
        engine.abort_request(request_id)
    return StepParts(*map(statistics.median, zip(*timer.steps[-num_steps:], strict=True)))


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Time per step, by part.")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b-8l", help="random weights (%(default)s)")
    add("--model", help="a checkpoint, instead of random weights")
    add("--seqs", type=numbers, default="1,4,16,64,256", help="%(default)s")
    add("--contexts", type=numbers, default="64,256,1024,4096", help="%(default)s")
    add("--steps", type=int, default=20, help="measured at each point (%(default)s)")
    add("--kv-gib", type=float, help="the KV pool; if not given, the engine chooses")
    add("--kv-cache-dtype", default="auto", help='"auto", "int8" or "fp8" (%(default)s)')
    add("--dtype", choices=DTYPES, default="bfloat16", help="%(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="%(default)s")
    add("--threads", type=int, help="if not given, torch chooses")
    add("--attention-backend", metavar="NAME", help="if not given, the engine chooses")
    add("--json", metavar="FILE", help="every point, in seconds")
    add("--plot", metavar="FILE.png", help="needs matplotlib (extra: bench)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    set_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        llm, timer = load(args, Path(folder))
    set_threads(args.threads)
    device = choose_device(args.device)
    print(f"{describe(device)}, torch {torch.__version__}, threads {torch.get_num_threads()}")
    print(
        f"{args.model or args.shape}, {args.dtype}, {llm.engine.executor.num_kv_blocks} KV blocks"
    )
    titles = ["sequences", "context", *(f"{part} us" for part in (*PARTS, "between", "total"))]
    print(f"\n| {' | '.join(titles)} | own share |\n{'|---' * (len(titles) + 1)}|")
    points, left_out = [], []
    measure(llm, timer, 1, min(args.contexts), args.steps)  # what is set up on first use
    for num_seqs in args.seqs:
        for context in args.contexts:
            if not fits(llm, num_seqs, context, args.steps):
                left_out.append(f"{num_seqs} x {context}")
                continue
            point = measure(llm, timer, num_seqs, context, args.steps)
            points.append(point)
            seconds = [*(getattr(point, part) for part in (*PARTS, "between")), point.total]
            cells = " | ".join(f"{1e6 * s:.0f}" for s in seconds)
            print(
                f"| {num_seqs} | {point.context:.0f} | {cells} | {point.own_share:.1%} |",
                flush=True,
            )
    if left_out:
        print(f"\nNot measured, they do not fit: {', '.join(left_out)} (sequences x context)")
    if args.json:
        Path(args.json).write_text(json.dumps([point._asdict() for point in points], indent=1))
    if args.plot:
        from nanoserve.cli.bench.plots import plot_steps

        plot_steps(
            [(f"{p.num_rows:.0f} x {p.context:.0f}", p._asdict()) for p in points], args.plot
        )


if __name__ == "__main__":
    main()
