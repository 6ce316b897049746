"""Where a request goes: the score, what is known of each replica, and what must never happen."""

import random
from collections import Counter

import pytest

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.input_processor import key_of_salt
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.replicas.prefix_router import PrefixRouter

SIZE = 4


def make_router(num_replicas: int, num_kv_blocks: int = 100, **options) -> PrefixRouter:
    options = {"rng": random.Random(0), **options}
    router = PrefixRouter(SIZE, prefix_cache_seed=7, **options)
    for i in range(num_replicas):
        router.add_replica(str(i), num_kv_blocks)
    return router


def idle(num_replicas: int) -> dict[str, float]:
    return {str(i): 0.0 for i in range(num_replicas)}


# ---------------------------------------------------------------- hashes


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 41])
@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("root", [(), ("kv_cache_dtype", "int8")])
def test_hashes_are_those_of_an_engine(num_tokens: int, salt: str | None, root: tuple) -> None:
    token_ids = [random.randrange(1000) for _ in range(num_tokens)]
    manager = BlockManager(20, SIZE, prefix_cache_seed=7)
    key = root if salt is None else root + key_of_salt(salt)
    seq = Sequence("r", token_ids, SamplingParams(), 100, cache_key=key)
    manager.lookup(seq)  # hashes what a hit can cover
    hashes = PrefixRouter(SIZE, 7).hashes(token_ids, key)
    assert hashes == seq.block_hashes
    assert len(hashes) == (num_tokens - 1) // SIZE


def test_a_seed_or_a_salt_of_its_own_shares_nothing() -> None:
    routers = [PrefixRouter(SIZE, 7), PrefixRouter(SIZE, 8)]
    keys = [(), key_of_salt("a"), key_of_salt("b")]
    found = [router.hashes(list(range(9)), key) for router in routers for key in keys]
    assert len({block_hash for hashes in found for block_hash in hashes}) == 6 * 2


# ---------------------------------------------------------------- what is known


def test_a_match_is_an_unbroken_chain() -> None:
    router = make_router(4)
    hashes = router.hashes(list(range(17)))
    router.update("0", hashes, [])
    router.update("1", hashes[:2], [])
    router.update("2", [hashes[0], *hashes[2:]], [])  # one that is missing ends it
    matched = router.matches(hashes, ["0", "1", "2", "3"])
    assert matched == {"0": 16, "1": 8, "2": 4, "3": 0}
    assert router.matches(hashes, ["1"]) == {"1": 8}
    router.update("0", [], hashes[1:3])
    assert router.matches(hashes, "0") == {"0": 4}


def test_what_was_sent_is_forgotten_from_its_tail_beyond_the_pool() -> None:
    router = make_router(1, num_kv_blocks=5)
    old, new = router.hashes(list(range(13))), router.hashes(list(range(50, 63)))
    router.sent("0", old)
    router.sent("0", new)
    assert router.matches(new, "0") == {"0": 12}
    assert router.matches(old, "0") == {"0": 8}
    router.sent("0", old[:1])  # used again, so the other one is the oldest now
    router.sent("0", router.hashes(list(range(80, 89))))
    assert router.matches(old, "0") == {"0": 4}
    assert router.matches(new, "0") == {"0": 8}


def test_a_replica_that_tells_is_believed_and_nothing_else() -> None:
    router = make_router(1)
    hashes = router.hashes(list(range(17)))
    router.sent("0", hashes)
    router.update("0", hashes[:1], [])
    assert router.matches(hashes, "0") == {"0": 4}
    router.sent("0", hashes)
    assert router.matches(hashes, "0") == {"0": 4}


def test_a_replica_that_is_gone_leaves_nothing() -> None:
    router = make_router(3)
    hashes = router.hashes(list(range(17)))
    router.sent("0", hashes)
    router.update("1", hashes, [])
    for replica in "01":
        router.remove_replica(replica)
    assert router.replicas == ["2"] and not router._holders
    router.add_replica("3", 100)  # in the place of one that had everything
    assert router.matches(hashes, "23") == {"2": 0, "3": 0}


def test_many_replicas_come_and_go() -> None:
    """Against sets of hashes, one for each replica."""
    rng = random.Random(1)
    router = make_router(0)
    known: dict[str, set[bytes]] = {}
    chains = [router.hashes([rng.randrange(2) for _ in range(30)]) for _ in range(20)]
    for step in range(3000):
        if rng.random() < 0.1 or not known:
            known[str(step)] = set()
            router.add_replica(str(step), 1000)
        if rng.random() < 0.1 and len(known) > 1:
            gone = rng.choice(list(known))
            router.remove_replica(gone)
            del known[gone]
        replica, chain = rng.choice(list(known)), rng.choice(chains)
        stored = {block_hash for block_hash in chain if rng.random() < 0.7}
        removed = set(rng.choice(chains)) - stored
        router.update(replica, stored, removed)
        known[replica] = (known[replica] - removed) | stored
        asked = rng.sample(list(known), rng.randint(1, len(known)))
        chain = rng.choice(chains)
        expected = {}
        for name in asked:
            missing = [i for i, block_hash in enumerate(chain) if block_hash not in known[name]]
            expected[name] = SIZE * (missing[0] if missing else len(chain))
        assert router.matches(chain, asked) == expected


# ---------------------------------------------------------------- the choice


def test_the_one_that_has_the_prefix_gets_the_request() -> None:
    router = make_router(4)
    hashes = router.hashes(list(range(17)))
    router.sent("2", hashes)
    assert {router.choose(hashes, 17, idle(4)) for _ in range(20)} == {"2"}
    assert router.choose(hashes, 17, {"0": 0.0, "1": 0.0}) in ("0", "1")  # it is no candidate


def test_too_much_load_outweighs_a_match() -> None:
    router = make_router(4)
    hashes = router.hashes(list(range(17)))
    router.sent("2", hashes)
    assert router.choose(hashes, 17, {**idle(4), "2": 10_000.0}) != "2"


def test_a_longer_match_wins_at_equal_loads() -> None:
    router = make_router(3)
    hashes = router.hashes(list(range(17)))
    router.sent("0", hashes[:1])
    router.sent("1", hashes[:3])
    assert router.choose(hashes, 17, dict.fromkeys("012", 500.0)) == "1"


@pytest.mark.parametrize("beta", [0, 0.1, 1, 30])
def test_with_nothing_shared_the_least_loaded_gets_it(beta: float) -> None:
    rng = random.Random(2)
    router = make_router(8, beta=beta)
    for replica in "0123":  # what is not of this prompt does not count
        router.sent(replica, router.hashes(list(range(500, 540))))
    for _ in range(500):
        loads = {str(i): float(rng.choice([0, 1, 2, 1000, 10**6])) for i in range(8)}
        num_tokens = rng.randint(1, 40)
        hashes = router.hashes([rng.randrange(400) for _ in range(num_tokens)])
        chosen = router.choose(hashes, num_tokens, loads)
        assert loads[chosen] == min(loads.values())


def test_ties_fall_anywhere() -> None:
    router = make_router(4)
    counts = Counter(router.choose([], 3, idle(4)) for _ in range(400))
    assert min(counts.values()) > 60 and len(counts) == 4


@pytest.mark.full(num_replicas=[2, 8])
@pytest.mark.small(num_replicas=[2, 8], share=[0.9], backlog=[0.1, 20])
@pytest.mark.parametrize("num_replicas", [2, 8, 32])
@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("backlog", [0.1, 1, 20])
def test_one_hot_prefix_overloads_nobody(num_replicas: int, share: float, backlog: float) -> None:
    """Work is what is computed; each replica does a token a tick, and `backlog` prompts are under
    way for each of them. At first only one has the prefix, and for a while gets more."""
    rng = random.Random(3)
    router = make_router(num_replicas, num_kv_blocks=1000)
    prefix = list(range(int(share * 400)))
    router.sent("0", router.hashes([*prefix, 0]))
    loads, work = idle(num_replicas), Counter()
    for i in range(300 * num_replicas):
        prompt = prefix + [rng.randrange(1000) for _ in range(401 - len(prefix))]
        hashes = router.hashes(prompt)
        chosen = router.choose(hashes, len(prompt), loads)
        computed = len(prompt) - router.matches(hashes, [chosen])[chosen]
        router.sent(chosen, hashes)
        work[chosen] += computed * (i >= 100 * num_replicas)
        loads[chosen] += computed
        while (done := sum(loads.values()) / num_replicas - backlog * 400) > 1e-3:
            loads = {replica: max(0.0, load - done) for replica, load in loads.items()}
    # Where next to nothing waits, some may stay idle: those who have the prefix do no harm yet.
    spread = 1.5 if backlog < 1 else 1.2
    assert max(work.values()) <= spread * sum(work.values()) / num_replicas


def test_who_comes_late_is_no_reason_to_leave_those_who_have_the_prefix() -> None:
    """A fleet that grows keeps its conversations where they are."""
    router = make_router(1)
    chains = {i: router.hashes([i] * 17) for i in range(20)}
    for hashes in chains.values():
        for _ in range(20):
            router.sent(router.choose(hashes, 17, idle(1)), hashes)
    router.add_replica("1", 100)
    assert all(router.choose(hashes, 17, idle(2)) == "0" for hashes in chains.values())


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"prefix_cache_seed": -1}, "prefix_cache_seed=-1"),
        ({"prefix_cache_seed": None}, "prefix_cache_seed=None"),
        ({"beta": -0.5}, "beta=-0.5"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"gamma": -1}, "gamma=-1"),
    ],
)
def test_bad_options(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PrefixRouter(**{"block_size": 16, "prefix_cache_seed": 0, **options})


def test_bad_calls() -> None:
    router = make_router(1)
    with pytest.raises(ValueError, match="loads is empty"):
        router.choose([], 1, {})
    with pytest.raises(ValueError, match=r"'x' is not one of \['0'\]"):
        router.choose([], 1, {"x": 0.0})
    with pytest.raises(ValueError, match="'0' was already added"):
        router.add_replica("0", 3)
    with pytest.raises(ValueError, match="num_kv_blocks=0"):
        router.add_replica("1", 0)
    with pytest.raises(ValueError, match="num_prompt_tokens=0"):
        router.choose([], 0, {"0": 0.0})
    for load in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"load={load}"):
            router.choose([], 1, {"0": load})
    assert router.replicas == ["0"]
