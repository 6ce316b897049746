"""Creates the executor, and chooses its device, attention backend, kernels and runner."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.registry import ATTENTION_BACKENDS, OPERATIONS
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.engine.executor import Executor, SecondModelMemory
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.routed_experts import RoutedExperts
from nanoserve.models.quantization.linear_methods import choose_linear_method
from nanoserve.models.quantization.schemes import check_activations
from nanoserve.models.registry import model_class, weight_bytes
from nanoserve.utils.registry import Registry
from nanoserve.worker.adapters import make_adapters
from nanoserve.worker.backend_checks import (
    TRITON_ATTENTION,
    TRITON_OPERATIONS,
    check_attention_backend,
    check_batch_invariant,
    check_kernels,
    check_latent_attention,
)
from nanoserve.worker.cpu_device import CpuDevice
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
    second_models: Sequence[Callable[[], SecondModelMemory]] = (),
) -> Executor:
    """Return the executor of an engine: one runner, or one for each rank.

    second_models: functions that return the memory that second models, such as a draft model, take
    on rank 0's GPU. Raises `ValueError`, before any weight is read, if there are too few devices,
    if the attention backend cannot run on them, or if the model cannot be split over so many ranks.
    """
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if num_ranks == 1:
        return make_runner(config, model_config, path, ParallelContext(), second_models)
    kind = "pipeline" if config.pipeline_parallel_size > 1 else "tensor_parallel"
    device = choose_device(config, 0, num_ranks)
    make = partial(make_runner, config, model_config, path, second_models=second_models)
    return EXECUTORS.get(kind)(config, model_config, path, device, make)


def make_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    parallel: ParallelContext,
    second_models: Sequence[Callable[[], SecondModelMemory]] = (),
) -> ModelRunner:
    """Return the runner of one rank, with its weights loaded."""
    context, host = make_context(config, model_config, parallel)
    if context.device.type == "cpu":
        return ModelRunner.load(config, model_config, path, context, host)
    from nanoserve.worker.cuda import Cuda
    from nanoserve.worker.cuda_device import CudaDevice  # imports Triton

    attention, model = context.attention, model_class(model_config.architecture)
    is_capturable = attention.capturable and getattr(model, "capturable", True)
    device = CudaDevice(
        config,
        Cuda(context.device),
        is_capturable=is_capturable,
        captures_mixed_steps=is_capturable and attention.captures_mixed_steps,
        second_models=second_models,
    )
    return ModelRunner.load(config, model_config, path, context, device)


def make_context(
    config: EngineConfig, model_config: ModelConfig, parallel: ParallelContext
) -> tuple[LayerContext, CpuDevice]:
    """Return the context of a rank's layers, and the device object to use if it is a CPU.

    Raises `ValueError` for a configuration that this machine does not support.
    """
    device = choose_device(config, parallel.global_rank, parallel.num_ranks)
    dtype = getattr(torch, model_config.dtype)
    name = choose_attention_backend(config, model_config, device)
    logger.info("device %s, attention backend %s", device, name)
    quantized = config.quantization, config.quantization_activations
    check_kernels(KernelConfig.of(config.kernel_config), name, device, *quantized)
    if config.batch_invariant:
        check_batch_invariant(config, model_config, name, device)
    attention, ops = _backend(name, config)
    if model_config.mla is not None:
        check_latent_attention(config, name, attention)
    num_bytes = weight_bytes(model_config)
    num_threads = choose_num_threads(config.num_threads, num_bytes)
    method = None
    if config.quantization_activations is not None:
        check_activations(config, model_config)
    # In float32 with attention_backend='torch', torch's own matrix products are kept: this is the
    # plain reference.
    is_quantized = config.quantization or model_config.quantization_config
    if is_quantized or name == "numba" or (name == "torch" and dtype.itemsize < 4):
        with threads(num_threads):
            method = choose_linear_method(config, model_config, device, num_bytes)
    routes = None
    # All ranks choose the same experts.
    if config.enable_return_routed_experts and model_config.moe and parallel.global_rank == 0:
        routes = RoutedExperts(model_config, config.max_num_batched_tokens, device)
    context = LayerContext(dtype, device, parallel, attention, ops, method, routed_experts=routes)
    if config.enable_lora:
        adapters = make_adapters(config, dtype, device, name)
        context = replace(context, adapters=adapters)
    if name == "numba":
        from nanoserve.sampling.numba_sampler import NumbaSampler

        return context, CpuDevice(num_threads, NumbaSampler, is_compiled=True)
    # If numba is installed, it computes matrix products with quantized weights under every
    # attention backend but Triton.
    is_compiled = bool(is_quantized) and name != "triton" and find_spec("numba") is not None
    return context, CpuDevice(num_threads, is_compiled=is_compiled)


def device_kind(requested: str) -> str:
    """Return "cpu" or "cuda" for the option `requested` ("auto", "cpu" or "cuda")."""
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise ValueError(f"device='cuda', but torch {torch.__version__} finds no NVIDIA GPU")
    return "cuda" if has_cuda and requested != "cpu" else "cpu"


def choose_device(config: EngineConfig, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """Return the device of a rank.

    With several ranks, rank i uses GPU i. A single rank, or a rank placed by Ray, uses the current
    CUDA device. Raises `ValueError` if there are fewer GPUs than ranks.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if num_ranks == 1 or config.distributed_executor_backend == "ray":
        return torch.device("cuda", torch.cuda.current_device())
    if num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size x pipeline_parallel_size = {num_ranks} ranks, but there are "
            f"{torch.cuda.device_count()} GPUs: each rank needs one"
        )
    return torch.device("cuda", rank)


def choose_attention_backend(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> str:
    """Return the attention backend to use, a name in `ATTENTION_BACKENDS`.

    It is the configured backend, or for "auto" the fastest backend that can run here. Raises
    `ValueError` if the configured backend cannot run here.
    """
    name = config.attention_backend
    if name == "auto" and device.type == "cpu":
        has_numba = model_config.dtype != "float16" and find_spec("numba") is not None
        return "numba" if has_numba else "torch"
    if name == "torch":
        return name
    requested = "triton" if name == "auto" else name
    return check_attention_backend(requested, config.block_size, model_config, device)


def attention_options(name: str, config: EngineConfig) -> dict[str, Any]:
    """Return the keyword arguments for the constructor of an attention backend."""
    options: dict[str, Any] = {}
    drafts = config.speculative_config
    if name not in TRITON_ATTENTION:
        return options
    if drafts is not None and not drafts.enforce_eager:
        options["longest_cut"] = drafts.num_speculative_tokens + 1
    if KernelConfig.of(config.kernel_config).merge_in_attention:
        options["merges_in_kernel"] = True
    if config.batch_invariant:
        options["batch_invariant"] = True
    return options


def _backend(name: str, config: EngineConfig | None = None) -> tuple[AttentionBackend, TorchOps]:
    """Return an attention backend and its operations; without `config`, with their defaults."""
    make_attention, make_operations = ATTENTION_BACKENDS.get(name), OPERATIONS.get(name)
    if config is None:
        return make_attention(), make_operations()
    attention = make_attention(**attention_options(name, config))
    if name not in TRITON_OPERATIONS:
        return attention, make_operations()
    kernels = KernelConfig.of(config.kernel_config)
    return attention, make_operations(
        kernels.dependent_launch,
        kernels.split_products,
        kernels.fused_quantization,
        config.batch_invariant,
    )
