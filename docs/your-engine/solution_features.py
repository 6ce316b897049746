"""A solution of `your_features.py`: three features, none of which changes `solution.py`."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from .your_engine import BlockManager, Config, Engine, Plan, Row, Scheduler, Sequence, draw, run

# -- Stage 11: a policy of your own --------------------------------------------------------------

Order = Callable[[Sequence], tuple[int, ...]]


def shortest_first(aging: int) -> Order:
    return lambda seq: (seq.max_len - seq.num_computed + aging * seq.arrival, seq.arrival)


class PolicyScheduler(Scheduler):
    def __init__(self, config: Config, order: Order) -> None:
        super().__init__(config)
        self.order, self.num_arrivals = order, 0

    def add(self, seq: Sequence) -> None:
        self.num_arrivals += 1
        seq.arrival = self.num_arrivals
        insort(self.waiting, seq, key=self.order)

    def make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        while not self.blocks.allocate(seq, seq.num_computed + n):
            victim = max(self.running, key=self.order)
            self.running.remove(victim)
            self.blocks.free(victim)
            victim.num_computed = 0
            insort(self.waiting, victim, key=self.order)
            plan.preempted.append(victim)
            plan.budget += sum(row.n for row in plan.rows if row.seq is victim)
            plan.rows = [row for row in plan.rows if row.seq is not victim]
            if victim is seq:
                return False
        return True


# -- Stage 12: KV offload ------------------------------------------------------------------------

HOST = 0  # among the hits: this block is in the host pool


class HostPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.contents: OrderedDict[bytes, Any] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.contents

    def get(self, block_hash: bytes) -> Any:
        return self.contents[block_hash]

    def put(self, block_hash: bytes, content: Any) -> None:
        self.contents[block_hash] = content
        self.contents.move_to_end(block_hash)
        while len(self.contents) > self.num_blocks:
            self.contents.popitem(last=False)


class OffloadManager(BlockManager):
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host: HostPool,
        read: Callable[[int], Any],
        write: Callable[[int, Any], None],
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.host, self.read, self.write = host, read, write

    def lookup(self, seq: Sequence) -> list[int]:
        hits = super().lookup(seq)
        hashes = self._hashes(seq, (len(seq.token_ids) - 1) // self.block_size)
        return hits + [HOST for _ in takewhile(self.host.__contains__, hashes[len(hits) :])]

    def allocate(self, seq: Sequence, num_tokens: int, hits: Collection[int] = ()) -> bool:
        here = [block for block in hits if block != HOST]
        # Read before the allocation: the blocks that it evicts may displace these.
        contents = [self.host.get(each) for each in seq.hashes[len(here) : len(hits)]]
        if not super().allocate(seq, num_tokens, here):
            return False
        for i, content in enumerate(contents, len(here)):
            self.write(seq.block_table[i], content)
        return True

    def _evict(self, block: int) -> None:
        block_hash = self.hash_of.get(block)
        if block_hash and self.blocks_of[block_hash] == [block]:  # it has no copy
            is_here = block_hash in self.host
            self.host.put(block_hash, self.host.get(block_hash) if is_here else self.read(block))
        super()._evict(block)


class OffloadEngine(Engine):
    def __init__(self, folder: Path, config: Config, host_blocks: int) -> None:
        super().__init__(folder, config)
        sizes = (config.num_blocks, config.block_size)
        host = HostPool(host_blocks)
        self.scheduler.blocks = OffloadManager(*sizes, host, self._read, self._write)

    def _read(self, block: int) -> Tensor:
        return self.pool.kv[:, :, block].clone()

    def _write(self, block: int, content: Tensor) -> None:
        self.pool.kv[:, :, block] = content


# -- Stage 13: async scheduling ------------------------------------------------------------------

PENDING = -1  # in place of a token that a step in flight will yield


def is_pending(seq: Sequence) -> bool:
    return seq.token_ids[-1] == PENDING


def drop_pending(seq: Sequence) -> None:
    if is_pending(seq):
        seq.token_ids.pop()


class KnownBlocks(BlockManager):
    def cache(self, seq: Sequence, num_tokens: int) -> None:
        super().cache(seq, min(num_tokens, len(seq.token_ids) - is_pending(seq)))


class AsyncScheduler(Scheduler):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.blocks = KnownBlocks(config.num_blocks, config.block_size)

    def share(self, seq: Sequence, budget: int) -> int:
        is_about_to_end = is_pending(seq) and len(seq.token_ids) >= seq.max_len
        return 0 if is_about_to_end else super().share(seq, budget)

    def make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        has_room = super().make_room(seq, n, plan)
        for victim in plan.preempted:
            drop_pending(victim)
        return has_room

    def commit(self, plan: Plan) -> None:
        for seq, start, n, catches_up in plan.rows:
            if seq.finish_reason:
                continue
            seq.num_computed = start + n
            self.blocks.cache(seq, start + n)  # a token that was pending is known by now
            if catches_up:
                seq.token_ids.append(PENDING)

    def update(self, plan: Plan, token_ids: list[int]) -> None:
        sampled = [row for row in plan.rows if row.catches_up]
        new = zip(sampled, token_ids, strict=True)
        live = [(row, token) for row, token in new if not row.seq.finish_reason]
        for row, _ in live:
            drop_pending(row.seq)
        # `commit` has counted the computed tokens: here n is 0.
        rows = [row._replace(n=0) for row, _ in live]
        super().update(Plan(0, rows), [token for _, token in live])

    def finish(self, seq: Sequence, reason: str) -> None:
        drop_pending(seq)
        super().finish(seq, reason)


class AsyncEngine(Engine):
    def __init__(self, folder: Path, config: Config) -> None:
        super().__init__(folder, config)
        self.scheduler = AsyncScheduler(config)
        self.device = ThreadPoolExecutor(1)
        self.in_flight: tuple[Plan, Future[list[int]]] | None = None
        self.last: dict[Sequence, int] = {}  # tokens of the last step; only the device uses it

    def step(self) -> dict[Sequence, str]:
        plan = self.scheduler.schedule()
        owners = [row.seq for row in plan.rows]
        # The device reads copies: the loop changes the sequences while it computes.
        copies = [
            replace(seq, token_ids=[*seq.token_ids], block_table=[*seq.block_table])
            for seq in owners
        ]
        rows = [row._replace(seq=seq) for row, seq in zip(plan.rows, copies, strict=True)]
        job = self.device.submit(self._compute, owners, rows) if rows else None
        pieces = self._collect()
        if job:
            self.scheduler.commit(plan)
            self.in_flight = plan, job
        return pieces

    def _compute(self, owners: list[Sequence], rows: list[Row]) -> list[int]:
        for owner, row in zip(owners, rows, strict=True):
            if is_pending(row.seq):
                row.seq.token_ids[-1] = self.last[owner]
        logits = run(self.model, self.pool, rows)
        sampled = [row.seq for row in rows if row.catches_up]
        tokens = [draw(x, seq) for x, seq in zip(logits, sampled, strict=True)]
        whose = [owner for owner, row in zip(owners, rows, strict=True) if row.catches_up]
        self.last = dict(zip(whose, tokens, strict=True))
        return tokens

    def _collect(self) -> dict[Sequence, str]:
        if self.in_flight is None:
            return {}
        (plan, job), self.in_flight = self.in_flight, None
        sampled = [row.seq for row in plan.rows if row.catches_up and not row.seq.finish_reason]
        self.scheduler.update(plan, job.result())
        return {seq: self._show(seq) for seq in sampled}
