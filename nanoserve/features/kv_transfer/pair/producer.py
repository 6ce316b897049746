"""The side of a prefill engine: it sends the blocks that it computes to those that wait for them.

The engine stores every full block in its connector, unless `find` has it already. Here a block that
no lease wants counts as one that is there, so it is not even copied.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from nanoserve.features.kv_transfer.connector import BlockKey, ConnectorContext, Prompt
from nanoserve.features.kv_transfer.pair.leases import Lease, Leases
from nanoserve.features.kv_transfer.pair.messages import (
    ClosedError,
    Hello,
    Link,
    ProtocolError,
)
from nanoserve.features.kv_transfer.pair.options import ProducerOptions

logger = logging.getLogger(__name__)

_GREETING = 5.0  # seconds in which a new connection must have reserved blocks
_POLL = 0.05  # seconds between two looks at whether the receiver is still there
_ACCEPT = 0.2  # seconds between two looks at whether the engine is closed
_MOST_CONNECTIONS = 256

_COUNTERS = {
    "kv_lease_requests": ("num_leases", "Leases of KV blocks for decode engines."),
    "kv_lease_confirmed": ("num_confirmed", "Leases whose blocks have been received."),
    "kv_lease_expired": ("num_expired", "Leases that have ended at their deadline."),
    "kv_lease_lost": ("num_lost", "Leases whose connection has broken."),
    "kv_lease_refused": ("num_refused", "Leases that were refused for want of room."),
    "kv_lease_sent_blocks": ("num_sent", "KV blocks sent to decode engines."),
    "kv_lease_rejected_connections": ("num_rejected", "Connections of unequal engines or none."),
}


class Producer:
    """The connector of a prefill engine. It listens from the start, in threads of its own."""

    is_awaited = True

    def __init__(self, context: ConnectorContext) -> None:
        options = ProducerOptions.of(context.config)
        self._hello = Hello(context.fingerprint, context.block_bytes)
        most_blocks = int(context.config.kv_buffer_size) // context.block_bytes
        self.leases = Leases(most_blocks, time.monotonic)
        self._longest, self._address = options.lease_timeout, options.address
        self._is_closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._listening = options.address.listen()
        self._listening.settimeout(_ACCEPT)
        self._thread = threading.Thread(target=self._listen, name="nanoserve-kv-send", daemon=True)
        self._thread.start()
        logger.info("KV blocks are sent to decode engines from %s", options.address)

    # ------------------------------------------------------------------ KVConnector

    def find(self, keys: Sequence[BlockKey], prompt: Prompt | None) -> int:
        for index, key in enumerate(keys):
            if self.leases.lacks((key.block_hash, key.group)):
                return index
        return len(keys)

    def load(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray], prompt: Prompt) -> int:
        return 0

    def store(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray]) -> None:
        for key, content in zip(keys, memory, strict=True):
            self.leases.keep((key.block_hash, key.group), content)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._listening.close()
        self._address.remove()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def counters(self) -> Iterable[tuple[str, str, int]]:
        self.leases.drop_expired()
        for name, (field, meaning) in _COUNTERS.items():
            yield name, meaning, getattr(self.leases.stats, field)

    # ------------------------------------------------------------------ connections

    def _listen(self) -> None:
        """Accept connections until the engine is closed."""
        while not self._is_closed.is_set():
            try:
                self._accept()
            except TimeoutError:
                self.leases.drop_expired()
            except (OSError, RuntimeError) as error:  # such as too many open files, or threads
                logger.warning("a connection for KV blocks was not accepted: %s", error)
                self._is_closed.wait(_ACCEPT)

    def _accept(self) -> None:
        """Accept a connection, and start a thread for it."""
        connection, _ = self._listening.accept()
        try:
            if len(self._connections) >= _MOST_CONNECTIONS:
                raise OSError(f"there are {_MOST_CONNECTIONS} already")
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except (OSError, RuntimeError):
            self._connections.discard(connection)
            connection.close()
            self.leases.note_rejected()
            raise

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection. Whatever it sends, it ends no other one."""
        try:
            with connection:
                self._answer(Link(connection))
        except (ProtocolError, OSError) as error:
            logger.debug("a connection for KV blocks has ended: %s", error)
        finally:
            self._connections.discard(connection)

    def _answer(self, link: Link) -> None:
        lease = self._begin(link)
        if lease is None:
            return
        is_confirmed = False
        try:
            self._send(link, lease)
            link.receive_confirmation(lease.deadline)
            is_confirmed = True
        finally:
            self.leases.end(lease, is_confirmed)

    def _begin(self, link: Link) -> Lease | None:
        """Return the lease of a new connection; None if it is refused."""
        deadline = time.monotonic() + _GREETING
        try:
            difference = self._hello.difference(link.receive_hello(deadline))
            if difference is not None:
                self.leases.note_rejected()
                link.refuse(difference, deadline)
                return None
            link.accept(deadline)
            names, seconds = link.receive_reserve(deadline)
        except ProtocolError as error:
            if not isinstance(error, ClosedError):
                self.leases.note_rejected()
            raise
        lease = self.leases.reserve(names, min(seconds, self._longest))
        if lease is None:
            link.refuse(f"no room for {len(names)} KV blocks", deadline)
            return None
        try:
            link.accept(deadline)
        except OSError:
            self.leases.end(lease, False)
            raise
        return lease

    def _send(self, link: Link, lease: Lease) -> None:
        """Send the blocks in turn, each as soon as it is there, until the receiver answers."""
        index = 0
        while index < len(lease.names) and not link.has_input and not self._is_closed.is_set():
            kept = self.leases.wait(lease, index, _POLL)
            if kept is not None:
                link.send_block(index, kept.checksum, kept.content, lease.deadline)
                self.leases.note_sent()
                index += 1
