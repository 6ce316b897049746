"""A solution of `exercise.py`."""

from contextlib import suppress
from dataclasses import dataclass

from nanoserve import RequestOutput, SamplingParams
from nanoserve.engine.guard import GuardedEngine

MOST_ATTEMPTS = 3


@dataclass
class Job:
    request_id: str
    arrival: int
    prompt: list[int]
    params: SamplingParams
    deadline: int | None = None


def serve(engine: GuardedEngine, jobs: list[Job]) -> dict[str, RequestOutput | ValueError]:
    results: dict[str, RequestOutput | ValueError] = {}
    tick = 0
    try:
        while len(results) < len(jobs):
            for job in jobs:
                if job.arrival == tick:
                    try:
                        engine.add_request(job.request_id, job.prompt, job.params)
                    except ValueError as error:
                        results[job.request_id] = error
            for job in jobs:
                is_due = job.deadline is not None and job.arrival + job.deadline == tick
                if is_due and job.request_id not in results:
                    results[job.request_id] = engine.abort_request(job.request_id)
            for output in _step(engine):
                if output.finished:
                    results[output.request_id] = output
            tick += 1
    finally:
        for job in jobs:
            engine.abort_request(job.request_id)  # returns None for those that have ended
    return results


def _step(engine: GuardedEngine) -> list[RequestOutput]:
    """A failed step is rolled back, so it can be repeated."""
    for _ in range(MOST_ATTEMPTS - 1):
        with suppress(RuntimeError):
            return engine.step()
    return engine.step()
