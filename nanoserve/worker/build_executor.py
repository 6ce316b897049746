"""What runs where: the device, its attention backend, its kernels and its runner."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.registry import ATTENTION_BACKENDS, OPERATIONS
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import Executor
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.quantization.linear_methods import choose_linear_method
from nanoserve.models.quantization.schemes import check_activations
from nanoserve.models.registry import weight_bytes
from nanoserve.utils.registry import Registry
from nanoserve.worker.backend_checks import check_attention_backend
from nanoserve.worker.cpu_device import CpuDevice
from nanoserve.worker.load_model import MemoryBeside
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.threads import choose_num_threads, threads

logger = logging.getLogger(__name__)

# Executors of several ranks: called with the configuration, the model's, its folder, rank 0's
# device, and the function that makes the runner of one rank.
EXECUTORS: Registry[Callable[..., Executor]] = Registry(
    "executor",
    {
        "tensor_parallel": "nanoserve.features.parallel.tensor_parallel:TensorParallelExecutor",
        "pipeline": "nanoserve.features.parallel.pipeline:PipelineExecutor",
    },
)


def make_executor(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    beside: Sequence[Callable[[], MemoryBeside]] = (),
) -> Executor:
    """What runs the steps of an engine: one runner, or one for each rank.

    beside: tell what second models take of rank 0's memory, if it is a GPU's. Raises `ValueError`
    if there are not so many devices, if the attention backend cannot run on them, or if the model
    cannot be shared by so many ranks, before any weight is read.
    """
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if num_ranks == 1:
        return make_runner(config, model_config, path, ParallelContext(), beside)
    kind = "pipeline" if config.pipeline_parallel_size > 1 else "tensor_parallel"
    device = choose_device(config, 0, num_ranks)
    make = partial(make_runner, config, model_config, path, beside=beside)
    return EXECUTORS.get(kind)(config, model_config, path, device, make)


def make_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    parallel: ParallelContext,
    beside: Sequence[Callable[[], MemoryBeside]] = (),
) -> ModelRunner:
    """Return the runner of one rank."""
    context, host = make_context(config, model_config, parallel)
    if context.device.type == "cpu":
        return ModelRunner.load(config, model_config, path, context, host)
    from nanoserve.worker.cuda import Cuda
    from nanoserve.worker.cuda_device import CudaDevice  # imports Triton

    attention = context.attention
    device = CudaDevice(
        config,
        Cuda(context.device),
        is_capturable=attention.capturable,
        captures_mixed_steps=attention.captures_mixed_steps,
        beside=beside,
    )
    return ModelRunner.load(config, model_config, path, context, device)


def make_context(
    config: EngineConfig, model_config: ModelConfig, parallel: ParallelContext
) -> tuple[LayerContext, CpuDevice]:
    """How a rank's layers compute; raises `ValueError` for what cannot be done so here."""
    device = choose_device(config, parallel.global_rank, parallel.num_ranks)
    dtype = getattr(torch, model_config.dtype)
    name = choose_attention_backend(config, model_config, device)
    logger.info("device %s, attention backend %s", device, name)
    attention, ops = _backend(name, **attention_options(name, config))
    num_bytes = weight_bytes(model_config)
    num_threads = choose_num_threads(config.num_threads, num_bytes)
    method = None
    if config.quantization_activations is not None:
        check_activations(config, model_config)
    # In float32, torch's products stay with its attention, as the plain reference.
    is_quantized = config.quantization or model_config.quantization_config
    if is_quantized or name == "numba" or (name == "torch" and dtype.itemsize < 4):
        with threads(num_threads):
            method = choose_linear_method(config, model_config, device, num_bytes)
    context = LayerContext(dtype, device, parallel, attention, ops, method)
    if name == "numba":
        from nanoserve.sampling.numba_sampler import NumbaSampler

        return context, CpuDevice(num_threads, NumbaSampler, is_compiled=True)
    # Products of integers are numba's, if it is there, whatever attention is; all but Triton's.
    is_compiled = bool(is_quantized) and name != "triton" and find_spec("numba") is not None
    return context, CpuDevice(num_threads, is_compiled=is_compiled)


def device_kind(asked: str) -> str:
    """ "cpu" or "cuda": what `asked` ("auto", "cpu" or "cuda") is on this machine."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ValueError(f"device='cuda', but torch {torch.__version__} sees no NVIDIA GPU")
    return "cuda" if has_cuda and asked != "cpu" else "cpu"


def choose_device(config: EngineConfig, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """Of "cuda", rank i of several takes GPU i; a single one, or one placed by Ray, the current."""
    if config.device == "cpu":
        return torch.device("cpu")
    if num_ranks == 1 or config.distributed_executor_backend == "ray":
        return torch.device("cuda", torch.cuda.current_device())
    if num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"{num_ranks} ranks (tensor_parallel_size x pipeline_parallel_size), but there are "
            f"{torch.cuda.device_count()} GPUs"
        )
    return torch.device("cuda", rank)


def choose_attention_backend(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> str:
    """What was asked for, if it can run here: a name in `ATTENTION_BACKENDS`."""
    name = config.attention_backend
    if name == "auto" and device.type == "cpu":
        has_numba = model_config.dtype != "float16" and find_spec("numba") is not None
        return "numba" if has_numba else "torch"
    if name == "torch":
        return name
    asked = "triton" if name == "auto" else name
    return check_attention_backend(asked, config.block_size, model_config, device)


def attention_options(name: str, config: EngineConfig) -> dict[str, Any]:
    """Return what the constructor of an attention backend is given."""
    drafts = config.speculative_config
    if name != "triton" or drafts is None or drafts.enforce_eager:
        return {}
    return {"longest_cut": drafts.num_speculative_tokens + 1}


def _backend(name: str, **options: Any) -> tuple[AttentionBackend, TorchOps]:
    return ATTENTION_BACKENDS.get(name)(**options), OPERATIONS.get(name)()
