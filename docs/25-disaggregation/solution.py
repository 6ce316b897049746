"""A solution of `exercise.py`."""

from collections import deque
from dataclasses import dataclass


@dataclass
class Request:
    name: str
    num_tokens: int
    number: int  # in the order in which prompts were computed
    num_full: int  # full blocks
    num_blocks: int = 0  # blocks that it holds here

    @property
    def num_needed(self) -> int:
        return self.num_full + 1


class DecodeSide:
    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.num_free_blocks, self.block_size = num_blocks, block_size
        self.max_num_seqs = max_num_seqs
        self.requests: dict[str, Request] = {}
        self.line: deque[Request] = deque()
        self.in_flight: list[Request] = []
        self.queue: list[Request] = []
        self.running: set[str] = set()

    def computed(self, name: str, num_tokens: int) -> None:
        num_full = (num_tokens - 1) // self.block_size
        self.requests[name] = Request(name, num_tokens, len(self.requests), num_full)
        self.line.append(self.requests[name])

    def start_transfers(self) -> list[str]:
        started = []
        while self.line:
            head = self.line[0]
            coming = [*self.in_flight, *self.queue]
            reserved = sum(request.num_needed - request.num_blocks for request in coming)
            if head.num_needed + reserved > self.num_free_blocks:
                break
            self._take(head, head.num_full)
            self.in_flight.append(self.line.popleft())
            started.append(head.name)
        return started

    def arrived(self, name: str) -> None:
        request = self.requests[name]
        self.in_flight.remove(request)
        self.queue.append(request)
        self.queue.sort(key=lambda each: each.number)

    def failed(self, name: str) -> None:
        self._take(self.requests[name], -self.requests[name].num_blocks)
        self.arrived(name)

    def admit(self) -> dict[str, int]:
        admitted: dict[str, int] = {}
        while self.queue and len(self.running) < self.max_num_seqs:
            head = self.queue[0]
            if head.num_needed - head.num_blocks > self.num_free_blocks:
                break
            admitted[head.name] = head.num_tokens - head.num_blocks * self.block_size
            self._take(head, head.num_needed - head.num_blocks)
            self.running.add(self.queue.pop(0).name)
        return admitted

    def finished(self, name: str) -> None:
        self.running.remove(name)
        self._take(self.requests[name], -self.requests[name].num_blocks)

    def _take(self, request: Request, num_blocks: int) -> None:
        request.num_blocks += num_blocks
        self.num_free_blocks -= num_blocks
