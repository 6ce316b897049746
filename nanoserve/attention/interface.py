"""The interface of an attention backend: its inputs, and what it must do."""

from dataclasses import dataclass, field, replace

from torch import Tensor


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
    kv_cache_dtype = "auto"  # "auto" is the model's own; see nanoserve.attention.quantized_kv

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache, K before V; `num_blocks` counts the dummy block 0.

        With the head before the token, what one KV head reads of a block is contiguous.
        """
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """q and what is returned: [num_tokens, num_heads, head_dim]."""
        raise NotImplementedError
