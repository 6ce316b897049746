"""Compare routers on real replicas: prefix-cache hits and balance of the load.

    python benchmarks/fleet_routing.py                    all routers, three traces, 12 minutes
    python benchmarks/fleet_routing.py --only conversations --rounds 3

The traces and the rules are those of `routing.py`, where time is simulated; here the bundled model
computes, in two replicas of one core each behind `nanoserve serve`, over HTTP. It is so small that
prompts and answers are shorter, and arrive faster. The server is forced to output one word
repeatedly, so that the next turns of a conversation are known. Each trace has a new server.

hits and spread are from the servers' metrics: cached tokens / prompt tokens, and the largest number
of tokens that a replica has computed / the mean. TTFT: from when a request was due to
its first text, mean and 99th percentile, in ms. "knows every cache" takes the longest match
according to the replicas' events, which are at most 10 ms late.
"""

import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.request
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence

from replicas import serving
from routing import TRACES, Job, Scale

from nanoserve.cli.bench.serve.connection import Server
from nanoserve.cli.bench.serve.stream import read_answer
from nanoserve.cli.main import main as nanoserve
from nanoserve.serve.replicas import routing
from nanoserve.serve.replicas.prefix_router import PrefixRouter

_NUM_REPLICAS = 2
_SAID = 270  # the only token that a server outputs: " the"
_FLAGS = [
    *("tiny-qwen3", "--data-parallel-size", str(_NUM_REPLICAS), "--num-threads", "1"),
    *("--block-size", "16", "--num-kv-blocks", "512", "--max-num-batched-tokens", "2048"),
]
_COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "iteration_tokens_total_sum")


class RoundRobin(PrefixRouter):
    _turn = 0

    def choose(
        self, hashes: AbstractSequence[bytes], num_prompt_tokens: int, loads: Mapping[str, float]
    ) -> str:
        self._turn += 1
        return sorted(loads)[self._turn % len(loads)]


class LeastLoaded(PrefixRouter):
    def choose(
        self, hashes: AbstractSequence[bytes], num_prompt_tokens: int, loads: Mapping[str, float]
    ) -> str:
        return self._rng.choice([name for name in loads if loads[name] == min(loads.values())])


class PureAffinity(PrefixRouter):
    """Router that uses a hash of the prompt's first blocks, whatever the load."""

    def choose(
        self, hashes: AbstractSequence[bytes], num_prompt_tokens: int, loads: Mapping[str, float]
    ) -> str:
        first = hashes[:4]
        number = int.from_bytes(first[-1][:8], "little") if first else 0
        return sorted(loads)[number % len(loads)]


class KnowsEveryCache(PrefixRouter):
    """Router that takes the longest match, and the least loaded of equal ones."""

    def choose(
        self, hashes: AbstractSequence[bytes], num_prompt_tokens: int, loads: Mapping[str, float]
    ) -> str:
        matched = self.matches(hashes, loads)
        rank = {name: (matched[name], -loads[name]) for name in loads}
        return self._rng.choice([name for name in loads if rank[name] == max(rank.values())])


ROUTERS: dict[str, tuple[type[PrefixRouter], list[str]]] = {
    "round robin": (RoundRobin, []),
    "least loaded": (LeastLoaded, []),
    "pure affinity": (PureAffinity, []),
    "ours, approximate": (PrefixRouter, []),
    "ours, exact": (PrefixRouter, ["--router", "exact"]),
    "knows every cache": (KnowsEveryCache, ["--router", "exact"]),
}


class Clients:
    """All clients of one server."""

    def __init__(self, url: str) -> None:
        self.waits: list[float] = []  # seconds until the first text
        self._server = Server(url, None, timeout=120)

    async def ask(self, jobs: list[Job]) -> float:
        """Each when it arrives, and what follows from it; the seconds until all are answered."""
        start = time.perf_counter()
        await asyncio.gather(*(self._follow(job, start) for job in jobs))
        seconds = time.perf_counter() - start
        self._server.close()
        return seconds

    async def _follow(self, first: Job, start: float) -> None:
        job: Job | None = first
        while job is not None:
            job.output[:] = [_SAID] * len(job.output)  # the beginning of the next turn
            body = {
                **{"model": "tiny-qwen3", "prompt": job.prompt, "stream": True, "temperature": 0},
                **{"max_tokens": len(job.output), "ignore_eos": True, "allowed_token_ids": [_SAID]},
            }
            request = self._server.request("completions", json.dumps(body).encode())
            await asyncio.sleep(max(0, start + job.arrival - time.perf_counter()))
            answer = read_answer(await self._server.send(request))
            self.waits.append(answer.times[0] - start - job.arrival)
            job = job.then(time.perf_counter() - start)


def counts(url: str) -> dict[str, list[float]]:
    """Return the counters of each replica."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in re.findall(r"^vllm:(\w+)\{replica=.*\} (\S+)$", text, re.MULTILINE):
        if name in _COUNTERS:
            found[name].append(float(value))
    return found


def run(router: str, trace: str, per_replica: int, scale: Scale, folder: str) -> list[float]:
    """Return hits, spread, mean and 99th percentile of the waits, and seconds."""
    program = (__file__, "--serve", router)
    jobs = TRACES[trace](_NUM_REPLICAS, per_replica, scale)
    with serving([*_FLAGS, *ROUTERS[router][1]], folder, program) as (url, _):
        clients = Clients(url)
        seconds = asyncio.run(clients.ask(jobs))
        found = counts(url)
    queries, hits, computed = (found[name] for name in _COUNTERS)
    waits = sorted(clients.waits)
    return [
        *(sum(hits) / sum(queries), max(computed) * len(computed) / sum(computed)),
        *(1e3 * sum(waits) / len(waits), 1e3 * waits[int(0.99 * len(waits))], seconds),
    ]


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:  # a process of `run`'s
        routing.PrefixRouter = ROUTERS[sys.argv[2]][0]
        return nanoserve(["serve", *sys.argv[3:]])
    parser = ArgumentParser(description="Routers before real replicas.")
    add = parser.add_argument
    add("--only", action="append", choices=TRACES, metavar="TRACE", help="some of the traces")
    add("--router", action="append", choices=ROUTERS, help="some of the routers")
    add(
        "--rounds",
        type=int,
        default=1,
        help="rounds of all routers in turn, each a row (default %(default)s)",
    )
    add("--per-replica", type=int, default=150, help="requests (%(default)s)")
    add(
        "--rate",
        type=float,
        default=0.5,
        help="factor on the arrival rates of routing.py (default %(default)s)",
    )
    args = parser.parse_args()
    scale = Scale(length=0.25, rate=args.rate, vocab_size=2048)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        for trace in args.only or TRACES:
            print(f"\n### {trace}\n\n| router | hits | spread | TTFT mean | p99 | seconds |")
            print("|---|---|---|---|---|---|", flush=True)
            for _ in range(args.rounds):
                for router in args.router or ROUTERS:
                    found = run(router, trace, args.per_replica, scale, folder)
                    hits, spread, mean, p99, seconds = found
                    row = f"{hits:.1%} | {spread:.2f} | {mean:.0f} | {p99:.0f} | {seconds:.1f}"
                    print(f"| {router} | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
