"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in its absorbed form.

K and V of all heads are linear functions of one small vector per token, the latent c, and only c is
cached. A head's key consists of W_UK c and of r, numbers with a rotary position that all heads
share; its value is W_UV c. So the score of a query (q, p), and the sum of values with weights w,
are

    q . (W_UK c) + p . r  =  (W_UK^T q) . c + p . r              sum w W_UV c  =  W_UV (sum w c)

The right-hand sides need no keys or values of heads: W_UK is *absorbed* into the query, and W_UV is
applied to the result. What is left is attention with one KV head for all query heads, whose key is
(c, r) and whose value is c, a part of the key. DeepSeek-V2-Lite caches 512 + 64 numbers per layer
and token in place of 16 x (192 + 128).

All rows are computed in this way, prompts and decode rows alike, so that a token's result does not
depend on the chunks of its prompt. It has the fewest bytes to read, which is what decode rows wait
for. In long prompts keys and values of heads would take fewer operations: 192 + 128 numbers for
each pair of tokens and head instead of 576 + 512.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.models.layers.ops import rotate
from nanoserve.models.layers.rotary import RotaryEmbedding

_EPS = 1e-6  # of the norms of latents: DeepSeek's code has it whatever rms_norm_eps is


class LatentAttention(nn.Module):
    """Attention with one cached vector per token; heads are split over the ranks, the cache not."""

    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__()
        self.mla, hidden, bias = config.mla, config.hidden_size, config.qkv_bias
        self.rotary, self.backend = rotary, context.attention
        num_heads = context.tp.part(config.num_attention_heads, "num_attention_heads")
        kv_heads, q_rank, parts = self.mla.kv_heads, self.mla.q_lora_rank, context.parts
        q_size = config.num_attention_heads * self.mla.head_dim
        # The projections to latents are small, and every rank computes them in full.
        latents = {"kv_a_proj_with_mqa": kv_heads.head_dim}
        self.q_a_layernorm = None
        if q_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, {"q_proj": q_size}, context)
        else:
            latents = {"q_a_proj": q_rank} | latents
            self.q_a_layernorm = parts.norm_class(q_rank, _EPS, context)
            self.q_proj = ColumnParallelLinear(q_rank, {"q_b_proj": q_size}, context)
        self.latent_proj = ColumnParallelLinear(
            hidden, latents, context, bias=bias, num_slices=dict.fromkeys(latents, 1)
        )
        self.kv_a_layernorm = parts.norm_class(self.mla.kv_lora_rank, _EPS, context)
        self.kv_b_proj = LatentUpProjection(config, context)
        o_size = config.num_attention_heads * self.mla.v_head_dim
        self.o_proj = RowParallelLinear(o_size, hidden, context, bias=config.o_bias)
        scale, value_dim = config.attention_scale, self.mla.kv_lora_rank
        self.layer = AttentionLayer(num_heads, *kv_heads[:2], scale, value_dim=value_dim)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """Compute attention, [num_tokens, hidden_size] -> the same; store the tokens' latents."""
        mla, num_heads = self.mla, self.layer.num_heads
        # 1) The latents of the queries, if they have one, and of the keys and values: [num_tokens,
        # q_lora_rank], [num_tokens, kv_lora_rank], and r, [num_tokens, qk_rope_head_dim].
        sizes = [mla.q_lora_rank or 0, mla.kv_lora_rank, mla.qk_rope_head_dim]
        q_latent, latent, r = self.latent_proj(hidden).split(sizes, dim=-1)
        if self.q_a_layernorm is not None:
            hidden = self.q_a_layernorm(q_latent.contiguous())
        latent = self.kv_a_layernorm(latent.contiguous())
        # 2) The queries: [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim].
        heads = self.q_proj(hidden).unflatten(1, (num_heads, mla.head_dim))
        q, p = heads.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        # 3) Both are rotated by their positions.
        cos, sin = self.rotary.cos[metadata.positions], self.rotary.sin[metadata.positions]
        p, r = (rotate(self._in_halves(x), cos, sin) for x in (p, r.unsqueeze(1)))
        # 4) (c, r) is stored, as the key of the only KV head.
        kv_cache.store(torch.cat((latent.unsqueeze(1), r), dim=-1), None, metadata.slot_mapping)
        # 5) Attention of the absorbed queries: [num_tokens, num_heads, kv_lora_rank].
        q = torch.cat((self.kv_b_proj.absorb(q), p), dim=-1)
        attended = self.backend.attend(self.layer, q, kv_cache, metadata)
        # 6) The values of heads: [num_tokens, num_heads x v_head_dim].
        return self.o_proj(self.kv_b_proj.values(attended).flatten(1))

    def _in_halves(self, x: Tensor) -> Tensor:
        """Order pairs to rotate as `rotate` has them; scores do not depend on that order."""
        if not self.mla.rope_interleave:
            return x
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class LatentUpProjection(nn.Module):
    """W_UK and W_UV of this rank's heads, which checkpoints store as the rows of one matrix.

    A head's qk_nope_head_dim rows of W_UK precede its v_head_dim rows of W_UV. The weight is never
    quantized: it multiplies a matrix per head, in either direction.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        mla, tp = config.mla, context.tp
        num_heads = tp.part(config.num_attention_heads, "num_attention_heads")
        self.rows = (mla.qk_nope_head_dim, mla.v_head_dim)
        self.stored_shape = (config.num_attention_heads * sum(self.rows), mla.kv_lora_rank)
        self.first = tp.rank * num_heads * sum(self.rows)
        self.weight = context.empty(num_heads * sum(self.rows), mla.kv_lora_rank)

    def absorb(self, q: Tensor) -> Tensor:
        """Return W_UK^T q, [num_tokens, num_heads, qk_nope_head_dim] -> [..., kv_lora_rank]."""
        return torch.bmm(q.transpose(0, 1), self._matrices()[0]).transpose(0, 1)

    def values(self, attended: Tensor) -> Tensor:
        """Return W_UV c, [num_tokens, num_heads, kv_lora_rank] -> [..., v_head_dim]."""
        return torch.bmm(attended.transpose(0, 1), self._matrices()[1].mT).transpose(0, 1)

    def _matrices(self) -> tuple[Tensor, ...]:
        """Return views of W_UK and W_UV: [num_heads, rows of each, kv_lora_rank]."""
        return self.weight.unflatten(0, (-1, sum(self.rows))).split(self.rows, dim=1)

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{own_name}.weight", self.weight, self.stored_shape, 0, self.first)
