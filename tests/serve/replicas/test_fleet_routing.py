"""The benchmark before real replicas: its rules, and its clients before one engine."""

import asyncio
import random

import pytest

pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from fleet_routing import Clients, KnowsEveryCache, LeastLoaded, PureAffinity, RoundRobin
from routing import Job
from serving import served

from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.replicas.prefix_router import PrefixRouter

LOADS = {"a": 30.0, "b": 10.0, "c": 20.0}


def made(kind: type[PrefixRouter]) -> PrefixRouter:
    router = kind(16, 1, rng=random.Random(0))
    for name in LOADS:
        router.add_replica(name, 100)
    return router


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [(RoundRobin, ["b", "c", "a", "b"]), (LeastLoaded, ["b"] * 4), (KnowsEveryCache, ["a"] * 4)],
)
def test_the_rules(kind: type[PrefixRouter], chosen: list[str]) -> None:
    router = made(kind)
    hashes = router.hashes(list(range(100)))
    router.update("a", hashes, [])
    router.update("c", hashes[:2], [])
    assert [router.choose(hashes, 100, LOADS) for _ in range(4)] == chosen


def test_affinity_is_to_the_beginning() -> None:
    router = made(PureAffinity)
    told = {}
    for first in range(20):
        prompts = [[first] * 65 + [other] * 40 for other in range(5)]
        told[first] = {router.choose(router.hashes(prompt), 105, LOADS) for prompt in prompts}
        assert len(told[first]) == 1
    assert set.union(*told.values()) == set(LOADS)
    assert router.choose([], 5, LOADS) == "a"


def test_a_conversation_goes_on_with_what_the_server_has_said() -> None:
    """Else a router would be judged by caches that cannot have what it was asked for."""
    rng = random.Random(0)
    first, more = ([rng.randrange(2048) for _ in range(size)] for size in (37, 20))
    output = [1, 2, 3] * 10
    second: list[Job] = []

    def then(now: float) -> Job:
        second.append(Job(now + 0.1, first + output + more, [5, 6]))
        return second[0]

    llm = AsyncLLM("tiny-qwen3", num_kv_blocks=100, block_size=16)
    with served(llm, served_model_name=["tiny-qwen3"]) as server:
        clients = Clients(server.url)
        assert asyncio.run(clients.ask([Job(0.0, first, output, then)])) > 0.1
        # The last token that was said was never an input: 66 tokens have keys, 4 blocks.
        assert llm.engine.stats.prefix_cache_hits == 64
    llm.shutdown()
    assert len(clients.waits) == 2 and min(clients.waits) > 0
