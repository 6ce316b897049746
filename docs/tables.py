"""Markdown tables, for pages and worked examples."""

from collections.abc import Sequence


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with a line for each row; a bar within a cell is escaped."""
    cells = [[_cell(cell) for cell in line] for line in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _cell(value: object) -> str:
    return str(value).replace("\\|", "|").replace("|", "\\|")
