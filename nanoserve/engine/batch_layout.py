"""The layout of a packed batch, which has a header and fields."""

from dataclasses import dataclass
from typing import Any, NamedTuple

_ALIGNMENT = 16  # bytes, for vector loads


class BatchHeader(NamedTuple):
    step: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_decode_rows: int = 0  # rows with one token; they come first
    num_pending: int = 0  # decode rows that take their token from device memory
    num_outputs: int = 0  # tokens whose hidden states are needed
    num_sampled: int = 0  # outputs from which a next token is sampled; they come first
    max_query_len: int = 0
    max_context_len: int = 0
    table_width: int = 0  # blocks of the longest context


@dataclass(frozen=True)
class BatchLayout:
    """The position of each field in a batch buffer. All fields are int32.

    `block_tables` is last and only as wide as a step needs, so that a step copies only the first
    `Batch.num_bytes_used` bytes. `heads` are the names of the heads that read outputs of prompt
    tokens, in the order of these outputs. `num_groups` is the number of layer groups, each of which
    has its own block tables.
    """

    max_num_tokens: int
    max_num_rows: int
    max_blocks_per_row: int
    heads: tuple[str, ...] = ()
    num_groups: int = 1

    def fields(self) -> dict[str, int]:
        """Return the capacity of each field, in integers."""
        tokens, rows = self.max_num_tokens, self.max_num_rows
        return {
            "header": len(BatchHeader._fields),
            "input_ids": tokens,
            "positions": tokens,
            # By layer group: the KV slot of each token.
            "slot_mapping": self.num_groups * tokens,
            "cu_seqlens_q": rows + 1,
            "context_lens": rows,
            "row_slots": rows,  # the slot of each row's sequence
            "output_rows": tokens,  # index of each token whose hidden state is needed
            "output_slots": tokens,  # the slot of each output's sequence
            "next_ids": tokens,  # for an output that is not sampled: the token after it
            "head_counts": len(self.heads),  # outputs of each head, after the sampler's outputs
            "block_tables": self.num_groups * rows * self.max_blocks_per_row,
        }

    def offsets(self) -> dict[str, int]:
        """Return the first byte of each field, and the end of the buffer as "end"."""
        offset, offsets = 0, {}
        for name, capacity in self.fields().items():
            offsets[name] = offset
            offset += -(-capacity * 4 // _ALIGNMENT) * _ALIGNMENT
        return {**offsets, "end": offset}

    @property
    def num_bytes(self) -> int:
        return self.offsets()["end"]

    def views(self, memory: Any, integer: Any) -> dict[str, Any]:
        """Return the fields as views of `memory`, bytes in an array or a tensor.

        `integer` is the int32 dtype of its library. Each view is as long as its field's capacity.
        """
        first = self.offsets()
        return {
            name: memory[first[name] : first[name] + capacity * 4].view(integer)
            for name, capacity in self.fields().items()
        }
