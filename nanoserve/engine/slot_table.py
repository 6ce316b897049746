"""The slots of running sequences, and their block tables as one array.

A running sequence keeps its slot, and its row of `block_tables` is extended in place. So a step
packs the block tables of its rows with one indexing operation, and state that a device keeps by
slot stays where it is.
"""

import numpy as np

from nanoserve.engine.sequence import Sequence


class SlotTable:
    """The slots and block tables of the running sequences.

    block_tables: int32 [num_groups, num_slots, max_blocks], by layer group and slot.
    """

    def __init__(self, num_slots: int, max_blocks: int, num_groups: int = 1) -> None:
        self.num_slots = num_slots
        self.block_tables = np.zeros((num_groups, num_slots, max_blocks), dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self._free = list(range(self.num_slots - 1, -1, -1))

    def take(self, seq: Sequence) -> None:
        """Give a sequence a free slot, and copy its block tables into the slot's rows."""
        seq.slot = self._free.pop()
        self.extend(seq, [0] * len(seq.block_tables))

    def extend(self, seq: Sequence, num_known: list[int]) -> None:
        """Copy the new entries of the block tables, after the first `num_known` of each table.

        Entries that a group has released become the dummy block: other sequences may use those
        blocks.
        """
        for group, table in enumerate(seq.block_tables):
            row, known = self.block_tables[group, seq.slot], num_known[group]
            if table.num_released:
                row[: table.num_released] = 0
            row[known : len(table)] = table[known:]

    def give_back(self, seq: Sequence) -> None:
        """Free the slot of a sequence, if it has one."""
        if seq.slot >= 0:
            self._free.append(seq.slot)
            seq.slot = -1

    def problems(self, running: list[Sequence]) -> list[str]:
        """Return a list of inconsistencies in the slots of all running sequences; empty if none."""
        slots = sorted([*self._free, *(seq.slot for seq in running)])
        found = []
        if slots != list(range(self.num_slots)):
            found.append("slots were lost or given out twice")
        if any(
            rows[seq.slot, : len(table)].tolist() != table
            for seq in running
            for rows, table in zip(self.block_tables, seq.block_tables, strict=True)
        ):
            found.append("a row of block_tables differs from its sequence")
        return found
