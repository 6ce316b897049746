"""Worked numbers of the packed batch: waste by padding, bytes copied per step, output rows."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_INT_BYTES = 4
_ALIGNMENT = 16  # bytes, of each field


class Row(NamedTuple):
    """One sequence of a step."""

    name: str
    computed: int  # tokens whose K and V are in the cache
    new: int  # tokens that this step computes
    total: int  # tokens that are known
    table: tuple[int, ...]


EXAMPLE_BLOCK_SIZE = 4
EXAMPLE = (
    Row("a", computed=7, new=1, total=8, table=(5, 2)),
    Row("b", computed=3, new=1, total=4, table=(8,)),
    Row("c", computed=4, new=4, total=10, table=(1, 6, 9)),
    Row("d", computed=0, new=3, total=3, table=(7,)),
)
STEPS: dict[str, list[int]] = {
    "256 sequences decode": [1] * 256,
    "31 decode, one prefills 512 tokens": [1] * 31 + [512],
    "255 decode, one prefills what is left of 2,048": [1] * 255 + [2048 - 255],
    "four prompts": [35, 100, 300, 512],
}


def padded_places(lengths: Sequence[int]) -> int:
    """Return the number of elements of the rectangle [rows, longest]."""
    return len(lengths) * max(lengths)


def padding_waste(lengths: Sequence[int]) -> float:
    """Return the fraction of the rectangle's elements that are padding."""
    return 1 - sum(lengths) / padded_places(lengths)


def padding_table() -> str:
    """Return `padding_waste` of each of `STEPS`, as Markdown."""
    lines = ["| step | tokens | tokens with padding | wasted |", "|---|---:|---:|---:|"]
    for name, lengths in STEPS.items():
        places, waste = padded_places(lengths), padding_waste(lengths)
        lines.append(f"| {name} | {sum(lengths):,} | {places:,} | {waste:.1%} |")
    return "\n".join(lines)


def fields(
    rows: Sequence[Row] = EXAMPLE, block_size: int = EXAMPLE_BLOCK_SIZE
) -> dict[str, list[int]]:
    """Return the fields of the packed batch of `rows`, by their definitions, token by token."""
    positions = [row.computed + i for row in rows for i in range(row.new)]
    tables = [row.table for row in rows for _ in range(row.new)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, position in zip(tables, positions, strict=True)
    ]
    ends = [sum(row.new for row in rows[:i]) for i in range(len(rows) + 1)]
    return {
        "positions": positions,
        "slot_mapping": slots,
        "cu_seqlens_q": ends,
        "context_lens": [row.computed + row.new for row in rows],
        "output_rows": [
            end - 1 for row, end in zip(rows, ends[1:], strict=True) if _is_caught_up(row)
        ],
    }


def rows_table(rows: Sequence[Row] = EXAMPLE) -> str:
    """Return the scheduler's decision as Markdown."""
    lines = ["| row | tokens known | computed | new | block table |", "|---|---:|---:|---:|---|"]
    for row in rows:
        table = list(row.table)
        lines.append(f"| {row.name} | {row.total} | {row.computed} | {row.new} | {table} |")
    return "\n".join(lines)


def token_fields_table(rows: Sequence[Row] = EXAMPLE, block_size: int = EXAMPLE_BLOCK_SIZE) -> str:
    """Return the fields with an integer per token as Markdown, with a column per token."""
    found = fields(rows, block_size)
    owners = [row.name for row in rows for _ in range(row.new)]
    lines = {
        "*row*": owners,
        "`input_ids`": [f"`{o}{p}`" for o, p in zip(owners, found["positions"], strict=True)],
        "`positions`": found["positions"],
        "`slot_mapping`": found["slot_mapping"],
    }
    return _columns("index in the batch", range(len(owners)), lines)


def row_fields_table(rows: Sequence[Row] = EXAMPLE, block_size: int = EXAMPLE_BLOCK_SIZE) -> str:
    """Return the fields with an integer per row; the last column is the end of the tokens."""
    found = fields(rows, block_size)
    width = -(-max(found["context_lens"]) // block_size)
    tables = [", ".join(map(str, row.table[:width])) for row in rows]
    lines = {
        "`cu_seqlens_q`": found["cu_seqlens_q"],
        "`context_lens`": [*found["context_lens"], ""],
        "`block_tables`": [*tables, ""],
    }
    return _columns("row", [*(row.name for row in rows), "(end)"], lines)


def _columns(corner: str, names: Iterable[object], lines: dict[str, Sequence[object]]) -> str:
    header = [corner, *map(str, names)]
    body = [[name, *map(str, cells)] for name, cells in lines.items()]
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))


def logits_bytes(num_rows: int, vocab_size: int, dtype_bytes: int) -> int:
    """Return the bytes of the logits [num_rows, vocab_size]."""
    return num_rows * vocab_size * dtype_bytes


def lm_head_share(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab_size: int,
) -> float:
    """Return the LM head's multiplications per token, relative to those of all layers."""
    attention = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    return hidden * vocab_size / (layers * (attention + 3 * hidden * intermediate))


def step_bytes(max_num_tokens: int, max_num_rows: int, num_rows: int, table_width: int) -> int:
    """Return the bytes that a step of `num_rows` copies: all fields, and its block tables.

    Capacities in integers as in `nanoserve.engine.batch_layout.BatchLayout`: a header, six fields
    with an integer per token, three with one per row, and the count of one head.
    """
    capacities = [10, *[max_num_tokens] * 6, max_num_rows + 1, *[max_num_rows] * 2, 1]
    padded = [-(-n * _INT_BYTES // _ALIGNMENT) * _ALIGNMENT for n in capacities]
    return sum(padded) + num_rows * table_width * _INT_BYTES


def _is_caught_up(row: Row) -> bool:
    return row.computed + row.new == row.total
