"""Who has got how much of the work lately: the slow signal of `PrefixRouter`."""

from collections.abc import Collection
from dataclasses import dataclass

_MEMORY = 100  # requests for each replica; the older, the less they count


@dataclass
class Share:
    """Of what was sent to a replica: sums that fade."""

    num_tokens: float = 0.0  # that were left to compute
    num_requests: float = 0.0


class WorkShares:
    """Of each replica, by its name."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}

    def add(self, replica: str) -> None:
        """With the mean share: what went to others before it came says nothing about it."""
        count = max(1, len(self._shares))
        self._shares[replica] = Share(self._num_tokens() / count, self._num_requests() / count)

    def remove(self, replica: str) -> None:
        del self._shares[replica]

    def note(self, replica: str, num_tokens: int) -> None:
        """A request has gone to `replica`, with so much left to compute."""
        kept = 1 - 1 / (_MEMORY * len(self._shares))
        for share in self._shares.values():
            share.num_tokens *= kept
            share.num_requests *= kept
        self._shares[replica].num_tokens += num_tokens
        self._shares[replica].num_requests += 1

    @property
    def work_of_a_request(self) -> float:
        """Tokens that one has left to compute, on average; 0 before the first."""
        num_requests = self._num_requests()
        return self._num_tokens() / num_requests if num_requests else 0.0

    def excess(self, replicas: Collection[str]) -> dict[str, float]:
        """How far the share of each is above the mean of `replicas`, as a part of that mean.

        Few requests are no share yet: they are set against what a full memory would hold.
        """
        shares = {replica: self._shares[replica].num_tokens for replica in replicas}
        mean = sum(shares.values()) / len(shares)
        if not mean:
            return dict.fromkeys(shares, 0.0)
        fullness = self._num_requests() / (_MEMORY * len(self._shares))
        return {replica: (share / mean - 1) * fullness for replica, share in shares.items()}

    def _num_tokens(self) -> float:
        return sum(share.num_tokens for share in self._shares.values())

    def _num_requests(self) -> float:
        return sum(share.num_requests for share in self._shares.values())
