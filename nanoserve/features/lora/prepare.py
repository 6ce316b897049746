"""Checks the options of LoRA for a model, and adds its extension to an engine."""

from typing import TYPE_CHECKING

import torch

from nanoserve.config import KernelConfig
from nanoserve.engine.extension import PreparedFeature
from nanoserve.features.lora.adapter import Limits, outline_of, read_adapter
from nanoserve.features.lora.adapter_files import AdapterFiles
from nanoserve.features.lora.extension import LoRAAdapters
from nanoserve.features.lora.store import AdapterStore
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.low_rank import all_targets
from nanoserve.models.registry import model_class
from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine


def prepare_lora(config: "EngineConfig", model_config: "ModelConfig") -> PreparedFeature:
    """Return a feature that adds `LoRAAdapters` to an engine.

    Raises `ValueError`, before any weight is read, for models and options that it does not support.
    """
    option = "enable_lora=True"
    require(
        model_config.transformers_config is None,
        f"{option}: {model_config.checkpoint_architecture} runs through transformers, whose layers "
        f"take no adapters; merge the adapter into its base (peft: merge_and_unload)",
    )
    require(
        config.device != "cuda" or not KernelConfig.of(config.kernel_config).fused_quantization,
        f"{option} does not support kernel_config with fused_quantization=True, which gives linear "
        f"layers codes instead of the numbers that adapters multiply: remove one of them",
    )
    require(
        config.distributed_executor_backend != "ray",
        f"{option} supports ranks on one machine: remove distributed_executor_backend='ray'",
    )
    limits = limits_of(config, model_config)
    name = model_config.architecture
    require(bool(limits.shapes), f"{option}: {name} has no linear layer that takes adapters")
    most = config.max_cpu_loras or config.max_loras
    shares_files = config.tensor_parallel_size * config.pipeline_parallel_size > 1

    def add_to(engine: "GuardedEngine") -> None:
        store = AdapterStore(limits, most, shares_files, engine.clock)
        engine.add_extension(LoRAAdapters(engine, store))
        engine.input_processor.adapter_checks.append(store.check)

    return PreparedFeature(add_to)


def limits_of(config: "EngineConfig", model_config: "ModelConfig") -> Limits:
    """Return what an adapter of this engine is checked against."""
    meta = LayerContext(device=torch.device("meta"), num_positions=1)
    model = model_class(model_config.architecture)(model_config, meta)
    shapes = {target.name: target.shape for target in all_targets(model)}
    return Limits(shapes, config.max_lora_rank, getattr(torch, model_config.dtype))


def check_adapter(
    config: "EngineConfig", model_config: "ModelConfig", path: str, root: str | None = None
) -> None:
    """Raise `ValueError` unless requests could use the adapter in a folder; reads all of it.

    root: a folder that must contain it.
    """
    limits = limits_of(config, model_config)
    read_adapter(outline_of(AdapterFiles.find(path, root), limits), limits)
