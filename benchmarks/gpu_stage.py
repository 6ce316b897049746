"""Run one stage of gpu_day.py in a separate process: its measurements, one after the other.

    python benchmarks/gpu_stage.py STAGE --device cuda --deadline 1234.5 --result FILE.json

If a measurement raises, its error is recorded, and the next one begins. The file is written after
each, so a stage that is killed leaves its results so far.
"""

import gc
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpu_job import Job, write_json

MODULES = {
    "facts": "gpu_facts",
    "smoke": "gpu_engine",
    "tests": "gpu_programs",
    "bench": "gpu_engine",
    "options": "gpu_engine",
    "fewer_bits": "gpu_engine",
    "profile": "gpu_profile",
    "kernels": "gpu_kernels",
    "drafts": "gpu_programs",
    "tp": "gpu_engine",
    "peers": "gpu_programs",
    "fa3": "gpu_kernels",
    "sweep": "tune",
    "sanitize": "gpu_programs",
}


def run(stage: str, job: Job, file: Path) -> bool:
    """Return True if nothing raised and no measurement marks its own result as "bad"."""
    result: dict[str, Any] = {}
    try:
        for name, measure in getattr(import_module(MODULES[stage]), stage)(job):
            start = time.perf_counter()
            try:
                result[name] = measure()
            except Exception as error:
                result[name] = _told(error)
            write_json(file, result)
            print(f"{name} [{time.perf_counter() - start:.1f} s]: {result[name]}", flush=True)
            gc.collect()
            if job.device == "cuda":
                torch.cuda.empty_cache()
    except Exception as error:  # between two measurements, or before the first
        result["what comes next"] = _told(error)
        write_json(file, result)
    found = [value for value in result.values() if isinstance(value, dict)]
    return not any("error" in value or value.get("bad") for value in found)


def _told(error: Exception) -> dict[str, str]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> int:
    parser = ArgumentParser(description="One stage of gpu_day.py.")
    add = parser.add_argument
    add("stage", choices=MODULES)
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--deadline", type=float, required=True, help="seconds of time.monotonic()")
    add("--result", type=Path, required=True)
    add("--fa3", type=Path)
    add("--peers", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(args.device, args.deadline, Path(scratch), args.fa3, args.peers)
        return 0 if run(args.stage, job, args.result) else 1


if __name__ == "__main__":
    sys.exit(main())
