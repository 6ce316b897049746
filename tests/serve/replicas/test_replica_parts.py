"""What an ingress keeps count of, and what it puts together; nothing of Ray."""

import asyncio
import pickle
import random

import pytest

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import RequestMetrics, RequestOutput
from nanoserve.serve.replicas.merged_metrics import merged
from nanoserve.serve.replicas.messages import Call, Order
from nanoserve.serve.replicas.output_queue import Outbox, news_of
from nanoserve.serve.replicas.routing import Placement
from nanoserve.serve.replicas.settings import ReplicaSettings, resources_of
from nanoserve.serve.token_stream import NewTokens

CONFIG = EngineConfig("none", max_num_seqs=4, block_size=4, prefix_cache_seed=1)


def order_of(placement: Placement, prompt: list[int], n: int = 1, max_tokens: int = 10) -> Order:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    sequences = [Sequence("a", list(prompt), params, 100, index=index) for index in range(n)]
    request = Request("a", None, prompt, params, sequences)
    order = Order(request, b"content", placement.choose)
    placement.hash(order)
    return order


def placement_of(*names: str) -> Placement:
    placement = Placement(CONFIG)
    for name in names:
        placement.join(name, 100)
    return placement


def test_what_arrives_of_a_call_is_its_content() -> None:
    assert pickle.loads(pickle.dumps(Call(b"content", "a"))) == b"content"
    order = order_of(placement_of("a"), [1, 2, 3])
    assert pickle.loads(pickle.dumps(order)) == b"content"


def test_a_call_goes_where_it_is_sent_or_nowhere() -> None:
    assert Call(b"", "b").choose(["a", "b"]) == "b"
    assert Call(b"", "c").choose(["a", "b"]) is None
    assert Call(b"").choose(["a", "b"]) == "a"


def test_loads_and_room_are_those_of_what_is_in_flight() -> None:
    placement = placement_of("a", "b")
    assert placement.backlog == -8
    order = order_of(placement, [1] * 20, n=3)
    name = order.choose(["a", "b"])
    member = placement.members[name]
    assert (member.load, member.num_sequences, placement.backlog) == (50, 3, -5)
    placement.note_tokens(order, 6)  # so its prompt was computed
    assert member.load == 24
    placement.note_tokens(order, 23)
    assert member.load == 3  # a token for each, at least, until it is over
    placement.release(order)
    placement.release(order)
    assert (member.load, member.num_sequences, placement.backlog) == (0, 0, -8)


def test_counts_do_not_drift_in_any_life_of_requests() -> None:
    rng = random.Random(0)
    placement, orders, names = placement_of("a", "b"), [], ["a", "b"]
    for step in range(2000):
        kind = rng.randrange(6)
        if kind < 2:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
            orders.append(order_of(placement, prompt, n=rng.randrange(1, 3)))
            orders[-1].choose(names)
        elif kind == 2 and orders:  # Serve could not reach it
            rng.choice(orders).choose(names)
        elif kind == 3 and orders:
            placement.note_tokens(rng.choice(orders), rng.randrange(5))
        elif kind == 4 and orders:
            placement.release(orders.pop(rng.randrange(len(orders))))
        elif kind == 5 and step % 10 == 0:  # one dies, and another one comes
            gone = names.pop(0)
            placement.leave(gone)
            for order in orders:
                if order.replica == gone:
                    placement.release(order)
            names.append(f"replica-{step}")
            placement.join(names[-1], 50)
        for name, member in placement.members.items():
            here = [order for order in orders if order.replica == name]
            assert member.load == sum(order.work for order in here)
            assert member.num_sequences == sum(order.num_sequences for order in here)
        assert sorted(member.number for member in placement.members.values()) == [0, 1]


def test_one_that_cannot_be_reached_is_the_last_choice() -> None:
    placement = placement_of("a", "b")
    order = order_of(placement, [1] * 8)
    first = order.choose(["a", "b"])
    second = order.choose(["a", "b"])
    assert {first, second} == {"a", "b"}
    assert order.choose([first]) == first  # rather than none
    assert order.choose(["elsewhere"]) is None and order.replica is None


def test_a_prefix_is_found_where_it_was_sent_and_a_salt_is_another_prefix() -> None:
    placement = placement_of("a", "b")
    prompt = list(range(40))
    first = order_of(placement, prompt).choose(["a", "b"])
    for _ in range(3):
        order = order_of(placement, [*prompt, 1])
        assert order.choose(["a", "b"]) == first
        placement.release(order)
    salted = order_of(placement, prompt)
    salted.request.sequences[0].cache_key = ("salt", "x")
    placement.hash(salted)
    assert not set(salted.hashes) & set(order.hashes)


def test_an_outbox_joins_what_waits() -> None:
    async def fill() -> None:
        outbox = Outbox()
        assert not await outbox.wait(0.01)
        outbox.add_tokens(NewTokens("a", 0, [1], None, None))
        outbox.add_tokens(NewTokens("a", 1, [5], None, None))
        outbox.add_tokens(NewTokens("a", 0, [2, 3], "stop", None))
        outbox.add_output(RequestOutput("b", None, [1], [], True, RequestMetrics()))
        outbox.add_blocks([b"x", b"y"], [])
        outbox.add_blocks([b"z"], [b"x", b"w"])
        assert await outbox.wait(0.01)
        tokens, outputs, stored, removed = outbox.take()
        news = news_of(tokens, outputs)
        assert news.tokens[0] == NewTokens("a", 0, [1, 2, 3], "stop", None)
        assert len(news.tokens) == 2 and news.outputs[0].request_id == "b"
        assert (sorted(stored), removed) == ([b"y", b"z"], [b"w"])
        assert outbox.take() == ([], [], [], []) and not await outbox.wait(0.01)

    asyncio.run(fill())


def test_expositions_become_one() -> None:
    one = b"# HELP a Some.\n# TYPE a gauge\na 1.0\n# HELP b Others.\n# TYPE b counter\n"
    one += b'b_total{x="{} "} 2.0\nb_created 3.0\n'
    two = b"# HELP a Some.\n# TYPE a gauge\na 4.0\n# HELP c New.\n# TYPE c gauge\nc 5.0\n"
    assert merged({1: two, 0: one}).decode().splitlines() == [
        "# HELP a Some.",
        "# TYPE a gauge",
        'a{replica="0"} 1.0',
        'a{replica="1"} 4.0',
        "# HELP b Others.",
        "# TYPE b counter",
        'b_total{replica="0",x="{} "} 2.0',
        'b_created{replica="0"} 3.0',
        "# HELP c New.",
        "# TYPE c gauge",
        'c{replica="1"} 5.0',
    ]
    assert merged({}) == b""


@pytest.mark.parametrize(
    ("options", "num_replicas", "num_cores", "is_cuda", "resources"),
    [
        ({}, 2, 8, False, {"num_cpus": 4}),
        ({}, 4, 2, False, {"num_cpus": 1}),
        ({"num_threads": 3}, 2, 8, False, {"num_cpus": 3}),
        ({"tensor_parallel_size": 2, "num_threads": 3}, 2, 16, False, {"num_cpus": 6}),
        ({"tensor_parallel_size": 2}, 2, 64, True, {"num_cpus": 1, "num_gpus": 2}),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            *(2, 64, True, {"num_cpus": 1, "num_gpus": 4}),
        ),
    ],
)
def test_resources(options, num_replicas, num_cores, is_cuda, resources) -> None:
    assert resources_of(options, num_replicas, num_cores, is_cuda) == resources


def test_one_engine_is_no_fleet() -> None:
    assert not ReplicaSettings().is_fleet
    assert ReplicaSettings(2).is_fleet and ReplicaSettings(1, max_data_parallel_size=3).is_fleet
    with pytest.raises(ValueError, match="target_ongoing_requests=0"):
        ReplicaSettings(2, target_ongoing_requests=0)


def test_what_is_cached_is_no_work() -> None:
    """Or each turn of a conversation would count as if all of it were computed again."""
    placement = placement_of("a")
    first, second = (order_of(placement, list(range(40))) for _ in range(2))
    first.choose(["a"])
    second.choose(["a"])
    assert first.num_matched == 0 < second.num_matched
    assert second.work == first.work - second.num_matched
    assert placement.members["a"].load == first.work + second.work
    placement.note_tokens(second, 1)
    assert placement.members["a"].load == first.work + second.work < 2 * first.work
