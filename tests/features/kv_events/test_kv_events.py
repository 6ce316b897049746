"""Events that are published add up to the set of cached blocks, in vLLM's format."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from counting_executor import make_engine, run

from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.listeners import BlockListener, CachedBlock
from nanoserve.engine.prefix_cache import chain_hash
from nanoserve.engine.sequence import Sequence
from nanoserve.features.kv_events.config import KVEventsConfig
from nanoserve.features.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    wire_hash,
)
from nanoserve.features.kv_events.publisher import make_kv_events
from nanoserve.sampling_params import SamplingParams


def published_engine(
    publish: Callable[[KVEventBatch], Any], num_kv_blocks: int = 20, **options: Any
) -> tuple[GuardedEngine, BlockManager]:
    """As `nanoserve.build` wires it."""
    given = {"enable_kv_cache_events": True, "publisher": publish}
    config = EngineConfig("none", kv_events_config=given).kv_events_config
    engine = make_engine(num_kv_blocks=num_kv_blocks, block_size=4, max_num_seqs=3, **options)
    manager = engine.scheduler.block_manager
    engine.extensions.append(make_kv_events(config, manager))
    return engine, manager


class Replayed:
    """Plays events back: by group and hash what is cached, with its parent and token ids."""

    def __init__(self, windows: tuple[int | None, ...] = (None,)) -> None:
        self.windows = windows
        self.known: dict[tuple[int, bytes], tuple[bytes | None, list[int]]] = {}
        self.kinds: list[str] = []

    def __call__(self, batch: KVEventBatch) -> None:
        assert batch.events and batch.ts > 1.7e9
        for event in batch.events:
            self.kinds.append(type(event).__name__)
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.known[event.group, block_hash]
            else:
                self.known.clear()

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.has_window == (self.windows[event.group] is not None)
        for index, block_hash in enumerate(event.block_hashes):
            assert (event.group, block_hash) not in self.known  # no copies
            token_ids = event.token_ids[index * size : (index + 1) * size]
            self.known[event.group, block_hash] = parent, token_ids
            parent = block_hash

    def agrees_with(self, manager: BlockManager) -> bool:
        """Return whether these are the contents of the prefix cache, group by group."""
        prefixes = manager.prefix_cache._prefixes.items()
        return set(self.known) == {
            (group, block_hash)
            for block_hash, prefix in prefixes
            for group, blocks in enumerate(prefix.blocks)
            if blocks
        }


class CountCopies(BlockListener):
    """Counts the copies of blocks that come, and those that go while another one is left."""

    def __init__(self) -> None:
        self.num_cached = self.num_removed = 0

    def on_cached(self, cached: CachedBlock) -> None:
        self.num_cached += cached.is_copy

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        self.num_removed += not is_last


def check_chains(known: dict[tuple[int, bytes], tuple[bytes | None, list[int]]]) -> None:
    for (_, block_hash), (parent, token_ids) in known.items():
        if parent is not None:
            assert chain_hash(parent, np.array(token_ids)) == block_hash


def random_requests(engine: GuardedEngine, count: int) -> None:
    rng = random.Random(3)
    for number in range(count):
        prompt = [rng.randrange(2)] * 8 + [rng.randrange(200) for _ in range(rng.randrange(1, 20))]
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=rng.randrange(1, 12)))


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6, 1)], ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_replay_gives_the_cached_blocks_after_every_step(
    ahead: bool, windows: tuple[int | None, ...]
) -> None:
    replayed, copies = Replayed(windows), CountCopies()
    # In chunks of a block: so sequences compute the same tokens side by side, each for itself.
    engine, manager = published_engine(
        replayed,
        20 * len(windows),
        sliding_windows=windows,
        async_scheduling=ahead,
        long_prefill_token_threshold=4,
    )
    assert manager.windows == windows
    manager.listeners.append(copies)
    random_requests(engine, 40)
    for number in range(1000):
        if not engine.has_unfinished_requests():
            break
        if number == 20:
            engine.executor.fail_next = True
            with pytest.raises(RuntimeError, match="on fire"):
                engine.step()
            assert replayed.known == {}  # at once: nobody knows whether another step follows
        if number == 40:
            engine.reset_prefix_cache()
            assert replayed.known == {}
        engine.step()
        if not ahead:  # else blocks of the step under way are not published yet
            assert replayed.agrees_with(manager)
    check_chains(replayed.known)
    engine.close()
    assert replayed.agrees_with(manager)
    assert {group for group, _ in replayed.known} == {*range(len(windows))}
    counts = [replayed.kinds.count(kind) for kind in ("BlockStored", "BlockRemoved")]
    assert min(counts) > 10 and replayed.kinds.count("AllBlocksCleared") >= 2
    assert min(copies.num_cached, copies.num_removed) > 0, vars(copies)


def test_blocks_of_one_chain_are_one_event() -> None:
    batches: list[KVEventBatch] = []
    engine, _ = published_engine(batches.append)
    salted = {"prompt_token_ids": [*range(11)], "cache_salt": "tenant"}
    engine.add_request("a", salted, SamplingParams(max_tokens=2))
    run(engine)
    first, second = batches
    (stored,) = first.events
    a, b = stored.block_hashes
    assert stored == BlockStored([a, b], None, [*range(8)], 4, ("cache_salt", "tenant"))
    (later,) = second.events  # decoding has filled the third one
    assert (later.parent_block_hash, later.token_ids) == (b, [8, 9, 10, 11])
    assert stored.wire()["extra_keys"] == [["tenant"], None]
    assert later.wire()["extra_keys"] == [None]


def test_a_chain_is_one_event_for_each_group() -> None:
    batches: list[KVEventBatch] = []
    options = {"sliding_windows": (None, 6), "prefix_cache_seed": 0}
    engine, _ = published_engine(batches.append, **options)
    engine.add_request("a", [*range(17)], SamplingParams(max_tokens=1))
    run(engine)
    (batch,) = batches
    full, window = batch.events
    assert (full.group, full.has_window) == (0, False)
    assert (window.group, window.has_window) == (1, True)
    assert len(full.block_hashes) == 4 and full.block_hashes == window.block_hashes
    assert full.token_ids == window.token_ids == [*range(16)]
    wire = [event.wire() for event in (full, window, BlockRemoved(full.block_hashes, 1))]
    assert [event["group_idx"] for event in wire] == [0, 1, 1]
    kinds = [event.get("kv_cache_spec_kind") for event in wire]
    assert kinds == ["full_attention", "sliding_window", None]


def test_what_goes_from_a_group_stays_in_the_others() -> None:
    """Behind a window, the blocks of an answer are given back, and with them their contents."""
    replayed = Replayed((None, 6))
    engine, manager = published_engine(replayed, sliding_windows=(None, 6))
    engine.add_request("a", [*range(5)], SamplingParams(max_tokens=30))
    run(engine)
    assert replayed.agrees_with(manager)
    by_group = [sum(group == each for group, _ in replayed.known) for each in (0, 1)]
    assert by_group[0] == 8 and 3 <= by_group[1] < 8  # the prompt's, and the window's


def test_steps_that_change_nothing_publish_nothing() -> None:
    batches: list[KVEventBatch] = []
    engine, _ = published_engine(batches.append)
    engine.add_request("a", [1], SamplingParams(max_tokens=9))
    run(engine)
    assert len(batches) == 2 and engine.stats.num_steps == 9


def test_a_function_that_raises_breaks_no_step(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: KVEventBatch) -> None:
        raise ZeroDivisionError

    engine, _ = published_engine(fail)
    engine.add_request("a", [*range(9)], SamplingParams(max_tokens=9))
    assert len(run(engine)["a"].outputs[0].token_ids) == 9
    (message,) = (m for m in caplog.messages if "kv_events_config" in m)
    assert "lost" in message


# ---------------------------------------------------------------- on the wire


def test_the_wire_format_is_vllms() -> None:
    """As vLLM's structures decode it, field by field: a batch is an array, an event a map."""
    msgspec = pytest.importorskip("msgspec", reason="pip install 'nanoserve[kv-events]'")

    class Stored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None

    class Removed(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
        block_hashes: list[int]
        medium: str | None
        group_idx: int | None = None

    class Cleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
        pass

    class Batch(msgspec.Struct, array_like=True):
        ts: float
        events: list[Stored | Removed | Cleared]
        data_parallel_rank: int | None = None

    a, b = bytes(range(16)), bytes([255] * 16)
    batch = KVEventBatch(
        1.5,
        [
            BlockStored([a, b], None, [1, 2, 3, 4], 2, ("cache_salt", "t")),
            BlockRemoved([b]),
            AllBlocksCleared(),
        ],
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch.wire()), type=Batch)
    hashes = [0x08090A0B0C0D0E0F, 2**64 - 1]
    assert [wire_hash(a), wire_hash(b)] == hashes
    keys = [("t",), None]
    stored = Stored(hashes, None, [1, 2, 3, 4], 2, None, "GPU", None, keys, 0, "full_attention")
    assert decoded == Batch(1.5, [stored, Removed(hashes[1:], "GPU", 0), Cleared()], 0)


@contextmanager
def subscribed(topic: str) -> Iterator[tuple[str, Any]]:
    """Bind a subscriber to a port of this machine; yields its endpoint and its socket."""
    zmq = pytest.importorskip("zmq", reason="pip install 'nanoserve[kv-events]'")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        socket.subscribe(topic)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        yield f"tcp://127.0.0.1:{port}", socket


def until_connected(manager: BlockManager, is_there: Callable[[], bool]) -> int:
    """Publish until the subscriber is reached; before, messages are dropped. Returns how many."""
    for count in range(1, 1000):
        manager.prefix_cache.clear()  # is published at once
        if is_there():
            return count
    raise AssertionError("the subscriber hears nothing")


def test_a_subscriber_hears_every_step() -> None:
    msgspec = pytest.importorskip("msgspec", reason="pip install 'nanoserve[kv-events]'")
    with subscribed("kv@") as (endpoint, socket):
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, topic="kv@here")
        engine = make_engine(num_kv_blocks=20, block_size=4, max_num_seqs=3)
        manager = engine.scheduler.block_manager
        engine.extensions.append(make_kv_events(config, manager))
        num_sent = until_connected(manager, lambda: socket.poll(50) != 0)
        random_requests(engine, 20)
        run(engine)
        engine.add_request("last", [250, 251, 252, 253, 254], SamplingParams(max_tokens=1))
        run(engine)
        assert (manager.prefix_cache.find(_first_hash(manager, [250, 251, 252, 253]))) is not None
        known: set[int] = set()
        expected_number = None
        while True:
            topic, number, payload = socket.recv_multipart()
            heard = int.from_bytes(number, "big")
            assert topic == b"kv@here" and heard == (expected_number or heard) and heard >= 0
            expected_number = heard + 1
            _, happened, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            if heard < num_sent:  # of those that were to reach it at all
                assert happened == [{"type": "AllBlocksCleared"}]
                continue
            for event in happened:
                if event["type"] == "BlockStored":
                    known.update(event["block_hashes"])
                else:
                    known.difference_update(event["block_hashes"])
            if any(e.get("token_ids") == [250, 251, 252, 253] for e in happened):
                break
        assert known == {*map(wire_hash, manager.prefix_cache.hashes())}
        assert expected_number > num_sent + 10
        engine.close()
        engine.close()


def _first_hash(manager: BlockManager, token_ids: list[int]) -> bytes:
    seq = Sequence("x", [*token_ids, 0], SamplingParams(), 100)
    manager.lookup(seq)
    return seq.block_hashes[0]


def test_an_address_that_is_taken_is_refused_and_free_again_after_close() -> None:
    zmq = pytest.importorskip("zmq", reason="pip install 'nanoserve[kv-events]'")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}")
    first = make_kv_events(config, BlockManager(4, 4))
    with pytest.raises(ValueError, match=rf"endpoint='tcp://\*:{port}'.*in use"):
        make_kv_events(config, BlockManager(4, 4))
    first.close()
    make_kv_events(config, BlockManager(4, 4)).close()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("zmq", "must be a dictionary"),
        ({"enable": True}, r"unknown option\(s\) \['enable'\]"),
        ({"enable_kv_cache_events": 1}, "must be True or False"),
        ({"publisher": "kafka"}, "publisher='kafka' must be"),
        ({"endpoint": 5557}, "endpoint=5557 must be"),
        ({"topic": None}, "topic=None must be"),
        ({"hwm": -1}, "hwm=-1 must be"),
        ({"buffer_steps": 0.5}, "buffer_steps=0.5 must be"),
        ({"replay_endpoint": "tcp://*:5558"}, "remove it"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("none", kv_events_config=options)


def test_events_of_a_prefix_cache_that_is_off_are_refused() -> None:
    events = {"enable_kv_cache_events": True, "publisher": print}
    with pytest.raises(ValueError, match="needs enable_prefix_caching=True"):
        EngineConfig("none", kv_events_config=events, enable_prefix_caching=False)
    EngineConfig("none", kv_events_config={"publisher": "null"}, enable_prefix_caching=False)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.features.kv_events.config.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs pyzmq, msgspec: pip install 'nanoserve\[kv-ev"):
        EngineConfig("none", kv_events_config={"enable_kv_cache_events": True})


def test_vllms_defaults(caplog: pytest.LogCaptureFixture) -> None:
    assert not KVEventsConfig().is_active
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").is_active
    assert not KVEventsConfig(publisher="zmq").is_active
    assert "nothing is published without" in caplog.text
    on = KVEventsConfig(enable_kv_cache_events=True, publisher=print)
    assert on.is_active and not on.uses_zmq
    assert EngineConfig("none", kv_events_config=on).for_device("cpu").kv_events_config is on
