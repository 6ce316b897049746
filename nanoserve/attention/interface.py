"""The interface that attention backends implement, and its inputs."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nanoserve.attention.kv_cache import KVCache, KVCacheSpec


@dataclass(frozen=True)
class AttentionLayer:
    """The parameters of an attention layer."""

    num_heads: int
    num_kv_heads: int  # query head h reads KV head h // (num_heads // num_kv_heads)
    head_dim: int
    scale: float
    sliding_window: int | None = None  # number of tokens that a query attends to, including its own
    soft_cap: float | None = None  # c: scores become c tanh(score / c)
    value_dim: int | None = None  # V is the first `value_dim` numbers of K; None: V is cached, too
    # Float32 [num_heads]: a score of each head that has a weight in its softmax, but no value.
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass
class AttentionMetadata:
    """The attention metadata of a batch: a few tensors and integers that all layers share.

    A row is a sequence; its tokens are q[cu_seqlens_q[row] : cu_seqlens_q[row + 1]], the last
    tokens of its context, and each attends to itself and to all tokens before it. `slot_mapping`
    and `block_tables` differ by group of layers, see `nanoserve.engine.kv_groups`.
    """

    positions: Tensor  # int32 [num_tokens]
    slot_mapping: Tensor  # int32 [num_tokens]: the KV slot of each token
    cu_seqlens_q: Tensor  # int32 [num_rows + 1]
    context_lens: Tensor  # int32 [num_rows]
    block_tables: Tensor  # int32 [num_rows, max_blocks]
    num_decode_rows: int  # rows with one token; they come first
    max_query_len: int
    max_context_len: int
    row_slots: Tensor | None = None  # int32 [num_rows]: see `nanoserve.attention.recurrent_state`
    # In a graph of mixed steps, int32 [2] on the device: the numbers of rows and of decode rows.
    # Tensor entries beyond these are padding, and `num_decode_rows` is not used.
    row_counts: Tensor | None = None
    # Values that a backend computes in the first layer of a step for all layers, by backend name.
    scratch: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    _other_groups: list["AttentionMetadata"] = field(default_factory=list, repr=False)

    def add_group(self, slot_mapping: Tensor, block_tables: Tensor) -> None:
        """Add the KV slots and block tables of one more group of layers; the rest is shared."""
        group = replace(self, slot_mapping=slot_mapping, block_tables=block_tables)
        self._other_groups.append(group)

    def of_group(self, group: int) -> "AttentionMetadata":
        """Return the metadata for the layers of a group; `self` is the metadata of group 0."""
        return self._other_groups[group - 1] if group else self

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)


class AttentionBackend:
    """The base class of attention backends.

    A backend attends over a KV cache in which K and V of the whole batch are already stored: a
    sequence may read blocks that another sequence of the same batch fills.
    """

    capturable = False  # whether a decode step can be captured in a CUDA graph
    captures_mixed_steps = False  # also a mixed step, for any numbers of decode rows and chunks
    supports_value_dim = False  # whether V may be a part of K: `AttentionLayer.value_dim`
    supports_sinks = False  # whether `attend` reads `AttentionLayer.sinks`

    def kv_cache_spec(
        self,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> KVCacheSpec:
        """Return the layout of a layer's K and V for this backend.

        num_kv_heads: of this rank. dtype: the model's. kv_cache_dtype: the configured format.
        Raises `ValueError` for a format that the backend does not support.
        """
        return KVCacheSpec.of_format(block_size, num_kv_heads, head_dim, dtype, kv_cache_dtype)

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute attention of q [num_tokens, num_heads, head_dim]; return the same shape.

        With a `value_dim` it is the last dimension of the result.
        Blocks before the windows of all of a row's queries may contain anything, even NaN.
        """
        raise NotImplementedError
