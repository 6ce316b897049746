"""What runs where: the device, its attention backend, its kernels and its runner."""

import logging
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import Executor
from nanoserve.layers.context import LayerContext, LinearMethod
from nanoserve.layers.ops import TorchOps
from nanoserve.layers.tensor_parallel import TensorParallel
from nanoserve.models.registry import model_class, model_location
from nanoserve.worker.host_device import HostDevice
from nanoserve.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def make_executor(config: EngineConfig, model_config: ModelConfig, path: Path) -> Executor:
    """What runs the steps of an engine: one runner, or one for each rank.

    Raises `ValueError` if there is no such device, if the attention backend cannot run on it, or
    if the model cannot be shared by so many ranks, before any weight is read.
    """
    size = config.tensor_parallel_size
    device = choose_device(config.device, 0, size)
    if size == 1:
        return make_runner(config, model_config, path, TensorParallel())
    shape_only = LayerContext(device=torch.device("meta"), tp=TensorParallel(0, size))
    model_class(model_config.architecture)(model_config, shape_only)
    model = (model_config.architecture, model_location(model_config.architecture))
    from nanoserve.worker.tensor_parallel import TensorParallelExecutor

    make = partial(make_runner, config, model_config, path)
    return TensorParallelExecutor(config, path, model, device, make)


def make_runner(
    config: EngineConfig, model_config: ModelConfig, path: Path, tp: TensorParallel
) -> ModelRunner:
    """The runner of one rank."""
    device = choose_device(config.device, tp.rank, tp.size)
    dtype = getattr(torch, model_config.dtype)
    name = choose_attention_backend(config, model_config, device)
    logger.info("device %s, attention backend %s", device, name)
    attention, ops = _backend(name)
    if device.type == "cpu":
        context = LayerContext(dtype, device, tp, attention, ops, _linear_method(dtype))
        return ModelRunner(config, model_config, path, context, HostDevice())
    context = LayerContext(dtype, device, tp, attention, ops)
    from nanoserve.worker.cuda import Cuda
    from nanoserve.worker.cuda_device import CudaDevice

    cuda_device = CudaDevice(config, Cuda(device), attention.capturable)
    return ModelRunner(config, model_config, path, context, cuda_device)


def _linear_method(dtype: torch.dtype) -> LinearMethod | None:
    """On a CPU; None for plain weights."""
    if dtype != torch.bfloat16:  # in other types, packed weights measured no better
        return None
    from nanoserve.kernels_cpu.packed_linear import packed_linear_method

    return packed_linear_method()


def choose_device(asked: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """`asked` is "auto", "cpu" or "cuda". Rank i of several takes GPU i, one rank the current."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ValueError(f"device='cuda', but torch {torch.__version__} sees no NVIDIA GPU")
    if asked == "cpu" or not has_cuda:
        return torch.device("cpu")
    if num_ranks == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size={num_ranks}, but there are {torch.cuda.device_count()} GPUs"
        )
    return torch.device("cuda", rank)


def choose_attention_backend(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> str:
    """ "torch", "numba", "triton" or "flash_attn": what was asked for, if it can run here."""
    name, is_cpu = config.attention_backend, device.type == "cpu"
    has_numba = is_cpu and model_config.dtype != "float16" and find_spec("numba") is not None
    if name == "auto":
        return "triton" if not is_cpu else "numba" if has_numba else "torch"
    if name == "numba" and not has_numba:
        raise ValueError(
            f"attention_backend='numba' needs the package numba (pip install 'nanoserve[cpu]'), a "
            f"CPU, and float32 or bfloat16, not device {device} and {model_config.dtype}"
        )
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "attention_backend='triton' needs an NVIDIA GPU; without one it runs, very slowly, "
            "in Triton's interpreter, if TRITON_INTERPRET=1 is set before Python starts"
        )
    if name in ("triton", "flash_attn") and find_spec("triton") is None:
        raise ValueError(f"attention_backend={name!r} needs the package triton")
    if name == "flash_attn":
        from nanoserve.attention.flash import check_flash_attention

        dtype = getattr(torch, model_config.dtype)
        check_flash_attention(config.block_size, model_config.head_dim, dtype, device)
    return name


def _backend(name: str) -> tuple[AttentionBackend, TorchOps]:
    if name == "torch":
        return TorchAttention(), TorchOps()
    if name == "numba":
        from nanoserve.attention.numba import NumbaAttention
        from nanoserve.kernels_cpu.ops import NumbaOps

        return NumbaAttention(), NumbaOps()
    from nanoserve.kernels.ops import TritonOps

    if name == "triton":
        from nanoserve.attention.triton import TritonAttention

        return TritonAttention(), TritonOps()
    from nanoserve.attention.flash import FlashAttention

    return FlashAttention(), TritonOps()
