"""The registry of attention backends and their operations. It does not import torch."""

from typing import Any

from nanoserve.utils.registry import Registry

# Classes of `nanoserve.attention.interface.AttentionBackend`.
ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention backend",
    {
        "torch": "nanoserve.attention.torch:TorchAttention",
        "numba": "nanoserve.attention.numba:NumbaAttention",
        "triton": "nanoserve.attention.triton:TritonAttention",
        "flash_attn": "nanoserve.attention.flash:FlashAttention",
        "flash_attn3": "nanoserve.attention.flash:FlashAttention3",  # chosen for "flash_attn"
    },
)
# `nanoserve.models.layers.ops.TorchOps` and its subclasses, by the name of the attention backend.
OPERATIONS: Registry[Any] = Registry(
    "operations of attention backend",
    {
        "torch": "nanoserve.models.layers.ops:TorchOps",
        "numba": "nanoserve.models.layers.numba_ops:NumbaOps",
        "triton": "nanoserve.models.layers.triton_ops:TritonOps",
        "flash_attn": "nanoserve.models.layers.triton_ops:TritonOps",
        "flash_attn3": "nanoserve.models.layers.triton_ops:TritonOps",
    },
)


def register_attention_backend(
    name: str, attention: Any, operations: Any = "nanoserve.models.layers.ops:TorchOps"
) -> None:
    """Register a backend: classes whose constructors take no arguments, or "module:Class".

    Then `LLM(..., attention_backend=name)` can use it. Other ranks do not have it.
    """
    ATTENTION_BACKENDS.register(name, attention)
    OPERATIONS.register(name, operations)


def backend_choices() -> list[str]:
    """Return the allowed values of the option `attention_backend`."""
    return ["auto", *(name for name in ATTENTION_BACKENDS.names() if name != "flash_attn3")]
