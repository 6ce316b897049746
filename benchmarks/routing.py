"""Simulate routers: prefix-cache hits and balance of the load, with real schedulers.

    python benchmarks/routing.py                 2 to 64 replicas, three traces, half an hour
    python benchmarks/routing.py --quick         4 replicas, short traces
    python benchmarks/routing.py --cost          only microseconds of a choice

Each replica is the real scheduler with the real block manager, without a model; time is simulated:
a step takes 8 ms, 50 us for each token that it computes, and 0.05 us for each that is attended to.
Arrivals are random, at a rate that keeps each replica busy for most of the time, and pools are so
small that blocks are evicted.

    one hot prefix      a system prompt of 2,048 tokens for all, for half of them followed by one
                        of several others of 512, and 64 to 512 tokens of their own
    conversations       2 to 8 turns of 50 to 400 tokens, each after all earlier turns
    nothing shared      100 to 1,500 tokens

hits: cached tokens / prompt tokens. spread: the largest number of tokens computed by a replica /
mean. TTFT: from arrival to first token, mean and 99th percentile, in ms. "knows every cache" reads
the block managers at the moment of the choice: it takes the longest match, and of equal ones the
least loaded, whatever the load; "ours, all known" is nanoserve's score with that knowledge.
"""

import argparse
import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.replicas.block_events import BlockEvents
from nanoserve.serve.replicas.prefix_router import PrefixRouter

_STEP, _TOKEN, _CONTEXT = 8e-3, 5e-5, 5e-8  # seconds
_BLOCK_SIZE, _POOL, _SEED, _MAX_LEN = 16, 2048, 5, 16_384
_TYPICAL_OUTPUT = 64  # tokens that a request is expected to generate
_VOCAB_SIZE = 100_000


@dataclass(eq=False)
class Job:
    """A request; `then(now)` is the next turn of its conversation."""

    arrival: float
    prompt: list[int]
    output: list[int]
    then: Callable[[float], "Job | None"] = lambda now: None
    hashes: list[bytes] | None = None
    matched: int = 0  # tokens that the router expects to be cached
    replica: int = -1


class Replica:
    """A scheduler whose steps take simulated time."""

    def __init__(self) -> None:
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "block_size": _BLOCK_SIZE}
        config = EngineConfig("none", prefix_cache_seed=_SEED, **options).for_device("cpu")
        self.scheduler = Scheduler(config, _POOL, _MAX_LEN)
        self.events = BlockEvents(self.scheduler.block_manager)
        self.plan: Any = None
        self.num_computed, self.busy = 0, 0.0
        self._jobs: dict[Sequence, Job] = {}

    def add(self, job: Job, number: int) -> None:
        params = SamplingParams(max_tokens=len(job.output), ignore_eos=True)
        seq = Sequence(str(number), list(job.prompt), params, _MAX_LEN, arrival=number)
        self._jobs[seq] = job
        self.scheduler.add(seq)

    def begin(self) -> float:
        """Plan a step and return its seconds."""
        self.plan = plan = self.scheduler.schedule()
        attended = sum(row.start + row.n for row in plan.rows)
        seconds = _STEP + _TOKEN * plan.num_tokens + _CONTEXT * attended
        self.num_computed += plan.num_tokens
        self.busy += seconds
        return seconds

    def end(self) -> tuple[list[Job], list[Job]]:
        """Return the requests with a first token in this step, and those that have ended."""
        plan, self.plan = self.plan, None
        self.scheduler.commit(plan)
        jobs = [(row.seq, self._jobs[row.seq]) for row in plan.sampled]
        self.scheduler.update(plan, [[job.output[seq.num_output_tokens]] for seq, job in jobs])
        done = [self._jobs.pop(seq) for seq, _ in jobs if seq.finished]
        return [job for seq, job in jobs if seq.num_output_tokens == 1], done

    def num_matched(self, job: Job) -> int:
        """Return how many tokens of the prompt are cached here now."""
        find = self.scheduler.block_manager.prefix_cache.find
        found = itertools.takewhile(lambda block: block is not None, map(find, job.hashes))
        return _BLOCK_SIZE * sum(1 for _ in found)


# ---------------------------------------------------------------- who gets a request


class Policy:
    """Router that counts the unfinished requests of each replica."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas, self.rng = replicas, random.Random(1)
        self.prompts, self.outputs = [0.0] * len(replicas), [0] * len(replicas)

    def choose(self, job: Job) -> int:
        raise NotImplementedError

    def loads(self) -> list[float]:
        return [a + _TYPICAL_OUTPUT * b for a, b in zip(self.prompts, self.outputs, strict=True)]

    def sent(self, job: Job) -> None:
        self.prompts[job.replica] += len(job.prompt) - job.matched
        self.outputs[job.replica] += 1

    def answered(self, job: Job) -> None:
        self.prompts[job.replica] -= len(job.prompt) - job.matched

    def done(self, job: Job) -> None:
        self.outputs[job.replica] -= 1

    def stepped(self, index: int) -> None:
        """Process the end of a replica's step."""


class RoundRobin(Policy):
    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__(replicas)
        self._turns = itertools.cycle(range(len(replicas)))

    def choose(self, job: Job) -> int:
        return next(self._turns)


class LeastLoaded(Policy):
    def choose(self, job: Job) -> int:
        loads = self.loads()
        return self.rng.choice([i for i, load in enumerate(loads) if load == min(loads)])


class PureAffinity(Policy):
    """Router that uses a hash of the prompt's first blocks, whatever the load."""

    def choose(self, job: Job) -> int:
        first = job.hashes[:4]
        return int.from_bytes(first[-1][:8], "little") % len(self.replicas) if first else 0


class KnowsEveryCache(Policy):
    """Router that takes the longest match, and the least loaded of equal ones."""

    def choose(self, job: Job) -> int:
        matched = [replica.num_matched(job) for replica in self.replicas]
        rank = [(m, -load) for m, load in zip(matched, self.loads(), strict=True)]
        chosen = self.rng.choice([i for i, each in enumerate(rank) if each == max(rank)])
        job.matched = matched[chosen]
        return chosen


class Ours(Policy):
    """nanoserve's `PrefixRouter`, in its approximate mode."""

    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__(replicas)
        self.router = PrefixRouter(_BLOCK_SIZE, _SEED, rng=self.rng)
        for index in range(len(replicas)):
            self.router.add_replica(str(index), _POOL)

    def choose(self, job: Job) -> int:
        loads = {str(index): load for index, load in enumerate(self.loads())}
        chosen = self.router.choose(job.hashes, len(job.prompt), loads)
        job.matched = self.router.matches(job.hashes, [chosen])[chosen]
        return int(chosen)

    def sent(self, job: Job) -> None:
        super().sent(job)
        self.router.sent(str(job.replica), job.hashes)


class OursExact(Ours):
    def stepped(self, index: int) -> None:
        self.router.update(str(index), *self.replicas[index].events.take())


class OursAllKnown(Ours):
    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__(replicas)
        self._job: Job | None = None
        self.router.matches = self._matches

    def choose(self, job: Job) -> int:
        self._job = job
        return super().choose(job)

    def _matches(self, hashes: Any, replicas: Any) -> dict[str, int]:
        return {name: self.replicas[int(name)].num_matched(self._job) for name in replicas}


POLICIES: dict[str, type[Policy]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "pure affinity": PureAffinity,
    "ours, approximate": Ours,
    "ours, exact": OursExact,
    "ours, all known": OursAllKnown,
    "knows every cache": KnowsEveryCache,
}


# ---------------------------------------------------------------- traces


@dataclass(frozen=True)
class Scale:
    """Parameters of the traces: lengths and arrivals."""

    length: float = 1.0
    rate: float = 1.0
    vocab_size: int = _VOCAB_SIZE

    def tokens(self, rng: random.Random, least: int, most: int) -> list[int]:
        count = rng.randint(round(self.length * least), round(self.length * most))
        return [rng.randrange(self.vocab_size) for _ in range(count)]

    def arrivals(self, rng: random.Random, rate: float, count: int) -> Iterator[float]:
        now = 0.0
        for _ in range(count):
            now += rng.expovariate(self.rate * rate)
            yield now


_AS_IT_IS = Scale()


def hot_prefix(num_replicas: int, per_replica: int, scale: Scale = _AS_IT_IS) -> list[Job]:
    rng = random.Random(1)
    system = scale.tokens(rng, 2048, 2048)
    groups = [scale.tokens(rng, 512, 512) for _ in range(4 * num_replicas)]
    jobs = []
    for now in scale.arrivals(rng, 22 * num_replicas, per_replica * num_replicas):
        group = rng.choice(groups) if rng.random() < 0.5 else []
        prompt = system + group + scale.tokens(rng, 64, 512)
        jobs.append(Job(now, prompt, scale.tokens(rng, 32, 96)))
    return jobs


def conversations(num_replicas: int, per_replica: int, scale: Scale = _AS_IT_IS) -> list[Job]:
    # In seconds; there are nine turns in one, and people do not think faster for a faster fleet.
    rng, end = random.Random(2), per_replica / 9 / scale.rate
    rate = 2.6 * num_replicas
    count = round(rate * scale.rate * end)
    return [
        _turn(scale, random.Random(rng.random()), now, [], rng.randint(2, 8), end)
        for now in scale.arrivals(rng, rate, count)
    ]


def _turn(
    scale: Scale, rng: random.Random, now: float, history: list[int], left: int, end: float
) -> Job:
    prompt, output = history + scale.tokens(rng, 50, 400), scale.tokens(rng, 32, 128)

    def then(answered: float) -> Job | None:
        at = answered + rng.expovariate(0.5)  # the user reads, thinks and types
        if left == 1 or at >= end:
            return None
        return _turn(scale, rng, at, prompt + output, left - 1, end)

    return Job(now, prompt, output, then)


def nothing_shared(num_replicas: int, per_replica: int, scale: Scale = _AS_IT_IS) -> list[Job]:
    rng = random.Random(3)
    return [
        Job(now, scale.tokens(rng, 100, 1500), scale.tokens(rng, 32, 96))
        for now in scale.arrivals(rng, 11 * num_replicas, per_replica * num_replicas)
    ]


TRACES = {
    "one hot prefix": hot_prefix,
    "conversations": conversations,
    "nothing shared": nothing_shared,
}


# ---------------------------------------------------------------- a run


@dataclass
class Found:
    hits: float
    spread: float
    mean_ttft: float
    p99_ttft: float
    seconds: float
    busy: float


def simulate(num_replicas: int, jobs: list[Job], kind: type[Policy]) -> Found:
    replicas = [Replica() for _ in range(num_replicas)]
    policy, hasher = kind(replicas), PrefixRouter(_BLOCK_SIZE, _SEED)
    order = itertools.count()
    events: list[tuple[float, int, Any]] = [(job.arrival, next(order), job) for job in jobs]
    heapq.heapify(events)
    waits: list[float] = []
    now = 0.0

    def begin(index: int) -> None:
        heapq.heappush(events, (now + replicas[index].begin(), next(order), index))

    while events:
        now, number, event = heapq.heappop(events)
        if isinstance(event, Job):
            event.hashes = hasher.hashes(event.prompt)
            event.replica = policy.choose(event)
            policy.sent(event)
            replicas[event.replica].add(event, number)
            if replicas[event.replica].plan is None:
                begin(event.replica)
            continue
        answered, done = replicas[event].end()
        for job in answered:
            waits.append(now - job.arrival)
            policy.answered(job)
        policy.stepped(event)
        for job in done:
            policy.done(job)
            following = job.then(now)
            if following is not None:
                heapq.heappush(events, (following.arrival, next(order), following))
        if replicas[event].scheduler.has_unfinished():
            begin(event)
    schedulers = [replica.scheduler for replica in replicas]
    queried = sum(scheduler.num_queried_tokens for scheduler in schedulers)
    computed = [replica.num_computed for replica in replicas]
    waits.sort()
    return Found(
        hits=sum(scheduler.num_hit_tokens for scheduler in schedulers) / queried,
        spread=max(computed) * num_replicas / sum(computed),
        mean_ttft=sum(waits) / len(waits),
        p99_ttft=waits[int(0.99 * len(waits))],
        seconds=now,
        busy=sum(replica.busy for replica in replicas) / num_replicas / now,
    )


def table(trace: str, num_replicas: int, per_replica: int) -> None:
    print(f"\n### {trace}, {num_replicas} replicas\n")
    print("| router | hits | spread | TTFT mean | p99 | seconds | busy |")
    print("|---|---|---|---|---|---|---|")
    for name, kind in POLICIES.items():
        found = simulate(num_replicas, TRACES[trace](num_replicas, per_replica), kind)
        print(
            f"| {name} | {found.hits:.1%} | {found.spread:.2f} | {1e3 * found.mean_ttft:.0f} "
            f"| {1e3 * found.p99_ttft:.0f} | {found.seconds:.1f} | {found.busy:.0%} |",
            flush=True,
        )


def cost() -> None:
    """Return microseconds of the most expensive choice: a prompt that is cached everywhere."""
    print("\n| prompt | replicas | hash us | choose us |\n|---|---|---|---|")
    for num_tokens, num_replicas in itertools.product((100, 1000, 8000), (2, 64)):
        router = PrefixRouter(_BLOCK_SIZE, _SEED)
        names = [str(index) for index in range(num_replicas)]
        prompt = list(range(num_tokens))
        for name in names:
            router.add_replica(name, 2048)
            router.sent(name, router.hashes(prompt))
        loads, count = dict.fromkeys(names, 100.0), 200
        start = time.perf_counter()
        for _ in range(count):
            hashes = router.hashes(prompt)
        middle = time.perf_counter()
        for _ in range(count):
            router.sent(router.choose(hashes, num_tokens, loads), hashes)
        end = time.perf_counter()
        microseconds = [1e6 * each / count for each in (middle - start, end - middle)]
        print(f"| {num_tokens} | {num_replicas} | {microseconds[0]:.0f} | {microseconds[1]:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    args = parser.parse_args()
    if not args.cost:
        for num_replicas in [4] if args.quick else args.replicas:
            for trace in TRACES:
                table(trace, num_replicas, 60 if args.quick else 250)
    cost()


if __name__ == "__main__":
    main()
