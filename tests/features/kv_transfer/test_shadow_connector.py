"""A connector under the late device: what is read too early, or kept too long, is another prefix.

Loads and stores run when chance says so, long after they were started, as threads may. Each place
of the host holds the prefixes that its K and V were computed for.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from ahead_run import AheadRun
from late_executor import require

from nanoserve.features.kv_transfer import loads, stores
from nanoserve.features.kv_transfer.block_keys import BlockKeys
from nanoserve.features.kv_transfer.calls import ConnectorCalls
from nanoserve.features.kv_transfer.connector import BlockKey, Prompt
from nanoserve.features.kv_transfer.loads import ConnectorLoads
from nanoserve.features.kv_transfer.staging import Staging
from nanoserve.features.kv_transfer.stores import ConnectorStores

FIRST = 1000  # the first staging place; those of the host tier come before it


class Pool:
    """In place of threads: what was submitted runs when chance says so, in order."""

    def __init__(self, run: "ConnectorRun") -> None:
        self.chance, self.jobs = run.rng, []

    def submit(self, call: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.jobs.append((future, call, args))
        return future

    def run_some(self, rate: float) -> None:
        while self.jobs and self.chance.random() < rate:
            future, call, args = self.jobs.pop(0)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args))
                except RuntimeError as error:
                    future.set_exception(error)

    def shutdown(self) -> None:
        self.run_some(2)


class Place:
    """The memory of a staging place on the late device."""

    def __init__(self, places: dict[int, Any], index: int) -> None:
        self.places, self.index = places, index


class Memory:
    def __init__(self, places: dict[int, Any]) -> None:
        self.places = places

    def __getitem__(self, index: int) -> Place:
        return Place(self.places, index)


class Shelf:
    """A connector that forgets, breaks down, and returns less than it has promised."""

    def __init__(self, run: "ConnectorRun") -> None:
        self.chance, self.blocks, self.num_loaded = run.rng, {}, 0
        self.failure_rate = run.rng.choice([0, 0, 0.1])
        self.is_awaited = self.always_loads = run.rng.random() < 0.5
        self.wrong: list[BlockKey] = []  # stored with another content than before

    def _may_fail(self) -> None:
        if self.chance.random() < self.failure_rate:
            raise RuntimeError("the shelf has fallen down")

    def find(self, keys: list[BlockKey], prompt: Prompt | None) -> int:
        self._may_fail()
        if self.blocks and self.chance.random() < 0.02:
            del self.blocks[self.chance.choice(list(self.blocks))]
        found = [key in self.blocks for key in keys]
        return found.index(False) if False in found else len(found)

    def load(self, keys: list[BlockKey], memory: list[Place], prompt: Prompt) -> int:
        assert len(prompt.token_ids) % len(keys[-1].token_ids) == 0
        assert tuple(prompt.token_ids[-len(keys[-1].token_ids) :]) == keys[-1].token_ids
        for index, (key, place) in enumerate(zip(keys, memory, strict=True)):
            self._may_fail()
            if key not in self.blocks or self.chance.random() < 0.05:
                return index
            place.places[place.index] = list(self.blocks[key])
            self.num_loaded += 1
        return len(keys)

    def store(self, keys: list[BlockKey], memory: list[Place]) -> None:
        for key, place in zip(keys, memory, strict=True):
            self._may_fail()
            content = list(place.places[place.index])
            if self.blocks.get(key, content) != content:  # the engine catches exceptions
                self.wrong.append(key)
            self.blocks[key] = content

    def close(self) -> None:
        pass


class ConnectorRun(AheadRun):
    """A run whose engine has a connector, in some runs also a host tier."""

    most_requests = 20
    has_arrived = False

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[Pool] = []
        monkeypatch.setattr(loads, "ThreadPoolExecutor", self._make_pool)
        monkeypatch.setattr(stores, "ThreadPoolExecutor", self._make_pool)
        monkeypatch.setattr(loads, "wait", lambda *args: self._run_pools(0.5))
        super().__init__(seed, seed % 3 > 0, num_places=(None, 2, 20)[seed % 3])

    def _make_pool(self, *args: Any) -> Pool:
        self.pools.append(Pool(self))
        return self.pools[-1]

    def _run_pools(self, rate: float) -> None:
        for pool in self.pools:
            pool.run_some(rate)

    def _add_extensions(self) -> None:
        engine, manager = self.engine, self.engine.scheduler.block_manager
        self.thread_rate = self.rng.choice([0.3, 0.05])
        self.reset_rate = self.rng.choice([0, 0.1, 0.3])
        num_groups, num_places = len(manager.windows), self.rng.choice([2, 5, 40])
        self.shelf = Shelf(self)
        self.staging = Staging(FIRST, num_places, lambda: Memory(self.executor.places))
        calls = ConnectorCalls(self.shelf, engine.clock)
        shared = calls, BlockKeys(b"", manager.block_size, num_groups), self.staging
        places = self.tier.places if self.tier is not None else None
        timeout, may_load = self.rng.choice([0, 100]), self.rng.random() < 0.8
        self.loads = ConnectorLoads(engine, *shared, places, timeout, lambda: may_load)
        self.stores = ConnectorStores(
            engine.scheduler, *shared, lambda: True, self.executor.copy_blocks
        )
        engine.add_extension(self.loads)
        engine.add_extension(self.stores)

    def _does_arrive(self) -> bool:
        """Some requests come together, others when the blocks of earlier ones are stored."""
        self.has_arrived = self.rng.random() < (0.6 if self.has_arrived else 0.08)
        return self.has_arrived

    def _step(self) -> None:
        self._run_pools(self.thread_rate)
        if self.rng.random() < self.reset_rate:  # as if the engine had been restarted
            self.engine.reset_prefix_cache()
        super()._step()

    def _ask(self, index: int) -> Any:
        """Half of the requests go on from an earlier prompt, as conversations do."""
        asked = super()._ask(index)
        earlier = getattr(self, "prompts", [])
        if earlier and self.rng.random() < 0.5:
            start = self.rng.choice(earlier)
            asked.prompt[: len(start)] = start[: len(asked.prompt)]
        self.prompts = [*earlier, asked.prompt]
        return asked

    def _check_the_end(self) -> None:
        super()._check_the_end()
        self._run_pools(2)
        for each in (self.loads, self.stores):
            each.on_reset()
            each.on_step_start()
        self.staging.begin_step(self, [])  # the copies of discarded steps are over when it ends
        self.staging.end_step(self)
        require(self.staging.num_free == self.staging.num_places, "staging places leaked")
        require(not self.shelf.wrong, "another content under the same key")
        for key, content in self.shelf.blocks.items():
            require({group for group, _ in content} == {key.group}, "K and V of another group")


def run_many(num_runs: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        run = ConnectorRun(seed, monkeypatch)
        try:
            run.run()
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        stats = run.loads.stats
        seen["loaded"] += stats.num_loaded > 0
        seen["hit"] += stats.hits > 0
        seen["stored"] += stats.num_stored > 0
        seen["late"] += stats.num_late > 0
        seen["failed"] += stats.num_failed > 0
        seen["not stored"] += stats.num_not_stored > 0
        seen["step failed"] += run.num_failures > 0
        seen["preempted"] += run.engine.scheduler.num_preemptions > 0
    return seen


def test_every_request_gets_its_tokens(
    by_size: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs = by_size(300, 3000, 100_000)
    seen = run_many(num_runs, monkeypatch)
    assert min(seen.values()) > 0.02 * num_runs and len(seen) == 8, seen


# ---------------------------------------------------------------- planted bugs


def places_of_discarded_steps_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may still copy from and to them."""

    def discard_steps(self: Staging, places: Any = ()) -> None:
        self.give_back([place for _, used in self._in_steps for place in used])
        self.give_back(places)
        self._in_steps.clear()

    monkeypatch.setattr(Staging, "discard_steps", discard_steps)


def places_freed_before_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ConnectorStores.on_result

    def on_result(self: ConnectorStores, plan: Any, result: Any) -> None:
        original(self, plan, result)
        for _, places in self._stores:
            self._staging.give_back(places)
            places[:] = []

    monkeypatch.setattr(ConnectorStores, "on_result", on_result)


def stored_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ConnectorStores.forward_inputs

    def forward_inputs(self: ConnectorStores, plan: Any, inputs: Any) -> None:
        self._ready |= self._new
        self._new = {}
        original(self, plan, inputs)

    monkeypatch.setattr(ConnectorStores, "forward_inputs", forward_inputs)


def stored_after_it_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectorStores, "on_removed", lambda self, *removed: None)


def kept_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ConnectorStores.on_cleared

    def on_cleared(self: ConnectorStores) -> None:
        kept = {**self._ready, **self._new}
        original(self)
        self._ready = kept

    monkeypatch.setattr(ConnectorStores, "on_cleared", on_cleared)


def filled_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before the loaded blocks has been evicted since the load began."""
    original = ConnectorLoads.on_admit

    def on_admit(self: ConnectorLoads, seq: Any) -> int:
        load = self._loaded.get(seq)
        if load is not None:
            load.first = min(load.first, seq.num_computed_tokens // self._manager.block_size)
        return original(self, seq)

    monkeypatch.setattr(ConnectorLoads, "on_admit", on_admit)


def groups_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockKeys.of_prefix
    monkeypatch.setattr(
        BlockKeys, "of_prefix", lambda self, prefix, group: original(self, prefix, 0)
    )


# Each with the first seed whose run shows it.
PLANTED_BUGS = {
    places_of_discarded_steps_freed: 10,
    places_freed_before_they_are_stored: 3,
    stored_before_it_is_computed: 2,
    stored_after_it_was_evicted: 20,
    kept_after_a_failure: 1,
    filled_behind_a_gap: 169,
    groups_mixed_up: 20,
}


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_the_late_device_sees(plant: Any, full_size: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    known = PLANTED_BUGS[plant]
    for seed in [*([] if full_size else [known]), *range(6000)]:
        try:
            ConnectorRun(seed, monkeypatch).run()
        except (AssertionError, IndexError, KeyError, ValueError):
            return
    pytest.fail("6000 runs with a planted bug, and none was seen")
