"""Decides which adapters have a place, so that no request waits for ever.

A batch has at most `num_places` adapters. A sequence whose adapter has a place may join it at once,
although others wait longer: that costs nothing while a place becomes free in time. But it might
never: with a stream of requests for the adapters that are there, their places would never be empty.
So a sequence that has waited for `patience` steps *claims* a place, the one with the fewest users.
From then on only sequences that come before it in the queue may join that place, which is empty
once those that run have ended.
"""

from collections.abc import Callable
from typing import Any

from nanoserve.engine.sequence import Sequence


class Place:
    """A place for an adapter. `users` are the running sequences with it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.adapter: str | None = None  # its content
        self.users: set[Sequence] = set()
        self.last_used = 0
        self.claimant: Sequence | None = None  # it gets the place when that is empty
        self.claimed_for: str | None = None  # the claimant's adapter

    def give_to(self, adapter: str) -> None:
        self.adapter, self.claimant, self.claimed_for = adapter, None, None

    def claim(self, seq: Sequence | None, adapter: str | None = None) -> None:
        self.claimant, self.claimed_for = seq, adapter

    def note_use(self, number: int) -> None:
        self.last_used = number


class Places:
    """The places of one engine.

    order: the queue's, `Scheduler.order`. patience: steps that a sequence waits before it claims.
    """

    def __init__(self, num_places: int, order: Callable[[Sequence], Any], patience: int) -> None:
        self._places = [Place(index) for index in range(num_places)]
        self._order, self._patience = order, patience
        self._by_adapter: dict[str, Place] = {}
        self._of_user: dict[Sequence, Place] = {}
        self._waits: dict[Sequence, int] = {}  # since which step a sequence finds no place
        self._step = 0

    @property
    def adapters(self) -> set[str]:
        """The adapters that have a place."""
        return set(self._by_adapter)

    def index_of(self, seq: Sequence) -> int:
        """Return the place of a running sequence, -1 if it has no adapter."""
        place = self._of_user.get(seq)
        return -1 if place is None else place.index

    def begin_step(self) -> None:
        self._step += 1

    def may_run(self, seq: Sequence, adapter: str) -> bool:
        """Return True if a waiting sequence has a place now; otherwise note that it waits."""
        place = self._by_adapter.get(adapter) or self._free_place(seq, adapter)
        if place is not None and self._may_join(place, seq):
            self._waits.pop(seq, None)
            return True
        since = self._waits.setdefault(seq, self._step)
        if self._step - since >= self._patience and place is None:
            self._claim(seq, adapter)
        return False

    def enter(self, seq: Sequence, adapter: str) -> None:
        """Note that a sequence runs, for which `may_run` has been True in this step."""
        place = self._by_adapter[adapter]
        place.users.add(seq)
        place.note_use(self._step)
        self._of_user[seq] = place
        self._drop_claims(seq)

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence runs no more: it has ended or was preempted."""
        place = self._of_user.pop(seq, None)
        if place is not None:
            place.users.discard(seq)
        if seq.finished:
            self._waits.pop(seq, None)
            self._drop_claims(seq)

    def clear(self) -> None:
        """Forget users, claims and waits; adapters keep their places."""
        self._of_user, self._waits = {}, {}
        for place in self._places:
            place.users.clear()
            place.claim(None)

    def _may_join(self, place: Place, seq: Sequence) -> bool:
        claimant = place.claimant
        return claimant is None or self._order(seq) <= self._order(claimant)

    def _free_place(self, seq: Sequence, adapter: str) -> Place | None:
        """Return the empty place that was used least recently, now with this adapter; or None."""
        empty = [p for p in self._places if not p.users and self._may_join(p, seq)]
        if not empty:
            return None
        place = min(
            empty, key=lambda p: (p.claimant is not seq, p.adapter is not None, p.last_used)
        )
        if place.adapter is not None:
            del self._by_adapter[place.adapter]
        place.give_to(adapter)
        place.note_use(self._step)
        self._by_adapter[adapter] = place
        return place

    def _claim(self, seq: Sequence, adapter: str) -> None:
        """Claim a place, unless one is claimed for this adapter already."""
        unclaimed = [p for p in self._places if p.claimant is None]
        if unclaimed and not any(p.claimed_for == adapter for p in self._places):
            min(unclaimed, key=lambda p: len(p.users)).claim(seq, adapter)

    def _drop_claims(self, seq: Sequence) -> None:
        for place in self._places:
            if place.claimant is seq:
                place.claim(None)
