"""Three experiments with scheduling policies, in virtual time: each in one command, in seconds.

    python benchmarks/policies.py                        all three
    python benchmarks/policies.py --only fairness

shortest    The shortest prompts first: mean waits fall, and long prompts pay for it.
fairness    Tenants take turns by the tokens that they have been served: one that floods the engine
            delays itself and not the others.
eviction    Free blocks of a prefix from its head: what is left of it in the cache is useless.

The same classes can be compared on other traffic: `nanoserve simulate qwen3-8b --gpu h100
--request-rate 60 --policy benchmarks/policies.py:ShortestFirst`. The device is simulated (qwen3-8b
on an H100 by its data sheet), the scheduler is the real one; results are the same on each machine.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from nanoserve.cli.simulate.fleet import Fleet
from nanoserve.cli.simulate.gpus import RooflineTime, gpu_named
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import Results
from nanoserve.cli.simulate.traffic import Arrival
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence


class ShortestFirst(Scheduler):
    """Admits the shortest prompt first; its output is not known."""

    def order(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.num_prompt_tokens, seq.arrival)


class FairByTenant(Scheduler):
    """Start-time fair queueing (Goyal et al. 1996) over tenants, which are cache keys.

    A request begins, in virtual time, when the one before it of the same tenant has been served,
    but not before now: the virtual time of the last request that was admitted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._starts: dict[Sequence, int] = {}
        self._ends: dict[tuple[str, ...], int] = {}  # by tenant
        super().__init__(*args, **kwargs)

    def add(self, seq: Sequence, held_for: Iterable[str] = ()) -> None:
        now = max((self._starts[one] for one in self.running), default=0)
        start = self._starts[seq] = max(now, self._ends.get(seq.cache_key, 0))
        self._ends[seq.cache_key] = start + seq.num_prompt_tokens + 400  # about a usual output
        super().add(seq, held_for)

    def order(self, seq: Sequence) -> tuple[int, ...]:
        return (self._starts[seq], seq.arrival)


class HeadsFirst(BlockManager):
    """Frees the blocks of a sequence from the first to the last: heads are evicted first."""

    def free(self, seq: Sequence, keep: int = 0) -> None:
        for table in seq.block_tables:
            table[keep:] = reversed(table[keep:])
        super().free(seq, keep)


class EvictsHeads(Scheduler):
    """A scheduler whose block manager evicts the heads of prefixes before their tails."""

    def __init__(self, config: EngineConfig, num_kv_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, num_kv_blocks, *args, **kwargs)
        self.block_manager = HeadsFirst.for_config(config, num_kv_blocks, (None,))


@dataclass(frozen=True)
class Requests:
    """Traffic from a list."""

    listed: list[Arrival]

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.listed)


def setup(num_kv_blocks: int = 8000, **options: Any) -> Setup:
    model_config = model_config_of("qwen3-8b")
    given = {"async_scheduling": False, "prefix_cache_seed": 0, "max_model_len": 8192}
    config = EngineConfig("qwen3-8b", **{**given, **options}).for_device("cuda")
    step_time = RooflineTime(model_config, gpu_named("h100"), efficiency=0.7, fixed=0.002)
    return Setup(config, model_config, num_kv_blocks, step_time)


def drawn(seed: int, rate: float, number: int, tenants: list[str] | None = None) -> list[Arrival]:
    """Requests whose prompts vary between 30 and 6,000 tokens."""
    rng, now, arrivals = Random(seed), 0.0, []
    for _ in range(number):
        now += rng.expovariate(rate)
        length = min(6000, max(30, round(rng.lognormvariate(6.0, 1.3))))
        prompt = rng.choices(range(150_000), k=length)
        output = rng.choices(range(150_000), k=rng.randint(20, 180))
        tenant = None if tenants is None else rng.choice(tenants)
        arrivals.append(Arrival(now, prompt, output, tenant=tenant))
    return arrivals


def run(base: Setup, policy: type[Scheduler] | None, requests: list[Arrival]) -> Results:
    config = replace(base.config, scheduler_cls=policy)
    return Fleet(replace(base, config=config)).run(Requests(requests))


def waits(results: Results, requests: list[Arrival]) -> np.ndarray:
    """Return the TTFT of each request in seconds, in the order of arrival."""
    done = results.finished.columns()
    return (done["first_token"] - done["arrival"])[np.argsort(done["request"])]


def shortest(number: int) -> dict[str, dict[str, float]]:
    requests = drawn(0, 42.0, number)
    lengths = np.array([len(arrival.prompt) for arrival in requests])
    rows = {}
    for name, policy in (("first come, first served", None), ("shortest first", ShortestFirst)):
        ttft = waits(run(setup(max_num_seqs=32), policy, requests), requests)
        rows[name] = {
            "mean TTFT": float(ttft.mean()),
            "median": float(np.median(ttft)),
            "mean, short half": float(ttft[lengths <= np.median(lengths)].mean()),
            "mean, longest tenth": float(ttft[lengths >= np.percentile(lengths, 90)].mean()),
            "longest": float(ttft.max()),
        }
    return rows


def fairness(number: int) -> dict[str, dict[str, float]]:
    requests = drawn(1, 42.0, number, ["flood"] * 16 + ["b", "c", "d", "e"])
    is_flood = np.array([arrival.tenant == "flood" for arrival in requests])
    rows = {}
    for name, policy in (("first come, first served", None), ("fair by tenant", FairByTenant)):
        ttft = waits(run(setup(max_num_seqs=32), policy, requests), requests)
        rows[name] = {
            "mean TTFT, flood": float(ttft[is_flood].mean()),
            "mean, others": float(ttft[~is_flood].mean()),
            "p99, others": float(np.percentile(ttft[~is_flood], 99)),
        }
    return rows


def eviction(number: int) -> dict[str, dict[str, float]]:
    """Long conversations, and single requests that evict a part of them between two turns."""
    rng, requests = Random(2), []
    histories = [rng.choices(range(150_000), k=3000) for _ in range(8)]
    for turn in range(number):
        output = rng.choices(range(150_000), k=40)
        if turn % 4:
            prompt = rng.choices(range(150_000), k=rng.randint(100, 500))
        else:
            which = turn // 4 % len(histories)
            prompt = histories[which]
            histories[which] = [*prompt, *output, *rng.choices(range(150_000), k=40)][:6000]
        requests.append(Arrival(0.1 * turn, prompt, output))
    rows = {}
    for name, policy in (("tails first", None), ("heads first", EvictsHeads)):
        results = run(setup(2400), policy, requests)
        rows[name] = {
            "hit rate": results.stats.prefix_cache_hit_rate,
            "TTFT p99": float(np.percentile(waits(results, requests), 99)),
            "computed tokens": float(results.stats.num_computed_tokens),
        }
    return rows


EXPERIMENTS = {"shortest": shortest, "fairness": fairness, "eviction": eviction}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=EXPERIMENTS, help="default: all")
    parser.add_argument("--requests", type=int, default=600, help="of each experiment")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    for name in [args.only] if args.only else EXPERIMENTS:
        found[name] = EXPERIMENTS[name](args.requests)
        print(name)
        for policy, row in found[name].items():
            cells = (f"{key} {value:.3g}" for key, value in row.items())
            print(f"    {policy:<26}{', '.join(cells)}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
