"""Pipeline parallelism on the scheduler side: as many steps under way as there are stages.

A step passes from stage to stage, so a stage is idle unless another step is in it meanwhile. The
loop keeps `num_steps_ahead` steps under way already; what this extension adds is which sequences
run in which step. Without it, the first step takes all sequences, and the others find none: the
stages take turns. So what runs is shared out, and so is the budget of tokens:

    step 1   a b c | a waits for its token until step 1 has left the last stage
    step 2   d e f |
    step 3   g h   | then a b c again

A pending token cannot be an input here: it is made in the last stage, and needed in the first one.
Of a prompt, all tokens are known: its chunks follow each other through the stages.
"""

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine

_LEAST_CHUNK = 32  # tokens of prompts in a step, where there are so many: fewer are no faster
STEP_UNDER_WAY = "a step that it is in is under way"  # a reason to be held


class PipelineSchedule(Extension):
    """Shares out sequences and tokens over the steps that are under way at the same time.

    A sequence with a pending token is left out. Chunks of a prompt need not wait for each other:
    each stage runs its steps in order. A sequence that is preempted while a step under way still
    owes it a token is held until it has it; or it would compute that token twice.
    """

    def __init__(self, engine: "GuardedEngine") -> None:
        self._scheduler = engine.scheduler
        self._num_stages = engine.config.pipeline_parallel_size
        self._most_tokens = -(-engine.scheduler.max_num_batched_tokens // self._num_stages)
        self._num_rows = 0  # of running sequences in the step that is planned
        self._under_way: list[Plan] = []
        self._held_back: list[Sequence] = []  # preempted in the middle of a step

    def on_step_start(self) -> None:
        if self._held_back:
            busy = self._busy()
            free = [seq for seq in self._held_back if seq not in busy]
            self._held_back = [seq for seq in self._held_back if seq in busy and not seq.finished]
            self._scheduler.release(free, STEP_UNDER_WAY)

    def token_budget(self, num_tokens: int) -> int:
        """Return this step's share of what all steps have to compute of prompts.

        A stage waits for the longest of the steps that are under way. So one that computes a whole
        prompt beside steps that decode would keep all stages but one idle.
        """
        running, scheduler = self._scheduler.running, self._scheduler
        self._num_rows = -(-len(running) // self._num_stages)
        missing = sum(
            seq.num_tokens - seq.num_computed_tokens
            for seq in running
            if not seq.num_pending and seq.num_tokens - seq.num_computed_tokens > 1
        )
        for seq in islice(scheduler.waiting, max(0, scheduler.max_num_seqs - len(running))):
            missing += seq.num_tokens
            if missing >= self._most_tokens * self._num_stages:
                break
        chunk = max(_LEAST_CHUNK, -(-missing // self._num_stages))
        return min(num_tokens, self._most_tokens, self._num_rows + chunk)

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        return not self._held_back  # a preempted sequence comes first

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        """Leave out what is under way, and what is beyond the share of a step."""
        if plan.admitted and plan.admitted[-1] is seq:
            return num_tokens
        is_beyond = len(plan.rows) >= self._num_rows
        return 0 if seq.num_pending or is_beyond else num_tokens

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        self._under_way.append(plan)

    def on_result(self, plan: Plan, result: StepResult) -> None:
        self._under_way = [each for each in self._under_way if each is not plan]

    def on_release(self, seq: Sequence) -> None:
        if not seq.finished and seq in self._busy():
            self._scheduler.hold(seq, STEP_UNDER_WAY)
            self._held_back.append(seq)

    def on_reset(self) -> None:
        self._under_way.clear()
        # An exception may have come between the two lines that hold a sequence back.
        self._held_back = [seq for seq in self._scheduler.held if STEP_UNDER_WAY in seq.held_for]

    def _busy(self) -> set[Sequence]:
        return {row.seq for plan in self._under_way for row in plan.rows}


def prepare_pipeline(
    config: "EngineConfig", model_config: "ModelConfig"
) -> "Callable[[GuardedEngine], None]":
    """Return what adds a `PipelineSchedule` to an engine; see `nanoserve.build.PrepareFeature`."""
    return lambda engine: engine.add_extension(PipelineSchedule(engine))
