"""Compare two replicas of one core each on Ray Serve with one server of two cores.

    python benchmarks/replicas.py                       the bundled model
    python benchmarks/replicas.py --shape qwen3-0.6b-8l random weights of that shape
    python benchmarks/replicas.py --only choice         only the cost of choosing a replica

The same requests over HTTP, from one load generator, to each server in turn: tokens a second with
several clients at a time, and the time to the first token with one client, whose difference is the
cost of Ray and the router for a request. The load generator and Ray's own processes compute on the
same cores. Also: seconds from the command to the first answer, and microseconds to hash a prompt
and to choose between replicas, which is the router's part of that difference.
"""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoserve import SamplingParams
from nanoserve.cli.bench.serve.measure import measure
from nanoserve.cli.bench.serve.options import parse_args as parse_load
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.serve.replicas.messages import Order
from nanoserve.serve.replicas.routing import Placement

_SERVERS = {
    "one server, two cores": ["--num-threads", "2"],
    "two replicas, a core each": ["--data-parallel-size", "2", "--num-threads", "1"],
    "the same, exact router": [
        *("--data-parallel-size", "2", "--num-threads", "1"),
        *("--router", "exact"),
    ],
    "one server, one core": ["--num-threads", "1"],
}
_VOCAB_SIZE = 2048  # of the bundled model and its tokenizer, which also serves the shapes


@contextmanager
def serving(
    flags: list[str], folder: str, program: tuple[str, ...] = ("-m", "nanoserve", "serve")
) -> Iterator[tuple[str, float]]:
    """Start a server; return its address and the seconds until it was ready."""
    command = [sys.executable, *program, *flags, "--port", "0"]
    began, log = time.perf_counter(), Path(folder) / "log"
    environment = {**os.environ, "RAY_TMPDIR": folder}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        while not (found := re.search(r" at (http://\S+)", log.read_text())):
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.02)
        yield found[1], time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def load_of(args: Namespace, url: str, number: int) -> Namespace:
    return parse_load(
        [
            *("--url", url, "--endpoint", "completions", "--token-ids", str(_VOCAB_SIZE)),
            *("--num-seqs", str(args.num_seqs), "--concurrency", args.concurrency),
            *("--input-len", args.input_len, "--output-len", args.output_len),
            *("--shared-len", str(args.shared_len), "--seed", str(number)),
        ]
    )


def rows_of(args: Namespace, url: str, number: int) -> Iterator[dict[str, Any]]:
    for point in asyncio.run(measure(load_of(args, url, number))):
        (run,) = point.runs
        waits = run.get("latencies", {})
        yield {
            "clients": point.concurrency,
            "tokens/s": run["output_tokens"] / run["seconds"],
            "ttft_p50": waits.get("ttft_p50"),
            "itl_p50": waits.get("itl_p50"),
            "failed": run["failed"],
            "client_core": run["client"]["core"],
        }


def choice_seconds(num_tokens: int, num_replicas: int, rounds: int = 200) -> tuple[float, float]:
    """Return median times to hash a prompt of this many tokens, and to choose."""
    placement = Placement(EngineConfig("none", prefix_cache_seed=1))
    names = [str(i) for i in range(num_replicas)]
    for name in names:
        placement.join(name, 10_000)
    params, hashing, choosing = SamplingParams(max_tokens=100), [], []
    for number in range(rounds):
        ids = [number % 7, *range(num_tokens - 1)]
        sequence = Sequence("a", ids, params, num_tokens + 100)
        request = Request("a", None, ids, params, [sequence])
        order = Order(request, b"", placement.choose)
        times = [time.perf_counter()]
        placement.hash(order)
        times.append(time.perf_counter())
        order.choose(names)
        times.append(time.perf_counter())
        hashing.append(times[1] - times[0])
        choosing.append(times[2] - times[1])
        placement.release(order)
    return statistics.median(hashing), statistics.median(choosing)


def show_choice() -> None:
    print("microseconds to hash a prompt + to choose between so many replicas")
    for num_tokens in (100, 1000, 10_000):
        for num_replicas in (2, 8, 32):
            hashing, choosing = choice_seconds(num_tokens, num_replicas)
            micros = f"{1e6 * hashing:8.1f} + {1e6 * choosing:.1f}"
            print(f"{num_tokens:7} tokens {num_replicas:3} replicas {micros}")


def show(servers: dict[str, list[dict[str, Any]]], starts: dict[str, list[float]]) -> None:
    print("\n| | starts in | clients | tokens/s | first token | between two | failed |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in servers.items():
        start = statistics.median(starts[name])
        for clients in sorted({row["clients"] for row in rows}):
            same = [row for row in rows if row["clients"] == clients]
            rate, first, between = (
                statistics.median(row[key] for row in same)
                for key in ("tokens/s", "ttft_p50", "itl_p50")
            )
            failed = sum(row["failed"] for row in same)
            print(
                f"| {name} | {start:.1f} s | {clients} | {rate:.0f} | {first:.1f} ms "
                f"| {between:.1f} ms | {failed} |"
            )


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Two replicas beside one server.")
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="random weights, instead of the bundled model")
    add("--only", action="append", metavar="NAME", help=f"choice, or some of {[*_SERVERS]}")
    add("--num-seqs", type=int, default=96, help="requests a run (%(default)s)")
    add("--concurrency", default="1,16,64", help="%(default)s")
    add("--input-len", default="64-256", help="%(default)s")
    add("--output-len", default="64-128", help="%(default)s")
    add("--shared-len", type=int, default=0, help="%(default)s")
    add("--rounds", type=int, default=1, help="of all servers in turn (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    wanted = args.only or ["choice", *_SERVERS]
    if "choice" in wanted:
        show_choice()
    chosen = {name: flags for name, flags in _SERVERS.items() if name in wanted}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    starts: dict[str, list[float]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        model = ["tiny-qwen3", "--num-kv-blocks", "4000"]
        if args.shape is not None:
            config = SHAPES[args.shape] | {"vocab_size": _VOCAB_SIZE}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model = [folder, "--load-format", "dummy", "--tokenizer", "tiny-qwen3"]
            model += ["--max-model-len", "2048", "--num-kv-blocks", "4000"]
        for number in range(args.rounds):
            for name, flags in chosen.items():
                with serving([*model, *flags], folder) as (url, seconds):
                    print(f"\n{name}: answers after {seconds:.1f} s", flush=True)
                    starts[name].append(seconds)
                    rows[name] += rows_of(args, url, number)
    if chosen:
        show(rows, starts)


if __name__ == "__main__":
    main()
