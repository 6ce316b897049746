"""Listeners hear of everything, cost nothing where there are none, and cannot break a step."""

import logging
import random
from collections import Counter

import numpy as np
import pytest
from counting_executor import make_engine, run
from shadow_kv import ShadowRun

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.listeners import BlockListener, CachedBlock, Listeners, RequestListener
from nanoserve.engine.prefix_cache import PrefixCache, chain_hash
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import SamplingParams


class Copy(BlockListener):
    """The cached blocks, by what is heard of them."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.cached, self.num_cleared = manager, {}, 0
        manager.listeners.append(self)

    def on_cached(self, cached: CachedBlock) -> None:
        assert cached.block not in self.cached
        assert self.manager.prefix_cache.has(cached.block)  # it has happened already
        self.cached[cached.block] = cached

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        assert not self.manager.prefix_cache.has(block)
        removed = self.cached.pop(block)
        assert (removed.block_hash, removed.group) == (block_hash, group)
        others = [one for one in self.cached.values() if one.block_hash == block_hash]
        assert is_last == all(one.group != group for one in others)

    def on_cleared(self) -> None:
        assert not self.manager.prefix_cache.hashes()
        self.cached.clear()
        self.num_cleared += 1


def sequence(token_ids: list[int], name: str = "a", **options: object) -> Sequence:
    return Sequence(name, token_ids, SamplingParams(), 100, **options)


def computed(manager: BlockManager, seq: Sequence) -> Sequence:
    """All of its tokens, as after the step that computes them."""
    assert manager.allocate(seq, seq.num_tokens, manager.lookup(seq))
    manager.cache(seq, seq.num_tokens)
    return seq


# ---------------------------------------------------------------- blocks


def test_a_cached_block_is_described_whole() -> None:
    manager = BlockManager(8, block_size=2)
    copy = Copy(manager)
    seq = computed(manager, sequence([5, 6, 7, 8, 9], cache_key=("cache_salt", "t")))
    first, second = seq.block_table[:2]
    a, b = seq.block_hashes
    assert copy.cached == {
        first: CachedBlock(first, a, None, [5, 6], ("cache_salt", "t")),
        second: CachedBlock(second, b, a, [7, 8], ("cache_salt", "t")),
    }


def test_what_is_found_in_the_cache_is_no_news() -> None:
    manager = BlockManager(8, block_size=2)
    computed(manager, sequence([1, 2, 3, 4, 5]))
    copy = Copy(manager)
    other = computed(manager, sequence([1, 2, 3, 4, 6, 7], "b"))
    assert [*copy.cached] == [other.block_table[2]]


def test_blocks_are_removed_as_they_are_reused_and_all_at_once() -> None:
    manager = BlockManager(4, block_size=2)
    copy = Copy(manager)
    manager.free(computed(manager, sequence([1, 2, 3, 4, 5, 6, 7, 8])))
    assert len(copy.cached) == 4
    manager.allocate(running := sequence([9] * 5), 5)
    assert len(copy.cached) == 1  # the tail went first
    manager.cache(running, 4)
    manager.prefix_cache.clear()
    assert (copy.cached, copy.num_cleared) == ({}, 1)
    manager.check([running])
    assert manager.lookup(sequence([9] * 5)) == []
    manager.clear()
    assert copy.num_cleared == 2


class HeardRun(ShadowRun):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.copy = Copy(self.scheduler.block_manager)

    def _step(self) -> None:
        super()._step()
        self.check()

    def check(self) -> None:
        manager = self.scheduler.block_manager
        flags = manager.snapshot()
        assert {*self.copy.cached} == {block for block, flag in enumerate(flags) if flag}
        for block, cached in self.copy.cached.items():
            assert manager.prefix_cache.has(block)
            if cached.parent_hash is not None:
                expected = chain_hash(cached.parent_hash, np.array(cached.token_ids))
                assert cached.block_hash == expected


def test_a_copy_stays_true_through_preemptions_aborts_and_failing_steps(fuzz_runs: int) -> None:
    seen: Counter[str] = Counter()
    num_runs = fuzz_runs // 3
    for seed in range(num_runs):
        heard = HeardRun(seed)
        heard.run()
        heard.check()
        seen["cached"] += bool(heard.copy.cached)
        seen["cleared"] += heard.copy.num_cleared > 0
        seen["preempted"] += heard.scheduler.num_preemptions > 0
    assert min(seen.values()) > 0.05 * num_runs, seen


def test_without_listeners_nothing_is_called_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_call(*args: object) -> None:
        raise AssertionError("a listener was looked for")

    monkeypatch.setattr(Listeners, "notify", no_call)
    monkeypatch.setattr(PrefixCache, "_notify_cached", no_call)
    manager, rng = BlockManager(6, block_size=2), random.Random(1)
    for number in range(200):
        manager.free(computed(manager, sequence([rng.randrange(3) for _ in range(8)], str(number))))
    manager.prefix_cache.clear()
    manager.clear()


def test_two_listeners_hear_the_same_and_one_may_leave() -> None:
    manager = BlockManager(8, block_size=2)
    copies = [Copy(manager), Copy(manager)]

    class Once(BlockListener):
        num_heard = 0

        def on_cached(self, cached: CachedBlock) -> None:
            self.num_heard += 1
            manager.listeners.remove(self)

    manager.listeners.insert(0, once := Once())
    computed(manager, sequence([1, 2, 3, 4, 5]))
    assert copies[0].cached == copies[1].cached != {} and once.num_heard == 1


class Broken(BlockListener):
    num_calls = 0

    def _fail(self, *args: object) -> None:
        self.num_calls += 1
        raise ZeroDivisionError

    on_cached = on_removed = on_cleared = _fail


def test_a_listener_that_raises_is_logged_once_and_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(num_kv_blocks=6, block_size=4)
    manager = engine.scheduler.block_manager
    manager.listeners.append(broken := Broken())
    copy = Copy(manager)
    with caplog.at_level(logging.ERROR):
        for first in range(0, 60, 20):
            engine.add_request("a", [*range(first, first + 12)], SamplingParams(max_tokens=3))
            (output,) = run(engine).values()
            assert output.outputs[0].token_ids == [*range(first + 12, first + 15)]
    assert broken.num_calls > 5 and copy.cached
    (message,) = (m for m in caplog.messages if "listener" in m)
    assert "Broken" in message


# ---------------------------------------------------------------- requests


class Log(RequestListener):
    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[tuple[str, str | None]] = []

    def on_start(self, request: Request) -> None:
        self.started.append(request.request_id)

    def on_finish(self, output: RequestOutput) -> None:
        assert output.finished
        self.ended.append((output.request_id, output.outputs[-1].finish_reason))


@pytest.mark.parametrize("ahead", [False, True])
def test_each_request_starts_once_and_ends_once(ahead: bool) -> None:
    """Whatever ends it, and whoever gets its last output."""
    engine = make_engine(async_scheduling=ahead, eos=frozenset({7}))
    engine.listeners.extend(logs := [Log(), Log()])
    with pytest.raises(ValueError, match="max_tokens"):
        engine.add_request("bad", [1], SamplingParams(max_tokens=0))
    engine.add_request("length", [10], SamplingParams(max_tokens=3, n=2))
    engine.add_request("stop", [5], SamplingParams(max_tokens=9))
    engine.add_request("aborted", [20], SamplingParams(max_tokens=90))
    engine.add_request("withdrawn", [20], SamplingParams(max_tokens=90))
    engine.step()
    engine.executor.fail_next = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    engine.abort_request("aborted")
    engine.abort_request("aborted")
    engine.withdraw(["withdrawn"])
    run(engine)
    engine.add_request("closed", [20], SamplingParams(max_tokens=90))
    engine.close()
    assert logs[0].started == logs[1].started
    assert logs[0].started == ["length", "stop", "aborted", "withdrawn", "closed"]
    assert logs[0].ended == logs[1].ended
    assert {*logs[0].ended} == {
        ("length", "length"),
        ("stop", "stop"),
        ("aborted", "abort"),
        ("withdrawn", "abort"),
        ("closed", "abort"),
    }
    assert len(logs[0].ended) == 5


def test_a_request_listener_that_raises_breaks_nothing() -> None:
    class Fails(RequestListener):
        def on_start(self, request: Request) -> None:
            raise ZeroDivisionError

        def on_finish(self, output: RequestOutput) -> None:
            raise ZeroDivisionError

    engine = make_engine()
    engine.listeners.extend([Fails(), log := Log()])
    engine.add_request("a", [1], SamplingParams(max_tokens=2))
    assert run(engine)["a"].outputs[0].token_ids == [2, 3]
    assert (log.started, log.ended) == (["a"], [("a", "length")])
