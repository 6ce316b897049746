"""Measure how busy the stages of a pipeline are, simulated and real.

    python benchmarks/pipeline.py [--shape qwen3-0.6b-8l] [--simulated-only]

Stages and time are simulated; the scheduler is the real one. A step takes each stage 1 / stages of
`2 ms + 0.05 ms x tokens`, and the scheduler side 0.2 ms. The last column is the result if a step
takes all running sequences and the whole budget, which leaves nothing for other steps.

Real stages share the processor: two of one thread each are compared with one process of two threads
and with two ranks of tensor parallelism. Best of three runs each, in turns; then a run with a
trace, for the bubbles.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from overlap import _model_config

from nanoserve import LLM, SamplingParams
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.features.parallel.pipeline_schedule import PipelineSchedule
from nanoserve.features.trace.phases import describe_stages
from nanoserve.features.trace.reader import read_trace

_MAX_MODEL_LEN = 1024
_FIXED, _PER_TOKEN = 2e-3, 5e-5  # seconds of a step in all stages together
_SCHEDULER = 2e-4  # seconds for a step's plan and its results


class SimulatedStages:
    """Stages in simulated time: only the times at which each has a step to compute matter.

    The last one shares its process with the scheduler, as in
    `nanoserve.features.parallel.pipeline`: it computes a step when that is collected, and nothing
    while the scheduler plans.
    """

    def __init__(self, config: EngineConfig) -> None:
        blocks = -(-_MAX_MODEL_LEN // config.block_size)
        self.max_model_len, self.num_kv_blocks = _MAX_MODEL_LEN, config.max_num_seqs * blocks
        layout = BatchLayout(config.max_num_batched_tokens, config.max_num_seqs, blocks)
        self._num_stages = config.pipeline_parallel_size
        self._batches = [
            Batch(layout, np.zeros(layout.num_bytes, np.uint8)) for _ in range(self._num_stages + 1)
        ]
        self._num_batches = 0
        self.now = 0.0
        self.busy = [0.0] * self._num_stages
        self._free_at = [0.0] * (self._num_stages - 1)

    def next_batch(self) -> Batch:
        self.now += _SCHEDULER
        self._num_batches += 1
        return self._batches[self._num_batches % len(self._batches)]

    def forward(self, batch: Batch, inputs: ForwardInputs) -> tuple[int, float, float]:
        seconds = (_FIXED + _PER_TOKEN * batch.header.num_tokens) / self._num_stages
        ready = self.now
        for stage, free_at in enumerate(self._free_at):
            self._free_at[stage] = ready = max(ready, free_at) + seconds
            self.busy[stage] += seconds
        return batch.header.num_sampled, ready, seconds

    def sample(self, handle: tuple[int, float, float], inputs: SampleInputs) -> None:
        """Collect the step, which runs its last stage."""

    def collect(self, handle: tuple[int, float, float]) -> StepResult:
        num_sampled, ready, seconds = handle
        self.now = max(self.now, ready) + seconds
        self.busy[-1] += seconds
        return StepResult([[7] for _ in range(num_sampled)])

    def cancel(self, handles: list[tuple[int, float, float]]) -> None:
        """Do nothing: launched steps end by themselves."""

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


class TakesAll(PipelineSchedule):
    """Let a step take all sequences, as with a single device."""

    def token_budget(self, num_tokens: int) -> int:
        return num_tokens

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return 0 if seq.num_pending else num_tokens


def bubble(num_stages: int, num_seqs: int, is_shared: bool) -> float:
    """Return the share of time in which a stage is idle, over all stages."""
    config = EngineConfig(
        "none",
        max_num_seqs=num_seqs,
        max_num_batched_tokens=2048,
        pipeline_parallel_size=num_stages,
    ).for_device("cpu")
    executor = SimulatedStages(config)
    engine = GuardedEngine(config, _model_config(), executor, None)
    engine.add_extension(PipelineSchedule(engine) if is_shared else TakesAll(engine))
    for number in range(2 * num_seqs):
        params = SamplingParams(max_tokens=20 + number * 7 % 60)
        engine.add_request(str(number), [number % 50 + 1] * (20 + number * 37 % 200), params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    return 1 - sum(executor.busy) / num_stages / executor.now


def simulated() -> None:
    print("| stages | sequences | bubble | bubble if a step takes all |\n|---|---|---|---|")
    for num_stages in (2, 3, 4, 8):
        for num_seqs in (16, 64):
            ours, naive = (bubble(num_stages, num_seqs, shared) for shared in (True, False))
            print(f"| {num_stages} | {num_seqs} | {ours:.1%} | {naive:.1%} |", flush=True)


def run(llm: LLM) -> float:
    """Return output tokens a second."""
    prompts = [[5 + n % 90, 7, 8, n % 50] * (4 + n % 13) for n in range(64)]
    params = [
        SamplingParams(temperature=0, max_tokens=16 + 5 * n % 48, ignore_eos=True)
        for n in range(64)
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def real(shape: str) -> None:
    ways = {
        "one process, two threads": {},
        "one process, one thread": {"num_threads": 1},
        "two stages": {"pipeline_parallel_size": 2},
        "two ranks": {"tensor_parallel_size": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        common: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": 32,
            "max_model_len": 512,
            "enable_prefix_caching": False,
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(3):
            for name, options in ways.items():
                with LLM(folder, **common, **options) as llm:
                    run(llm)
                    rates[name].append(run(llm))
        print(f"\n{shape}, float32, 64 requests, 32 at once\n\n| | tok/s |\n|---|---|")
        for name, found in rates.items():
            print(f"| {name} | {max(found):.0f} ({', '.join(f'{r:.0f}' for r in found)}) |")
        for num_stages in (2, 3):
            trace = Path(folder) / f"{num_stages}.jsonl"
            with LLM(folder, **common, pipeline_parallel_size=num_stages, trace=trace) as llm:
                run(llm)
            print(f"\n{num_stages} stages{describe_stages(read_trace(trace))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b-8l")
    parser.add_argument("--simulated-only", action="store_true")
    args = parser.parse_args()
    simulated()
    if not args.simulated_only:
        real(args.shape)


if __name__ == "__main__":
    main()
