"""The small operations between matrix products, in plain torch.

They have little arithmetic and much memory traffic, so on a GPU each should be one pass over its
data: `nanoserve.models.layers.triton_ops` implements the same methods as Triton kernels, and is
tested against these. `FusedOps` is the common base of the versions with kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache


class TorchOps:
    # Fused operations of a layer; None: the layer runs them one by one. The first is (heads,
    # rotary, (q_norm, k_norm), kv_cache, metadata) -> q, see Qwen3Attention; a missing norm is
    # None. The others have the signatures of functions of `nanoserve.models.layers.experts`.
    norm_rotate_store: Callable[..., Tensor] | None = None
    sum_of_experts: Callable[..., Tensor] | None = None
    swiglu: Callable[..., Tensor] | None = None

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T, [..., inputs] x [outputs, inputs] -> [..., outputs]."""
        return F.linear(x, weight)

    def gated_product(self, gate_up: Any, x: Tensor, activation: str) -> Tensor:
        """Return `act_and_mul` of the product of x and `gate_up`, a linear layer."""
        return self.act_and_mul(gate_up(x), activation)

    def expect_codes(self, operation: str, code_format: Any) -> None:
        """Note that linears quantize the results of "norm" or "activation" to `code_format`.

        Kernels may then compute the codes together with the results.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm (Zhang and Sennrich 2019) over the last dimension: no mean, no bias."""
        # Gemma's norm weights are float32, also if activations have 16 bits.
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add `x` to the residual stream, and normalise the sum; return (normalised, sum).

        The results may overwrite the arguments, which callers must not use again.
        """
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up, [..., 2 x size] -> [..., size].

        SwiGLU or GEGLU (Shazeer 2020).
        """
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


class FusedOps(TorchOps):
    """Operations that fuse everything between the qkv projection and attention into one kernel."""

    # `nanoserve.kernels.triton.store_kv.store_kv`, or the function of that name in `kernels/cpu`.
    store_kv: Callable[..., Tensor]

    def norm_rotate_store(
        self,
        heads: Tensor,
        rotary: Any,
        norms: tuple[Any, Any],
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Run steps 2 to 5 of `Qwen3Attention.forward` as one kernel; return q.

        8-bit codes are computed from float32 values, without rounding to 16 bits first. Raises
        `ValueError` if the norms of q and k differ in eps.
        """
        q_norm, k_norm = norms
        q_weight, k_weight, eps = None, None, 0.0
        if q_norm is not None:
            q_weight, eps = q_norm.weight, q_norm.eps
        if k_norm is not None:
            k_weight = k_norm.weight
            if k_norm.eps != eps:
                raise ValueError(
                    f"the norms of q and k must have the same eps, not {eps} and {k_norm.eps}"
                )
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
    """Apply rotary embeddings to x [num_tokens, num_heads, head_dim].

    cos and sin are [num_tokens, head_dim / 2], for the tokens' positions. Pairs (x[i], x[i +
    head_dim / 2]) are rotated by their angles: see `RotaryEmbedding`.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
