"""Who holds which KV block at this moment, for those who look at the pool from outside."""

from typing import NamedTuple

from nanoserve.engine.scheduler import Scheduler


class Occupancy(NamedTuple):
    """A copy: what the engine does later does not change it.

    tables: the block table of each running sequence, by arrival number. Nobody else holds blocks.
    cached: the blocks in the prefix cache, whether somebody holds them or not.
    """

    tables: dict[int, list[int]]
    cached: set[int]


def occupancy(scheduler: Scheduler) -> Occupancy:
    """O(blocks that are held or cached); not while a step is being planned.

    With a step ahead, this is the pool as the step that is under way was planned to find it.
    """
    tables = {seq.arrival: list(seq.block_table) for seq in scheduler.running}
    return Occupancy(tables, set(scheduler.block_manager._block_of.values()))
