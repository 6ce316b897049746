"""The interface of an attention backend: its inputs, and what it must do."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanoserve.attention.kv_cache import KVCache, KVCacheSpec


@dataclass(frozen=True)
class AttentionLayer:
    """The layer that a backend computes for."""

    num_heads: int
    num_kv_heads: int  # query head h reads KV head h // (num_heads // num_kv_heads)
    head_dim: int
    scale: float
    sliding_window: int | None = None  # how many tokens a query sees, its own included
    soft_cap: float | None = None  # c: scores become c tanh(score / c)


@dataclass
class AttentionMetadata:
    """The batch as attention sees it: a few tensors and integers, the same for every layer.

    A row is a sequence; its tokens are q[cu_seqlens_q[row] : cu_seqlens_q[row + 1]], they are the
    last of its context, and each attends to itself and to all that came before it. `slot_mapping`
    and `block_tables` differ by group of layers, see `nanoserve.engine.kv_groups`.
    """

    positions: Tensor  # int32 [num_tokens]
    slot_mapping: Tensor  # int32 [num_tokens]: where each token's K and V go
    cu_seqlens_q: Tensor  # int32 [num_rows + 1]
    context_lens: Tensor  # int32 [num_rows]
    block_tables: Tensor  # int32 [num_rows, max_blocks]
    num_decode_rows: int  # rows with one token; they come first
    max_query_len: int
    max_context_len: int
    # In a graph of mixed steps int32 [2], on the device: all rows, and decode rows. What the other
    # tensors have behind is padding, and `num_decode_rows` says nothing.
    row_counts: Tensor | None = None
    # What a backend computes in a step's first layer for all the others, by the backend's name.
    scratch: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    _other_groups: list["AttentionMetadata"] = field(default_factory=list, repr=False)

    def add_group(self, slot_mapping: Tensor, block_tables: Tensor) -> None:
        """Add where the K and V of one more group of layers are; all else is the same."""
        group = replace(self, slot_mapping=slot_mapping, block_tables=block_tables)
        self._other_groups.append(group)

    def of_group(self, group: int) -> "AttentionMetadata":
        """Return the step as the layers of a group see it; this one is that of group 0."""
        return self._other_groups[group - 1] if group else self

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)


class AttentionBackend:
    """Attends over a KV cache in which K and V of the whole batch are already stored.

    In this order: a sequence may read blocks that another one of the same batch fills.
    """

    capturable = False  # whether a decode step can be captured in a CUDA graph
    captures_mixed_steps = False  # and a step of decode rows and chunks, of any numbers of both

    def kv_cache_spec(
        self,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> KVCacheSpec:
        """Return how a layer's K and V are kept for this backend.

        num_kv_heads: of this rank. dtype: the model's. kv_cache_dtype: the user's choice. Raises
        `ValueError` for a format that the backend cannot read.
        """
        return KVCacheSpec.of_format(block_size, num_kv_heads, head_dim, dtype, kv_cache_dtype)

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend from q [num_tokens, num_heads, head_dim]; return the same shape.

        Blocks behind the windows of all of a row's queries may hold anything, even NaN.
        """
        raise NotImplementedError
