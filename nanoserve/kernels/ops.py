"""`TorchOps` as one Triton kernel each, for tensors on a GPU."""

from typing import Any

import torch

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.kernels.act_and_mul import act_and_mul
from nanoserve.kernels.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.experts import fused_experts
from nanoserve.kernels.store_kv import store_kv
from nanoserve.layers.ops import TorchOps


class TritonOps(TorchOps):
    """What has no kernel of its own here is not part of a decode step of a supported model."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def act_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return act_and_mul(gate_up, activation)

    def sum_of_experts(self, *args: Any) -> torch.Tensor:
        """Arguments and result as of `nanoserve.layers.experts.sum_of_experts`."""
        return fused_experts(*args)

    def norm_rotate_store(
        self,
        heads: torch.Tensor,
        rotary: Any,
        norms: tuple[Any, Any],
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `nanoserve.layers.ops.TorchOps`."""
        q_norm, k_norm = norms
        return store_kv(
            heads,
            metadata.positions,
            rotary.cos,
            rotary.sin,
            q_norm.weight if q_norm else None,
            k_norm.weight if k_norm else None,
            q_norm.eps if q_norm else 0.0,
            kv_cache,
            metadata.slot_mapping,
        )
