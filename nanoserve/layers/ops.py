"""The small operations between the matrix products, in plain torch.

They cost few operations and many bytes, so a GPU wants each of them as one pass over its data:
`nanoserve.kernels.ops` has the same methods as Triton kernels, and is measured against these.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata

if TYPE_CHECKING:
    from nanoserve.layers.experts import SparseMoE
    from nanoserve.layers.norm import RMSNorm
    from nanoserve.layers.rotary import RotaryEmbedding


class TorchOps:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension: no mean, no bias."""
        # Gemma's weights are float32 beside activations in 16 bits.
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add `x` to the residual stream, and normalise the sum: (normalised, sum).

        The results may lie where the arguments were; callers have no use for those any more.
        """
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """[..., 2 x size] -> [..., size]: activation(gate) * up (Shazeer 2020: SwiGLU, GEGLU)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def experts(
        self, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, layer: "SparseMoE"
    ) -> Tensor:
        """The weighted sum of each token's experts: see `nanoserve.layers.experts`."""
        from nanoserve.layers.experts import sum_of_experts

        weights = (layer.gate_up, layer.down, layer.first_expert)
        return sum_of_experts(hidden, expert_ids, expert_weights, *weights)

    def store_kv(
        self,
        heads: Tensor,
        rotary: "RotaryEmbedding",
        norms: "tuple[RMSNorm, RMSNorm] | None",
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Norm and turn queries and keys, store keys and values, and return the queries.

        heads: [num_tokens, num_heads + 2 x num_kv_heads, head_dim], as the fused qkv projection
        gives them. norms: of queries and of keys, with one eps, for models that have them. Slots
        are numbered block x block_size + offset.
        """
        num_kv_heads, block_size = kv_cache.shape[2:4]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        cos, sin = (table[metadata.positions].unsqueeze(1) for table in (rotary.cos, rotary.sin))
        blocks, offsets = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
        kv_cache[0][blocks, :, offsets] = _rotate(k, cos, sin)
        kv_cache[1][blocks, :, offsets] = v
        return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
