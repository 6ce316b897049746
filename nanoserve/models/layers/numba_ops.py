"""`TorchOps` implemented for CPUs and compiled by numba (extra: `nanoserve[cpu]`)."""

from torch import Tensor

from nanoserve.checkpoint.moe_config import SwiGLU
from nanoserve.kernels.cpu.ops import act_and_mul, add_rms_norm, rms_norm, swiglu_and_mul
from nanoserve.kernels.cpu.store_kv import store_kv
from nanoserve.models.layers.ops import FusedOps

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


class NumbaOps(FusedOps):
    """Operations whose results for a token do not depend on the batch, to the bit."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    store_kv = staticmethod(store_kv)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up, [num_tokens, 2 x size] -> [num_tokens, size]."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r:.80} must be one of {ACTIVATIONS}")
        return act_and_mul(gate_up, activation != "silu")

    @staticmethod
    def swiglu(gate_up: Tensor, swiglu: SwiGLU) -> Tensor:
        """Return what `models.layers.experts.swiglu_and_mul` returns."""
        return swiglu_and_mul(gate_up, *swiglu)
