"""The small operations between the matrix products, in plain torch.

They cost few operations and many bytes, so a GPU wants each of them as one pass over its data:
`nanoserve.kernels.ops` has the same methods as Triton kernels, and is measured against these.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from nanoserve.layers.norm import RMSNorm
    from nanoserve.layers.rotary import RotaryEmbedding


class TorchOps:
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension: no mean, no bias."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, and normalise the sum: (normalised, sum)."""
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU (Shazeer 2020), [..., 2 x size] -> [..., size]: silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def store_kv(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor,
        rotary: "RotaryEmbedding",
        norms: "tuple[RMSNorm, RMSNorm] | None",
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Norm and turn queries and keys, store keys and values, and return the queries.

        heads: [num_tokens, num_heads + 2 x num_kv_heads, head_dim], as the fused qkv projection
        gives them. norms: of queries and of keys, with one eps, for models that have them. Token i
        is stored at offset slot_mapping[i] % block_size of block slot_mapping[i] // block_size.
        """
        num_kv_heads, block_size = kv_cache.shape[2:4]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        cos, sin = rotary.cos[positions].unsqueeze(1), rotary.sin[positions].unsqueeze(1)
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        kv_cache[0][blocks, :, offsets] = _rotate(k, cos, sin)
        kv_cache[1][blocks, :, offsets] = v
        return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
