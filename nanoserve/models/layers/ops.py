"""The small operations between the matrix products, in plain torch.

They cost few operations and many bytes, so a GPU wants each of them as one pass over its data:
`nanoserve.models.layers.triton_ops` has the same methods as Triton kernels, and is measured against these.
`FusedOps` is what the versions with kernels share.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache


class TorchOps:
    # Where several operations of a layer are one kernel. None: the layer does them one by one.
    # (heads, rotary, (q_norm, k_norm), kv_cache, metadata) -> q, see Qwen3Attention; no norm is
    # None. The other is as `nanoserve.models.layers.experts.sum_of_experts`.
    norm_rotate_store: Callable[..., Tensor] | None = None
    sum_of_experts: Callable[..., Tensor] | None = None

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


class FusedOps(TorchOps):
    """All between the qkv projection and attention as one kernel, whichever compiler made it."""

    # As `nanoserve.kernels.triton.store_kv.store_kv`, and the one of that name in `kernels_cpu`.
    store_kv: Callable[..., Tensor]

    def norm_rotate_store(
        self,
        heads: Tensor,
        rotary: Any,
        norms: tuple[Any, Any],
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Do steps 2 to 5 of `Qwen3Attention.forward` in one; return q.

        Codes of 8 bits are made of float32, with no rounding to 16 bits between. Raises
        `ValueError` for norms of q and k that differ in eps.
        """
        q_norm, k_norm = norms
        q_weight, k_weight, eps = None, None, 0.0
        if q_norm is not None:
            q_weight, eps = q_norm.weight, q_norm.eps
        if k_norm is not None:
            k_weight = k_norm.weight
            if k_norm.eps != eps:
                raise ValueError(f"the norms of q and k must have one eps, not {eps}, {k_norm.eps}")
        return self.store_kv(
            heads,
            metadata.positions,
            rotary.cos,
            rotary.sin,
            q_weight,
            k_weight,
            eps,
            kv_cache.values,
            metadata.slot_mapping,
            kv_cache.scales,
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim]; cos and sin [num_tokens, head_dim / 2] of its positions.

    Pairs (x[i], x[i + head_dim / 2]) are turned by their angles: see `RotaryEmbedding`.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
