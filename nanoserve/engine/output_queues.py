"""The output queues: one for each subscribed request, and one for all other requests."""

from collections import deque
from collections.abc import Collection, Iterable

from nanoserve.outputs import RequestOutput


class OutputQueues:
    """Keeps outputs in order until they are read.

    `step` returns the outputs of requests without a subscriber; a stream subscribes to its request
    and reads its own queue, whichever thread steps the engine.
    """

    def __init__(self) -> None:
        # Outputs of requests without a subscriber. The list object never changes, so callers can
        # empty and fill it without a function call, in which a Ctrl-C could strike.
        self.unclaimed: list[RequestOutput] = []
        self._queues: dict[str, deque[RequestOutput]] = {}

    def __len__(self) -> int:
        """Return how many outputs `take` would return."""
        return len(self.unclaimed)

    def subscribe(self, request_id: str) -> "deque[RequestOutput]":
        """Create and return a queue that receives the outputs of a request from now on."""
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
        """Add the outputs that are not there yet: an exception may have interrupted `put`."""
        for output in outputs:
            queue = self._queue_of(output.request_id)
            if not any(output is earlier for earlier in queue):
                queue.append(output)

    def has(self, request_id: str) -> bool:
        """Return True if earlier outputs of a request have not been read."""
        queue = self._queue_of(request_id)
        return any(output.request_id == request_id for output in queue)

    def take(self) -> list[RequestOutput]:
        """Remove and return the outputs of all requests without a subscriber."""
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
