"""Reserves room for draft tokens in a step that is being planned.

Draft tokens use only the remaining token budget, and blocks that are free and not cached. So no
sequence is preempted or kept waiting because of them, and no cached block is evicted.
"""

from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence


def add_draft_tokens(scheduler: Scheduler, plan: Plan, index: int, token_ids: list[int]) -> int:
    """Add draft tokens to row `index` of a plan; returns how many of them it computes.

    Call it in `Extension.extend_plan`. Draft tokens are truncated by the plan's filters, the
    budget, the sequence's limits and the free blocks. A row has draft tokens of one extension only.
    """
    row = plan.rows[index]
    if row.seq in plan.draft_tokens:
        return 0
    if row.seq in plan.draft_filters:
        token_ids = plan.draft_filters[row.seq](token_ids)
    count = reserve_draft_tokens(scheduler, plan, row, len(token_ids))
    plan.set_draft_tokens(index, token_ids[:count])
    return count


def reserve_draft_tokens(scheduler: Scheduler, plan: Plan, row: Row, most: int) -> int:
    """Reserve budget and blocks for up to `most` draft tokens after `row`; returns how many fit."""
    most = min(most, plan.budget, max_draft_tokens(scheduler, row))
    seq, end = row.seq, row.start + row.n
    while seq.num_allocated_tokens < end + most and _has_spare_blocks(scheduler):
        scheduler.grow(seq, seq.num_allocated_tokens + 1 - row.start)
    count = max(0, min(most, seq.num_allocated_tokens - end))
    plan.budget -= count
    return count


def max_draft_tokens(scheduler: Scheduler, row: Row) -> int:
    """Return the maximum number of draft tokens of `row`, regardless of budget and blocks.

    It is 0 until all tokens of the sequence are known and planned. The last token that the sequence
    may have is sampled, so it is never a draft token.
    """
    seq = row.seq
    if not may_draft(scheduler, seq) or seq.num_pending or not row.num_sampled:
        return 0
    wanted = seq.params.num_speculative_tokens
    limit = max(0, seq.max_num_tokens - seq.num_tokens - 1)
    return limit if wanted is None else min(limit, wanted)


def may_draft(scheduler: Scheduler, seq: Sequence) -> bool:
    """Return True if a sequence may have draft tokens at all.

    A logits processor may count its calls, so it must not see tokens that are then rejected.
    """
    has_processors = seq.params.logits_processors or scheduler.config.logits_processors
    return seq.params.num_speculative_tokens != 0 and not has_processors


def _has_spare_blocks(scheduler: Scheduler) -> bool:
    manager = scheduler.block_manager
    if not manager.has_spare_blocks():
        return False
    # With async scheduling, the next step is planned before this one has ended, and may need a
    # block for each running sequence.
    is_scarce = manager.num_free_blocks <= len(scheduler.running) * len(manager.windows)
    return not (scheduler.config.async_scheduling and (scheduler.waiting or is_scarce))
