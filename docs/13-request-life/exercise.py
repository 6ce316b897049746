"""Exercise: the loop of a server, with bad requests, deadlines and steps that fail.

Write `serve(engine, jobs)` with three methods of `nanoserve.engine.guard.GuardedEngine`:
`add_request(request_id, prompt, params)`, `step()` and `abort_request(request_id)`. Their
docstrings say what they return and what they guarantee.

Time is counted in ticks, from 0. In each tick, in this order:

1. the jobs whose `arrival` is this tick are added, in the order of the list. A job that the engine
   refuses is over: its result is the ValueError;
2. the jobs that came `deadline` ticks ago and are not over are aborted: their result is what
   `abort_request` returns (a job with a deadline of 5 has had five ticks to run in);
3. one step is made. If it raises RuntimeError, it is made again, twice at most; if it fails three
   times, the error leaves `serve`. Of what a step returns, the outputs that are `finished` are
   results.

Ticks go on while there is a job without a result, also when nothing runs because the next one comes
later. Then the results are returned, by request id (no two jobs share one).

If any exception leaves `serve`, a KeyboardInterrupt for one, none of these jobs may be left in the
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
