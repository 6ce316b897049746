"""`TorchOps` as one Triton kernel each, for tensors on a GPU."""

import torch

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.kernels.act_and_mul import act_and_mul
from nanoserve.kernels.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.experts import fused_experts
from nanoserve.kernels.store_kv import store_kv
from nanoserve.layers.experts import SparseMoE
from nanoserve.layers.norm import RMSNorm
from nanoserve.layers.ops import TorchOps
from nanoserve.layers.rotary import RotaryEmbedding


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

    def experts(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        layer: SparseMoE,
    ) -> torch.Tensor:
        weights = (layer.gate_up, layer.down, layer.first_expert, layer.num_experts)
        return fused_experts(hidden, expert_ids, expert_weights, *weights)

    def store_kv(
        self,
        heads: torch.Tensor,
        rotary: RotaryEmbedding,
        norms: tuple[RMSNorm, RMSNorm] | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        q_norm, k_norm = norms or (None, None)
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
