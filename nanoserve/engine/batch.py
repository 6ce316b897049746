"""A packed batch holds every integer that the device needs for a step, in one flat buffer.

Sequences of different lengths lie one after the other, without padding. Three rows: a and b decode,
c is a prefill of four tokens. Blocks have 4 tokens; the block tables are a: [5, 2], b: [8], c: [3].

    input_ids      [a7 | b3 | c0 c1 c2 c3]
    positions      [ 7 |  3 |  0  1  2  3]
    slot_mapping   [11 | 35 | 12 13 14 15]      a7 is token 3 of a's second block, 2: 2 x 4 + 3
    cu_seqlens_q   [0, 1, 2, 6]                 where each row's tokens begin and end
    context_lens   [8, 4, 4]                    tokens each row attends to, including its own
    output_rows    [0, 1, 5]                    tokens whose hidden states are needed

The executor provides the memory of the buffer: pageable, pinned, or shared with worker processes.
So a step is transferred by one copy and nothing is pickled. The buffer cannot overflow, because its
capacities are the limits that the scheduler keeps to.
"""

import numpy as np

from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence

PENDING = -1  # input id known only to the device: `last_token` of the row's slot


class Batch:
    """The integers of one step, as numpy views of `memory` (uint8, `layout.num_bytes` long)."""

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
        views["slot_mapping"] = views["slot_mapping"].reshape(layout.num_groups, -1)
        self.__dict__.update(views)

    @property
    def header(self) -> BatchHeader:
        return BatchHeader._make(self._header.tolist())

    def block_tables(self, num_rows: int, width: int) -> np.ndarray:
        """Return a view [num_groups, num_rows, width], as wide as the step's longest context."""
        groups = self.layout.num_groups
        return self._tables[: groups * num_rows * width].reshape(groups, num_rows, width)

    def num_bytes_used(self, header: BatchHeader) -> int:
        """Return how many bytes of the buffer a step uses."""
        tables = self.layout.num_groups * header.num_rows * header.table_width
        return self._before_tables + tables * 4

    def pack(self, plan: Plan, block_tables: np.ndarray, block_size: int) -> None:
        """Write `plan` into this buffer; `block_tables` are the scheduler's tables.

        Costs a few list operations per sequence; all work per token is done by numpy.
        """
        # One pass over the sequences, in batch order; everything after it works on arrays.
        sequences, starts, counts, num_outputs, num_sampled = zip(*plan.rows, strict=True)
        slots = np.array([seq.slot for seq in sequences], dtype=np.int32)
        start = np.array(starts, dtype=np.int32)
        n = np.array(counts, dtype=np.int32)
        input_ids = _input_ids(sequences, starts, counts, plan.draft_tokens)
        context_lens = start + n
        max_context_len = int(context_lens.max())
        width = blocks_needed(max_context_len, block_size)
        tables = block_tables[: self.layout.num_groups, slots, :width]
        self._pack_rows(slots, n, context_lens, tables)
        self._pack_tokens(input_ids, start, n, tables, block_size)
        outputs, all_outputs = sum(num_sampled), sum(num_outputs)
        self._pack_outputs(slots, np.array(num_sampled), outputs)
        if all_outputs > outputs:
            self._pack_prompt_outputs(plan, outputs)
        self._header[:] = BatchHeader(
            step=self.step,
            num_tokens=len(input_ids),
            num_rows=len(sequences),
            num_decode_rows=counts.count(1),
            num_pending=input_ids.count(PENDING),
            num_outputs=all_outputs,
            num_sampled=outputs,
            max_query_len=max(counts),
            max_context_len=max_context_len,
            table_width=width,
        )

    def _pack_rows(
        self, slots: np.ndarray, n: np.ndarray, context_lens: np.ndarray, tables: np.ndarray
    ) -> None:
        """Write the fields that have one entry per row; tables: [num_groups, num_rows, width]."""
        _, rows, width = tables.shape
        self.cu_seqlens_q[0] = 0
        np.cumsum(n, out=self.cu_seqlens_q[1 : rows + 1])
        self.context_lens[:rows] = context_lens
        self.row_slots[:rows] = slots
        self.block_tables(rows, width)[:] = tables

    def _pack_tokens(
        self,
        input_ids: list[int],
        start: np.ndarray,
        n: np.ndarray,
        tables: np.ndarray,
        block_size: int,
    ) -> None:
        """Write the fields that have one entry per token.

        Token i of a row is at position start + i, and its KV slot is
        block_table[position // block_size] * block_size + position % block_size.
        """
        rows, tokens = len(n), len(input_ids)
        self.input_ids[:tokens] = input_ids
        row_of_token = np.repeat(np.arange(rows, dtype=np.int32), n)
        shift = start - self.cu_seqlens_q[:rows]
        positions = np.arange(tokens, dtype=np.int32) + shift[row_of_token]
        self.positions[:tokens] = positions
        blocks = tables[:, row_of_token, positions // block_size]
        self.slot_mapping[:, :tokens] = blocks * block_size + positions % block_size

    def _pack_outputs(self, slots: np.ndarray, num_sampled: np.ndarray, outputs: int) -> None:
        """Write the outputs that are sampled from: the last tokens of the rows that catch up."""
        ends = self.cu_seqlens_q[1 : len(slots) + 1]
        first = ends - np.cumsum(num_sampled)  # a row's first output, less the outputs before it
        self.output_rows[:outputs] = np.repeat(first, num_sampled) + np.arange(outputs)
        self.output_slots[:outputs] = np.repeat(slots, num_sampled)

    def _pack_prompt_outputs(self, plan: Plan, first: int) -> None:
        """Write the outputs that are not sampled, from output `first` on, and the token after each.

        They are grouped by head (`nanoserve.worker.heads`), and within a head in batch order.
        """
        self.head_counts[:] = 0
        for head, name in enumerate(self.layout.heads):
            for row, (seq, start, n, num_outputs, num_sampled) in enumerate(plan.rows):
                count, skipped = num_outputs - num_sampled, n - num_outputs
                if count and seq.prompt_head == name:
                    span, begin = slice(first, first + count), start + skipped + 1
                    self.output_rows[span] = self.cu_seqlens_q[row] + skipped + np.arange(count)
                    self.output_slots[span] = seq.slot
                    next_ids = seq.token_ids[begin : begin + count]
                    self.next_ids[first : first + len(next_ids)] = next_ids
                    self.head_counts[head] += count
                    first += count

    def prompt_outputs(self, header: BatchHeader) -> dict[str, slice]:
        """Return, by head, the slice of its outputs; the sampler's outputs come before them all."""
        if header.num_outputs == header.num_sampled:
            return {}
        ends = header.num_sampled + np.cumsum(self.head_counts)
        spans = zip(self.layout.heads, ends - self.head_counts, ends, strict=True)
        return {name: slice(int(first), int(end)) for name, first, end in spans if first < end}


def _input_ids(
    sequences: tuple[Sequence, ...],
    starts: tuple[int, ...],
    counts: tuple[int, ...],
    draft_tokens: dict[Sequence, list[int]],
) -> list[int]:
    """Return the input tokens of all rows, concatenated."""
    input_ids: list[int] = []
    for seq, start, n in zip(sequences, starts, counts, strict=True):
        if n > 1:
            input_ids += seq.token_ids[start : start + n]
            input_ids += draft_tokens.get(seq, ())
        elif start < len(seq.token_ids):
            input_ids.append(seq.token_ids[start])
        else:  # a pending token is always the only token of its row
            input_ids.append(PENDING)
    return input_ids
