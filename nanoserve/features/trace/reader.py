"""A recorded trace, read back; and the state of the KV pool in it, rebuilt step by step."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.utils.checks import json_object

FORMAT, VERSION = "nanoserve-trace", 2  # whoever reads a trace need not load what records one
Record = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """The lines of a trace; `recorder.py` says what is in them.

    closed: the last line; None if the engine was never closed, or is running.
    cut_off_line: number of a last line that a crash cut off, which is left out.
    """

    header: Record
    steps: list[Record]
    closed: Record | None
    cut_off_line: int | None

    @property
    def num_sequences(self) -> int:
        return sum(len(step["arrived"]) for step in self.steps)


def read_trace(path: str | Path) -> Trace:
    """Raises `ValueError` with the number of the line that cannot be read.

    A line is complete when its line break is there. A last one without it is no error: the trace
    of a process that crashed has one, or that of a process that is writing now.
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")
    if not lines:
        raise ValueError(f"{path} is empty, or its first line was cut off")
    records = [json_object(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    header, *records = records
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError(f"{path}, line 1: this is no header of a {FORMAT}, version {VERSION}")
    closed = records.pop() if records and "closed" in records[-1] else None
    for number, record in enumerate(records, 2):
        if "rows" not in record:
            raise ValueError(f"{path}, line {number}: this is no step")
    return Trace(header, records, closed, len(lines) + 1 if rest else None)


@dataclass
class Pool:
    """Who holds which block, and which blocks are in the prefix cache: rebuilt from the steps.

    After `advance` it is as the device saw it in that step; what the step finished still has its
    blocks. `release` takes them away, and leaves what the engine had when the step was over.
    """

    tables: dict[int, list[int]] = field(default_factory=dict)  # by arrival number
    cached: set[int] = field(default_factory=set)

    def advance(self, step: Record) -> None:
        for seq in lost_blocks(step):
            self.tables.pop(seq, None)
        self.cached -= set(step["evicted"])
        for row in step["rows"]:
            self.tables.setdefault(row["seq"], []).extend(row["blocks"])
        self.cached |= set(step["published"])

    def release(self, step: Record) -> None:
        for ended in step["finished"]:
            del self.tables[ended["seq"]]

    def ref_counts(self) -> Counter[int]:
        """How many sequences hold each block."""
        return Counter(block for table in self.tables.values() for block in table)


def lost_blocks(step: Record) -> list[int]:
    """The sequences that had no blocks any more when this step's rows got theirs."""
    return [*(ended["seq"] for ended in step["aborted"]), *step["undone"], *step["preempted"]]
