"""Qwen3-Next (Qwen team 2025): three of four layers have linear attention, and most have experts.

Full attention has an output gate, and rotates a quarter of each head. Norms multiply by one plus
their weight, as in Gemma. One more expert, weighted by a gate of its own, computes every token.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.recurrent_state import LayerCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.gemma2 import GemmaRMSNorm
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.gated_delta_net import GatedDeltaNet, InterleavedGatedDeltaNet
from nanoserve.models.layers.ops import rotate
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.layers.shared_expert import SharedExpertMoE
from nanoserve.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP, Qwen3Model


class GatedAttention(Qwen3Attention):
    """Attention whose output is multiplied by the sigmoid of a gate (Qiu et al. 2025, 2505.06708).

    `q_proj` yields a query and a gate for each head.
    """

    q_parts = 2

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        num_heads, num_kv_heads = self.layer.num_heads, self.layer.num_kv_heads
        heads = self.project(hidden)
        q, k, v = heads.split([2 * num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, gate = q.unflatten(1, (num_heads, 2)).unbind(dim=2)
        cos, sin = self.rotary.cos[metadata.positions], self.rotary.sin[metadata.positions]
        q, k = (
            rotate_first(norm(x.reshape(-1, x.shape[2]).contiguous()).view(x.shape), cos, sin)
            for norm, x in zip(self.norms, (q, k), strict=True)
        )
        kv_cache.store(k, v, metadata.slot_mapping)
        attended = self.backend.attend(self.layer, q, kv_cache, metadata)
        return self.o_proj((attended * gate.sigmoid()).flatten(1))


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as many of the first dimensions of each head as cos and sin have angles for."""
    first, rest = x.tensor_split((2 * cos.shape[-1],), dim=-1)
    return torch.cat((rotate(first, cos, sin), rest), dim=-1)


def sparse_or_dense(config: ModelConfig, index: int, context: LayerContext) -> nn.Module:
    """Return the feed-forward of layer `index`."""
    is_dense = config.moe is None or index in config.moe.dense_layers
    return (Qwen3MLP if is_dense else SharedExpertMoE)(config, index, context)


class Qwen3NextModel(Qwen3Model):
    def rotary_by_layer(self, config: ModelConfig, context: LayerContext) -> list[RotaryEmbedding]:
        """Return tables as wide as the part of a head that is rotated: see `rotate_first`."""
        rotary_dim = config.rope.rotary_dim(config.head_dim)
        whole = replace(config.rope, partial_rotary_factor=1.0)
        rotary = RotaryEmbedding(whole, rotary_dim, config.max_position_embeddings, context)
        return [rotary] * config.num_hidden_layers


class Qwen3NextDecoderLayer(nn.Module):
    """A decoder layer with linear or full attention, which have different names in checkpoints."""

    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__()
        parts, size, eps = context.parts, config.hidden_size, config.rms_norm_eps
        self.self_attn = self.linear_attn = None
        if index in config.recurrent_layers:
            self.linear_attn = parts.linear_attention_class(config, index, context)
        else:
            self.self_attn = parts.attention_class(config, index, rotary, context)
        self.mlp = parts.mlp_class(config, index, context)
        self.input_layernorm = parts.norm_class(size, eps, context)
        self.post_attention_layernorm = parts.norm_class(size, eps, context)

    def forward(
        self, hidden: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer: (output of the last block, residual stream) -> the same two."""
        mixer = self.linear_attn if self.self_attn is None else self.self_attn
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = mixer(hidden, cache, metadata)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3NextForCausalLM(Qwen3ForCausalLM):
    model_class = Qwen3NextModel
    layer_class = Qwen3NextDecoderLayer  # type: ignore[assignment]  # it has the same constructor
    attention_class, norm_class = GatedAttention, GemmaRMSNorm
    linear_attention_class: type[GatedDeltaNet] = InterleavedGatedDeltaNet
    mlp_class = staticmethod(sparse_or_dense)  # type: ignore[assignment]  # called like a class
    # Read by the loader.
    fused_tensors = GatedDeltaNet.fused_tensors
    unused_tensors = ("mtp.",)  # of heads for multi-token prediction
