"""Exercise: give the running sequences their tokens, and choose which to preempt.

Complete `schedule_running`, the first half of a step. The rules:

1. The sequences come in the order of `running`. Each gets as many tokens as are not computed yet,
   but no more than the rest of `budget`, and no more than `threshold`, if that is not 0.
2. It needs blocks for all its computed tokens and these new ones; it has `num_blocks` already.
3. If too few blocks are free, sequences are preempted one after the other until there are enough.
   The victim is the last in the order of (priority, arrival) among those that still run, whether
   its turn has come or not; without `by_priority` all priorities count as equal. It may be the
   sequence that needs the blocks: then it gets nothing.
4. A victim frees all its blocks, including one that it may have got in this very step. If it was
   planned already, it is removed from the plan, and its tokens go back to the budget. The number
   of rule 1 is computed once, before blocks are allocated, and does not change when the budget has
   grown. It would make no difference: a sequence that lacks a block lacks a single token, because
   a prompt got blocks for all its tokens when it was admitted.

Return the planned tokens by name, and the names of the victims in the order of preemption.

Test it with `pytest -x docs/07-preemption/test_exercise.py`.
"""

from dataclasses import dataclass


@dataclass
class Running:
    name: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    arrival: int
    priority: int = 0


def schedule_running(
    running: list[Running],
    num_free_blocks: int,
    block_size: int,
    budget: int,
    threshold: int = 0,
    by_priority: bool = False,
) -> tuple[dict[str, int], list[str]]:
    raise NotImplementedError
