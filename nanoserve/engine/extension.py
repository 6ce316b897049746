"""Extensions are the interface through which features take part in the engine's steps.

    step      methods called                          what they may do
    --------  --------------------------------------  --------------------------------------------
    add       on_add(seq)                             hold the sequence
    schedule  on_step_start()                         release held sequences, finish sequences
              token_budget(n)                         lower the budget of this step
              may_admit(seq, plan)                    leave a waiting sequence out of this step
              on_admit(seq)                           fill further blocks from elsewhere
              limit_tokens(seq, n, plan)              give a sequence fewer tokens, or none
              extend_plan(plan)                       add draft tokens within the remaining budget
    launch    forward_inputs(plan, inputs)            fill in a field of `ForwardInputs`
    sample    sample_inputs(plan, inputs)             fill in a field of `SampleInputs`
    collect   on_result(plan, result)                 read the result of the step
    any time  on_release(seq)                         a sequence has lost its slot and blocks
              on_reset()                              launched steps are discarded

Extensions are called in the order of the engine's list. They never call each other: they
communicate through the plan. They use the public methods of `Scheduler`, such as `hold`, `release`,
`grow` and `finish`. An exception in any of these methods fails the step, which is then rolled back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoserve.engine.executor import ForwardInputs, SampleInputs, SecondModelMemory, StepResult
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.utils.registry import Registry


class Extension:
    """The base class of all extensions; every method does nothing."""

    def on_add(self, seq: Sequence) -> str | None:
        """Return a reason to hold a new sequence until `Scheduler.release(..., reason)`, or None.

        Called for the first sequence of a request; its `siblings` are held until it has computed
        the prompt.
        """

    def on_step_start(self) -> None:
        """Called before a step is planned, even if nothing can run."""

    def token_budget(self, num_tokens: int) -> int:
        """Return the token budget of the next step: `num_tokens` or fewer."""
        return num_tokens

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        """Return True if a waiting sequence may start to run in this step."""
        return True

    def on_admit(self, seq: Sequence) -> int:
        """Return how many tokens after `seq.num_computed_tokens` need not be computed.

        Called for a sequence that was just admitted. The extension fills the blocks of these tokens
        before the model runs; they are whole blocks that are allocated, without the last token.
        """
        return 0

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        """Return how many of `num_tokens` a sequence may compute in this step; 0 leaves it out.

        Also called for a sequence that was just admitted, which is then the last of
        `plan.admitted`.
        """
        return num_tokens

    def extend_plan(self, plan: Plan) -> None:
        """Add draft tokens to rows that catch up; see `nanoserve.engine.draft_room`."""

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Add to the inputs that the model gets in addition to the batch."""

    def sample_inputs(self, plan: Plan, inputs: SampleInputs) -> None:
        """Add to the inputs of the sampler. All tokens of the previous steps are known."""

    def on_result(self, plan: Plan, result: StepResult) -> None:
        """Called when the tokens of a step have been appended to their sequences."""

    def on_release(self, seq: Sequence) -> None:
        """Called when a sequence has freed its slot and blocks.

        It was preempted (`seq.status` is WAITING) or has finished (FINISHED).
        """

    def on_reset(self) -> None:
        """Called when all steps in flight are discarded: after an error, or without requests.

        After an error, running sequences have lost their slots and blocks and wait again, without
        `on_release`: forget which ones run.
        """

    def close(self) -> None:
        """Release threads, memory and files. The engine is not used again."""


@dataclass(frozen=True)
class PreparedFeature:
    """A feature that has been checked for a model, whose weights are not read yet.

    add_to: adds the feature, usually an `Extension`, to an engine.
    second_model_memory: returns the GPU memory that a second model of the feature will take on the
        first rank's GPU. None: it has none.
    """

    add_to: Callable[[Any], None]
    second_model_memory: Callable[[], SecondModelMemory] | None = None


# Extensions that requests may need, by name (`Request.extensions`), as "module:Class". They are
# imported by the first request that needs them, and constructed with the engine as argument.
EXTENSIONS: Registry[Callable[[Any], Extension]] = Registry(
    "extension", {"structured_outputs": "nanoserve.features.structured.extension:StructuredOutputs"}
)


def register_extension(name: str, location: str) -> None:
    """Register an extension that requests can need, as "module:Class"."""
    EXTENSIONS.register(name, location)
