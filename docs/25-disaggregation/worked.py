"""Chapter 25's numbers: bytes of KV on links, and a simulation of prefill and decode in two pools.

The engine's pair of servers is not used here. Times of steps, a link, and the KV slots are
simulated; the engine's own `Scheduler` and `BlockManager`, one of each for a GPU, decide which
sequences run in a step and which blocks they own. A KV slot holds a number that represents the
prefix for which it was computed, and the next token is derived from the number that is *read from
the KV slots*: so K and V that were not transferred, or are those of another request, produce
another token.

Times are those of LLaMA-3.1-8B in 16 bits on one H100 (3.35 TB/s; half of 989 TFLOP/s): a step
takes as long as reading the weights or as its arithmetic, whichever is longer, and in addition as
long as reading K and V.
"""

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from functools import cache, partial

from tables import table

from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

# Parameters, bytes of K and V of a token, GPUs. Two bytes a number; the last model stores a
# compressed K and V (MLA: 512 + 64 numbers a layer), and has 37 of 671 billion parameters active.
MODELS = {
    "LLaMA-2-7B": (6.74e9, 2 * 32 * 32 * 128 * 2, 1),
    "LLaMA-3.1-8B": (8.03e9, 2 * 32 * 8 * 128 * 2, 1),
    "LLaMA-2-70B": (68.98e9, 2 * 80 * 8 * 128 * 2, 4),
    "DeepSeek-V3": (37e9, 61 * (512 + 64) * 2, 16),
}
FLOPS, BANDWIDTH = 0.5 * 989e12, 3.35e12  # of one H100
LINKS = {"NVLink": 450e9, "400 Gb/s": 50e9, "100 Gb/s": 12.5e9, "10 Gb/s": 1.25e9}
PCIE = 50e9

PARAMETERS, KV_BYTES, _ = MODELS["LLaMA-3.1-8B"]
NUM_LAYERS = 32
# Seconds: to read the weights for a step, to compute a token.
READ, TOKEN = 2 * PARAMETERS / BANDWIDTH, 2 * PARAMETERS / FLOPS
CONTEXT = KV_BYTES / BANDWIDTH  # seconds for each token that is attended to
BLOCK_SIZE, MAX_LEN, VOCAB = 16, 8192, 1000
KV_IN_TRANSFER = "its K and V are being transferred"  # a reason to be held


# ---------------------------------------------------------------- bytes


def transfer_table(num_tokens: int) -> str:
    """Table: K and V of a prompt, the times to send them over links, and to compute them."""
    rows = []
    for name, (_, kv_bytes, num_gpus) in MODELS.items():
        size = num_tokens * kv_bytes
        times = [f"{size / rate * 1e3:,.1f} ms" for rate in LINKS.values()]
        computed = f"{compute_seconds(name, num_tokens) * 1e3:,.0f} ms"
        hidden = f"{hidden_from(name) / 1e9:.1f} GB/s"
        rows.append((name, num_gpus, f"{size / 1e6:,.0f} MB", *times, computed, hidden))
    header = ("model", "GPUs", "K and V", *LINKS, "computed in", "hidden from")
    return table(header, rows)


def compute_seconds(model: str, num_tokens: int) -> float:
    """Time of the arithmetic of a prompt, without attention."""
    parameters, _, num_gpus = MODELS[model]
    return 2 * parameters * num_tokens / (num_gpus * FLOPS)


def hidden_from(model: str) -> float:
    """Bytes per second of a link that sends K and V as fast as they are computed."""
    return MODELS[model][1] / compute_seconds(model, 1)


def tier_table(num_tokens: int) -> str:
    """Table: one GPU's part of a prefix, loaded over PCIe from the host, or computed again."""
    rows = []
    for name, (_, kv_bytes, num_gpus) in list(MODELS.items())[:3]:  # whose KV heads are divided
        load, again = num_tokens * kv_bytes / num_gpus / PCIE, compute_seconds(name, num_tokens)
        rows.append((name, f"{load * 1e3:.1f} ms", f"{again * 1e3:.0f} ms", f"{again / load:.0f}x"))
    return table(("model", "load", "compute", "gain"), rows)


def piece_bytes(contiguous: bool) -> int:
    """Bytes of a block of 16 tokens that one copy moves: K or V of one layer, or all of it."""
    return BLOCK_SIZE * KV_BYTES // (1 if contiguous else 2 * NUM_LAYERS)


def step_ms(num_tokens: int) -> float:
    """Time of a step of this many tokens, without reading K and V."""
    return max(READ, TOKEN * num_tokens) * 1e3


def balanced_tokens() -> int:
    """Tokens per step at which computing takes as long as reading the weights."""
    return round(READ / TOKEN)


# ---------------------------------------------------------------- the simulation


@dataclass(eq=False)
class Job:
    """A request: its prompt and output length, and when it got each token."""

    number: int
    arrival: float
    prompt: list[int]
    num_output: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    log: dict[str, float] = field(default_factory=dict)  # with two pools: the times of events


class Pool:
    """A GPU: a scheduler, KV slots that hold digests, and steps that take simulated time."""

    def __init__(self, num_blocks: int, budget: int, block_size: int = BLOCK_SIZE) -> None:
        options = {"max_num_seqs": 256, "max_num_batched_tokens": max(256, budget)}
        config = EngineConfig("none", prefix_cache_seed=0, block_size=block_size, **options)
        self.scheduler = Scheduler(config.for_device("cpu"), num_blocks, MAX_LEN)
        self.manager = self.scheduler.block_manager
        self.kv = [0] * ((num_blocks + 1) * block_size)
        self.plan, self.began, self.busy = None, 0.0, 0.0
        self.num_wrong_reads, self.checks_all = 0, False
        self.settle = lambda admitted: False  # gets the admitted ones; True if it freed blocks
        self.jobs: dict[Sequence, Job] = {}

    def add(self, job: Job, token_ids: list[int], max_tokens: int) -> Sequence:
        seq = sequence(token_ids, max_tokens, job.number)
        self.jobs[seq] = job
        return seq

    def begin(self, now: float) -> float | None:
        """Plan a step. Return its duration in seconds, or None if there is nothing to do."""
        plan = self.scheduler.schedule()
        while self.settle(plan.admitted) and not plan.rows:  # blocks were freed: are they enough?
            plan = self.scheduler.schedule()
        if not plan.rows:
            return None
        attended = sum(row.start + row.n for row in plan.rows)
        seconds = max(READ, TOKEN * plan.num_tokens) + CONTEXT * attended
        self.plan, self.began, self.busy = plan, now, self.busy + seconds
        return seconds

    def end(self, before_update=lambda sampled: None) -> list[tuple[Sequence, int]]:
        """The sampled tokens of the step. `before_update` gets them while all blocks are held."""
        plan, self.plan = self.plan, None
        admitted = set(plan.admitted)
        # A sequence that shares blocks filled by this step starts after the one that fills them.
        for seq, start, n, _, _ in sorted(plan.rows, key=lambda row: row.start):
            digest = self.kv[self._slots(seq, start - 1, start)[0]] if start else 0
            if self.checks_all or seq in admitted:  # later steps append to what was checked
                digest += self._is_wrong(seq, start)
            slots = self._slots(seq, start, start + n)
            for slot, token in zip(slots, seq.token_ids[start : start + n], strict=True):
                self.kv[slot] = digest = mix(digest, token)
        self.scheduler.commit(plan)
        sampled = [(row.seq, self._token(row.seq)) for row in plan.sampled]
        before_update(sampled)
        self.scheduler.update(plan, [[token] for _, token in sampled])
        return sampled

    def _token(self, seq: Sequence) -> int:
        last = len(seq.token_ids) - 1
        return self.kv[self._slots(seq, last, last + 1)[0]] % VOCAB

    def _is_wrong(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether attention reads a KV slot that was computed for another prefix than its own."""
        digest = 0
        for slot, token in zip(self._slots(seq, 0, num_tokens), seq.token_ids, strict=False):
            digest = mix(digest, token)
            if self.kv[slot] != digest:
                self.num_wrong_reads += 1
                return True
        return False

    def _slots(self, seq: Sequence, start: int, end: int) -> list[int]:
        """The KV slots of the tokens at these positions."""
        size, blocks = self.manager.block_size, seq.block_table
        return [blocks[position // size] * size + position % size for position in range(start, end)]


class OnePool:
    """Some GPUs, which get the requests in turn and compute prompts and answers in mixed steps."""

    def __init__(self, pools: list[Pool]) -> None:
        self.pools = pools

    def arrive(self, job: Job, run: "Run") -> None:
        index = job.number % len(self.pools)
        pool = self.pools[index]
        pool.scheduler.add(pool.add(job, job.prompt, job.num_output))
        run.wake(index)

    def ended(self, index: int, run: "Run") -> None:
        for seq, token in self.pools[index].end():
            run.deliver(self.pools[index].jobs[seq], token)


@dataclass(eq=False)
class Transfer:
    """K and V of a prompt's full blocks, from the pool that computed them to the one that needs
    them. `source` and `target` are not requests: they hold blocks, so that no request gets them."""

    job: Job
    source: Sequence
    blocks: list[int]  # of the source
    began: float  # the step that computed them
    target: Sequence | None = None
    num_cached: int = 0  # blocks that the target pool already has


class TwoPools:
    """A GPU for prompts, one for answers, and a link between them.

    The first token is sampled where the prompt was computed. The answer's sequence is held until
    its K and V have arrived; then it is queued, and finds them as any request finds a cached
    prefix. Until it is admitted, the blocks are kept for it.
    With `layerwise`, a layer is sent as soon as it is computed: a transfer may begin with the step
    that computes the prompt (its last one, if it has several), and only the last layer must be sent
    after it. Without `leases`, the source's blocks are free as soon as the prompt is computed.
    """

    def __init__(
        self,
        pools: list[Pool],
        rate: float,
        latency: float = 1e-4,
        layerwise: bool = True,
        leases: bool = True,
    ) -> None:
        self.pools = pools
        self.rate, self.latency, self.layerwise, self.leases = rate, latency, layerwise, leases
        self.pending: deque[Transfer] = deque()  # wait for blocks of the decode pool
        self.held: dict[Job, Sequence] = {}
        self.in_flight = 0
        self.kept: dict[Sequence, Transfer] = {}  # arrived; their sequence is not admitted yet
        pools[1].settle = self._settle
        self.link_free, self.num_bytes = 0.0, 0

    def arrive(self, job: Job, run: "Run") -> None:
        prefill = self.pools[0]
        prefill.scheduler.add(prefill.add(job, job.prompt, 1))
        run.wake(0)

    def ended(self, index: int, run: "Run") -> None:
        pool = self.pools[index]
        sampled = pool.end(partial(self._keep, pool) if index == 0 else lambda sampled: None)
        for seq, token in sampled:
            run.deliver(pool.jobs[seq], token)
        self.start_transfers(run)

    def _keep(self, pool: Pool, sampled: list[tuple[Sequence, int]]) -> None:
        """Prompts have been computed: keep their blocks, and hold the sequences of the answers."""
        for seq, token in sampled:
            job = pool.jobs[seq]
            if job.num_output == 1:
                continue
            known = [*job.prompt, token]
            source = sequence(known, 1, job.number)
            hits = pool.manager.lookup(source)
            if self.leases:
                pool.manager.allocate(source, len(hits) * pool.manager.block_size, hits)
            blocks = [block for (block,) in hits]  # layers are one group here
            self.pending.append(Transfer(job, source, blocks, pool.began))
            answer = self.pools[1].add(job, known, job.num_output - 1)
            self.pools[1].scheduler.hold(answer, KV_IN_TRANSFER)
            self.held[job] = answer

    def start_transfers(self, run: "Run") -> None:
        """Start transfers from the head of the line, while there are blocks to receive them."""
        pool = self.pools[1]
        size = pool.manager.block_size
        while self.pending:
            transfer = self.pending[0]
            target = sequence([*transfer.job.prompt, 0], 1, transfer.job.number)
            needed = pool.manager.blocks_needed(len(target.token_ids))
            if needed + self._reserved() > pool.manager.num_free_blocks:
                return  # no transfer overtakes the head
            hits = pool.manager.lookup(target)
            pool.manager.allocate(target, len(transfer.blocks) * size, hits)
            self.pending.popleft()
            self.in_flight += 1
            transfer.target, transfer.num_cached = target, len(hits)
            run.at(self._arrival(transfer, run.now), partial(self._arrived, transfer))

    def _reserved(self) -> int:
        """Blocks that requests before the head will still need: one more for those whose blocks are
        kept, and all for the others."""
        scheduler, needed = self.pools[1].scheduler, self.pools[1].manager.blocks_needed
        others = [seq for seq in scheduler.waiting if seq not in self.kept]
        return self.in_flight + len(self.kept) + sum(needed(seq.num_tokens) for seq in others)

    def _settle(self, admitted: list[Sequence]) -> bool:
        """Free what was kept for admitted sequences, which now share these blocks. After a
        preemption, free all that is kept: it stays cached until the blocks are needed, and can be
        computed again. Return whether this freed blocks after a preemption."""
        manager, scheduler = self.pools[1].manager, self.pools[1].scheduler
        gone = [self.kept.pop(seq) for seq in admitted if seq in self.kept]
        give_up = any(seq not in self.kept for seq in scheduler.waiting)
        if give_up:
            gone += self.kept.values()
            self.kept.clear()
        for transfer in gone:
            manager.free(transfer.target)
        return give_up and bool(gone)

    def _arrival(self, transfer: Transfer, now: float) -> float:
        """The time at which the last byte arrives. Transfers use the link one at a time."""
        num_blocks = len(transfer.blocks) - transfer.num_cached
        num_bytes = num_blocks * self.pools[1].manager.block_size * KV_BYTES
        seconds = num_bytes / self.rate
        begin = max(transfer.began if self.layerwise else now, self.link_free)
        self.link_free = begin + seconds
        if self.layerwise:  # the last layer is computed when the step ends, which is now
            self.link_free = max(self.link_free, now + seconds / NUM_LAYERS)
        self.num_bytes += num_bytes
        transfer.job.log |= {"transfer begins": begin, "transfer ends": self.link_free}
        return self.link_free + self.latency

    def _arrived(self, transfer: Transfer, run: "Run") -> None:
        prefill, decode = self.pools
        size = decode.manager.block_size
        pairs = list(zip(transfer.blocks, transfer.target.block_table, strict=True))
        for theirs, ours in pairs[transfer.num_cached :]:
            part = prefill.kv[theirs * size : (theirs + 1) * size]
            decode.kv[ours * size : (ours + 1) * size] = part
        decode.manager.cache(transfer.target, len(transfer.blocks) * size)
        prefill.manager.free(transfer.source)
        seq = self.held.pop(transfer.job)
        self.kept[seq] = transfer
        self.in_flight -= 1
        decode.scheduler.release([seq], KV_IN_TRANSFER)
        transfer.job.log["released"] = run.now
        run.wake(0)  # its blocks are free again
        run.wake(1)
        self.start_transfers(run)


class Run:
    """Runs requests to the end, with a clock and a queue of events."""

    def __init__(self, setup: OnePool | TwoPools, jobs: list[Job]) -> None:
        self.setup, self.jobs, self.now = setup, jobs, 0.0
        self._order = itertools.count()
        self._events: list = []
        for job in jobs:
            self.at(job.arrival, partial(setup.arrive, job))
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen(self)

    def at(self, time: float, happen) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def wake(self, index: int) -> None:
        """Let a pool begin a step, if none is in flight and there is work."""
        pool = self.setup.pools[index]
        if pool.plan is None and (seconds := pool.begin(self.now)) is not None:
            self.at(self.now + seconds, partial(self._ended, index))

    def deliver(self, job: Job, token: int) -> None:
        job.tokens.append(token)
        job.times.append(self.now)

    @staticmethod
    def _ended(index: int, run: "Run") -> None:
        run.setup.ended(index, run)
        run.wake(index)


def sequence(token_ids: list[int], max_tokens: int, arrival: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(str(arrival), list(token_ids), params, MAX_LEN, arrival=arrival)


def mix(digest: int, token: int) -> int:
    """Represents K and V: depends on the token and on all tokens before it."""
    return (digest * 6364136223846793005 + token + 1442695040888963407) % 2**64


def make_jobs(
    rate: float, prompts: tuple[int, int], outputs: tuple[int, int], count: int = 40
) -> list[Job]:
    """Random arrivals, `rate` per second on average; no two prompts have a common prefix."""
    rng, now, jobs = random.Random(1), 0.0, []
    for number in range(count):
        now += rng.expovariate(rate)
        prompt = rng.choices(range(VOCAB), k=rng.randint(*prompts))
        jobs.append(Job(number, now, prompt, rng.randint(*outputs)))
    return jobs


# ---------------------------------------------------------------- results

TRAFFIC = {
    "long prompts": ((1000, 4000), (20, 80)),
    "long answers": ((100, 500), (150, 300)),
}
SETUPS = ("one pool, chunks of 2,048", "one pool, chunks of 256", "two pools")


def make_setup(name: str, rate: float = LINKS["400 Gb/s"], **options: bool) -> OnePool | TwoPools:
    """A setup of two GPUs."""
    if name == "two pools":
        return TwoPools([Pool(8192, 8192), Pool(8192, 2048)], rate, **options)
    budget = 2048 if "2,048" in name else 256
    return OnePool([Pool(8192, budget), Pool(8192, budget)])


@cache
def run(setup: str, traffic: str, rate: float, link: str = "400 Gb/s", layerwise: bool = True):
    options = {"layerwise": layerwise} if setup == "two pools" else {}
    made = make_setup(setup, LINKS[link], **options)
    return Run(made, make_jobs(rate, *TRAFFIC[traffic]))


def ttfts(jobs: list[Job]) -> list[float]:
    return sorted(job.times[0] - job.arrival for job in jobs)


def gaps(jobs: list[Job]) -> list[float]:
    return sorted(b - a for job in jobs for a, b in itertools.pairwise(job.times))


def first_gaps(jobs: list[Job]) -> list[float]:
    """Times between first and second token, in which two pools send K and V."""
    return sorted(job.times[1] - job.times[0] for job in jobs if len(job.times) > 1)


def percentile(values: list[float], percent: float) -> float:
    """A percentile of sorted values, by the nearest rank."""
    return values[max(0, -(-len(values) * percent // 100).__trunc__() - 1)]


def load_table(traffic: str, rates: list[float]) -> str:
    rows = []
    for rate in rates:
        for setup in SETUPS:
            done = run(setup, traffic, rate)
            first, between = ttfts(done.jobs), gaps(done.jobs)
            cells = [_ms(percentile(first, p)) for p in (50, 95)]
            cells += [_ms(percentile(between, p)) for p in (50, 99)]
            rows.append((f"{rate:g}/s", setup, *cells))
    names = ("TTFT, median", "p95", "ITL, median", "p99")
    return table(("arrivals", "two GPUs as", *names), rows)


def link_table(traffic: str, rate: float) -> str:
    """Table: the gap in which K and V are sent, by link, after the prompt or layer by layer."""
    rows = []
    for link in LINKS:
        cells = []
        for layerwise in (False, True):
            between = first_gaps(run("two pools", traffic, rate, link, layerwise).jobs)
            cells += [_ms(percentile(between, p)) for p in (50, 95)]
        rows.append((link, *cells))
    return table(("link", "whole: median", "p95", "by layer: median", "p95"), rows)


def busy(traffic: str, rate: float) -> float:
    """The fraction of the time in which the GPU for prompts computes."""
    done = run("two pools", traffic, rate)
    return done.setup.pools[0].busy / done.now


def needed_rate(rate: float, mean_tokens: int) -> float:
    """Bytes per second that the link must carry."""
    return rate * mean_tokens * KV_BYTES


def life_table(number: int = 30) -> str:
    """Table: the events of one request with two pools, in ms since its arrival."""
    job = run("two pools", "long prompts", 4, "100 Gb/s").jobs[number]
    moments = {"first token": job.times[0], **job.log, "second token": job.times[1]}
    moments |= {f"last token, of {len(job.tokens)}": job.times[-1]}
    rows = [("arrives", f"with {len(job.prompt):,} tokens", "0.0")]
    where = {"first token": "prefill", "transfer begins": "link", "transfer ends": "link"}
    for what, time in sorted(moments.items(), key=lambda each: each[1]):
        rows.append((what, where.get(what, "decode"), f"{(time - job.arrival) * 1e3:.1f}"))
    return table(("event", "where", "ms"), rows)


def without_leases(leases: bool) -> str:
    """How many requests get other tokens than from one pool, of how many. The prefill pool is small
    and the link slow, so freed blocks are soon taken for another prompt."""
    jobs = make_jobs(12, *TRAFFIC["long prompts"], count=40)
    Run(TwoPools([Pool(600, 8192), Pool(8192, 2048)], LINKS["10 Gb/s"], leases=leases), jobs)
    right = make_jobs(12, *TRAFFIC["long prompts"], count=40)
    Run(OnePool([Pool(8192, 2048)]), right)
    wrong = sum(a.tokens != b.tokens for a, b in zip(jobs, right, strict=True))
    return f"{wrong} of {len(jobs)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.0995 else f"{seconds * 1e3:.1f} ms"
