"""A packed step as tensors."""

import torch

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout


class BatchTensors:
    """The fields of a `Batch` as int32 tensors, over `memory` of the same layout on any device.

    They are as long as the field's capacity; `block_tables` is flat, as wide as its step.
    """

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

    def packed_tables(self, header: BatchHeader) -> torch.Tensor:
        """The block tables of a step: [num_rows, table_width]."""
        size = header.num_rows * header.table_width
        return self.block_tables[:size].view(header.num_rows, header.table_width)

    def attention_metadata(
        self, header: BatchHeader, block_tables: torch.Tensor
    ) -> AttentionMetadata:
        rows, tokens = header.num_rows, header.num_tokens
        return AttentionMetadata(
            positions=self.positions[:tokens],
            slot_mapping=self.slot_mapping[:tokens],
            cu_seqlens_q=self.cu_seqlens_q[: rows + 1],
            context_lens=self.context_lens[:rows],
            block_tables=block_tables,
            num_decode_rows=header.num_decode_rows,
            max_query_len=header.max_query_len,
            max_context_len=header.max_context_len,
        )

    def fill_in_pending(self, header: BatchHeader, last_token: torch.Tensor) -> None:
        """Put the tokens that only the device knows in the places left for them.

        last_token: int32, by slot. Such a token is always the only one of its row.
        """
        input_ids = self.input_ids[: header.num_decode_rows]
        known = last_token[self.row_slots[: header.num_decode_rows]]
        input_ids.copy_(torch.where(input_ids < 0, known, input_ids))
