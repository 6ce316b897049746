"""nanoserve's paged attention as an attention function of transformers.

transformers looks up the function by name and calls it in every attention layer. The KV caches of
the layers and the metadata of the step are in a context variable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache

NAME = "nanoserve"  # of the attention function in transformers' registry
# Arguments of attention functions that change no result: the causal mask covers them, or they are
# for training.
_WITHOUT_EFFECT = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "layer_idx",
    "logits_to_keep", "max_length_k", "max_length_q", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids",
    "return_dict", "use_cache",
}  # fmt: skip


@dataclass
class AttentionStep:
    """The inputs of attention in a step, and what the layers computed so far have."""

    backend: AttentionBackend
    kv_caches: list[KVCache]
    metadata: AttentionMetadata
    windows: dict[int, int | None] = field(default_factory=dict)  # by layer
    has_sinks: bool = False  # in any layer


_STEP: ContextVar[AttentionStep] = ContextVar("step")


def register_attention() -> None:
    """Make the attention known to transformers, under `NAME`, without masks."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, **options: Any) -> None:
    return None


@contextmanager
def attention_of(step: AttentionStep) -> Iterator[None]:
    """Use the KV caches and the metadata of `step` in attention within the `with` block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, as the attention functions of transformers do.

    query: [1, num_heads, num_tokens, head_dim]; key and value: [1, num_kv_heads, num_tokens,
    head_dim]. s_aux: attention sinks [num_heads]. Returns [1, num_tokens, num_heads, head_dim], and
    no attention weights.

    Raises `ValueError` for whatever the paged KV cache, or its attention, does not have.
    """
    step, index = _STEP.get(), module.layer_idx
    effects = sorted(n for n, v in options.items() if v is not None and n not in _WITHOUT_EFFECT)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    _check_call(step, index, attention_mask, effects, q, k, v)
    if s_aux is not None and s_aux.shape != q.shape[1:2]:
        raise ValueError(f"its sinks are {tuple(s_aux.shape)}, and there are {q.shape[1]} heads")
    step.windows[index] = sliding_window
    kv_cache = step.kv_caches[index]
    kv_cache.store(k, v, step.metadata.slot_mapping)
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    layer = _layer(q.shape[1], k.shape[1], q.shape[2], scale, sliding_window, softcap)
    if s_aux is not None:
        layer, step.has_sinks = replace(layer, sinks=s_aux.float().contiguous()), True
    return step.backend.attend(layer, q, kv_cache, step.metadata)[None], None


_layer = lru_cache(maxsize=4096)(AttentionLayer)


def _check_call(
    step: AttentionStep,
    index: int,
    mask: Tensor | None,
    effects: list[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    num_kv_heads, _, head_dim = step.kv_caches[0].values.shape[2:]
    sizes = {"queries": q.shape[2], "keys": k.shape[2], "values": v.shape[2]}
    problem = None
    if index in step.windows:
        problem = f"layer {index} computes attention twice, and its KV cache has room for one"
    elif index >= len(step.kv_caches):
        problem = f"there is a layer {index}, but num_hidden_layers is {len(step.kv_caches)}"
    elif set(sizes.values()) != {head_dim} or k.shape[1] != num_kv_heads:
        problem = (
            f"its heads are {sizes} wide, {k.shape[1]} of them for keys, and config.json has "
            f"{num_kv_heads} of {head_dim}"
        )
    elif mask is not None:
        problem = f"it builds an attention mask of its own, {tuple(mask.shape)}"
    elif effects:
        problem = f"its attention has {', '.join(effects)}"
    if problem is not None:
        raise ValueError(problem)
