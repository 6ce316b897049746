"""Provides tensor views of a packed step."""

import math

import torch

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout


class BatchTensors:
    """The fields of a `Batch` as int32 tensors, over `memory` of the same layout on any device.

    Each tensor has the length of its field's capacity. `slot_mapping` is [num_groups, num_tokens],
    with a row for each group of layers; `block_tables` is flat, and its row width is set by each
    step.
    """

    header: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    row_slots: torch.Tensor
    output_rows: torch.Tensor
    output_slots: torch.Tensor
    next_ids: torch.Tensor
    block_tables: torch.Tensor

    def __init__(self, layout: BatchLayout, memory: torch.Tensor) -> None:
        self.__dict__.update(layout.views(memory, torch.int32))
        self.num_groups = layout.num_groups
        self.slot_mapping = self.slot_mapping.view(layout.num_groups, -1)

    def packed_tables(self, header: BatchHeader) -> torch.Tensor:
        """Return the block tables of a step: [num_groups, num_rows, table_width]."""
        shape = (self.num_groups, header.num_rows, header.table_width)
        return self.block_tables[: math.prod(shape)].view(shape)

    def attention_metadata(
        self, header: BatchHeader, block_tables: torch.Tensor, is_mixed: bool = False
    ) -> AttentionMetadata:
        """Return the attention metadata of a step; block_tables: [num_groups, num_rows, width].

        is_mixed: the numbers of rows are read on the device, and `header` is the one that the graph
        was recorded with.
        """
        rows, tokens = header.num_rows, header.num_tokens
        first_count = BatchHeader._fields.index("num_rows")  # followed by the number of decode rows
        first = AttentionMetadata(
            positions=self.positions[:tokens],
            slot_mapping=self.slot_mapping[0, :tokens],
            cu_seqlens_q=self.cu_seqlens_q[: rows + 1],
            context_lens=self.context_lens[:rows],
            block_tables=block_tables[0],
            num_decode_rows=header.num_decode_rows,
            max_query_len=header.max_query_len,
            max_context_len=header.max_context_len,
            row_slots=self.row_slots[:rows],
            row_counts=self.header[first_count : first_count + 2] if is_mixed else None,
        )
        for group in range(1, self.num_groups):
            first.add_group(self.slot_mapping[group, :tokens], block_tables[group])
        return first

    def fill_in_pending(self, header: BatchHeader, last_token: torch.Tensor) -> None:
        """Replace pending token ids by the sampled tokens, which only the device knows.

        last_token: int32, by slot. A pending token is always the only token of its row.
        """
        input_ids = self.input_ids[: header.num_decode_rows]
        known = last_token[self.row_slots[: header.num_decode_rows]]
        input_ids.copy_(torch.where(input_ids < 0, known, input_ids))
