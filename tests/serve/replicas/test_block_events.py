"""What an engine tells of its prefix cache adds up to its prefix cache, whatever happens in it."""

import random
import threading

import pytest
from counting_executor import make_engine, run
from shadow_kv import ShadowRun

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.input_processor import key_of_salt
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.replicas.block_events import BlockEvents
from nanoserve.serve.replicas.prefix_router import PrefixRouter


class Copy:
    """What somebody outside knows who is told of every change."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.events = manager, BlockEvents(manager)
        self.known: set[bytes] = set()
        self.num_stored = self.num_removed = 0

    def take(self) -> None:
        stored, removed = self.events.take()
        assert len({*stored, *removed}) == len(stored) + len(removed), "told twice"
        assert self.known.isdisjoint(stored) and self.known.issuperset(removed), "no news"
        self.known = (self.known | set(stored)) - set(removed)
        self.num_stored += len(stored)
        self.num_removed += len(removed)

    def check(self) -> None:
        self.take()
        assert self.known == set(self.manager.prefix_cache.hashes())


class MirroredRun(ShadowRun):
    """Arrivals, aborts, preemptions, failing steps in a tiny pool; and prefixes are reset."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.copy = Copy(self.scheduler.block_manager)
        self.takes_every_step = self.rng.random() < 0.7  # others see sums of several steps

    def _abort(self) -> None:
        super()._abort()
        self.copy.check()
        if self.rng.random() < 0.02:  # as `reset_prefix_cache` does
            self.scheduler.block_manager.prefix_cache.clear()
            self.copy.check()

    def _step(self) -> None:
        super()._step()
        if self.takes_every_step or self.rng.random() < 0.2:
            self.copy.check()


def test_events_add_up_to_the_table(fuzz_runs: int) -> None:
    evicted, preempted, num_runs = 0, 0, fuzz_runs // 3  # each is checked after every step
    for seed in range(num_runs):
        run_ = MirroredRun(seed)
        run_.run()
        run_.copy.check()
        evicted += run_.copy.num_removed > 0
        preempted += run_.scheduler.num_preemptions > 0
    assert min(evicted, preempted) > 0.1 * num_runs, (evicted, preempted)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Of few first halves and many second ones."""
    return [[rng.randrange(3)] * 40 + [rng.randrange(256) for _ in range(40)] for _ in range(count)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_whole_engine(ahead: bool) -> None:
    """Steps that fail, and prefixes that are reset, with and without a step under way."""
    engine = make_engine(num_kv_blocks=40, async_scheduling=ahead)
    copy = Copy(engine.scheduler.block_manager)
    for i, prompt in enumerate(prompts(random.Random(0), 30)):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=20))
    for step in range(1000):
        if not engine.has_unfinished_requests():
            break
        if step in (5, 20):
            engine.executor.fail_next = True
            with pytest.raises(RuntimeError, match="on fire"):
                engine.step()
            copy.check()
            assert not copy.known
        if step in (12, 30):
            engine.reset_prefix_cache(reset_running_requests=step == 30)
            copy.check()
            assert not copy.known
        engine.step()
        copy.check()
    assert copy.num_removed > 40 and copy.known


def test_what_was_there_before_is_told_first() -> None:
    engine = make_engine()
    engine.add_request("a", list(range(50)), SamplingParams(max_tokens=1))
    run(engine)
    copy = Copy(engine.scheduler.block_manager)
    copy.check()
    assert copy.num_stored == 3


def test_what_comes_and_goes_between_two_calls_is_not_told() -> None:
    manager = BlockManager(8, block_size=4)
    events = BlockEvents(manager)
    seq = Sequence("a", list(range(12)), SamplingParams(), 100)
    assert manager.allocate(seq, 12)
    manager.cache(seq, 12)
    manager.prefix_cache.remove(seq.block_table[2])
    stored, removed = events.take()
    assert set(stored) == set(seq.block_hashes[:2]) and not removed
    manager.clear()
    stored, removed = events.take()
    assert not stored and set(removed) == set(seq.block_hashes[:2])
    assert events.take() == ([], [])


def test_no_method_of_a_manager_is_replaced() -> None:
    watched, other = BlockManager(8, 4), BlockManager(8, 4)
    events = BlockEvents(watched)
    assert watched.listeners == [events] and other.listeners == []
    assert vars(watched).keys() == vars(other).keys()


def test_events_that_are_taken_in_another_thread_add_up() -> None:
    """One thread caches and evicts as fast as it can, another one takes."""
    manager = BlockManager(6, block_size=2)
    copy, is_over = Copy(manager), threading.Event()

    def change() -> None:
        rng = random.Random(0)
        for number in range(3000):
            seq = Sequence(str(number), [rng.randrange(3) for _ in range(8)], SamplingParams(), 99)
            assert manager.allocate(seq, 8, manager.lookup(seq))
            manager.cache(seq, 8)
            manager.free(seq)
            if rng.random() < 0.01:
                manager.prefix_cache.clear()
        is_over.set()

    thread = threading.Thread(target=change)
    thread.start()
    while not is_over.is_set():
        copy.take()
    thread.join()
    copy.check()
    assert min(copy.num_stored, copy.num_removed) > 100


def hits_and_matches(
    requests: list[tuple[list[int], str | None]], windows: tuple[int | None, ...] = (None,)
) -> list[tuple[int, int]]:
    """Return for each prompt the tokens that come from the cache, and those that a router who
    hears of all blocks has expected before."""
    engine = make_engine(
        num_kv_blocks=24 * len(windows),
        prefix_cache_seed=3,
        block_size=16,
        max_num_batched_tokens=64,
        sliding_windows=windows,
    )
    assert engine.scheduler.block_manager.windows == windows
    events = BlockEvents(engine.scheduler.block_manager)
    router = PrefixRouter(16, prefix_cache_seed=3)
    router.add_replica("0", 24)
    found = []
    for i, (prompt, salt) in enumerate(requests):
        key = () if salt is None else key_of_salt(salt)
        expected = router.matches(router.hashes(prompt, key), ["0"])["0"]
        before = engine.stats.prefix_cache_hits
        engine.add_request(
            str(i), {"prompt_token_ids": prompt, "cache_salt": salt}, SamplingParams(max_tokens=9)
        )
        run(engine)
        router.update("0", *events.take())
        found.append((engine.stats.prefix_cache_hits - before, expected))
    return found


def test_the_router_knows_what_the_engine_will_find() -> None:
    """Of each prompt, before it is added: exactly the tokens that come from the cache."""
    salts = [random.Random(i).choice([None, "a"]) for i in range(40)]
    found = hits_and_matches([*zip(prompts(random.Random(0), 40), salts, strict=True)])
    assert all(hit == expected for hit, expected in found)
    assert (0, 0) in found[10:] and (32, 32) in found


@pytest.mark.parametrize("windows", [(None, 20), (20,), (20, 5)], ids=str)
def test_the_router_and_a_model_with_windows(windows: tuple[int | None, ...]) -> None:
    """It hears of the first group, and follows a chain from its first block on."""
    rng = random.Random(0)
    turns: list[list[int]] = [[number] for number in range(4)]
    requests: list[tuple[list[int], str | None]] = []
    for _ in range(80):  # conversations that grow, and begin anew
        index = rng.randrange(len(turns))
        turns[index] = (turns[index] if len(turns[index]) < 250 else [index]) + [
            rng.randrange(256) for _ in range(40)
        ]
        requests.append((list(turns[index]), None))
    found = hits_and_matches(requests, windows)
    if windows[0] is None:
        # All groups must have a hit, so there may be less than the first group has.
        assert all(hit <= expected for hit, expected in found)
    elif len(windows) == 1:
        # A hit needs the last blocks only, so it may go on behind those that are gone.
        assert all(hit >= expected for hit, expected in found)
        assert sum(hit > expected == 0 for hit, expected in found) > 3, found
    num_right = sum(hit == expected > 0 for hit, expected in found)
    assert num_right > 10, found
