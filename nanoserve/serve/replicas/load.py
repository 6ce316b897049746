"""The recent share of each replica in all work, which is the slow signal of `PrefixRouter`."""

from collections.abc import Collection
from dataclasses import dataclass

_MEMORY = 100  # time constant of the exponential decay, in requests per replica


@dataclass
class Share:
    """Exponentially decaying sums over the requests sent to a replica."""

    num_tokens: float = 0.0  # tokens to compute, without cached tokens
    num_requests: float = 0.0


class WorkShares:
    """Work shares of all replicas, by name."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}

    def add(self, replica: str) -> None:
        """Add a replica with the mean share, as earlier requests could not have gone to it."""
        count = max(1, len(self._shares))
        self._shares[replica] = Share(self._num_tokens() / count, self._num_requests() / count)

    def remove(self, replica: str) -> None:
        del self._shares[replica]

    def note(self, replica: str, num_tokens: int) -> None:
        """Record a request sent to `replica`, with `num_tokens` tokens to compute."""
        kept = 1 - 1 / (_MEMORY * len(self._shares))
        for share in self._shares.values():
            share.num_tokens *= kept
            share.num_requests *= kept
        self._shares[replica].num_tokens += num_tokens
        self._shares[replica].num_requests += 1

    @property
    def work_of_a_request(self) -> float:
        """Mean number of tokens to compute per request; 0 before the first request."""
        num_requests = self._num_requests()
        return self._num_tokens() / num_requests if num_requests else 0.0

    def excess(self, replicas: Collection[str]) -> dict[str, float]:
        """Return how far each share exceeds the mean of `replicas`, relative to that mean.

        After few requests, the result is scaled down by the fill level of the decaying sums.
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
