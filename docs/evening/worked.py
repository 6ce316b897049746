"""An evening: the recorded steps of the request that is followed, and their packed batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import reading

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import BlockTable, Sequence
from nanoserve.sampling_params import SamplingParams

_RUN = Path(__file__).parents[1] / "00-first-run" / "first-run.jsonl"
_FIELDS = ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "context_lens", "output_rows")


def num_files() -> int:
    """Return the number of files of the reading path."""
    return len(reading.stops())


def steps() -> list[dict[str, Any]]:
    """Return the recorded steps, each with its only row."""
    lines = map(json.loads, _RUN.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line.get("rows")]


def steps_table() -> str:
    """Return a table of the steps in which something happens for the first time, or blocks do."""
    found = steps()
    shown = [0, 1, 2, *(i for i, step in enumerate(found) if i > 2 and step["rows"][0]["blocks"])]
    shown.append(len(found) - 1)
    table: list[int] = []
    lines = [
        "| step | `start` | `n` | block table | token sampled |",
        "|---:|---:|---:|---|---|",
    ]
    for index, step in enumerate(found):
        (row,) = step["rows"]
        table += row["blocks"]
        if index in shown:
            token = f"`{row['text']!r}`" if row["text"] else "end of sequence"
            start, n = row["computed"], row["new"]
            lines.append(f"| {index} | {start} | {n} | {list(table)} | {token} |")
    return "\n".join(lines)


def batch_of(index: int) -> dict[str, list[int]]:
    """Return the fields of the packed batch of a step, as the engine packs it."""
    found = steps()
    (row,) = found[index]["rows"]
    start, n = row["computed"], row["new"]
    token_ids = json.loads(_RUN.read_text("utf-8").splitlines()[1])["arrived"][0]["prompt"]
    token_ids = token_ids + [step["rows"][0]["token"] for step in found[:index]]
    blocks = [block for step in found[: index + 1] for block in step["rows"][0]["blocks"]]
    seq = Sequence("0", token_ids, SamplingParams(), max_model_len=192)
    seq.slot, seq.block_tables = 0, [BlockTable()]
    tables = np.zeros((1, 1, 12), np.int32)
    tables[0, 0, : len(blocks)] = blocks
    layout = BatchLayout(max_num_tokens=32, max_num_rows=1, max_blocks_per_row=12)
    batch = Batch(layout, np.zeros(layout.num_bytes, np.uint8))
    plan = Plan(budget=0, rows=[Row(seq, start, n, num_outputs=1, num_sampled=1)])
    batch.pack(plan, tables, block_size=16)
    sizes = {"cu_seqlens_q": 2, "context_lens": 1, "output_rows": 1}
    values = {name: getattr(batch, name) for name in _FIELDS}
    return {name: v.reshape(-1)[: sizes.get(name, n)].tolist() for name, v in values.items()}


def batch_table() -> str:
    """Return the fields of the first two steps' batches, as Markdown."""
    first, second = batch_of(0), batch_of(1)
    lines = ["| field | step 0 | step 1 |", "|---|---|---|"]
    for name in _FIELDS:
        lines.append(f"| `{name}` | {_shortened(first[name])} | {_shortened(second[name])} |")
    return "\n".join(lines)


def _shortened(values: list[int]) -> str:
    if len(values) <= 4:
        return str(values)
    return f"[{values[0]}, {values[1]}, ... {values[-2]}, {values[-1]}]"
