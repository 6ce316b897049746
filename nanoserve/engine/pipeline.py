"""Pipeline parallelism, as the brain sees it: as many steps under way as there are stages.

A step passes from stage to stage, so a stage is idle unless another step is in it meanwhile. The
loop keeps `num_steps_ahead` steps under way already; what is added here is who runs in which. With
a naive scheduler the first step takes all sequences, and the others find nobody left: the stages
take turns. So what runs is shared out, and so is the budget of tokens:

    step 1   a b c | a waits for its token until step 1 has left the last stage
    step 2   d e f |
    step 3   g h   | then a b c again

A token that is not known can be nobody's input here: it is made in the last stage, and needed in
the first one. Of a prompt, all tokens are known: its chunks follow each other through the stages.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from functools import cache
from itertools import islice
from typing import Any

from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus

_LEAST_CHUNK = 32  # tokens of prompts in a step, where there are so many: fewer are no faster
STEP_UNDER_WAY = "a step that it is in is under way"  # a reason to be held


class PipelinedScheduler(Scheduler):
    """Plans steps of which several are under way. A sequence with a pending token is left out.

    Chunks of a prompt need not wait for each other: each stage runs its steps in order. Whoever is
    preempted while a step under way still owes it a token is held until it has it; or it would
    compute that token twice.
    """

    def share_out(self, num_stages: int, steps: "StepsUnderWay") -> None:
        """Begin to; `steps` are those of the engine."""
        self.num_stages, self.steps = num_stages, steps
        self._most_tokens = -(-self.max_num_batched_tokens // num_stages)

    def schedule(self) -> Plan:
        self.max_num_batched_tokens = self._share_of_tokens()
        if self.held:
            busy = self._busy()
            self.release([seq for seq in self._held_back() if seq not in busy])
        return super().schedule()

    def _schedule_running(self, plan: Plan) -> None:
        """The next ones of those that are not under way, up to a stage's share."""
        running, share = SequenceStatus.RUNNING, -(-len(self.running) // self.num_stages)
        for seq in list(self.running):  # a copy: preemption shortens the list
            if len(plan.rows) >= share:
                break
            if seq.status is running and not seq.num_pending:
                self._plan_row(seq, plan)

    def _admit_waiting(self, plan: Plan) -> None:
        if not any(self._held_back()):  # who was preempted comes first
            super()._admit_waiting(plan)

    def _preempt(self, seq: Sequence) -> None:
        super()._preempt(seq)
        if seq in self._busy():
            self._leave_queue(seq)
            self.hold(seq, STEP_UNDER_WAY)

    def _share_of_tokens(self) -> int:
        """The budget of the next step: what all steps have to compute of prompts, shared out.

        A stage waits for the longest of the steps that are under way. So one that computes a whole
        prompt beside steps that decode would keep all stages but one idle.
        """
        missing = sum(
            seq.num_tokens - seq.num_computed_tokens
            for seq in self.running
            if not seq.num_pending and seq.num_tokens - seq.num_computed_tokens > 1
        )
        for seq in islice(self.waiting, self.max_num_seqs - len(self.running)):
            missing += seq.num_tokens
            if missing >= self._most_tokens * self.num_stages:
                break
        chunk = max(_LEAST_CHUNK, -(-missing // self.num_stages))
        return min(self._most_tokens, -(-len(self.running) // self.num_stages) + chunk)

    def _busy(self) -> set[Sequence]:
        return {row.seq for step in self.steps for row in step.plan.rows}

    def _held_back(self) -> Iterable[Sequence]:
        return (seq for seq in self.held if seq.held_for is STEP_UNDER_WAY)


class StepsUnderWay(deque[Any]):
    """An engine's steps under way. If they are given up, its executor is told.

    Other ranks compute a step that was launched, whoever still wants it, and wait for this one.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = weakref.ref(engine)

    def clear(self) -> None:
        super().clear()
        executor = self._engine().executor
        if hasattr(executor, "give_up"):  # else it sleeps
            executor.give_up()


def share_out(engine: Any) -> None:
    """Prepare an `LLMEngine` whose executor is a pipeline."""
    engine._in_flight = StepsUnderWay(engine)
    scheduler = engine.scheduler
    scheduler.__class__ = pipelined(type(scheduler))
    scheduler.share_out(engine.config.pipeline_parallel_size, engine._in_flight)


@cache
def pipelined(kind: type[Scheduler]) -> type[PipelinedScheduler]:
    """A scheduler of this kind, for a pipeline: those that guess are others."""
    return type(f"Pipelined{kind.__name__}", (PipelinedScheduler, kind), {})
