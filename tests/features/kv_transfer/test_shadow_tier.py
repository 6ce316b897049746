"""The host tier under the shadow-KV oracle: each place remembers whose K and V it holds."""

from collections.abc import Callable
from typing import Any

import pytest
from late_executor import copy_blocks
from shadow_kv import Corruption, ShadowRun

from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.extension import Extension
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import HostTier


class TierRun(ShadowRun):
    """A run of the scheduler with a tier of a few places, which are often too few."""

    def __init__(self, seed: int) -> None:
        extensions: list[Extension] = []
        super().__init__(seed, lambda *args, **kw: Scheduler(*args, extensions=extensions, **kw))
        num_places = self.rng.choice([1, 2, 5, 20, 100])
        manager = self.scheduler.block_manager
        self.tier = HostTier(manager, HostPlaces(manager.prefix_cache, num_places))
        extensions.append(self.tier)
        self.places: list[list[tuple[int, int]]] = [[] for _ in range(num_places)]

    def _store_and_attend(self, plan: Plan) -> None:
        inputs = ForwardInputs()
        self.tier.forward_inputs(plan, inputs)
        self.tier.places.check()
        if inputs.kv_transfers is not None:
            self._copy(inputs.kv_transfers)
        super()._store_and_attend(plan)

    def _reset(self) -> None:
        """The step has failed before its copies, or among them."""
        inputs = ForwardInputs()
        self.tier.forward_inputs(Plan(0), inputs)
        if inputs.kv_transfers is not None:
            to_host, to_device = inputs.kv_transfers
            done = self.rng.randint(0, len(to_host) + len(to_device))
            self._copy(KVTransfers(to_host[:done], to_device[: max(0, done - len(to_host))]))
        super()._reset()
        self.tier.places.check()

    def _copy(self, transfers: KVTransfers) -> None:
        copy_blocks(self.shadow, self.places, transfers, self.block_size)


def test_no_run_reads_kv_of_another_prefix(by_size: Callable[..., int]) -> None:
    num_runs = by_size(600, 6000, 100_000)
    loaded = evicted = of_groups = 0
    for seed in range(num_runs):
        run = TierRun(seed)
        try:
            run.run()
        except (Corruption, RuntimeError) as error:
            pytest.fail(f"seed {seed}: {error}")
        loaded += run.tier.stats.num_loaded > 0
        evicted += run.tier.stats.num_evicted > 0
        of_groups += len(run.windows) > 1 and run.tier.stats.num_loaded > 0
    assert min(loaded, evicted, 5 * of_groups) > 0.1 * num_runs, (loaded, evicted, of_groups)


def copied_in_first(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TierRun._copy

    def copy(self: TierRun, transfers: KVTransfers) -> None:
        original(self, KVTransfers([], transfers.to_device))
        original(self, KVTransfers(transfers.to_host, []))

    monkeypatch.setattr(TierRun, "_copy", copy)


def copied_after_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def store(self: TierRun, plan: Plan) -> None:
        inputs = ForwardInputs()
        self.tier.forward_inputs(plan, inputs)
        ShadowRun._store_and_attend(self, plan)
        if inputs.kv_transfers is not None:
            self._copy(inputs.kv_transfers)

    monkeypatch.setattr(TierRun, "_store_and_attend", store)


def kept_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places and the prefixes they are known by, as if the failed step had been computed."""

    def clear(self: Any) -> None:
        self._prefixes = {key: p for key, p in self._prefixes.items() if p.num_kept}
        self._prefix_of = [None] * (self._num_blocks + 1)
        for prefix in self._prefixes.values():
            prefix.blocks = [[] for _ in prefix.blocks]

    monkeypatch.setattr("nanoserve.engine.prefix_cache.PrefixCache.clear", clear)
    monkeypatch.setattr(HostPlaces, "check", lambda self: None)


def overwrites_what_will_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HostPlaces._take

    def take(self: HostPlaces) -> int | None:
        self._read.clear()
        self._wanted.clear()
        return original(self)

    monkeypatch.setattr(HostPlaces, "_take", take)
    monkeypatch.setattr(HostPlaces, "check", lambda self: None)


def covers_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HostTier.on_admit

    def on_admit(self: HostTier, seq: Sequence) -> int:
        size = self._manager.block_size
        self._chain = self._cache.chain(seq, len(seq.token_ids) // size)
        seq.num_allocated_tokens += size
        num_filled = original(self, seq)
        seq.num_allocated_tokens -= size
        return num_filled

    monkeypatch.setattr(HostTier, "on_admit", on_admit)


def skips_a_missing_block(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HostTier.on_admit

    def on_admit(self: HostTier, seq: Sequence) -> int:
        num_filled, size = original(self, seq), self._manager.block_size
        end = seq.num_computed_tokens + num_filled + size
        has_more = self.places and end < min(len(seq.token_ids), seq.num_allocated_tokens)
        return num_filled + size if has_more else num_filled

    monkeypatch.setattr(HostTier, "on_admit", on_admit)


def forgets_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HostTier.on_removed

    def on_removed(self: HostTier, block: int, block_hash: bytes, group: int, last: bool) -> None:
        original(self, block, block_hash, 0, last)
        groups = range(1, len(self._manager.windows))
        prefix = self._cache.keep(block_hash)
        places = self.places._places
        if (prefix, 0) in places:
            places |= {(prefix, g): places[prefix, 0] for g in groups}

    monkeypatch.setattr(HostTier, "on_removed", on_removed)
    monkeypatch.setattr(HostPlaces, "check", lambda self: None)


PLANTED_BUGS = {
    copied_in_first: 31,
    copied_after_the_model: 4,
    kept_after_a_failure: 195,
    overwrites_what_will_be_read: 202,
    covers_the_last_token: 8,
    skips_a_missing_block: 1,
    forgets_the_group: 15,
}


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_the_oracle_catches(plant, full_size: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the invariants, which would see some of these before the oracle does."""
    plant(monkeypatch)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    known = PLANTED_BUGS[plant]
    seeds = [*range(3000), known] if full_size else [known, *range(3000)]
    for seed in seeds:
        try:
            TierRun(seed).run()
        except (Corruption, IndexError, KeyError, ValueError, RuntimeError):
            return
    pytest.fail("3000 runs with a planted bug, and none was caught")
