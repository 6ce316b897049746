"""The protocol between a decode engine and a prefill engine: hostile bytes, leases, outages."""

import contextlib
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_pair import free_port
from serving import wait_until

from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.kv_transfer.connector import BlockKey, ConnectorContext
from nanoserve.features.kv_transfer.pair.addresses import Address
from nanoserve.features.kv_transfer.pair.leases import Leases
from nanoserve.features.kv_transfer.pair.messages import (
    MOST_BLOCKS,
    ClosedError,
    Hello,
    Link,
    Name,
    ProtocolError,
    RefusedError,
    checksum,
)
from nanoserve.features.kv_transfer.pair.outage import Outage
from nanoserve.features.kv_transfer.pair.producer import Producer

BLOCK_BYTES = 64
FINGERPRINT = b"f" * 32


def name_of(number: int) -> Name:
    return f"{number}".encode().ljust(32, b"."), number % 2


def content_of(name: Name) -> np.ndarray:
    return np.frombuffer(name[0] + name[0][::-1], dtype=np.uint8)


def names(first: int, end: int) -> list[Name]:
    return [name_of(number) for number in range(first, end)]


def store(producer: Producer, wanted: list[Name]) -> None:
    keys = [BlockKey(name[0], b"", (1, 2), name[1]) for name in wanted]
    producer.store(keys, [content_of(name) for name in wanted])


@contextlib.contextmanager
def producing(kv_ip: str | None = None, num_blocks: int = 20, **extra: Any) -> Iterator[Producer]:
    folder = tempfile.mkdtemp(prefix="kv")
    config = KVTransferConfig(
        "socket",
        "kv_producer",
        kv_buffer_size=num_blocks * BLOCK_BYTES,
        kv_ip=kv_ip or f"{folder}/kv",
        kv_port=free_port(),
        kv_connector_extra_config=extra,
    )
    producer = Producer(ConnectorContext(config, BLOCK_BYTES, 2, 1, FINGERPRINT, 10))
    try:
        yield producer
    finally:
        producer.close()


def soon(seconds: float = 10) -> float:
    return time.monotonic() + seconds


def connect(producer: Producer) -> Link:
    return Link(producer._address.connect(5))


HELLO = Hello(FINGERPRINT, BLOCK_BYTES)


def receive(link: Link, wanted: list[Name]) -> None:
    for index, name in enumerate(wanted):
        memory = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        assert link.receive_block(index, name, memory, soon())
        assert memory.tobytes() == content_of(name).tobytes()


def open_leases(producer: Producer) -> int:
    stats = producer.leases.stats
    return stats.num_leases - stats.num_confirmed - stats.num_expired - stats.num_lost


# ---------------------------------------------------------------- a connection


@pytest.mark.parametrize("kv_ip", [None, "127.0.0.1", "::1"], ids=["unix", "IPv4", "IPv6"])
def test_blocks_arrive_in_order_and_are_dropped(kv_ip: str | None) -> None:
    with producing(kv_ip) as producer:
        link, wanted = connect(producer), names(0, 6)
        link.greet(HELLO, soon())
        link.reserve(wanted, 5, soon())
        assert producer.find([BlockKey(wanted[0][0], b"", (), wanted[0][1])], None) == 0
        for number in (3, 0, 1):  # and nobody waits for the last one
            store(producer, [name_of(number), name_of(number + 50)])
        receive(link, wanted[:2])
        store(producer, wanted)
        for index, name in enumerate(wanted[2:], 2):
            assert link.receive_block(index, name, np.zeros(BLOCK_BYTES, np.uint8), soon())
        assert producer.leases.num_kept == 6
        link.confirm(6, soon())
        wait_until(lambda: producer.leases.stats.num_confirmed == 1)
        assert producer.leases.num_kept == producer.leases.num_blocks == 0
        assert producer.find([BlockKey(wanted[0][0], b"", (), wanted[0][1])], None) == 1
        link.close()


def test_a_receiver_may_confirm_before_all_has_arrived() -> None:
    with producing() as producer:
        link = connect(producer)
        link.greet(HELLO, soon())
        link.reserve(names(0, 6), 5, soon())
        store(producer, names(0, 2))
        receive(link, names(0, 2))
        link.confirm(2, soon())
        wait_until(lambda: producer.leases.stats.num_confirmed == 1)
        link.close()


def test_a_receiver_that_goes_leaves_no_lease() -> None:
    with producing() as producer:
        link = connect(producer)
        link.greet(HELLO, soon())
        link.reserve(names(0, 6), 1000, soon())
        store(producer, names(0, 2))
        link.close()
        wait_until(lambda: producer.leases.stats.num_lost == 1)
        assert producer.leases.num_kept == producer.leases.num_blocks == 0


def test_a_silent_receiver_loses_its_lease_at_the_deadline() -> None:
    with producing(lease_timeout=0.2) as producer:
        link = connect(producer)
        link.greet(HELLO, soon())
        link.reserve(names(0, 6), 1000, soon())
        store(producer, names(0, 2))
        wait_until(lambda: producer.leases.stats.num_expired == 1)
        assert producer.leases.num_kept == producer.leases.num_blocks == 0
        link.close()


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (Hello(b"g" * 32, BLOCK_BYTES), "other weights"),
        (Hello(FINGERPRINT, 128), "128 bytes; those here take 64"),
        (Hello(FINGERPRINT, BLOCK_BYTES, 7), "version 7 of the protocol; this engine speaks 1"),
    ],
)
def test_unequal_engines_are_refused(hello: Hello, message: str) -> None:
    with producing() as producer:
        link = connect(producer)
        with pytest.raises(RefusedError, match=message):
            link.greet(hello, soon())
        link.close()
        assert producer.leases.stats.num_rejected == 1


def test_leases_beyond_the_room_are_refused() -> None:
    with producing(num_blocks=10) as producer:
        first, second = connect(producer), connect(producer)
        for link in (first, second):
            link.greet(HELLO, soon())
        first.reserve(names(0, 8), 5, soon())
        with pytest.raises(RefusedError, match="no room for 3 KV blocks"):
            second.reserve(names(10, 13), 5, soon())
        third = connect(producer)
        third.greet(HELLO, soon())
        third.reserve(names(2, 10), 5, soon())  # six of the eight have room already
        for link in (first, second, third):
            link.close()
        wait_until(lambda: not open_leases(producer))


def test_a_wrong_checksum_is_noticed() -> None:
    ours, theirs = (Link(each) for each in socket.socketpair())
    content = content_of(name_of(1)).tobytes()
    good = checksum(name_of(1), content_of(name_of(1)))
    theirs.send_block(0, good, content, soon())
    theirs.send_block(1, good, content[:-1] + b"?", soon())
    theirs.send_block(2, good, content, soon())
    memory = np.zeros(BLOCK_BYTES, np.uint8)
    assert ours.receive_block(0, name_of(1), memory, soon())
    assert not ours.receive_block(1, name_of(1), memory, soon())
    assert not ours.receive_block(2, name_of(2), memory, soon())  # under another name
    for link in (ours, theirs):
        link.close()


# ---------------------------------------------------------------- hostile bytes


def conversation() -> bytes:
    """What a decode engine sends."""
    sent = []

    class Recorder:
        def settimeout(self, seconds: float) -> None:
            pass

        def sendall(self, content: bytes) -> None:
            sent.append(content)

    link = Link(Recorder())  # type: ignore[arg-type]
    with contextlib.suppress(AttributeError):
        link.greet(HELLO, soon())
    with contextlib.suppress(AttributeError):
        link.reserve(names(0, 6), 5, soon())
    link.confirm(0, soon())
    return b"".join(sent)


def test_hostile_bytes_end_their_connection_only(by_size: Callable[..., int]) -> None:
    good, rng = conversation(), random.Random(0)
    with producing() as producer:
        honest = connect(producer)
        honest.greet(HELLO, soon())
        honest.reserve(names(10, 14), 100, soon())
        for _ in range(by_size(200, 5000)):
            content = bytearray(good)
            first = rng.randrange(len(content))
            kind = rng.choice(["flip", "cut", "insert", "zero", "random", "length"])
            if kind == "flip":
                content[first] ^= 1 << rng.randrange(8)
            elif kind == "cut":
                del content[first:]
            elif kind == "insert":
                content[first:first] = rng.randbytes(rng.randrange(1, 20))
            elif kind == "zero":
                content[first : first + 20] = bytes(len(content[first : first + 20]))
            elif kind == "length":  # of the first message, or of the second one
                at = rng.choice([1, 5 + 12 + 2 + 32 + 8 + 1])
                content[at : at + 4] = struct.pack("!I", rng.choice([0, 1, 2**31, 2**32 - 1]))
            else:
                content = bytearray(rng.randbytes(rng.randrange(200)))
            with producer._address.connect(5) as raw, contextlib.suppress(OSError):
                raw.sendall(content)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(1000):
                    pass
        store(producer, names(10, 14))
        receive(honest, names(10, 14))
        honest.confirm(4, soon())
        honest.close()
        wait_until(lambda: not open_leases(producer))
        wait_until(lambda: not producer._connections)
        assert producer.leases.num_kept == producer.leases.num_blocks == 0
        assert producer.leases.stats.num_rejected > 20


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("!BI", 4, 2**32 - 1),
        struct.pack("!BI", 4, 8),
        struct.pack("!BI", 4, 8 + 34 * (MOST_BLOCKS + 1)),
        struct.pack("!BId", 4, 8 + 34, float("nan")) + bytes(34),
        struct.pack("!BId", 4, 8 + 34, -1.0) + bytes(34),
        struct.pack("!BId", 4, 8 + 34, float("inf")) + bytes(34),
        struct.pack("!BI", 9, 0),
    ],
)
def test_what_reserves_nothing(content: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(content)
    with pytest.raises(ProtocolError):
        Link(ours).receive_reserve(soon())
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
        (struct.pack("!BI", 5, 2**30), ProtocolError),
        (struct.pack("!BIIQ", 5, 12 + BLOCK_BYTES, 3, 0) + bytes(BLOCK_BYTES), ProtocolError),
        (struct.pack("!BIIQ", 5, 12 + BLOCK_BYTES, 0, 0) + bytes(3), ClosedError),
        (b"", ClosedError),
    ],
)
def test_a_hostile_prefill_engine(content: bytes, error: type[Exception]) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(content)
    theirs.close()
    with pytest.raises(error):
        Link(ours).receive_block(0, name_of(0), np.zeros(BLOCK_BYTES, np.uint8), soon())
    ours.close()


def test_a_message_that_does_not_end_has_a_deadline() -> None:
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(0.02):
                theirs.sendall(b"\0")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises((TimeoutError, ProtocolError)):
        Link(ours).receive_block(0, name_of(0), np.zeros(2**20, np.uint8), soon(0.2))
    is_over.set()
    thread.join()
    ours.close()
    theirs.close()


# ---------------------------------------------------------------- leases, by a clock of the test


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_ends_at_its_deadline() -> None:
    clock = Clock()
    leases = Leases(10, clock)
    first, second = leases.reserve(names(0, 4), 5), leases.reserve(names(2, 6), 8)
    assert first is not None and second is not None
    for name in names(0, 8):
        leases.keep(name, content_of(name))
    assert leases.num_kept == 6 and not leases.lacks(name_of(0)) and not leases.lacks(name_of(7))
    clock.now += 5
    with pytest.raises(TimeoutError):
        leases.wait(first, 0, 0)
    assert leases.num_kept == leases.num_blocks == 4
    assert leases.wait(second, 0, 0) is not None
    leases.end(first, True)  # too late
    clock.now += 3
    leases.drop_expired()
    assert leases.num_kept == leases.num_blocks == 0
    stats = leases.stats
    assert (stats.num_expired, stats.num_confirmed) == (2, 0)


def test_a_name_that_is_reserved_twice() -> None:
    leases = Leases(4, Clock())
    lease = leases.reserve([name_of(0)] * 9, 5)
    assert lease is not None and leases.num_blocks == 1
    leases.end(lease, True)
    assert leases.num_blocks == 0


def test_random_leases(by_size: Callable[..., int]) -> None:
    """What is kept is what leases want, whatever happens in which order."""
    rng, clock = random.Random(0), Clock()
    leases, open_ones = Leases(30, clock), []
    kept: set[Name] = set()
    for _ in range(by_size(3000, 100_000)):
        clock.now += rng.choice([0, 0, 0.5])
        open_ones = [lease for lease in open_ones if lease.deadline > clock.now]
        kept &= {name for lease in open_ones for name in lease.names}
        action = rng.choice(["reserve", "keep", "keep", "end"])
        if action == "reserve":
            first = rng.randrange(40)
            wanted = names(first, first + rng.randrange(1, 10))
            if (lease := leases.reserve(wanted, rng.choice([1, 5, 50]))) is not None:
                open_ones.append(lease)
        elif action == "keep":
            name = name_of(rng.randrange(50))
            leases.keep(name, content_of(name))
            kept.add(name)
        elif open_ones:
            leases.end(open_ones.pop(rng.randrange(len(open_ones))), rng.random() < 0.5)
        leases.drop_expired()
        wanted_now = {name for lease in open_ones for name in lease.names}
        assert leases.num_blocks == len(wanted_now) <= 30
        kept &= wanted_now
        assert leases.num_kept == len(kept)
        assert all(leases.lacks(name) == (name not in kept) for name in wanted_now)


# ---------------------------------------------------------------- outages


def test_an_outage_becomes_longer_and_ends() -> None:
    clock = Clock()
    outage, error = Outage("http://x", clock), OSError("no")
    assert outage.may_try() and outage.may_try()
    began = clock.now
    clock.now += 0.5
    outage.note_failure(began, error)
    outage.note_failure(began, error)  # of another request at the same time: counts once
    assert not outage.may_try()
    clock.now += 1
    assert outage.may_try() and not outage.may_try()  # one tries
    outage.note_failure(clock.now, error)
    clock.now += 1
    assert not outage.may_try()
    clock.now += 1
    assert outage.may_try()
    outage.note_success()
    assert outage.may_try() and outage.may_try()
    for _ in range(10):
        outage.note_failure(clock.now, error)
    clock.now += 30
    assert outage.may_try()


# ---------------------------------------------------------------- addresses


def test_a_port_in_use() -> None:
    port = free_port()
    in_use = pytest.raises(ValueError, match=f"127.0.0.1:{port}: Address already in use")
    with Address("127.0.0.1", port).listen(), in_use:
        Address("127.0.0.1", port).listen()
    with pytest.raises(ValueError, match="cannot be sent from /no/such/folder"):
        Address("/no/such/folder", 0).listen()


def test_the_socket_of_a_killed_engine_is_replaced() -> None:
    path = f"{tempfile.mkdtemp(prefix='kv')}/kv"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    address = Address(path, 0)
    with address.listen(), pytest.raises(ValueError, match="in use"):
        address.listen()
    address.remove()
    Path(path).write_text("a file of the user's")
    with pytest.raises(ValueError, match="in use"):
        address.listen()
    assert Path(path).read_text()
