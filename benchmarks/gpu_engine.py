"""Stages of gpu_day.py that run engines in this process: `smoke`, `bench`, `tp` and others.

Weights are random and created on the device, which takes a second and does not affect times.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from attention import SIZES, measure_peaks
from gpu_job import Job, Measurements

import nanoserve.worker.build_executor
from nanoserve import LLM, SamplingParams
from nanoserve.cli.bench.roofline import limit, planned_steps
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.cli.bench.workloads import WORKLOADS, draw_workload, length_range
from nanoserve.config import EngineConfig
from nanoserve.models.layers.context import ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel

_QUESTIONS = [
    "What is a KV cache?",
    "What is a block table?",
    "What is chunked prefill?",
    "What is continuous batching?",
    "What is a prefix cache?",
    "12 + 30 =",
    "What is preemption?",
    "Who are you?",
]
Variants = dict[str, dict[str, Any]]
_OTHER_KERNELS = dict.fromkeys(("dependent_launch", "merge_in_attention", "split_products"), True)
# The default comes first and last, so that differences can be compared with its variation.
_VARIANTS: Variants = {
    "default": {},
    "dependent launch": {"kernel_config": {"dependent_launch": True}},
    "merged in attention": {"kernel_config": {"merge_in_attention": True}},
    "split products": {"kernel_config": {"split_products": True}},
    "all three": {"kernel_config": _OTHER_KERNELS},
    "all three, sampling in graphs": {"kernel_config": _OTHER_KERNELS, "capture_sampling": True},
    "default again": {},
}
_OTHER_VARIANTS: Variants = {
    "default": {},
    "mixed steps launched": {"capture_mixed_steps": False},
    "16384 tokens a step": {"max_num_batched_tokens": 16384},
    "sampling in graphs": {"capture_sampling": True},
    "no step ahead": {"async_scheduling": False},
    "2048 tokens a step": {"max_num_batched_tokens": 2048},
    "no graphs": {"enforce_eager": True},
}
_KV_VARIANTS: Variants = {
    "default": {},
    "int8 KV cache": {"kv_cache_dtype": "int8"},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
}
_SCHEMES: Variants = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "quantization_group_size": 128},
    "fp8": {"quantization": "fp8"},
    "fp8, fused": {
        "quantization": "fp8",
        "kernel_config": {"fused_quantization": True, "dependent_launch": True},
    },
}
_STEP_ROWS = (64, 16, 1)


# ---------------------------------------------------------------- smoke


def smoke(job: Job) -> Measurements:
    """Check that every mode gives the same answers as a CPU, in float32."""
    ways: dict[str, dict[str, Any]] = {
        "graphs": {},
        "eager": {"enforce_eager": True},
        "blocks of 256": {"block_size": 256},
        "sampling in graphs": {"capture_sampling": True},
        "mixed steps launched": {"capture_mixed_steps": False},
        "other kernels": {"kernel_config": _OTHER_KERNELS},
    }
    expected: list[list[int]] = []
    yield "cpu", lambda: expected.extend(_answers(job, device="cpu")) or len(expected)
    for name, options in ways.items():
        yield name, partial(_same_answers, job, expected, options)


def _answers(job: Job, **options: Any) -> list[list[int]]:
    requested = [[{"role": "user", "content": question}] for question in _QUESTIONS]
    greedy = SamplingParams(temperature=0, max_tokens=8 if job.is_tiny else 60)
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=200, **options) as llm:
        answers = llm.chat(requested, greedy, use_tqdm=False)
    return [answer.outputs[0].token_ids for answer in answers]


def _same_answers(job: Job, expected: list[list[int]], options: dict[str, Any]) -> str:
    answers = _answers(job, device=job.device, **options)
    same = sum(a == b for a, b in zip(answers, expected, strict=True))
    if same < len(_QUESTIONS):
        raise AssertionError(f"{same} of {len(_QUESTIONS)} answers equal the CPU's")
    return f"{same} of {len(_QUESTIONS)} answers equal the CPU's"


# ---------------------------------------------------------------- bench


def open_engine(job: Job, shape: str | None = None, **options: Any) -> LLM:
    """Return a model of Qwen3-0.6B's or the given shape, or a tiny one, with random weights."""
    named = shape_name(job) if job.is_tiny or shape is None else shape
    (job.scratch / "config.json").write_text(json.dumps(SHAPES[named]))
    common = {"device": job.device, "load_format": "dummy", "skip_tokenizer_init": True}
    common |= {"num_kv_blocks": 500} if job.is_tiny else {}
    dtype = "float32" if job.is_tiny else "bfloat16"
    return LLM(job.scratch, dtype=dtype, **common | options)


def shape_name(job: Job) -> str:
    return "tiny" if job.is_tiny else "qwen3-0.6b"


def bench(job: Job) -> Measurements:
    """Time nano-vllm's workload; non-default options have one run, while time is left.

    The options are those that have not been measured yet; `options` has the others.
    """
    yield from _runs(job, _VARIANTS)


def options(job: Job) -> Measurements:
    """Time the same with options that are known to be slower, or as fast."""
    yield from _runs(job, _OTHER_VARIANTS)


def fewer_bits(job: Job) -> Measurements:
    """Time the same with an 8-bit KV cache, and decode steps of an 8B model with quantized weights.

    0.6B is too small for quantized weights: its steps are limited by launches, not by bytes.
    """
    yield from _runs(job, {name: v for name, v in _KV_VARIANTS.items() if _is_possible(job, v)})
    for name, scheme in _SCHEMES.items():
        if _is_possible(job, scheme):
            yield f"8B, {name}", partial(_decode_steps, job, scheme)


def _is_possible(job: Job, options: dict[str, Any]) -> bool:
    """Return True if the GPU has e4m3 products: compute capability 8.9 or higher."""
    has_fp8 = job.device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    return has_fp8 or "fp8" not in options.values()


def _decode_steps(job: Job, scheme: dict[str, Any]) -> dict[str, Any]:
    """Return microseconds of a step by number of rows, and the bytes of the weights."""
    from gpu_profile import step_time

    start, before = time.perf_counter(), _allocated(job)
    pool = {} if job.is_tiny else {"num_kv_blocks": 5000}
    with open_engine(job, "qwen3-8b", max_num_seqs=64, **pool, **scheme) as llm:
        result: dict[str, Any] = {"start s": time.perf_counter() - start}
        result["GB"] = (_allocated(job) - before) / 1e9
        rows = (4, 1) if job.is_tiny else _STEP_ROWS
        return result | {f"{n} rows us": step_time(job, llm.engine, n) for n in rows}


def _allocated(job: Job) -> int:
    return 0 if job.device == "cpu" else torch.cuda.memory_allocated()


def _runs(job: Job, variants: Variants) -> Measurements:
    limits = _Limits(job)
    longest = 0.0
    for name, chosen in variants.items():
        if job.left < 1.3 * longest:
            yield name, lambda left=job.left: {"left out": f"{left:.0f} s are left"}
            continue
        start = time.monotonic()
        yield name, partial(_run_variant, job, limits, chosen, is_default=not chosen)
        longest = max(longest, time.monotonic() - start)


class _Limits:
    """The workload, and its minimum time on this device."""

    def __init__(self, job: Job) -> None:
        workload = WORKLOADS["nano-vllm"]
        requested: tuple[Any, ...] = (4, (5, 20), (4, 8))
        if not job.is_tiny:
            lengths = (length_range(workload[name]) for name in ("input_len", "output_len"))
            requested = (workload["num_seqs"], *lengths)
        vocab_size = SHAPES[shape_name(job)]["vocab_size"]
        self.prompts, self.output_lens = draw_workload(*requested, vocab_size)
        self.params = [
            SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True) for n in self.output_lens
        ]
        self._peaks = measure_peaks(SIZES[job.device], job.device)
        self._seconds: dict[int, float] = {}

    def seconds(self, llm: LLM) -> float:
        """Return the limit at the rate of a large copy, for steps with this engine's options.

        Weights count as 16 bits, also where they have fewer: the share can then exceed 1.
        """
        config: EngineConfig = llm.engine.config
        budget = config.max_num_batched_tokens
        if budget not in self._seconds:
            steps = planned_steps(config, self.prompts, self.output_lens)
            rates = (self._peaks.bandwidth, self._peaks.matmul)
            self._seconds[budget] = limit(llm.engine.model_config, steps, *rates).seconds
        return self._seconds[budget]

    def prompts_of_run(self, number: int) -> list[list[int]]:
        """Return new prompts of the same lengths, which are in no prefix cache."""
        return [[(token + number) % 2000 for token in prompt] for prompt in self.prompts]


def _run_variant(
    job: Job, limits: _Limits, options: dict[str, Any], is_default: bool
) -> dict[str, Any]:
    start = time.perf_counter()
    with open_engine(job, **options) as llm:
        started = time.perf_counter() - start
        warm_up = SamplingParams(max_tokens=4, temperature=0.6, ignore_eos=True)
        llm.generate(limits.prompts[:4], warm_up, use_tqdm=False)
        idle = _IdleTime(job, llm)
        num_runs = 2 if is_default else 1
        seconds = [_timed(llm, limits, number) for number in range(1, 1 + num_runs)]
        num_tokens, best = sum(limits.output_lens), min(seconds)
        result = {
            "seconds": seconds,
            "tok/s": num_tokens / best,
            "of roofline": limits.seconds(llm) / best,
            "start s": started,
            "KV blocks": llm.engine.executor.num_kv_blocks,
            "preemptions": llm.stats.num_preemptions,
            "steps": llm.stats.num_steps,
            "idle s": idle.seconds() / len(seconds),
        }
        if is_default:
            result["single stream tok/s"] = _single_stream(job, llm)
    return result


class _IdleTime:
    """Measure the time for which the GPU is idle between two steps.

    An event lies on the stream before what a step launches and one behind it. While a step is
    launched kernel by kernel the GPU may also wait for the host; that is not in this number.
    """

    def __init__(self, job: Job, llm: LLM) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if job.device != "cuda":
            return
        executor: Any = llm.engine.executor
        forward, sample = executor.forward, executor.sample

        def timed_forward(*args: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events.append((begin, end))
            begin.record()
            return forward(*args)

        def timed_sample(*args: Any) -> None:
            sample(*args)
            self._events[-1][1].record()

        executor.forward, executor.sample = timed_forward, timed_sample

    def seconds(self) -> float:
        """Return the total of all steps since this was created; waits for the GPU."""
        if self._events:
            torch.cuda.synchronize()
        gaps = [
            last[1].elapsed_time(next_[0])
            for last, next_ in zip(self._events, self._events[1:], strict=False)
        ]
        # Between two runs there is one long gap without requests.
        return sum(gap for gap in gaps if gap < 100) / 1e3


def _timed(llm: LLM, limits: _Limits, number: int) -> float:
    prompts = limits.prompts_of_run(number)
    start = time.perf_counter()
    outputs = llm.generate(prompts, limits.params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lens = [len(output.outputs[0].token_ids) for output in outputs]
    if lens != limits.output_lens:
        raise AssertionError("an output does not have the requested length")
    return seconds


def _single_stream(job: Job, llm: LLM) -> float:
    """Time 128 tokens in and 256 out, without the time of the first token."""
    num_in, num_out = (8, 4) if job.is_tiny else (128, 256)

    def generate(first: int, n: int) -> float:
        params = SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([[first + i for i in range(num_in)]], params, use_tqdm=False)
        return time.perf_counter() - start

    to_first = statistics.median(generate(10 * i, 1) for i in range(3))
    return (num_out - 1) / (generate(100, num_out) - to_first)


# ---------------------------------------------------------------- tp, on one device


def tp(job: Job) -> Measurements:
    """Run the tests of tensor parallelism with two GPUs; with one, a group of one rank."""
    if torch.cuda.device_count() >= 2 and not job.is_tiny:
        from gpu_programs import tensor_parallel_tests

        yield from tensor_parallel_tests(job)
        return
    from nanoserve.features.parallel.process_group import join_group, serve_store

    device = torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")
    group = join_group(0, 1, serve_store(1), device, timeout=60)
    ranks = TensorParallel(0, 1, group)
    x = torch.ones(256, 1024, device=device, dtype=torch.bfloat16)
    yield "all-reduce", lambda: _is_the_same(ranks.all_reduce(x.clone()), x)
    yield "gather", lambda: _is_the_same(ranks.gather(x), x)
    yield "smallest", lambda: group.smallest(7)
    if job.device == "cuda":
        yield "all-reduce in a graph us", lambda: _captured(lambda: ranks.all_reduce(x), x)
        yield "gather in a graph us", lambda: _captured(lambda: ranks.gather(x), x)
    yield "an engine over it", lambda: _engine_over(job, ranks)
    yield "abort", lambda: group.abort() or group.close() or "returns"


def _is_the_same(found: torch.Tensor, expected: torch.Tensor) -> str:
    if not torch.equal(found, expected):
        raise AssertionError("the all-reduce of one rank changed its input")
    return "right"


def _captured(collective: Callable[[], torch.Tensor], x: torch.Tensor) -> float:
    """Return microseconds of one of many in a CUDA graph, captured like the engine's."""
    from nanoserve.worker.cuda import Cuda

    cuda, repeats = Cuda(x.device), 50
    pool = cuda.graph_pool()
    replay, found = cuda.capture(lambda: [collective() for _ in range(repeats)][-1], pool)
    replay()
    cuda.synchronize()
    start = time.perf_counter()
    replay()
    cuda.synchronize()
    seconds = time.perf_counter() - start
    _is_the_same(found, x)
    return seconds / repeats * 1e6


def _engine_over(job: Job, ranks: TensorParallel) -> str:
    """Check layers that reduce and gather over the group, in graphs if possible."""
    alone = _answers(job, device=job.device)
    parallel = ParallelContext(ranks)
    with mock.patch.object(nanoserve.worker.build_executor, "ParallelContext", lambda: parallel):
        together = _answers(job, device=job.device)
    if together != alone:
        raise AssertionError("the answers differ from those without the group")
    return "same answers"
