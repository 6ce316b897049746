"""The packed step: every integer that the device needs, in one flat buffer.

Sequences of different lengths lie one after the other, without padding. Three rows: a and b decode,
c is a prefill of four tokens. Blocks have 4 tokens; the block tables are a: [5, 2], b: [8], c: [3].

    input_ids      [a7 | b3 | c0 c1 c2 c3]
    positions      [ 7 |  3 |  0  1  2  3]
    slot_mapping   [11 | 35 | 12 13 14 15]      a7 is token 3 of a's second block, 2: 2 x 4 + 3
    cu_seqlens_q   [0, 1, 2, 6]                 where each row's tokens begin and end
    context_lens   [8, 4, 4]                    tokens each row attends to, its own included
    output_rows    [0, 1, 5]                    tokens whose hidden state is wanted

The buffer is memory that the executor hands in: plain, pinned, or shared with worker processes.
So a step is handed over by one copy, nothing is pickled, and nothing can overflow: the capacities
are those that the scheduler keeps to.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanoserve.engine.block_manager import blocks_needed
from nanoserve.engine.plan import Plan

PENDING = -1  # an input id that only the device knows: `last_token` of the row's slot
_ALIGNMENT = 16  # bytes; what vector loads want


class BatchHeader(NamedTuple):
    step: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_decode_rows: int = 0  # rows with one token; they come first
    num_pending: int = 0  # of which so many take their token from the device
    num_outputs: int = 0  # tokens whose hidden state is wanted
    num_sampled: int = 0  # of which a next token is sampled; they come first
    max_query_len: int = 0
    max_context_len: int = 0
    table_width: int = 0  # blocks of the longest context


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a batch lies. All fields are int32.

    `block_tables` is last and only as wide as a step needs, so that a step copies the first
    `Batch.num_bytes_used` bytes only. `heads` are the names of those that take outputs of a
    prompt's tokens, in the order in which they get them.
    """

    max_num_tokens: int
    max_num_rows: int
    max_blocks_per_row: int
    heads: tuple[str, ...] = ()

    def fields(self) -> dict[str, int]:
        """Capacity of each field, in integers."""
        tokens, rows = self.max_num_tokens, self.max_num_rows
        return {
            "header": len(BatchHeader._fields),
            "input_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,  # where in the KV cache each token's K and V go
            "cu_seqlens_q": rows + 1,
            "context_lens": rows,
            "row_slots": rows,  # the slot of the sequence behind each row
            "output_rows": tokens,  # index of each token whose hidden state is wanted
            "output_slots": tokens,  # the slot of the sequence behind each output
            "next_ids": tokens,  # for an output that is not sampled: the token that follows it
            "head_counts": len(self.heads),  # outputs of each head, behind those of the sampler
            "block_tables": rows * self.max_blocks_per_row,
        }

    def offsets(self) -> dict[str, int]:
        """First byte of each field, and of the end as "end"."""
        offset, offsets = 0, {}
        for name, capacity in self.fields().items():
            offsets[name] = offset
            offset += -(-capacity * 4 // _ALIGNMENT) * _ALIGNMENT
        return {**offsets, "end": offset}

    @property
    def num_bytes(self) -> int:
        return self.offsets()["end"]

    def views(self, memory: Any, integer: Any) -> dict[str, Any]:
        """The fields as views of `memory`, bytes in an array or a tensor; `integer` is its int32.

        Each is as long as its capacity.
        """
        first = self.offsets()
        return {
            name: memory[first[name] : first[name] + capacity * 4].view(integer)
            for name, capacity in self.fields().items()
        }


class Batch:
    """One step's integers, as numpy views of `memory` (uint8, `layout.num_bytes` long)."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens_q: np.ndarray
    context_lens: np.ndarray
    row_slots: np.ndarray
    output_rows: np.ndarray
    output_slots: np.ndarray
    next_ids: np.ndarray
    head_counts: np.ndarray

    def __init__(self, layout: BatchLayout, memory: np.ndarray) -> None:
        self.layout, self.memory = layout, memory
        self.step = 0  # the number that `pack` writes; set by the executor
        self._before_tables = layout.offsets()["block_tables"]
        views = layout.views(memory, np.int32)
        self._header, self._tables = views.pop("header"), views.pop("block_tables")
        self.__dict__.update(views)

    @property
    def header(self) -> BatchHeader:
        return BatchHeader._make(self._header.tolist())

    def block_tables(self, num_rows: int, width: int) -> np.ndarray:
        """[num_rows, width]: as wide as the longest context of the step."""
        return self._tables[: num_rows * width].reshape(num_rows, width)

    def num_bytes_used(self, header: BatchHeader) -> int:
        """How much of the buffer a step needs."""
        return self._before_tables + header.num_rows * header.table_width * 4

    def pack(self, plan: Plan, block_tables: np.ndarray, block_size: int) -> None:
        """Write `plan` into this buffer; `block_tables` is the scheduler's table, by slot.

        Per sequence a few list operations, per token none but numpy's. Said slowly, token i of a
        row is at position start + i, and its slot is block_table[position // block_size] *
        block_size + position % block_size.
        """
        # 1) One pass over the sequences, in batch order.
        sequences, starts, counts, num_outputs, num_sampled = zip(*plan.rows, strict=True)
        start, n = np.array(starts, dtype=np.int32), np.array(counts, dtype=np.int32)
        slots = np.array([seq.slot for seq in sequences], dtype=np.int32)
        input_ids: list[int] = []
        for seq, first, count in zip(sequences, starts, counts, strict=True):
            if count > 1:
                input_ids += seq.token_ids[first : first + count]
            elif first < len(seq.token_ids):
                input_ids.append(seq.token_ids[first])
            else:  # what is not known yet is the only token of its row
                input_ids.append(PENDING)

        # 2) Rows.
        rows, tokens = len(sequences), len(input_ids)
        ends = self.cu_seqlens_q[1 : rows + 1]
        self.cu_seqlens_q[0] = 0
        np.cumsum(n, out=ends)
        np.add(start, n, out=self.context_lens[:rows])
        self.row_slots[:rows] = slots
        max_context_len = int(self.context_lens[:rows].max())
        width = blocks_needed(max_context_len, block_size)
        tables = self.block_tables(rows, width)
        tables[:] = block_tables[slots, :width]

        # 3) Tokens.
        self.input_ids[:tokens] = input_ids
        row_of_token = np.repeat(np.arange(rows, dtype=np.int32), n)
        shift = start - self.cu_seqlens_q[:rows]
        positions = np.arange(tokens, dtype=np.int32) + shift[row_of_token]
        self.positions[:tokens] = positions
        blocks = tables[row_of_token, positions // block_size]
        self.slot_mapping[:tokens] = blocks * block_size + positions % block_size

        # 4) Outputs: the sampler's are the last tokens of the rows that catch up.
        catches_up = np.flatnonzero(num_sampled)
        outputs = len(catches_up)
        self.output_rows[:outputs] = ends[catches_up] - 1
        self.output_slots[:outputs] = slots[catches_up]
        all_outputs, self.head_counts[:] = sum(num_outputs), 0
        if all_outputs > outputs:
            self._add_prompt_outputs(plan, outputs)
        self._header[:] = BatchHeader(
            step=self.step,
            num_tokens=tokens,
            num_rows=rows,
            num_decode_rows=counts.count(1),
            num_pending=input_ids.count(PENDING),
            num_outputs=all_outputs,
            num_sampled=outputs,
            max_query_len=max(counts),
            max_context_len=max_context_len,
            table_width=width,
        )

    def _add_prompt_outputs(self, plan: Plan, first: int) -> None:
        """From output `first` on, those that are not sampled: a known token follows each of them.

        Head by head, and within a head in batch order.
        """
        for head, name in enumerate(self.layout.heads):
            for row, (seq, start, _, num_outputs, num_sampled) in enumerate(plan.rows):
                count = num_outputs - num_sampled
                if count and seq.prompt_head == name:
                    span = slice(first, first + count)
                    self.output_rows[span] = self.cu_seqlens_q[row] + np.arange(count)
                    self.output_slots[span] = seq.slot
                    self.next_ids[span] = seq.token_ids[start + 1 : start + count + 1]
                    self.head_counts[head] += count
                    first += count

    def prompt_outputs(self, header: BatchHeader) -> dict[str, slice]:
        """Which outputs go to which head, apart from the sampler's, which are the first."""
        ends = header.num_sampled + np.cumsum(self.head_counts)
        spans = zip(self.layout.heads, ends - self.head_counts, ends, strict=True)
        return {name: slice(int(first), int(end)) for name, first, end in spans if first < end}
