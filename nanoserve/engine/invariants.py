"""What holds between any two steps, stated once: tests ask for it after everything they do.

It looks into private tables, because that is where a defect shows first.
"""

from itertools import pairwise

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `RuntimeError` unless queues, slots and pool are consistent. O(pool + tables)."""
    check_pool(scheduler.block_manager, [*scheduler.running, *scheduler.waiting])
    _check_queues(scheduler)


def check_pool(pool: BlockManager, sequences: list[Sequence]) -> None:
    """Raise `RuntimeError` unless the pool is consistent with the tables of `sequences`."""
    expected = [0] * (pool.num_blocks + 1)
    for seq in sequences:
        for block in seq.block_table:
            expected[block] += 1
    used = sum(count > 0 for count in pool._ref_counts)
    published = {h: block for block, h in enumerate(pool._hash_of) if h is not None}
    problems = {
        "reference counts differ from the tables": expected != pool._ref_counts,
        "the dummy block was given out": pool._ref_counts[0] != 0,
        "free + used != num_blocks": len(pool._free) + used != pool.num_blocks,
        "a free block is in use": any(pool._ref_counts[block] for block in pool._free),
        "hash and block maps disagree": pool._block_of != published,
        "a published block has nothing that proves a hit": any(
            pool._content_of[block] is None for block in published.values()
        ),
    }
    _raise_if_any(problems, "the block pool is inconsistent")


def _check_queues(scheduler: Scheduler) -> None:
    running, waiting = scheduler.running, scheduler.waiting
    slots = sorted([*scheduler._free_slots, *(seq.slot for seq in running)])
    rows = [scheduler.block_tables[seq.slot, : len(seq.block_table)] for seq in running]
    order = [scheduler._order(seq) for seq in waiting]
    problems = {
        "slots were lost or given out twice": slots != list(range(scheduler.max_num_seqs)),
        "a row of block_tables differs from its sequence": any(
            row.tolist() != seq.block_table for row, seq in zip(rows, running, strict=True)
        ),
        "waiting is out of order": not all(a < b for a, b in pairwise(order)),
        "a sequence is queued twice": len({*map(id, running), *map(id, waiting)})
        != len(running) + len(waiting),
        "a waiting sequence holds blocks": any(seq.block_table for seq in waiting),
    }
    _raise_if_any(problems, "the scheduler is inconsistent")


def _raise_if_any(problems: dict[str, bool], message: str) -> None:
    found = [problem for problem, is_there in problems.items() if is_there]
    if found:
        raise RuntimeError(f"{message}: {found}")
