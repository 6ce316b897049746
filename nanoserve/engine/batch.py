"""The packed step: every integer that the device needs, in one flat buffer.

Sequences of different lengths lie one after the other, without padding:

    input_ids      [a7 | b3 | c0 c1 c2 c3]      a and b decode, c is a prefill of four tokens
    positions      [ 7 |  3 |  0  1  2  3]
    cu_seqlens_q   [0, 1, 2, 6]                 where each row's tokens begin and end
    context_lens   [8, 4, 4]                    tokens each row attends to, its own included

The buffer is memory that the executor hands in: plain, pinned, or shared with worker processes.
So a step is handed over by one copy, nothing is pickled, and nothing can overflow: the capacities
are those that the scheduler keeps to.
"""

from dataclasses import dataclass

import numpy as np

from nanoserve.engine.scheduler import Plan
from nanoserve.engine.sequence import Sequence

_ALIGNMENT = 16  # bytes; what vector loads want
HEADER = (
    "step",
    "num_tokens",
    "num_rows",
    "num_decode_rows",  # rows with one token; they come first
    "num_logits_rows",  # tokens whose logits are needed
    "num_sampled_rows",  # of which a next token is sampled; they come first
    "max_query_len",
    "max_context_len",
)


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a batch lies. All fields are int32.

    `block_tables` is last, so that a step copies the first `Batch.num_bytes_used` bytes only.
    """

    max_num_tokens: int
    max_num_rows: int
    max_blocks_per_row: int

    def fields(self) -> dict[str, int]:
        """Capacity of each field, in integers."""
        tokens, rows = self.max_num_tokens, self.max_num_rows
        return {
            "header": len(HEADER),
            "input_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,  # where in the KV cache each token's K and V go
            "cu_seqlens_q": rows + 1,
            "cu_seqlens_k": rows + 1,
            "context_lens": rows,
            "logits_rows": tokens,  # index of each token whose logits are needed
            "slots": tokens,  # the slot of the sequence behind each logits row
            "next_ids": tokens,  # for a logits row that is not sampled: the token that follows it
            "block_tables": rows * self.max_blocks_per_row,
        }

    def offsets(self) -> dict[str, int]:
        """First byte of each field, and of the end as "end"."""
        offset, offsets = 0, {}
        for name, capacity in self.fields().items():
            offsets[name] = offset
            offset += -(-capacity * 4 // _ALIGNMENT) * _ALIGNMENT
        offsets["end"] = offset
        return offsets

    @property
    def num_bytes(self) -> int:
        return self.offsets()["end"]


class Batch:
    """One step's integers, as numpy views of `memory` (uint8, `layout.num_bytes` long)."""

    def __init__(self, layout: BatchLayout, memory: np.ndarray) -> None:
        self.layout = layout
        self.memory = memory
        self._offsets = layout.offsets()
        view = {
            name: memory[self._offsets[name] : self._offsets[name] + capacity * 4].view(np.int32)
            for name, capacity in layout.fields().items()
        }
        self.header = view["header"]
        self.input_ids = view["input_ids"]
        self.positions = view["positions"]
        self.slot_mapping = view["slot_mapping"]
        self.cu_seqlens_q = view["cu_seqlens_q"]
        self.cu_seqlens_k = view["cu_seqlens_k"]
        self.context_lens = view["context_lens"]
        self.logits_rows = view["logits_rows"]
        self.slots = view["slots"]
        self.next_ids = view["next_ids"]
        self.block_tables = view["block_tables"].reshape(layout.max_num_rows, -1)

    def header_dict(self) -> dict[str, int]:
        return dict(zip(HEADER, self.header.tolist(), strict=True))

    def num_bytes_used(self, num_rows: int) -> int:
        """How much of the buffer a step of so many rows needs."""
        return self._offsets["block_tables"] + num_rows * self.layout.max_blocks_per_row * 4

    def pack(self, plan: Plan, block_tables: np.ndarray, block_size: int, step: int) -> None:
        """Write `plan` into this buffer; `block_tables` is the scheduler's table, by slot.

        Per sequence a few list operations, per token none but numpy's.
        """
        # 1) One pass over the sequences, in batch order.
        sequences = list(plan.num_new_tokens)
        num_new = np.array(list(plan.num_new_tokens.values()), dtype=np.int32)
        computed = np.array([seq.num_computed_tokens for seq in sequences], dtype=np.int32)
        slots = np.array([seq.slot for seq in sequences], dtype=np.int32)
        caught_up = computed + num_new == [len(seq.token_ids) for seq in sequences]
        token_ids: list[int] = []
        for seq, n in plan.num_new_tokens.items():
            start = seq.num_computed_tokens
            if n == 1:
                token_ids.append(seq.token_ids[start])
            else:
                token_ids += seq.token_ids[start : start + n]

        # 2) Rows.
        rows, tokens = len(sequences), len(token_ids)
        context_lens = computed + num_new
        self.context_lens[:rows] = context_lens
        self.cu_seqlens_q[0] = self.cu_seqlens_k[0] = 0
        np.cumsum(num_new, out=self.cu_seqlens_q[1 : rows + 1])
        np.cumsum(context_lens, out=self.cu_seqlens_k[1 : rows + 1])
        max_context_len = int(context_lens.max())
        used_blocks = -(-max_context_len // block_size)
        self.block_tables[:rows, :used_blocks] = block_tables[slots, :used_blocks]

        # 3) Tokens: token i of a row is at position computed + i.
        self.input_ids[:tokens] = token_ids
        row_of_token = np.repeat(np.arange(rows, dtype=np.int32), num_new)
        shift = computed - self.cu_seqlens_q[:rows]
        positions = np.arange(tokens, dtype=np.int32) + shift[row_of_token]
        self.positions[:tokens] = positions
        blocks = self.block_tables[row_of_token, positions // block_size]
        self.slot_mapping[:tokens] = blocks * block_size + positions % block_size

        # 4) The last token of each caught-up row has the logits that the next token comes from.
        logits_rows = self.cu_seqlens_q[1 : rows + 1][caught_up] - 1
        num_sampled = num_logits = len(logits_rows)
        self.logits_rows[:num_sampled] = logits_rows
        self.slots[:num_sampled] = slots[caught_up]
        for seq, n in plan.prompt_logprobs.items():
            num_logits += self._add_prompt_rows(seq, n, sequences.index(seq), num_logits)
        self.header[:] = (
            step,
            tokens,
            rows,
            np.count_nonzero(num_new == 1),
            num_logits,
            num_sampled,
            num_new.max(),
            max_context_len,
        )

    def _add_prompt_rows(self, seq: Sequence, n: int, row: int, first: int) -> int:
        """Ask for the logits of the prompt tokens in this chunk that another prompt token follows.

        They go to logits rows `first` and on; returns how many there are.
        """
        start = seq.num_computed_tokens
        following = seq.token_ids[start + 1 : min(start + n + 1, seq.num_prompt_tokens)]
        span = slice(first, first + len(following))
        self.logits_rows[span] = self.cu_seqlens_q[row] + np.arange(len(following))
        self.slots[span] = seq.slot
        self.next_ids[span] = following
        return len(following)
