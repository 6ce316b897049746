"""Qwen3-Next (Qwen team 2025): three of four layers have linear attention, and most have experts.

Full attention has an output gate, and rotates a quarter of each head. Norms multiply by one plus
their weight, as in Gemma. One more expert, weighted by a gate of its own, computes every token.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.recurrent_state import LayerCache
from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.gemma2 import GemmaRMSNorm
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.experts import SparseMoE
from nanoserve.models.layers.gated_delta_net import GatedDeltaNet, InterleavedGatedDeltaNet
from nanoserve.models.layers.ops import rotate
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP


class GatedAttention(Qwen3Attention):
    """Attention whose output is multiplied by the sigmoid of a gate (Qiu et al. 2025, 2505.06708).

    `q_proj` yields a query and a gate for each head.
    """

    q_parts = 2

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        num_heads, num_kv_heads = self.layer.num_heads, self.layer.num_kv_heads
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.layer.head_dim)
        q, k, v = heads.split([2 * num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, gate = q.unflatten(1, (num_heads, 2)).unbind(dim=2)
        cos, sin = self.rotary.cos[metadata.positions], self.rotary.sin[metadata.positions]
        q, k = (
            rotate_first(norm(x.reshape(-1, x.shape[2])).view(x.shape), cos, sin)
            for norm, x in zip(self.norms, (q, k), strict=True)  # kernels of norms take rows
        )
        kv_cache.store(k, v, metadata.slot_mapping)
        attended = self.backend.attend(self.layer, q, kv_cache, metadata)
        return self.o_proj((attended * gate.sigmoid()).flatten(1))


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as many of the first dimensions of each head as cos and sin have angles for."""
    first, rest = x.tensor_split((2 * cos.shape[-1],), dim=-1)
    return torch.cat((rotate(first, cos, sin), rest), dim=-1)


class SharedExpertMoE(SparseMoE):
    """A mixture of experts with one that computes every token, weighted by a sigmoid."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        shared = replace(config, intermediate_size=config.moe.shared_expert_intermediate_size)
        self.shared_expert = Qwen3MLP(shared, index, context)
        self.shared_gate = context.empty(1, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = torch.nn.functional.linear(hidden, self.shared_gate).sigmoid()
        return super().forward(hidden) + weight * self.shared_expert(hidden)

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield from super().checkpoint_tensors(own_name)
        name, shape = f"{own_name}.shared_expert_gate.weight", tuple(self.shared_gate.shape)
        yield CheckpointTensor(name, self.shared_gate, shape)


def sparse_or_dense(config: ModelConfig, index: int, context: LayerContext) -> nn.Module:
    """Return the feed-forward of layer `index`."""
    is_dense = config.moe is None or index in config.moe.dense_layers
    return (Qwen3MLP if is_dense else SharedExpertMoE)(config, index, context)


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
    layer_class = Qwen3NextDecoderLayer  # type: ignore[assignment]  # it has the same constructor
    attention_class, norm_class = GatedAttention, GemmaRMSNorm
    linear_attention_class: type[GatedDeltaNet] = InterleavedGatedDeltaNet
    mlp_class = staticmethod(sparse_or_dense)  # type: ignore[assignment]  # called like a class
    fused_tensors = GatedDeltaNet.fused_tensors
    # Heads for multi-token prediction are not read.
    unread_prefixes = ("mtp.",)
