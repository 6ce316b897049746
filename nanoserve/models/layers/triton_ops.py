"""`TorchOps` implemented with a Triton kernel for each operation, for tensors on a GPU."""

from typing import Any

import torch

from nanoserve.kernels.triton.act_and_mul import act_and_mul
from nanoserve.kernels.triton.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.triton.experts import fused_experts
from nanoserve.kernels.triton.store_kv import store_kv
from nanoserve.models.layers.ops import FusedOps


class TritonOps(FusedOps):
    """Triton kernels of all operations that occur in a decode step of a supported model."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    act_and_mul = staticmethod(act_and_mul)
    store_kv = staticmethod(store_kv)

    def sum_of_experts(self, *args: Any) -> torch.Tensor:
        """Return what `models.layers.experts.sum_of_experts` returns, for the same arguments."""
        return fused_experts(*args)
