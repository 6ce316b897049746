"""The layout of a packed step: the fields of a batch, and the header before them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """The place of each field of a batch. All fields are int32.

    `block_tables` is last and only as wide as a step needs, so that a step copies the first
    `Batch.num_bytes_used` bytes only. `heads` are the names of those that take outputs of a
    prompt's tokens, in the order in which they get them. `num_groups` is how many groups of layers
    have block tables of their own.
    """

    max_num_tokens: int
    max_num_rows: int
    max_blocks_per_row: int
    heads: tuple[str, ...] = ()
    num_groups: int = 1

    def fields(self) -> dict[str, int]:
        """Capacity of each field, in integers."""
        tokens, rows = self.max_num_tokens, self.max_num_rows
        return {
            "header": len(BatchHeader._fields),
            "input_ids": tokens,
            "positions": tokens,
            # By group: where in the KV cache each token's K and V go.
            "slot_mapping": self.num_groups * tokens,
            "cu_seqlens_q": rows + 1,
            "context_lens": rows,
            "row_slots": rows,  # the slot of the sequence behind each row
            "output_rows": tokens,  # index of each token whose hidden state is wanted
            "output_slots": tokens,  # the slot of the sequence behind each output
            "next_ids": tokens,  # for an output that is not sampled: the token that follows it
            "head_counts": len(self.heads),  # outputs of each head, behind those of the sampler
            "block_tables": self.num_groups * rows * self.max_blocks_per_row,
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
