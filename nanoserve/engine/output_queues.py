"""Outputs until they are read: a queue for each subscribed request, and one for the others."""

from collections import deque
from collections.abc import Collection, Iterable

from nanoserve.outputs import RequestOutput


class OutputQueues:
    """Keeps outputs until they are read, in order.

    `step` returns the outputs of requests without a subscriber; a stream subscribes to its request
    and reads its own queue, in whichever thread the engine steps.
    """

    def __init__(self) -> None:
        # Of requests without a subscriber. It stays the same list, so that it can be emptied and
        # filled without a call: a Ctrl-C comes with calls.
        self.unclaimed: list[RequestOutput] = []
        self._queues: dict[str, deque[RequestOutput]] = {}

    def __len__(self) -> int:
        """Return how many outputs `take` would return."""
        return len(self.unclaimed)

    def subscribe(self, request_id: str) -> "deque[RequestOutput]":
        """Return the queue that gets the outputs of a request from now on."""
        queue = self._queues[request_id] = deque()
        return queue

    @property
    def num_subscribers(self) -> int:
        return len(self._queues)

    def is_subscribed(self, request_id: str) -> bool:
        return request_id in self._queues

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self._queue_of(output.request_id).append(output)

    def put_missing(self, outputs: Iterable[RequestOutput]) -> None:
        """Put those that are not there yet: an exception may have come between two of them."""
        for output in outputs:
            queue = self._queue_of(output.request_id)
            if not any(output is earlier for earlier in queue):
                queue.append(output)

    def has(self, request_id: str) -> bool:
        """Return whether earlier outputs of a request have not been read."""
        queue = self._queue_of(request_id)
        return any(output.request_id == request_id for output in queue)

    def take(self) -> list[RequestOutput]:
        """Return the outputs of all requests without a subscriber, each of them once."""
        taken = self.unclaimed[:]
        del self.unclaimed[:]
        return taken

    def drop(self, request_ids: Collection[str]) -> None:
        """Remove the queues and outputs of these requests."""
        for request_id in request_ids:
            self._queues.pop(request_id, None)
        self.unclaimed[:] = [o for o in self.unclaimed if o.request_id not in request_ids]

    def _queue_of(self, request_id: str) -> "deque[RequestOutput] | list[RequestOutput]":
        return self._queues.get(request_id, self.unclaimed)
