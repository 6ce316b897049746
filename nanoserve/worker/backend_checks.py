"""Checks whether an attention backend can run here, and whether it can be in CUDA graphs."""

import os
from importlib.util import find_spec

import torch

from nanoserve.attention.interface import AttentionBackend
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.utils.checks import require

# Attention backends whose other operations are Triton kernels.
TRITON_OPERATIONS = ("triton", "flash_attn", "flash_attn3")

# Attention backends that attend to the keys of decode rows with Triton kernels.
TRITON_ATTENTION = ("triton", "flash_attn3")

# Ampere: the first with bfloat16 tensor cores and asynchronous copies to shared memory.
_FIRST_CAPABILITY = (8, 0)


def check_attention_backend(
    name: str, block_size: int, model_config: ModelConfig, device: torch.device
) -> str:
    """Return `name`, or "flash_attn3" if `name` is "flash_attn" and version 3 is to be used.

    name: "numba", "triton" or "flash_attn". Raises `ValueError`, which says what to do, if the
    backend cannot run here.
    """
    is_cpu = device.type == "cpu"
    if name == "numba" and (
        not is_cpu or model_config.dtype == "float16" or find_spec("numba") is None
    ):
        raise ValueError(
            f"attention_backend='numba' needs the package numba (pip install 'nanoserve[cpu]'), a "
            f"CPU, and float32 or bfloat16 (got device {device} and {model_config.dtype})"
        )
    if name == "triton" and is_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "attention_backend='triton' needs an NVIDIA GPU; without one it runs, very slowly, "
            "in Triton's interpreter, if TRITON_INTERPRET=1 is set before Python starts"
        )
    if name in ("triton", "flash_attn") and find_spec("triton") is None:
        raise ValueError(f"attention_backend={name!r} needs the package triton: pip install triton")
    if name in ("triton", "flash_attn") and device.type == "cuda":
        _check_capability(name, device)
    if name == "flash_attn":
        from nanoserve.attention.flash import check_flash_attention

        dtype = getattr(torch, model_config.dtype)
        return check_flash_attention(block_size, model_config.head_dim, dtype, device)
    return name


def _check_capability(name: str, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        found, first = (".".join(map(str, pair)) for pair in (capability, _FIRST_CAPABILITY))
        raise ValueError(
            f"attention_backend={name!r} needs a GPU of compute capability {first} (Ampere) or "
            f"newer; {torch.cuda.get_device_name(device)} has {found}. It can run "
            f"attention_backend='torch', which is slower"
        )


def check_kernels(
    kernels: KernelConfig,
    name: str,
    device: torch.device,
    quantization: str | None = None,
    activations: str | None = None,
) -> None:
    """Raise `ValueError` for variants of kernels that are not launched on a GPU.

    name: of the attention backend. quantization, activations: the options `quantization` and
    `quantization_activations`. On a CPU the variants are ignored, like other GPU options.
    """
    if device.type == "cpu":
        return
    require(
        name in TRITON_ATTENTION or not kernels.merge_in_attention,
        f"kernel_config with merge_in_attention=True is a variant of attention_backend='triton', "
        f"not of {name!r}: remove one of them",
    )
    for option in ("dependent_launch", "split_products", "fused_quantization", "adapter_kernels"):
        require(
            name in TRITON_OPERATIONS or not getattr(kernels, option),
            f"kernel_config with {option}=True is a variant of Triton kernels, which "
            f"attention_backend={name!r} does not launch: remove one of them",
        )
    has_floats = activations is None and quantization in (None, "int8", "int4")
    require(
        not kernels.fused_quantization or not (has_floats or activations == "none"),
        f"kernel_config with fused_quantization=True, but activations are not quantized with "
        f"quantization={quantization!r} and quantization_activations={activations!r}: remove it, "
        f"or choose quantization='fp8', or 'int8' with quantization_activations='int8'",
    )


def check_batch_invariant(
    config: EngineConfig, model_config: ModelConfig, name: str, device: torch.device
) -> None:
    """Raise `ValueError` unless results are batch-invariant with the attention backend `name`."""
    require(
        model_config.mla is None,
        "batch_invariant=True does not support multi-head latent attention, whose products with a "
        "matrix per head depend on the batch in their last bits: remove it",
    )
    require(
        name in ("numba", "triton"),
        f"batch_invariant=True needs attention_backend='numba', which runs on a CPU with the "
        f"package numba in float32 and bfloat16 (pip install 'nanoserve[cpu]'), or 'triton' on a "
        f"GPU; got {name!r} on {device}: results of its kernels depend on the batch in their last "
        f"bits",
    )
    if name == "numba":
        return
    is_quantized = config.quantization or model_config.quantization_config
    kernels = KernelConfig.of(config.kernel_config)
    # torch's log_softmax on a GPU adds up in an order that depends on the alignment of a row, and
    # its rows, of float32, are aligned alike only if they have a multiple of 16 bytes.
    vocab_size = model_config.vocab_size
    reasons = {
        f"vocab_size={vocab_size}, which is not a multiple of 4": vocab_size % 4,
        "quantized weights, whose kernels choose tiles by the number of rows": is_quantized,
        f"tensor_parallel_size={config.tensor_parallel_size}: more than two ranks add up in an "
        f"order that depends on the size of a tensor": config.tensor_parallel_size > 2,
        "capture_mixed_steps=True": config.capture_mixed_steps,
        "kernel_config with split_products=True": kernels.split_products,
        "kernel_config with merge_in_attention=True": kernels.merge_in_attention,
        "enable_lora=True without adapter_kernels=True of kernel_config": config.enable_lora
        and not kernels.adapter_kernels,
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    require(
        not found,
        f"batch_invariant=True with attention_backend='triton' does not support "
        f"{'; '.join(found)}: remove it, or batch_invariant=True",
    )


def check_latent_attention(config: EngineConfig, name: str, attention: AttentionBackend) -> None:
    """Raise `ValueError` if the backend `name` does not support multi-head latent attention.

    Also for a variant of its kernels, on a GPU, that there is not for this attention.
    """
    require(
        attention.supports_value_dim,
        f"attention_backend={name!r} does not support multi-head latent attention, in which V is a "
        f"part of K: choose 'triton' on a GPU, 'numba' on a CPU, or 'torch'",
    )
    require(
        name != "triton" or not KernelConfig.of(config.kernel_config).merge_in_attention,
        "kernel_config with merge_in_attention=True does not support multi-head latent attention: "
        "remove it",
    )


def check_graphs(
    config: EngineConfig, is_capturable: bool, captures_mixed_steps: bool = False
) -> None:
    """Raise `ValueError` for graphs that `config` enables and that cannot be captured."""
    require(
        is_capturable or not config.capture_sampling,
        f"capture_sampling=True, but attention_backend={config.attention_backend!r} cannot be part "
        f"of a CUDA graph: choose another backend, or set capture_sampling=False",
    )
    require(
        (is_capturable and captures_mixed_steps) or not config.capture_mixed_steps,
        f"capture_mixed_steps=True, but attention_backend={config.attention_backend!r} cannot be "
        f"part of a CUDA graph of mixed steps: choose 'triton', or set capture_mixed_steps=False",
    )
    drafts, budget = config.speculative_config, config.max_num_batched_tokens
    if drafts is None or drafts.enforce_eager:
        return
    query_len = drafts.num_speculative_tokens + 1
    require(
        is_capturable and budget >= query_len,
        f"speculative_config with enforce_eager=False captures rows of {query_len} tokens: "
        f"attention_backend={config.attention_backend!r} must be one that can be part of a CUDA "
        f"graph, and max_num_batched_tokens={budget} must be at least {query_len}",
    )
