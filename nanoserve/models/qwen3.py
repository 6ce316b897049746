"""Qwen3 (Qwen team 2025, arXiv 2505.09388): the annotated model.

A decoder-only transformer: RMSNorm before each block, grouped-query attention with rotary positions
and a norm on every query and key head, and a SwiGLU feed-forward. The residual stream is passed
along separately from the block outputs, so that each addition is fused with the norm that follows
it.

Shapes: a batch is packed, so the first dimension is always num_tokens, over all sequences.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.models.layers.norm import RMSNorm
from nanoserve.models.layers.ops import rotate
from nanoserve.models.layers.rotary import RotaryEmbedding


class Qwen3Attention(nn.Module):
    q_parts = 1  # outputs of q_proj for each dimension of a query

    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__()
        self.config, tp, head_dim = config, context.tp, config.head_dim
        num_heads = tp.part(config.num_attention_heads, "num_attention_heads")
        # If there are fewer KV heads than ranks, several ranks have copies of the same head.
        kv_slices = tp.slices(config.num_key_value_heads, "num_key_value_heads")
        num_kv_heads = config.num_key_value_heads // kv_slices
        kv_size = config.num_key_value_heads * head_dim
        q_size = config.num_attention_heads * head_dim  # need not equal hidden_size
        outputs = {"q_proj": self.q_parts * q_size, "k_proj": kv_size, "v_proj": kv_size}
        num_slices = {"k_proj": kv_slices, "v_proj": kv_slices}
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, outputs, context, bias=config.qkv_bias, num_slices=num_slices
        )
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, context, bias=config.o_bias)
        self.q_norm = self.k_norm = None
        if context.parts.has_head_norms:
            self.q_norm = context.parts.norm_class(head_dim, config.rms_norm_eps, context)
            self.k_norm = context.parts.norm_class(head_dim, config.rms_norm_eps, context)
        self.norms = (self.q_norm, self.k_norm)  # not a module: look-ups of modules are slow
        self.rotary = rotary
        self.backend, self.ops = context.attention, context.ops
        scale, soft_cap = config.attention_scale, config.attention_soft_cap
        window = config.sliding_windows[index]
        self.layer = AttentionLayer(num_heads, num_kv_heads, head_dim, scale, window, soft_cap)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """Compute attention, [num_tokens, hidden_size] -> the same; store the tokens' K and V."""
        layer = self.layer
        # 1) One product yields all heads: [num_tokens, num_heads + 2 num_kv_heads, head_dim].
        heads = self.project(hidden)
        if self.ops.norm_rotate_store is not None:  # 2) to 5) as one kernel
            q = self.ops.norm_rotate_store(heads, self.rotary, self.norms, kv_cache, metadata)
        else:
            # 2) Queries, keys and values. k and v have fewer heads: a group of query heads shares
            #    one of each (GQA, Ainslie et al. 2023), which makes the cache smaller.
            sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
            q, k, v = heads.split(sizes, dim=1)
            # 3) Every query and key head is normalised over its head_dim.
            q_norm, k_norm = self.norms
            if q_norm is not None:
                q, k = q_norm(q), k_norm(k)
            # 4) Each is rotated by its position, so that q k depends on the distance between the
            # two.
            cos, sin = self.rotary.cos[metadata.positions], self.rotary.sin[metadata.positions]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            # 5) K and V are stored in their KV slots, before it is read.
            kv_cache.store(k, v, metadata.slot_mapping)
        # 6) Every token attends to the cached K and V up to itself: [num_tokens, num_heads,
        # head_dim].
        attended = self.backend.attend(layer, q, kv_cache, metadata)
        return self.o_proj(attended.flatten(1))

    def project(self, hidden: Tensor) -> Tensor:
        """Return this rank's heads of q, k and v."""
        return self.qkv_proj(hidden).view(len(hidden), -1, self.layer.head_dim)


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        outputs = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, outputs, context, bias=bias)
        self.down_proj = RowParallelLinear(size, config.hidden_size, context, bias=bias)
        self.ops, self.config = context.ops, config

    def forward(self, hidden: Tensor) -> Tensor:
        # [num_tokens, hidden_size] -> [..., 2 x intermediate_size] -> half of that -> hidden_size.
        activation = self.config.hidden_act
        return self.down_proj(self.ops.gated_product(self.gate_up_proj, hidden, activation))


class Qwen3DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__()
        parts, size, eps = context.parts, config.hidden_size, config.rms_norm_eps
        self.self_attn = parts.attention_class(config, index, rotary, context)
        self.mlp = parts.mlp_class(config, index, context)
        self.input_layernorm = parts.norm_class(size, eps, context)
        self.post_attention_layernorm = parts.norm_class(size, eps, context)

    def forward(
        self, hidden: Tensor, residual: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer: (output of the last block, residual stream) -> the same two."""
        # `add` does two steps: residual += hidden, and hidden = norm(residual).
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, kv_cache, metadata)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.config, self.dtype, self.pp = config, context.dtype, context.pp
        size, parts = config.hidden_size, context.parts
        # A pipeline stage has some of the layers; the first stage also has the embedding, and the
        # last one the norm and the head. Usually the model is a single stage, both first and last.
        self.embed_tokens = self.norm = None
        is_head = self.pp.is_last and config.tie_word_embeddings
        if self.pp.is_first or is_head:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, context)
        rotary = self.rotary_by_layer(config, context)
        self.layers = nn.ModuleList()
        for index in self.pp.layers_of(config.num_hidden_layers):
            layer = parts.layer_class(config, index, rotary[index], context)
            self.layers.add_module(str(index), layer)  # its name in checkpoints
        if self.pp.is_last:
            self.norm = parts.norm_class(size, config.rms_norm_eps, context)

    def rotary_by_layer(self, config: ModelConfig, context: LayerContext) -> list[RotaryEmbedding]:
        """Return the rotary embedding of each layer of the model: here all share one table."""
        num_positions = config.max_position_embeddings
        rotary = RotaryEmbedding(config.rope, config.head_dim, num_positions, context)
        return [rotary] * config.num_hidden_layers

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        if inputs_embeds is not None:
            hidden = inputs_embeds
        elif self.pp.is_first:
            hidden = self.embed(input_ids)  # [num_tokens, hidden_size], as in all layers
        else:
            shape = (len(input_ids), self.config.hidden_size)
            hidden = self.pp.receive(input_ids.new_empty(shape, dtype=self.dtype))
        residual = torch.zeros_like(hidden)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            # Layers that keep the same range of tokens form a group with its own block tables.
            group = metadata.of_group(kv_cache.group)
            hidden, residual = layer(hidden, residual, kv_cache, group)
        if not self.pp.is_last:  # the next stage uses the sum like an embedding
            return self.pp.send(residual + hidden)
        return self.norm.add(hidden, residual)[0]


class Qwen3ForCausalLM(nn.Module):
    """Qwen3 with an LM head. The class attributes name the parts; subclasses replace some of them.

    The context passes them to the layers. Only the constructors of Qwen3's own classes are used
    here: an attention or a layer of another kind has the same constructor; a feed-forward is built
    as `mlp_class(config, index, context)`.
    """

    model_class, layer_class = Qwen3Model, Qwen3DecoderLayer
    attention_class, mlp_class, norm_class = Qwen3Attention, Qwen3MLP, RMSNorm
    has_head_norms = True  # the difference between Qwen3 and Llama

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        context = replace(context, parts=type(self))
        self.model = self.model_class(config, context)
        self.lm_head = None
        if context.pp.is_last:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context)
        # Tied checkpoints often contain the head, too; it must equal the embedding, and is read
        # once.
        self.tied_tensors: dict[str, str] = {}
        if config.tie_word_embeddings:
            self.tied_tensors = {"lm_head.weight": "model.embed_tokens.weight"}
            if self.lm_head is not None:
                self.lm_head.tie(self.model.embed_tokens)

    def forward(
        self,
        input_ids: Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of the last layer computed here.

        input_ids are int32 [num_tokens]; kv_caches has one cache for each layer computed here.
        inputs_embeds, [num_tokens, hidden_size], are used instead of `embed(input_ids)`.
        """
        return self.model(input_ids, kv_caches, metadata, inputs_embeds)

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Return the logits, [num_rows, hidden_size] -> [num_rows, vocab_size], of sampled rows.

        The result is None on every rank but rank 0.
        """
        return None if self.lm_head is None else self.lm_head(hidden)
