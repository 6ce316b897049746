"""Pipeline parallelism in the scheduler keeps as many steps in flight as there are stages.

A step passes from stage to stage, so a stage is idle unless it computes another step in the
meantime. The loop already keeps `num_steps_ahead` steps in flight; this extension decides which
sequences run in which step. Without it, the first step would take all sequences and the next steps
none, so only one stage would work at a time. So the running sequences are divided into
micro-batches, and so is the token budget:

    step 1   a b c | a waits for its token until step 1 has left the last stage
    step 2   d e f |
    step 3   g h   | then a b c again

A pending token cannot be an input here, because it is sampled in the last stage and needed in the
first. All tokens of a prompt are known, so its chunks follow each other through the stages.
"""

from itertools import islice
from typing import TYPE_CHECKING

from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension, PreparedFeature
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine

_LEAST_CHUNK = 32  # minimum number of prompt tokens in a step, if available: fewer are no faster
STEP_UNDER_WAY = "a step that contains it is in flight"  # reason for which a sequence is held


class PipelineSchedule(Extension):
    """Divides sequences and tokens into micro-batches, one per step in flight.

    A sequence with a pending token is left out. Chunks of a prompt need not wait for each other,
    because each stage runs its steps in order. If a sequence is preempted while a step in flight
    will still yield its token, it is held until it has that token; otherwise it would compute the
    token twice.
    """

    def __init__(self, engine: "GuardedEngine") -> None:
        self._scheduler = engine.scheduler
        self._num_stages = engine.config.pipeline_parallel_size
        self._most_tokens = -(-engine.scheduler.max_num_batched_tokens // self._num_stages)
        self._num_rows = 0  # maximum number of running sequences in the planned step
        self._under_way: list[Plan] = []
        self._held_back: list[Sequence] = []  # preempted while a step with them was in flight

    def on_step_start(self) -> None:
        if self._held_back:
            busy = self._busy()
            free = [seq for seq in self._held_back if seq not in busy]
            self._held_back = [seq for seq in self._held_back if seq in busy and not seq.finished]
            self._scheduler.release(free, STEP_UNDER_WAY)

    def token_budget(self, num_tokens: int) -> int:
        """Return the token budget of this step's micro-batch.

        A stage waits for the longest of the steps in flight. So a step that computed a whole prompt
        next to decode steps would leave all stages but one idle.
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
        """Leave out sequences in flight, and sequences beyond the size of a micro-batch."""
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
        # An exception may have interrupted `on_release` between its last two lines.
        self._held_back = [seq for seq in self._scheduler.held if STEP_UNDER_WAY in seq.held_for]

    def _busy(self) -> set[Sequence]:
        return {row.seq for plan in self._under_way for row in plan.rows}


def prepare_pipeline(config: "EngineConfig", model_config: "ModelConfig") -> PreparedFeature:
    """Return a feature that adds a `PipelineSchedule`; see `nanoserve.build.PrepareFeature`."""
    return PreparedFeature(lambda engine: engine.add_extension(PipelineSchedule(engine)))
