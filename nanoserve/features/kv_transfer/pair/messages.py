"""Messages between a decode engine and a prefill engine, over one connection for each prompt.

    decode engine                            prefill engine
    HELLO version, fingerprint, size    -->
                                        <--  ACCEPTED, or REFUSED reason
    RESERVE seconds, names of blocks    -->
                                        <--  ACCEPTED, or REFUSED reason
                                        <--  BLOCK index, checksum, content     for each name
    RECEIVED number                     -->

A message is a byte for its kind, four for the length of what follows, and that. All numbers are in
network order. What has another kind or length than the other side may send is an error, and ends
the connection: nothing is allocated for a length before it has been checked.
"""

import select
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import xxhash

VERSION = 1
MOST_BLOCKS = 2**16  # in one lease: a million tokens of 16 to a block
_MAGIC = b"nanoserve-kv"
_HEADER = struct.Struct("!BI")
_HELLO = struct.Struct("!12sH32sQ")
_SECONDS = struct.Struct("!d")
_NAME = struct.Struct("!32sH")
_BLOCK = struct.Struct("!IQ")
_NUMBER = struct.Struct("!I")
_MOST_REASON = 500  # bytes

Name = tuple[bytes, int]  # a block hash and a layer group


class Kind(IntEnum):
    HELLO = 1
    ACCEPTED = 2
    REFUSED = 3
    RESERVE = 4
    BLOCK = 5
    RECEIVED = 6


class ProtocolError(Exception):
    """The other side has sent something that it must not send."""


class ClosedError(ProtocolError):
    """The other side has closed the connection."""


class RefusedError(Exception):
    """The prefill engine has refused a connection or a lease, with a reason."""


class Hello(NamedTuple):
    """The facts on which both engines must agree."""

    fingerprint: bytes
    block_bytes: int
    version: int = VERSION

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.version, self.fingerprint, self.block_bytes)

    @classmethod
    def unpack(cls, content: bytes) -> "Hello":
        magic, version, fingerprint, block_bytes = _HELLO.unpack(content)
        if magic != _MAGIC:
            raise ProtocolError("the other side does not speak this protocol")
        return cls(fingerprint, block_bytes, version)

    def difference(self, other: "Hello") -> str | None:
        """Return what keeps this prefill engine from serving another engine; None if nothing."""
        if other.version != self.version:
            return f"version {other.version} of the protocol; this engine speaks {self.version}"
        if other.block_bytes != self.block_bytes:
            return f"KV blocks of {other.block_bytes} bytes; those here take {self.block_bytes}"
        if other.fingerprint != self.fingerprint:
            return "other weights, or other options on which K and V depend"
        return None


def checksum(name: Name, content: np.ndarray) -> int:
    """Return a checksum of a block's content, and of the name under which it is sent."""
    digest = xxhash.xxh3_64(_NAME.pack(*name))
    digest.update(content.data)
    return digest.intdigest()


class Link:
    """One side of a connection. Every call has a deadline, in `time.monotonic()`.

    Raises `ProtocolError` for a message that is not expected, and `OSError` if the deadline passes
    or the connection breaks.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def has_input(self) -> bool:
        """True if a message has begun to arrive, or if the other side has gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    # ------------------------------------------------------------------ decode engine

    def greet(self, hello: Hello, deadline: float) -> None:
        """Introduce a decode engine; raises `RefusedError` if the other side does not serve it."""
        self._send(Kind.HELLO, deadline, hello.pack())
        self._receive_answer(deadline)

    def reserve(self, names: Sequence[Name], seconds: float, deadline: float) -> None:
        """Request a lease of so many seconds; raises `RefusedError` if there is no room."""
        packed = (_NAME.pack(*name) for name in names)
        self._send(Kind.RESERVE, deadline, _SECONDS.pack(seconds), *packed)
        self._receive_answer(deadline)

    def receive_block(self, index: int, name: Name, memory: np.ndarray, deadline: float) -> bool:
        """Write the next block to `memory`; returns False if its checksum is wrong."""
        self._receive_header(Kind.BLOCK, _BLOCK.size + memory.nbytes, deadline)
        number, expected = _BLOCK.unpack(self._receive_bytes(_BLOCK.size, deadline))
        if number != index:
            raise ProtocolError(f"block {number} arrives, and not {index}")
        self._receive_into(memory.data.cast("B"), deadline)
        return checksum(name, memory) == expected

    def confirm(self, num_blocks: int, deadline: float) -> None:
        """Let the prefill engine know what has arrived, so that it can drop the lease."""
        self._send(Kind.RECEIVED, deadline, _NUMBER.pack(num_blocks))

    def _receive_answer(self, deadline: float) -> None:
        kind, length = self._receive_any(deadline)
        if kind == Kind.REFUSED and length <= _MOST_REASON:
            raise RefusedError(self._receive_bytes(length, deadline).decode(errors="replace"))
        if kind != Kind.ACCEPTED or length:
            raise ProtocolError(f"message {kind} of {length} bytes is no answer")

    # ------------------------------------------------------------------ prefill engine

    def receive_hello(self, deadline: float) -> Hello:
        self._receive_header(Kind.HELLO, _HELLO.size, deadline)
        return Hello.unpack(self._receive_bytes(_HELLO.size, deadline))

    def receive_reserve(self, deadline: float) -> tuple[list[Name], float]:
        """Return the names of the wanted blocks, and for how many seconds."""
        kind, length = self._receive_any(deadline)
        num_names, rest = divmod(length - _SECONDS.size, _NAME.size)
        if kind != Kind.RESERVE or rest or not 1 <= num_names <= MOST_BLOCKS:
            raise ProtocolError(f"message {kind} of {length} bytes reserves nothing")
        (seconds,) = _SECONDS.unpack(self._receive_bytes(_SECONDS.size, deadline))
        if not 0 < seconds < 2**32:  # false for NaN
            raise ProtocolError(f"a lease of {seconds} seconds")
        names = _NAME.iter_unpack(self._receive_bytes(num_names * _NAME.size, deadline))
        return list(names), seconds

    def accept(self, deadline: float) -> None:
        self._send(Kind.ACCEPTED, deadline)

    def refuse(self, reason: str, deadline: float) -> None:
        self._send(Kind.REFUSED, deadline, reason.encode()[:_MOST_REASON])

    def send_block(self, index: int, expected: int, content: bytes, deadline: float) -> None:
        self._send(Kind.BLOCK, deadline, _BLOCK.pack(index, expected), content)

    def receive_confirmation(self, deadline: float) -> int:
        self._receive_header(Kind.RECEIVED, _NUMBER.size, deadline)
        (num_blocks,) = _NUMBER.unpack(self._receive_bytes(_NUMBER.size, deadline))
        return int(num_blocks)

    # ------------------------------------------------------------------ bytes

    def _send(self, kind: Kind, deadline: float, *parts: bytes) -> None:
        length = sum(map(len, parts))
        self._limit(deadline)
        self._socket.sendall(_HEADER.pack(kind, length) + b"".join(parts))

    def _receive_any(self, deadline: float) -> tuple[int, int]:
        """Return the kind and the length of the next message."""
        kind, length = _HEADER.unpack(self._receive_bytes(_HEADER.size, deadline))
        return kind, length

    def _receive_header(self, kind: Kind, length: int, deadline: float) -> None:
        found = self._receive_any(deadline)
        if found != (kind, length):
            raise ProtocolError(
                f"message {found[0]} of {found[1]} bytes arrives, and not {kind.value} of {length}"
            )

    def _receive_bytes(self, length: int, deadline: float) -> bytes:
        content = bytearray(length)
        self._receive_into(memoryview(content), deadline)
        return bytes(content)

    def _receive_into(self, memory: memoryview, deadline: float) -> None:
        while memory:
            self._limit(deadline)
            num_read = self._socket.recv_into(memory)
            if not num_read:
                raise ClosedError("the other side has closed the connection")
            memory = memory[num_read:]

    def _limit(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side takes too long")
        self._socket.settimeout(left)
