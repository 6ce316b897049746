"""The stage `profile` of gpu_day.py: the launches of a step, and the idle time of the GPU.

Every kind of step is run with async scheduling, without and with sampling in graphs: first timed,
then under torch.profiler, which slows down the host but not the kernels. At 64 rows, one of them
may have a penalty or logprobs, which must not slow down the step of the others.
"""

import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from gpu_engine import open_engine
from gpu_job import Job, Measurements
from torch.profiler import ProfilerActivity

from nanoserve import RequestOutputKind, SamplingParams
from nanoserve.engine.guard import GuardedEngine

_CONTEXT = 800  # tokens of every sequence's prompt
_MIXED_ROWS = 64
_NEW_PROMPT = 1000  # tokens of the prompt of a mixed step
_TIMED, _PROFILED = 20, 5  # steps
_WAYS = {
    "one step ahead": {"async_scheduling": True},
    "mixed steps launched": {"async_scheduling": True, "capture_mixed_steps": False},
    "sampling in graphs": {"async_scheduling": True, "capture_sampling": True},
}
# Sampling parameters of one row of a step whose other rows are plain.
_ONE_ROW: dict[str, dict[str, Any]] = {
    "one penalty": {"repetition_penalty": 1.1},
    "one with logprobs": {"logprobs": 5},
}
_KINDS = {
    "attention": r"attention|merge_|flash",
    "sampling": r"best_of|choose|filter|argmax",
    "products": r"nvjet|gemm|cutlass|splitk|cublas",
    "copies": r"memcpy|memset|copy_kernel",
}


def profile(job: Job) -> Measurements:
    rows = (4, 1) if job.is_tiny else (256, 64, 8, 1)
    for way, options in _WAYS.items():
        with open_engine(job, max_model_len=4096, **options) as llm:
            for n in rows:
                yield f"{n} rows, {way}", partial(_profile, job, llm.engine, n, 0)
            for name, special in _ONE_ROW.items():
                n = 4 if job.is_tiny else _MIXED_ROWS
                yield f"{n} rows, {name}, {way}", partial(_profile, job, llm.engine, n, 0, special)
            new_prompt = 50 if job.is_tiny else _NEW_PROMPT
            n = 4 if job.is_tiny else _MIXED_ROWS
            yield f"mixed, {way}", partial(_profile, job, llm.engine, n, new_prompt)


def _profile(
    job: Job,
    engine: GuardedEngine,
    num_rows: int,
    new_prompt: int,
    special: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Profile decode steps of `n` rows; with `new_prompt`, each also has a prompt of that length.

    `special` are sampling parameters of one of the rows.
    """
    step = _start(job, engine, num_rows, new_prompt, special)
    result = _timed(job, step) | _profiled(job, engine, step)
    _abort_all(engine)
    if "busy us" in result:
        result["busy share"] = result["busy us"] / result["wall us"]
    return result


def step_time(job: Job, engine: GuardedEngine, num_rows: int) -> float:
    """Return the median microseconds of a decode step of `n` rows."""
    step = _start(job, engine, num_rows, 0, None)
    microseconds = _timed(job, step)["wall us"]
    _abort_all(engine)
    return microseconds


def _start(
    job: Job,
    engine: GuardedEngine,
    num_rows: int,
    new_prompt: int,
    special: dict[str, Any] | None,
) -> Callable[[], None]:
    """Return a function that runs one step in which all rows decode."""
    vocab_size, names = engine.model_config.vocab_size, count()

    def add(num_tokens: int) -> None:
        i = next(names)
        prompt = [(i * i + 3 * i + new_prompt + j) % vocab_size for j in range(num_tokens)]
        params = SamplingParams(
            max_tokens=None,
            temperature=0.6,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **(special or {} if i == num_rows - 1 else {}),
        )
        engine.add_request(f"profile-{i}", prompt, params)

    def step() -> None:
        if new_prompt:
            add(new_prompt)
        engine.step()

    for _ in range(num_rows):
        add(20 if job.is_tiny else _CONTEXT)
    _until_all_decode(engine, num_rows)
    return step


def _abort_all(engine: GuardedEngine) -> None:
    for request_id in list(engine.output_processor.requests):
        engine.abort_request(request_id)
    while engine.has_unfinished_requests():
        engine.step()


def _until_all_decode(engine: GuardedEngine, num_rows: int) -> None:
    seen: list[tuple[int, int]] = []

    def observe(plan: Any, batch: Any, result: Any, times: Any) -> None:
        seen.append((batch.header.num_rows, batch.header.max_query_len))

    engine.observers.append(observe)
    while not seen or seen[-1] != (num_rows, 1):
        engine.step()
    engine.observers.remove(observe)


def _timed(job: Job, step: Callable[[], None]) -> dict[str, Any]:
    times = []
    for _ in range(3 if job.is_tiny else _TIMED):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {"wall us": statistics.median(times) * 1e6}


def _profiled(job: Job, engine: GuardedEngine, step: Callable[[], None]) -> dict[str, Any]:
    """Return values per step; with async scheduling, the previous step is awaited first."""
    activities, kind = [ProfilerActivity.CPU], torch.autograd.DeviceType.CPU
    if job.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        kind = torch.autograd.DeviceType.CUDA
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_PROFILED):
            step()
        if job.device == "cuda":
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == kind]
    if not events:
        return {"kernels": []}
    events.sort(key=lambda event: event.time_range.start)
    first = last = events[0].time_range.start
    gaps: list[float] = [0.0]
    kernels: dict[str, list[float]] = {}  # by name, microseconds
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        gaps.append(start - last)
        # A kernel may start before its predecessor ends, and wait: that is not counted as its time.
        alone = max(0.0, end - max(start, last))
        kernels.setdefault(event.name[:100], []).append(alone)
        last = max(last, end)
    busy = sum(map(sum, kernels.values()))
    return {
        "busy us": busy / _PROFILED,
        "profiled wall us": (last - first) / _PROFILED,
        "largest gap us": max(gaps),
        "launches": len(events) / _PROFILED,
        "launches per layer": len(events) / _PROFILED / engine.model_config.num_hidden_layers,
        "shares": {name: us / busy for name, us in _by_kind(kernels).items()},
        "kernels": [
            {"name": name, "count": len(us) / _PROFILED, "us": sum(us) / _PROFILED}
            for name, us in sorted(kernels.items(), key=lambda item: -sum(item[1]))
        ][:40],
    }


def _by_kind(kernels: dict[str, list[float]]) -> dict[str, float]:
    sums = dict.fromkeys([*_KINDS, "other"], 0.0)
    for name, us in kernels.items():
        matches = (kind for kind, pattern in _KINDS.items() if re.search(pattern, name, re.I))
        sums[next(matches, "other")] += sum(us)
    return sums
