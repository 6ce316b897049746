"""The store of responses: its bounds, and conversations whose beginnings were evicted."""

import random
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve.serve.http.responses.store import ResponseStore


def item(number: int, role: str, size: int = 10) -> dict[str, Any]:
    return {"id": f"{role}_{number}", "text": "x" * size}


def put(store: ResponseStore, number: int, parent: Any, size: int = 10) -> str:
    response = {"id": f"resp_{number}", "output": [item(number, "out", size)]}
    store.put(response, [item(number, "in")], parent)
    return response["id"]


def names(items: list[dict[str, Any]]) -> list[str]:
    return [one["id"] for one in items]


def test_a_conversation_outlives_its_evicted_beginning() -> None:
    store = ResponseStore(2, 10**6)
    link = None
    for number in range(5):
        response_id = put(store, number, link)
        link = store.link(response_id)
    assert len(store) == 2 and store.get("resp_2") is None
    expected = [f"{role}_{number}" for number in range(5) for role in ("in", "out")]
    assert names(store.conversation(link)) == expected
    assert names(store.input_items("resp_4") or []) == expected[:-1]
    assert store.item("out_0") is None and store.item("out_4") == item(4, "out")
    assert store.item("in_4") is None  # ids of an input are the client's
    assert store.delete("resp_4") and store.delete("resp_3") and not store.delete("resp_3")
    assert store.num_bytes == 0


def test_what_is_used_stays() -> None:
    store = ResponseStore(2, 10**6)
    put(store, 0, None)
    put(store, 1, None)
    assert store.get("resp_0")
    put(store, 2, None)
    assert store.get("resp_1") is None and store.get("resp_0") and store.get("resp_2")


def test_one_that_is_larger_than_the_store_is_not_kept() -> None:
    store = ResponseStore(10, 1000)
    put(store, 0, None)
    put(store, 1, None, size=2000)
    assert len(store) == 0 and store.num_bytes == 0


def test_a_released_beginning_counts_again() -> None:
    """A response may be evicted while one that continues it is generated."""
    store = ResponseStore(10, 10**6)
    link = store.link(put(store, 1, store.link(put(store, 0, None))))
    size = store.num_bytes
    store.delete("resp_0")
    store.delete("resp_1")
    assert store.num_bytes == 0
    put(store, 2, link)
    assert store.num_bytes > size
    store.delete("resp_2")
    assert store.num_bytes == 0


def test_random_conversations_stay_within_the_bounds(by_size: Any) -> None:
    rng = random.Random(0)
    store = ResponseStore(8, 4000)
    links: list[Any] = [None]
    for number in range(by_size(300, 3000, 30000)):
        link = rng.choice(links)
        size = rng.choice([1, 50, 500])
        link = store.link(put(store, number, link, size))
        links = [None, *filter(None, [*links, link])][-6:]
        if rng.random() < 0.1:
            store.delete(f"resp_{number - rng.randint(0, 5)}")
        live = {id(entry): entry for one in store._entries.values() for entry in chain(one)}
        assert store.num_bytes == sum(len(entry.content) for entry in live.values())
        assert len(store) <= 8 and (store.num_bytes <= 4000 or not len(store))


def chain(entry: Any) -> Any:
    while entry is not None:
        yield entry
        entry = entry.parent
