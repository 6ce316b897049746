"""What runs where: the device, its attention backend, its kernels and its runner."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path

import torch

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers.context import LayerContext
from nanoserve.layers.ops import TorchOps
from nanoserve.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def make_runner(config: EngineConfig, model_config: ModelConfig, path: Path) -> ModelRunner:
    """The runner for the device that `config` asks for.

    Raises `ValueError` if there is no such device, or if the attention backend cannot run on it,
    before any weight is read.
    """
    device = choose_device(config.device)
    dtype = getattr(torch, model_config.dtype)
    name = choose_attention_backend(config, model_config, device)
    logger.info("device %s, attention backend %s", device, name)
    attention, ops = _backend(name)
    context = LayerContext(dtype, device, attention=attention, ops=ops)
    if device.type == "cpu":
        return ModelRunner(config, model_config, path, context)
    from nanoserve.worker.gpu_runner import GPURunner

    return GPURunner(config, model_config, path, context)


def choose_device(asked: str) -> torch.device:
    """`asked` is "auto", "cpu" or "cuda"; a CUDA device is the caller's current one."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ValueError(f"device='cuda', but torch {torch.__version__} sees no NVIDIA GPU")
    if asked == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_attention_backend(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> str:
    """ "torch", "triton" or "flash_attn": what was asked for, if it can run here."""
    name = config.attention_backend
    if name == "auto":
        return "torch" if device.type == "cpu" else "triton"
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "attention_backend='triton' needs an NVIDIA GPU; without one it runs, very slowly, "
            "in Triton's interpreter, if TRITON_INTERPRET=1 is set before Python starts"
        )
    if name != "torch" and find_spec("triton") is None:
        raise ValueError(f"attention_backend={name!r} needs the package triton")
    if name == "flash_attn":
        from nanoserve.attention.flash import check_flash_attention

        dtype = getattr(torch, model_config.dtype)
        check_flash_attention(config.block_size, model_config.head_dim, dtype, device)
    return name


def _backend(name: str) -> tuple[AttentionBackend, TorchOps]:
    if name == "torch":
        return TorchAttention(), TorchOps()
    from nanoserve.kernels.ops import TritonOps

    if name == "triton":
        from nanoserve.attention.triton import TritonAttention

        return TritonAttention(), TritonOps()
    from nanoserve.attention.flash import FlashAttention

    return FlashAttention(), TritonOps()
