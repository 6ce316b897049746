"""Make one measurement in a separate process, for each engine and run of `nanoserve bench`.

    python nanoserve/cli/bench/child.py JOB SPEC.json RESULT.json

JOB is "probe" (measure the machine), "weights" (write random weights) or an engine's name. This
file and the modules of other engines do not import nanoserve, so that they run in an environment
without it. For this reason it is started as a file, and imports the files in its folder without a
package name.
"""

import json
import resource
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import Engine, Tokens, engine_class, missing_packages
from latency import latencies, serve

Generate = Callable[[Tokens, list[int]], Tokens]
_DEFAULT_BATCH = 256  # max_num_seqs of nanoserve and of vLLM


def probe(spec: Namespace) -> dict[str, Any]:
    """Return the device that `--device` selects, its name, speeds and number of threads."""
    import hardware
    import torch

    hardware.set_threads(spec.threads)
    device = hardware.choose_device(spec.device)
    copying, reading = hardware.copy_bandwidth(device, 2**29), hardware.read_bandwidth(device)
    threads, dtype = torch.get_num_threads(), getattr(torch, spec.dtype)
    matmul_rate = integer_rate = hardware.matmul_rate(device, dtype)
    if device == "cpu":
        from product_rates import best_rates

        matmul_rate, integer_rate = best_rates(dtype, matmul_rate, threads)
    return {
        "device": device,
        "hardware": hardware.describe(device),
        "threads": threads,
        "bandwidth": max(copying, reading),
        "matmul_rate": matmul_rate,
        "integer_rate": integer_rate,
    }


def weights(spec: Namespace) -> dict[str, Any]:
    from engines.hugging_face import write_weights

    return write_weights(spec)


def measure(name: str, spec: Namespace) -> dict[str, Any]:
    """Load an engine, warm it up, and run the workload."""
    missing = missing_packages(name)
    if missing:
        return {"missing": f"not installed: no package {', '.join(missing)}"}
    chosen = engine_class(name)
    if spec.arrivals and not chosen.is_online:
        return {"missing": "offline only; it cannot accept requests while others run"}
    chosen.prepare(spec)
    started = time.perf_counter()
    engine = chosen(spec, spec.options)
    loaded = time.perf_counter()
    try:
        engine.generate([[1] * 8, [2] * 4], [4, 4])  # warm up
        run = run_online(engine, spec) if spec.arrivals else run_offline(engine, spec)
        if [len(tokens) for tokens in run["outputs"]] != spec.output_lens:
            raise RuntimeError("an output does not have the requested length")
        run |= {"load": loaded - started, "versions": engine.versions, "facts": engine.facts()}
        return run | {"step_times": engine.step_times(), **peak_memory(spec.device)}
    finally:
        engine.close()


def run_offline(engine: Engine, spec: Namespace) -> dict[str, Any]:
    generate, run = engine.generate, {}
    if spec.batching == "static":
        generate = in_static_batches(generate, spec.max_num_seqs or _DEFAULT_BATCH)
    if len(spec.prompts) == 1:  # a single stream: its first token is prefill
        turned = [spec.prompts[0][1:] + spec.prompts[0][:1]]  # not in any prefix cache
        start = time.perf_counter()
        generate(turned, [1])
        run["first_token"] = time.perf_counter() - start
    engine.begin()
    start = time.perf_counter()
    run["outputs"] = generate(spec.prompts, spec.output_lens)
    run["seconds"] = time.perf_counter() - start
    return run


def in_static_batches(generate: Generate, size: int) -> Generate:
    """Return `generate` with static batches of `size` requests, each started after the previous.

    The engine and the order of requests are the same, but no request joins a running batch.
    """

    def generate_batches(prompts: Tokens, output_lens: list[int]) -> Tokens:
        outputs: Tokens = []
        for start in range(0, len(prompts), size):
            batch = slice(start, start + size)
            outputs += generate(prompts[batch], output_lens[batch])
        return outputs

    return generate_batches


def run_online(engine: Engine, spec: Namespace) -> dict[str, Any]:
    engine.begin()
    outputs, token_times = serve(engine, spec.prompts, spec.output_lens, spec.arrivals)
    return {
        "outputs": outputs,
        "seconds": max(times[-1] for times in token_times),
        "latencies": latencies(spec.arrivals, token_times, spec.slo_ttft, spec.slo_itl),
    }


def peak_memory(device: str) -> dict[str, float]:
    """Return the peak memory in MiB of this process and its descendants.

    "gpu_mib" is what torch reserved on a GPU in this process.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mib = own / (2**20 if sys.platform == "darwin" else 2**10)  # bytes or KiB
    mib += sum(map(_peak_mib, _descendants("self")))
    torch = sys.modules.get("torch")
    gpu_mib = torch.cuda.max_memory_reserved() / 2**20 if device == "cuda" and torch else 0
    return {"mib": mib} | ({"gpu_mib": gpu_mib} if gpu_mib else {})


def _descendants(process: str) -> list[str]:
    """Return the ids of all descendants of a process, where /proc has them (Linux)."""
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        for child in _read(file).split():
            found += [child, *_descendants(child)]
    return found


def _peak_mib(process: str) -> float:
    lines = _read(Path(f"/proc/{process}/status")).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def _read(file: Path) -> str:
    """Return the text of a file of /proc, or "" if the process has just ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def main() -> None:
    job, spec_file, result_file = sys.argv[1:]
    spec = Namespace(**json.loads(Path(spec_file).read_text()))
    jobs = {"probe": probe, "weights": weights}
    result = jobs[job](spec) if job in jobs else measure(job, spec)
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
