"""A solution of `exercise.py`."""

from collections import deque
from dataclasses import dataclass


@dataclass
class Request:
    name: str
    prompt_len: int
    output_len: int
    arrival_step: int = 0


@dataclass
class Progress:
    request: Request
    known: int
    computed: int = 0

    @property
    def done(self) -> bool:
        return self.known == self.request.prompt_len + self.request.output_len


def simulate(
    requests: list[Request], max_num_seqs: int, budget: int, threshold: int = 0
) -> list[dict[str, int]]:
    waiting: deque[Progress] = deque()
    running: list[Progress] = []
    steps: list[dict[str, int]] = []
    num_unfinished = len(requests)
    while num_unfinished:
        arrived = [r for r in requests if r.arrival_step == len(steps)]
        waiting += [Progress(request, request.prompt_len) for request in arrived]
        plan: dict[str, int] = {}
        left = budget
        for progress in running:
            left -= give(progress, plan, left, threshold)
        while waiting and left and len(running) < max_num_seqs:
            running.append(waiting.popleft())
            left -= give(running[-1], plan, left, threshold)
        for progress in running:
            progress.known += progress.computed == progress.known
        num_unfinished -= sum(progress.done for progress in running)
        running = [progress for progress in running if not progress.done]
        steps.append(plan)
    return steps


def give(progress: Progress, plan: dict[str, int], left: int, threshold: int) -> int:
    """Plan as many tokens as the limits allow; returns their number."""
    n = min(progress.known - progress.computed, left, threshold or left)
    plan[progress.request.name] = n
    progress.computed += n
    return n
