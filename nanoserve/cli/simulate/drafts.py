"""Speculative decoding in simulation: draft tokens that are right with a given chance.

The extension proposes tokens as a draft model would; the executor verifies them against the scripts
as the sampler does. What drafting costs is the step time's: a step computes the tokens of all
drafts.
"""

from collections.abc import Callable
from random import Random

from nanoserve.cli.simulate.executor import SimulatedExecutor
from nanoserve.engine.draft_room import add_draft_tokens
from nanoserve.engine.extension import Extension
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.plan import Plan
from nanoserve.utils.checks import check_int, check_number, require


class DrawnDrafts(Extension):
    """Adds `num_draft_tokens` to each decode row; each is right with chance `acceptance`.

    A draft token counts only if all before it are right, as in real drafts: of k tokens with chance
    a, a + a^2 + ... + a^k are accepted on average.
    """

    def __init__(
        self, engine: LLMEngine, num_draft_tokens: int, acceptance: float, seed: int = 0
    ) -> None:
        check_int("num_draft_tokens", num_draft_tokens, 1)
        check_number("acceptance", acceptance, 0, 1)
        executor = engine.executor
        require(
            isinstance(executor, SimulatedExecutor),
            "DrawnDrafts knows the outputs of a simulated executor only",
        )
        self._executor: SimulatedExecutor = executor  # type: ignore[assignment]
        self._scheduler, self._rng = engine.scheduler, Random(seed)
        self._number, self._acceptance = num_draft_tokens, acceptance

    def extend_plan(self, plan: Plan) -> None:
        if plan.admitted:
            return  # a step with prompts has no drafts, as in `Speculation`
        for index, row in enumerate(plan.rows):
            seq = row.seq
            if not row.num_sampled or not seq.num_output_tokens or seq.num_pending:
                continue
            script = self._executor.script_of(seq.slot)
            right = list(script[seq.num_output_tokens :][: self._number])
            add_draft_tokens(self._scheduler, plan, index, self._drafted(right))

    def _drafted(self, right: list[int]) -> list[int]:
        """Return `right` up to the first token that is drawn to be wrong, which is changed."""
        for index, token_id in enumerate(right):
            if self._rng.random() >= self._acceptance:
                return [*right[:index], token_id ^ 1, *right[index + 1 :]]
        return right


def drawn_drafts(num_draft_tokens: int, acceptance: float) -> Callable[[LLMEngine], DrawnDrafts]:
    """Return a maker of the extension, for `Setup.extensions`."""
    return lambda engine: DrawnDrafts(engine, num_draft_tokens, acceptance)
