"""Read a recorded trace, and reconstruct the KV block pool step by step."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.utils.checks import json_object

FORMAT, VERSION = "nanoserve-trace", 2  # here, as a reader need not load the recorder
Record = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """The records of a trace, one per line. `recorder.py` describes them.

    closed: the last line, or None if the engine was never closed or is still running.
    cut_off_line: number of an incomplete last line, which is left out.
    """

    header: Record
    steps: list[Record]
    closed: Record | None
    cut_off_line: int | None

    @property
    def num_sequences(self) -> int:
        return sum(len(step["arrived"]) for step in self.steps)


def read_trace(path: str | Path) -> Trace:
    """Read a trace. Raises `ValueError` with the number of an invalid line.

    A line is complete if it ends with a line break. An incomplete last line is not an error: the
    process may have crashed, or be writing now.
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")
    if not lines:
        raise ValueError(f"{path} is empty, or its first line was cut off")
    records = [json_object(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    header, *records = records
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError(f"{path}, line 1: this is not the header of {FORMAT}, version {VERSION}")
    closed = records.pop() if records and "closed" in records[-1] else None
    for number, record in enumerate(records, 2):
        if "rows" not in record:
            raise ValueError(f"{path}, line {number}: this is not a step")
    return Trace(header, records, closed, len(lines) + 1 if rest else None)


@dataclass
class Pool:
    """The block tables and cached blocks of the KV block pool, reconstructed from steps.

    After `advance` it is the state during that step, so sequences that finished in it still have
    their blocks. `release` frees these, which gives the state of the engine after the step.
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
        """Return the number of sequences that use each block."""
        return Counter(block for table in self.tables.values() for block in table)


def lost_blocks(step: Record) -> list[int]:
    """Return the sequences whose blocks were freed before the rows of this step got theirs."""
    return [*(ended["seq"] for ended in step["aborted"]), *step["undone"], *step["preempted"]]
