"""The slots of running sequences, and their block tables as one array.

A running sequence keeps its slot, and its row of `block_tables` is extended in place; so a step
packs the tables of its rows with one index, and what a device keeps by slot stays where it is.
"""

import numpy as np

from nanoserve.engine.sequence import Sequence


class SlotTable:
    """block_tables: int32 [num_slots, max_blocks]; row i is the table of the sequence in slot i."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.num_slots = num_slots
        self.block_tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self._free = list(range(self.num_slots - 1, -1, -1))

    def take(self, seq: Sequence) -> None:
        """Give a sequence a slot, and enter its block table."""
        seq.slot = self._free.pop()
        self.extend(seq, 0)

    def extend(self, seq: Sequence, num_known: int) -> None:
        """Enter what the block table of a sequence has behind its first `num_known` blocks."""
        table = seq.block_table
        self.block_tables[seq.slot, num_known : len(table)] = table[num_known:]

    def give_back(self, seq: Sequence) -> None:
        """Free the slot of a sequence, if it has one."""
        if seq.slot >= 0:
            self._free.append(seq.slot)
            seq.slot = -1

    def problems(self, running: list[Sequence]) -> list[str]:
        """Return what is wrong with the slots of all running sequences; nothing, it is hoped."""
        slots = sorted([*self._free, *(seq.slot for seq in running)])
        rows = [self.block_tables[seq.slot, : len(seq.block_table)] for seq in running]
        found = []
        if slots != list(range(self.num_slots)):
            found.append("slots were lost or given out twice")
        if any(row.tolist() != seq.block_table for row, seq in zip(rows, running, strict=True)):
            found.append("a row of block_tables differs from its sequence")
        return found
