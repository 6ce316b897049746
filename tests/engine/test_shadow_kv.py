"""The scheduler under the shadow-KV oracle, and proof that the oracle sees planted bugs."""

from collections.abc import Callable
from typing import Any

import pytest
from shadow_kv import Corruption, ShadowRun

from nanoserve.engine import prefix_cache
from nanoserve.engine.block_manager import BlockManager, Hits
from nanoserve.engine.prefix_cache import PrefixCache
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus


def test_no_run_reads_kv_of_another_prefix(fuzz_runs: int) -> None:
    preempted = hit = aborted = 0
    for seed in range(fuzz_runs):
        run = ShadowRun(seed)
        try:
            run.run()
        except (Corruption, RuntimeError) as error:
            pytest.fail(f"seed {seed}: {error}")
        preempted += run.scheduler.num_preemptions > 0
        hit += run.scheduler.num_hit_tokens > 0
        aborted += any(seq.finish_reason == "abort" for seq in run.live)
    # The runs must be hard enough to mean something.
    assert min(preempted, hit, aborted) > 0.1 * fuzz_runs, (preempted, hit, aborted, fuzz_runs)


def collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hashes for all the blocks that there are."""
    original = prefix_cache.chain_hash
    monkeypatch.setattr(
        prefix_cache, "chain_hash", lambda parent, ids: bytes([original(parent, ids)[0] % 3])
    )


def test_hashes_that_collide_cost_hits_and_nothing_else(
    by_size: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    collide(monkeypatch)
    hit, num_runs = 0, by_size(60, 1000, 5000)
    for seed in range(num_runs):
        run = ShadowRun(seed)
        run.run()
        hit += run.scheduler.num_hit_tokens > 0
    assert hit > 0.1 * num_runs


def stale_hash_left_on_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: BlockManager) -> int:
        block, _ = self._free.popitem(last=False)
        self._ref_counts[block] = 1
        return block

    monkeypatch.setattr(BlockManager, "_take", take)


def hash_without_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block goes by its own tokens, and so does the proof of a hit."""
    original = prefix_cache.chain_hash
    monkeypatch.setattr(prefix_cache, "chain_hash", lambda parent, ids: original(b"", ids))

    def is_at(self: PrefixCache, prefix: Any, seq: Sequence, index: int, parent: Any) -> bool:
        return prefix.token_ids == self._content(seq, index)[0]

    monkeypatch.setattr(PrefixCache, "_is_at", is_at)


def hit_believed_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    collide(monkeypatch)
    monkeypatch.setattr(PrefixCache, "_is_at", lambda self, prefix, seq, index, parent: True)


def hit_covers_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(self: BlockManager, seq: Sequence) -> Hits:
        if not self.enable_prefix_caching or seq.needs_prompt_outputs:
            return []
        return self.prefix_cache.lookup(seq, len(seq.token_ids) // self.block_size)

    monkeypatch.setattr(BlockManager, "lookup", lookup)


def cached_beyond_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockManager.cache

    def cache(self: BlockManager, seq: Sequence, num_tokens: int) -> list[int]:
        allocated = len(seq.block_table) * self.block_size
        return original(self, seq, max(min(len(seq.token_ids), allocated), num_tokens))

    monkeypatch.setattr(BlockManager, "cache", cache)


def cached_one_block_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockManager.cache

    def cache(self: BlockManager, seq: Sequence, num_tokens: int) -> list[int]:
        return original(self, seq, min(len(seq.token_ids), num_tokens + 1))

    monkeypatch.setattr(BlockManager, "cache", cache)


def cached_before_preemption_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.grow

    def grow(self: Scheduler, seq: Sequence, n: int) -> bool:
        grown = original(self, seq, n)
        if grown:
            self.block_manager.cache(seq, seq.num_computed_tokens + n)
        return grown

    monkeypatch.setattr(Scheduler, "grow", grow)


def salt_left_out_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """And out of the proof: either of them would do."""
    monkeypatch.setattr(PrefixCache, "_root_of", lambda self, seq: self._root)

    def is_at(self: PrefixCache, prefix: Any, seq: Sequence, index: int, parent: Any) -> bool:
        is_same = prefix.token_ids == self._content(seq, index)[0]
        return (index == 0 or prefix.parent is parent) and is_same

    monkeypatch.setattr(PrefixCache, "_is_at", is_at)


def victim_left_in_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, seq: Sequence) -> None:
        if seq.status is not SequenceStatus.RUNNING:
            raise Corruption("a sequence is preempted that does not run")
        seq.num_computed_tokens = seq.num_pending = 0
        self._enqueue(seq)
        self._free(seq)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def failed_step_stays_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.reset

    def reset(self: Scheduler, sequences: list[Sequence]) -> None:
        cache = self.block_manager.prefix_cache
        known = cache._prefixes, cache._prefix_of
        original(self, sequences)
        cache._prefixes, cache._prefix_of = known

    monkeypatch.setattr(Scheduler, "reset", reset)


def released_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockManager._release_behind_windows

    def release(self: BlockManager, seq: Sequence) -> None:
        windows = self.windows
        self.windows = [window and window - 1 for window in windows]
        original(self, seq)
        self.windows = windows

    monkeypatch.setattr(BlockManager, "_release_behind_windows", release)


def hit_with_a_window_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.lookup

    def lookup(self: PrefixCache, seq: Sequence, max_blocks: int) -> Any:
        needed = self.num_needed
        self.num_needed = tuple(n and max(1, n - 1) for n in needed)
        try:
            return original(self, seq, max_blocks)
        finally:
            self.num_needed = needed

    monkeypatch.setattr(PrefixCache, "lookup", lookup)


def groups_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.lookup

    def lookup(self: PrefixCache, seq: Sequence, max_blocks: int) -> Any:
        return [(max(blocks),) * len(blocks) for blocks in original(self, seq, max_blocks)]

    monkeypatch.setattr(PrefixCache, "lookup", lookup)


# With the first seed whose run shows each.
PLANTED_BUGS = {
    stale_hash_left_on_reuse: 1,
    hash_without_parent: 0,
    hit_believed_by_its_hash: 0,
    hit_covers_the_last_token: 0,
    cached_beyond_the_step: 11,
    cached_one_block_early: 11,
    cached_before_preemption_is_over: 7342,
    salt_left_out_of_the_hash: 0,
    victim_left_in_running: 21,
    failed_step_stays_cached: 11,
    released_one_token_early: 0,
    hit_with_a_window_cut_short: 0,
    groups_share_blocks: 0,
}


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_the_oracle_catches(plant, full_size: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the invariants, which would see some of these before the oracle does."""
    plant(monkeypatch)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    known = PLANTED_BUGS[plant]
    # The search from 0 on, at small size after the known seed; one is rarer than 1 in 1000.
    seeds = [*range(1000), known] if full_size else [known, *range(1000)]
    for seed in seeds:
        try:
            ShadowRun(seed).run()
        except (Corruption, IndexError, KeyError, ValueError, AssertionError):
            return
    pytest.fail("1000 runs with a planted bug, and none was caught")
