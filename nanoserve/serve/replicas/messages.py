"""What is sent to a replica: here it knows where it may go, there it is only its content."""

from collections.abc import Callable, Collection
from typing import Any

from nanoserve.engine.request import Request

# Tokens that a completion is thought to bring, whatever it may bring. With many more, the router
# spreads conversations for outputs that never come (benchmarks/routing.py).
_MOST_EXPECTED = 64


def expected_output(request: Request) -> int:
    """Tokens that a request will bring, as far as that is known."""
    most = request.params.max_tokens or _MOST_EXPECTED
    return len(request.sequences) * min(_MOST_EXPECTED, most)


class NotThereError(RuntimeError):
    """No replica that a call may go to is there."""


class Call:
    """For one replica by its name, or for any (None).

    Ray Serve asks its router where a call shall go, and its router asks the call. On the way it is
    pickled, and all that arrives is `content`.
    """

    def __init__(self, content: bytes, replica: str | None = None) -> None:
        self.content, self.replica = content, replica

    def choose(self, candidates: Collection[str]) -> str | None:
        """One of `candidates`; None if it cannot go to any of them now."""
        if self.replica is None:
            return next(iter(candidates), None)
        return self.replica if self.replica in candidates else None

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.content,)


class FirstCall(Call):
    """Makes Serve's router tell from now on, in its thread, which replicas there are."""

    def __init__(self, content: bytes, note_replicas: Callable[[set[str]], None]) -> None:
        super().__init__(content)
        self.note_replicas = note_replicas


class Order(Call):
    """A request: from when it is queued to its last output, wherever it is computed.

    `place` chooses one of the candidates for it.
    """

    def __init__(
        self,
        request: Request,
        content: bytes,
        place: "Callable[[Order, Collection[str]], str | None]",
    ) -> None:
        super().__init__(content)
        self.request, self._place = request, place
        self.num_failures = 0  # of replicas that had it
        self.unreached: set[str | None] = set()  # that were chosen for it in vain
        self.hashes: list[bytes] = []
        self.num_matched = 0  # tokens that the replica which has it is thought to have cached
        self.num_sequences = len(request.sequences)
        self.num_tokens = 0  # that have come of it
        self.counted = 0  # of its work, at the replica that has it
        self.response: Any = None  # Serve's, while it is at a replica or on its way
        self.is_aborted = self.is_over = False

    def choose(self, candidates: Collection[str]) -> str | None:
        return None if self.is_over else self._place(self, candidates)

    @property
    def work(self) -> int:
        """Tokens that are still to be computed, as far as that is known."""
        left = max(self.num_sequences, expected_output(self.request) - self.num_tokens)
        if self.num_tokens:
            return left
        return left + len(self.request.prompt_token_ids) - self.num_matched
