"""Calls to replicas, with the routing information that Ray Serve's router reads in this process."""

from collections.abc import Callable, Collection
from typing import Any

from nanoserve.engine.request import Request

# Expected output tokens of a completion if max_tokens allows more. A much larger value makes the
# router spread conversations because of output that is never generated (benchmarks/routing.py).
_MOST_EXPECTED = 64


def expected_output(request: Request) -> int:
    """Return the expected number of output tokens of a request."""
    most = request.params.max_tokens or _MOST_EXPECTED
    return len(request.sequences) * min(_MOST_EXPECTED, most)


class NotThereError(RuntimeError):
    """Raised if no replica is available for a call."""


class Call:
    """A call to the replica with the given name, or to any replica (None).

    Ray Serve's router calls `choose` to route it. A call is pickled as its `content` alone, which
    is what the replica receives.
    """

    def __init__(self, content: bytes, replica: str | None = None) -> None:
        self.content, self.replica = content, replica

    def choose(self, candidates: Collection[str]) -> str | None:
        """Return one of `candidates`; None if none of them can take the call now."""
        if self.replica is None:
            return next(iter(candidates), None)
        return self.replica if self.replica in candidates else None

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.content,)


class FirstCall(Call):
    """A call after which Serve's router passes the names of all replicas to `note_replicas`.

    It does so now and on every change, in the router's thread.
    """

    def __init__(self, content: bytes, note_replicas: Callable[[set[str]], None]) -> None:
        super().__init__(content)
        self.note_replicas = note_replicas


class Order(Call):
    """A request on its way from the queue to its last output, on whichever replica.

    place: chooses one of the candidate replicas for it.
    """

    def __init__(
        self,
        request: Request,
        content: bytes,
        place: "Callable[[Order, Collection[str]], str | None]",
    ) -> None:
        super().__init__(content)
        self.request, self._place = request, place
        self.num_failures = 0  # replicas that failed while they had it
        self.unreached: set[str | None] = set()  # chosen replicas that Serve could not reach
        self.hashes: list[bytes] = []  # of the full blocks of its prompt
        self.num_matched = 0  # prompt tokens that its replica is expected to have cached
        self.num_sequences = len(request.sequences)
        self.num_tokens = 0  # output tokens received so far
        self.counted = 0  # its work that is included in the load of its replica
        self.response: Any = None  # Serve's response, while the call is in flight
        self.is_aborted = self.is_over = False

    def choose(self, candidates: Collection[str]) -> str | None:
        return None if self.is_over else self._place(self, candidates)

    @property
    def work(self) -> int:
        """Expected number of tokens that are still to be computed."""
        left = max(self.num_sequences, expected_output(self.request) - self.num_tokens)
        if self.num_tokens:
            return left
        return left + len(self.request.prompt_token_ids) - self.num_matched
