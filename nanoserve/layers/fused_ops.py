"""All between the qkv projection and attention as one kernel, whichever compiler made it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.layers.ops import TorchOps


class FusedOps(TorchOps):
    # As `nanoserve.kernels.store_kv.store_kv`, and the one of that name in `kernels_cpu`.
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
