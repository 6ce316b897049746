"""Stages of gpu_day.py that run other programs: `tests`, `drafts`, `peers` and `sanitize`."""

import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

from gpu_job import ROOT, Job, Measurements, Program, python

_GPU_TESTS = "tests/gpu/test_gpu.py"
# Tests that run whole engines, and measure memory, need a process for themselves; all others
# mostly wait for the compiler, which can run many times at once.
_ENGINES = "((tokens and not choose) or engine or memory or launched or generates)"
_COMPILERS = 12
# Plugins of other packages that fail in several processes.
_NO_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:benchmark")
_PEER = ("nanoserve", "transformers-cb")
# Engines of gpu_peers.py, in the order in which they run, and their shares of the time left.
_PEERS = {"nanoserve": 0.2, "nano-vllm": 0.4, "vllm": 0.75, "nanoserve again": 1.0}
_SANITIZED = (
    "ragged and bfloat16-128 or decode_rows and all-3-exact or store_kv and bfloat16 and -65-"
)


# ---------------------------------------------------------------- tests


def _engine_files() -> dict[str, str]:
    """Return the files whose tests run whole engines of small models, by subject."""
    files = sorted((ROOT / "tests/gpu").glob("test_*_gpu.py"))
    return {
        file.stem.removeprefix("test_").removesuffix("_gpu"): str(file.relative_to(ROOT))
        for file in files
    }


def tests(job: Job) -> Measurements:
    """Run `pytest -m gpu` without tensor parallelism, in parallel processes."""
    num_processes = str(max(1, min(_COMPILERS, (os.cpu_count() or 1) - 2)))
    options: dict[str, tuple[str, ...]] = {
        name: (file, "-n", "0") for name, file in _engine_files().items()
    }
    options["engine tests"] = (_GPU_TESTS, "-n", "0", "-k", _ENGINES)
    workers = ("-n", num_processes, "--dist", "worksteal")
    options["kernel tests"] = (_GPU_TESTS, *workers, "-k", f"not {_ENGINES}")
    running = {name: _start_tests(job, name, *chosen) for name, chosen in options.items()}
    for name, program in running.items():
        yield name, partial(_test_counts, program, job.scratch / f"{name}.xml")


def tensor_parallel_tests(job: Job) -> Measurements:
    name = "tests of two ranks"
    program = _start_tests(job, name, "tests/features/parallel/test_tensor_parallel.py", "-n", "0")
    yield name, partial(_test_counts, program, job.scratch / f"{name}.xml")


def _start_tests(job: Job, name: str, file: str, *options: str) -> Program:
    command = python("-m", "pytest", file, "-m", "gpu", "-q", *_NO_PLUGINS, *options)
    command += ["--collect-only"] if job.is_tiny else []
    return Program([*command, f"--junitxml={job.scratch / name}.xml"], job, name)


def _test_counts(program: Program, report: Path) -> dict[str, Any]:
    rc, said = program.wait()
    if not report.is_file():
        raise RuntimeError(f"pytest wrote no report: exit status {rc}, {said[-200:]!r}")
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, failed, errors, skipped = (
        int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    )
    names = [
        case.get("name", "")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    result: dict[str, Any] = {"passed": total - failed - errors - skipped}
    result |= {"failed": failed + errors, "skipped": skipped, "names": names[:40], "rc": rc}
    result["bad"] = rc != 0
    if collected := re.search(r"^(\d+)(?:/\d+)? tests collected", said, re.M):
        result["collected"] = int(collected[1])
    return result


# ---------------------------------------------------------------- drafts


def drafts(job: Job) -> Measurements:
    """Measure the gain of speculative decoding, with CUDA graphs of its steps."""
    yield "7 draft tokens", partial(_gains, job, "7 draft tokens", "--draft-tokens", "7")


def _gains(job: Job, name: str, *more: str) -> dict[str, Any]:
    """Return ratios over an engine without draft tokens, by text and number of sequences."""
    command = python("benchmarks/speculation.py", "--device", job.device, *more)
    command += ["--rounds", "1", "--texts", "copy,random"]
    if job.is_tiny:
        command += ["--streams", "1", "--prompt", "20", "--tokens", "30"]
    else:
        command += ["--shape", "qwen3-0.6b", "--streams", "1,16"]
    _, said = Program(command, job, name).wait()
    found = re.findall(r"^\| (\w+) \| (\d+) \| .* \*\*([\d.]+)\*\*", said, re.M)
    if not found:
        raise RuntimeError(f"no cell was measured: {said[-200:]!r}")
    return {f"{text} {num_streams}": float(ratio) for text, num_streams, ratio in found}


# ---------------------------------------------------------------- peers


def peers(job: Job) -> Measurements:
    """Run the engines of gpu_peers.py one after the other, each in a process of its own.

    Without a folder that has them, run bench.py, whose engines take turns, on the same random
    weights: transformers' continuous batching, or its static batches if that does not run.
    """
    if job.peers is not None:
        for name, share in _PEERS.items():
            yield name, partial(_peer, job, name, share)
        return
    runs: dict[str, Any] = {}
    yield "in turns", lambda: runs.update(_compare(job, _PEER, "2")) or runs
    if not runs.get(_PEER[1]):
        static = ("transformers",)
        yield "static", lambda: _compare(job, static, "1", "--hf-batch-size", "64")


def _peer(job: Job, name: str, share: float) -> dict[str, Any]:
    """Return the seconds of the workload, and milliseconds of a step with few rows."""
    lines = job.scratch / f"{name}.jsonl"
    command = python("benchmarks/gpu_peers.py", "--engine", name.removesuffix(" again"))
    command += ["--peers", str(job.peers), "--out", str(lines)]
    command += ["--limit", str(max(1.0, share * job.left - 5))]
    command += ["--tiny"] if job.is_tiny else []
    rc, said = Program(command, job, name).wait()
    text = lines.read_text() if lines.is_file() else ""
    records = [json.loads(line) for line in text.splitlines()]
    seconds = [each["seconds"] for each in records if each["what"] == "workload"]
    if not seconds:
        raise RuntimeError(f"no run was finished: exit status {rc}, {said[-200:]!r}")
    few = {f"{r['rows']} rows ms": r["step ms"] for r in records if r["what"] == "few rows"}
    return {"seconds": seconds, **few, "rc": rc, "bad": rc != 0}


def _compare(job: Job, engines: tuple[str, ...], repeat: str, *more: str) -> dict[str, Any]:
    command = python("bench.py", "--workload", "nano-vllm", "--device", job.device)
    # Short outputs: transformers takes minutes for those of the workload.
    command += ["--num-seqs", "64", "--output-len", "64-128"]
    command += ["--repeat", repeat, "--engine", ",".join(engines), *more]
    if job.is_tiny:
        command += ["--shape", "tiny", "--num-seqs", "3", "--input-len", "4-9"]
        command += ["--output-len", "2-4", "--repeat", "1", "--threads", "1"]
    _, said = Program(command, job, "-".join(engines)).wait()
    # Parsed from the output after each run, because the program may have been interrupted.
    num_tokens = re.search(r"(\d+) output tokens", said)
    result: dict[str, Any] = {}
    for engine in engines:
        found = re.findall(rf"^run \d+, {re.escape(engine)}: ([\d.]+)$", said, re.M)
        if found and num_tokens:
            result[engine] = [int(num_tokens[1]) / float(seconds) for seconds in found]
    if not result:
        raise RuntimeError(f"no engine finished a run: {said[-200:]!r}")
    return {"unit": "tok/s", **result, "failed": re.findall(r"^(.+ FAILED: .+)$", said, re.M)}


# ---------------------------------------------------------------- sanitize


def sanitize(job: Job) -> Measurements:
    """Run NVIDIA's tools on some kernel tests and on the attention kernels."""
    tests = python("-m", "pytest", _GPU_TESTS, "-m", "gpu", "-n", "0", "-q", *_NO_PLUGINS)
    tests += ["-k", _SANITIZED]
    for tool, share in (("memcheck", 1 / 3), ("racecheck", 1 / 2)):
        command = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", *tests]
        yield tool, partial(_tool, job, "compute-sanitizer", tool, command, share)
    command = ["--set", "basic", "--clock-control", "none", "-k", "regex:attention", "-c", "3"]
    command += python("benchmarks/attention.py", "--device", job.device)
    yield "ncu", partial(_tool, job, "ncu", "ncu", command, 1.0)


def _tool(job: Job, program: str, name: str, arguments: list[str], share: float) -> dict[str, Any]:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if path is None:
        return {"left out": f"{program} is not installed"}
    rc, said = Program([path, *arguments], job, name).wait(share)
    return {"rc": rc, "said": said.splitlines()[-60 if name == "ncu" else -5 :]}
