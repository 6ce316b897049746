"""Leases: the blocks that decode engines wait for, kept in memory until they have been sent.

A prefill engine keeps only blocks for which another engine waits. A decode engine takes out a lease
of the blocks that it wants, before it sends the prompt. What the engine then computes of them is
kept until the decode engine has confirmed it, or its connection breaks, or the lease's deadline
passes.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanoserve.features.kv_transfer.pair.messages import Name, checksum


@dataclass
class LeaseStats:
    """Totals since the start. Leases that are neither confirmed, expired nor lost are in use."""

    num_leases: int = 0
    num_confirmed: int = 0  # leases whose receiver has confirmed what it has got
    num_expired: int = 0  # leases whose deadline has passed
    num_lost: int = 0  # leases whose connection has broken or has been closed for an error
    num_refused: int = 0  # leases, for want of room
    num_sent: int = 0  # blocks
    num_rejected: int = 0  # connections: of other engines, or with malformed messages


class Kept(NamedTuple):
    """The content of a block."""

    content: bytes
    checksum: int


@dataclass(eq=False)
class Lease:
    """The wanted blocks of one prompt, in order, until a deadline of the clock."""

    names: Sequence[Name]
    deadline: float


class Leases:
    """All leases of a prefill engine, of at most `most_blocks` blocks together.

    Methods may be called in any thread. clock: returns seconds.
    """

    def __init__(self, most_blocks: int, clock: Callable[[], float]) -> None:
        self._most_blocks, self._clock = most_blocks, clock
        self._leases: set[Lease] = set()
        self._num_wanting: Counter[Name] = Counter()  # leases
        self._kept: dict[Name, Kept] = {}
        self._changed = threading.Condition()
        self.stats = LeaseStats()

    @property
    def num_blocks(self) -> int:
        """Number of blocks for which there is, or will be, memory."""
        return len(self._num_wanting)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def reserve(self, names: Sequence[Name], seconds: float) -> Lease | None:
        """Return a lease; None if its blocks have no room beside those of all others."""
        with self._changed:
            self._drop_expired()
            num_new = sum(1 for name in set(names) if name not in self._num_wanting)
            if self.num_blocks + num_new > self._most_blocks:
                self.stats.num_refused += 1
                return None
            lease = Lease(names, self._clock() + seconds)
            self._leases.add(lease)
            self._num_wanting.update(names)
            self.stats.num_leases += 1
            return lease

    def lacks(self, name: Name) -> bool:
        """Return True if a lease waits for this block."""
        with self._changed:
            return name in self._num_wanting and name not in self._kept

    def keep(self, name: Name, content: np.ndarray) -> None:
        """Copy a block for the leases that wait for it, if there are any."""
        if not self.lacks(name):
            return
        kept = Kept(content.tobytes(), checksum(name, content))
        with self._changed:
            self._drop_expired()
            if name in self._num_wanting:
                self._kept[name] = kept
                self._changed.notify_all()

    def wait(self, lease: Lease, index: int, seconds: float) -> Kept | None:
        """Return a block of a lease as soon as it has been computed; None if it is not in time.

        Raises `TimeoutError` if the lease has expired.
        """
        name = lease.names[index]
        with self._changed:
            self._changed.wait_for(lambda: name in self._kept, seconds)
            self._drop_expired()
            if lease not in self._leases:
                raise TimeoutError("the lease has expired")
            return self._kept.get(name)

    def note_sent(self) -> None:
        with self._changed:
            self.stats.num_sent += 1

    def note_rejected(self) -> None:
        with self._changed:
            self.stats.num_rejected += 1

    def end(self, lease: Lease, is_confirmed: bool) -> None:
        """End a lease, unless it has expired: its receiver has what it wanted, or has gone."""
        with self._changed:
            self._drop_expired()
            if lease in self._leases:
                self.stats.num_confirmed += is_confirmed
                self.stats.num_lost += not is_confirmed
                self._drop(lease)

    def drop_expired(self) -> None:
        """Drop all leases whose deadline has passed."""
        with self._changed:
            self._drop_expired()

    def _drop_expired(self) -> None:
        now = self._clock()
        for lease in [lease for lease in self._leases if lease.deadline <= now]:
            self.stats.num_expired += 1
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._num_wanting.subtract(lease.names)
        for name in set(lease.names):
            if not self._num_wanting[name]:
                del self._num_wanting[name]
                self._kept.pop(name, None)
