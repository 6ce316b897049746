"""Run all GPU tests and measurements in one command, within a budget of seconds.

    python benchmarks/gpu_day.py --out FOLDER --budget 570
    python benchmarks/gpu_day.py --out FOLDER --stages facts,bench
    python benchmarks/gpu_day.py --out FOLDER --plan first          then --plan second
    python benchmarks/gpu_day.py --out FOLDER --device cpu          tiny, as a check

A stage is a separate process with a time limit, reduced to the rest of the budget. If one fails or
reaches its limit, that is reported, and the next one begins. FOLDER/gpu_day.json has the results so
far, also while stages are running, and FOLDER/log.txt their output. A table of all results comes
last.

The two plans are for a GPU that is rented for fifteen minutes, with a start of a minute and a spare
one: the first is what has never run and what decides defaults, the second what takes longer. They
have limits and a budget of their own.

`sanitize` (NVIDIA's compute-sanitizer and ncu, where they are installed) runs only if it is
requested, `fa3` only with a folder that has the library of FlashAttention 3.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from gpu_job import write_json
from gpu_table import print_table

_HERE = Path(__file__).resolve().parent
# Maximum seconds of each stage on a machine with a slow processor, the most important first.
LIMITS = {
    "facts": 40,
    "smoke": 80,
    "tests": 160,
    "bench": 110,
    "profile": 60,
    "drafts": 80,
    "fewer_bits": 130,
    "options": 100,
    "kernels": 100,
    "tp": 60,
    "peers": 180,
    "fa3": 80,
    "sweep": 150,
    "sanitize": 400,
}
PLANS = {
    "first": {"facts": 15, "tests": 145, "bench": 130, "profile": 70},
    "second": {"peers": 200, "fewer_bits": 90, "drafts": 60, "smoke": 40},
}
_BUDGET = 570  # seconds
_LEAST = 5.0  # seconds: less does not suffice for importing torch
TIMED_OUT = 124  # exit status of a stage that reached its limit, as of `timeout`

Record = dict[str, Any]


class Day:
    """Run stages and write their results to files."""

    def __init__(
        self,
        folder: Path,
        budget: float,
        device: str,
        fa3: Path | None = None,
        peers: Path | None = None,
    ) -> None:
        self.folder, self.device, self.fa3, self.peers = folder, device, fa3, peers
        self.records: list[Record] = []
        self._end = time.monotonic() + budget
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").write_text("")

    def run(self, stage: str, limit: float) -> Record:
        """Run a stage for at most `limit` seconds; its record is then in the file."""
        limit = min(limit, self._end - time.monotonic())
        if limit < _LEAST:
            record = {"stage": stage, "rc": None, "seconds": 0.0, "result": {}}
            record["skipped"] = f"{max(0.0, limit):.0f} s of the budget are left"
        else:
            record = self._run(stage, limit)
        self.records.append(record)
        write_json(self.folder / "gpu_day.json", self.records)
        return record

    def _run(self, stage: str, limit: float) -> Record:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch, (self.folder / "log.txt").open("ab") as log:
            log.write(f"\n===== {stage}, {limit:.0f} s\n".encode())
            log.flush()
            file = Path(scratch) / "result.json"
            command = [sys.executable, str(_HERE / "gpu_stage.py"), stage, "--device", self.device]
            command += ["--deadline", str(start + limit), "--result", str(file)]
            command += ["--fa3", str(self.fa3)] if self.fa3 else []
            command += ["--peers", str(self.peers)] if self.peers else []
            rc = _run_in_group(command, limit, self._environment(), log)
            result = json.loads(file.read_text()) if file.is_file() else {}
        seconds = time.monotonic() - start
        return {"stage": stage, "rc": rc, "seconds": round(seconds, 1), "result": result}

    def _environment(self) -> dict[str, str]:
        paths = [str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        variables["TQDM_DISABLE"] = "1"
        if self.device == "cpu":
            variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        return os.environ | variables


def _run_in_group(command: list[str], limit: float, environment: dict[str, str], log: Any) -> int:
    """Return the exit status; all descendants of the process end with it."""
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def parse_args() -> Namespace:
    parser = ArgumentParser(description="All measurements and tests that need a GPU.")
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for the results")
    add(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"total time (default {_BUDGET}, or what the plan's stages may take)",
    )
    add("--plan", choices=PLANS, help="the stages of one of two calls, with their own limits")
    add("--stages", help=f"some of {','.join(LIMITS)}; default: all except sanitize")
    add("--sanitize", action="store_true", help="also run the stage sanitize, last")
    add(
        "--fa3",
        type=Path,
        metavar="FOLDER",
        help="folder with _vllm_fa3_C.abi3.so, or with its .so.xz",
    )
    add("--peers", type=Path, metavar="FOLDER", help="vLLM and nano-vllm, from pack_peers.py")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="%(default)s")
    args = parser.parse_args()
    for name in ("fa3", "peers"):
        folder = getattr(args, name)
        if folder and not folder.is_dir():
            parser.error(f"--{name} {folder} is not a folder")
    if args.plan and (args.stages or args.sanitize):
        parser.error("--plan has stages of its own: remove --stages and --sanitize")
    args.limits = PLANS[args.plan] if args.plan else LIMITS
    if args.budget is None:
        args.budget = sum(args.limits.values()) if args.plan else _BUDGET
    if args.plan:
        args.stages = [*args.limits]
        return args
    if args.stages:
        named = args.stages.split(",")
        if unknown := [name for name in named if name not in LIMITS]:
            parser.error(f"--stages: no {', '.join(unknown)}; known are {', '.join(LIMITS)}")
        if "fa3" in named and not args.fa3:
            parser.error("--stages fa3 needs --fa3 FOLDER, which has the library")
    else:
        named = [name for name in LIMITS if name != "sanitize" and (name != "fa3" or args.fa3)]
    named += ["sanitize"] if args.sanitize else []
    args.stages = [name for name in LIMITS if name in named]  # the most important first
    return args


def _end_by_signal(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, _end_by_signal)  # also ends the running stage
    day = Day(args.out, args.budget, args.device, args.fa3, args.peers)
    try:
        for stage in args.stages:
            record = day.run(stage, args.limits[stage])
            print(
                f"{stage}: {record.get('skipped', record['rc'])}, {record['seconds']} s", flush=True
            )
    finally:
        print_table(day.records)
    return 0 if all(record["rc"] == 0 for record in day.records) else 1


if __name__ == "__main__":
    sys.exit(main())
