"""Exercise: the loop of a server, with invalid requests, deadlines and steps that fail.

Write `serve(engine, jobs)` with three methods of `nanoserve.engine.guard.GuardedEngine`:
`add_request(request_id, prompt, params)`, `step()` and `abort_request(request_id)`. Their
docstrings state what they return and what they guarantee.

Time is counted in ticks, from 0. In each tick, in this order:

1. the jobs whose `arrival` is this tick are added, in the order of the list. A job that the engine
   rejects has ended: its result is the ValueError;
2. the jobs that arrived `deadline` ticks ago and have not ended are aborted: their result is the
   return value of `abort_request` (a job with a deadline of 5 has had five ticks to run);
3. one step is run. If it raises RuntimeError, it is repeated, at most twice; if it fails three
   times, the error is raised from `serve`. Of the outputs that a step returns, those that are
   `finished` are results.

Ticks continue while there is a job without a result, also when no job runs because the next one
arrives later. Then the results are returned, by request id (no two jobs share one).

If `serve` raises any exception, such as KeyboardInterrupt, none of these jobs may be left in the
engine.

Test it with: pytest -x docs/13-request-life/test_exercise.py
"""

from dataclasses import dataclass

from nanoserve import RequestOutput, SamplingParams
from nanoserve.engine.guard import GuardedEngine


@dataclass
class Job:
    request_id: str
    arrival: int
    prompt: list[int]
    params: SamplingParams
    deadline: int | None = None


def serve(engine: GuardedEngine, jobs: list[Job]) -> dict[str, RequestOutput | ValueError]:
    raise NotImplementedError
