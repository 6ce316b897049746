"""Builds one rank's model and KV caches, and checks that they fit into memory."""

import logging
from collections.abc import Callable, Set
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from nanoserve.attention.recurrent_state import LayerCache
from nanoserve.checkpoint.loader import check_weights, load_weights, possible_tensors
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.quantized_loader import check_weights as check_quantized_weights
from nanoserve.checkpoint.quantized_loader import load_deferred
from nanoserve.checkpoint.text_part import TextWeights
from nanoserve.checkpoint.weight_files import Weights, base_weights, text_weights
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import SecondModelMemory
from nanoserve.engine.kv_groups import blocks_needed
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.registry import model_class
from nanoserve.utils.checks import require
from nanoserve.worker.kv_cache import KVCacheLayout, allocate_kv_caches

logger = logging.getLogger(__name__)

T = TypeVar("T")


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Weights,
    context: LayerContext,
    num_positions: int | None,
    memory_bytes: int,
    *,
    shows_progress: bool = True,
) -> nn.Module:
    """Return this rank's model with the weights in `path`.

    num_positions: the maximum sequence length; None if it is not known yet. memory_bytes: the
    memory that the rank has in total. Raises `ValueError` if the files do not match this model, or
    if it does not fit.
    """
    path = _of_model(path, config, model_config)
    # 1) A model on the meta device, which has no memory, shows whether the weights will fit.
    elsewhere = check_source(config, model_config, path, context, memory_bytes)
    # 2) The model; its position tables have `num_positions` entries.
    context = replace(context, max_model_len=config.max_model_len, num_positions=num_positions)
    model = model_class(model_config.architecture)(model_config, context)
    if hasattr(model, "load_weights"):  # the model's class reads its weights itself
        model.load_weights(path, config.load_format)
    else:
        is_deferred = any(hasattr(parameter, "bits") for parameter in model.parameters())
        load = load_weights
        if is_deferred or model_config.quantization_config:
            load = load_deferred
        shows_progress = shows_progress and context.tp.rank == 0
        load(model, path, config.load_format, elsewhere, shows_progress=shows_progress)
    if context.adapters is not None:
        context.adapters.attach(model)
    return model


def check_source(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Weights,
    context: LayerContext,
    memory_bytes: int,
) -> Set[str]:
    """Raise `ValueError` unless this rank's model can be filled from `path`, and fits into memory.

    Reads no weights. Returns the names of the tensors that belong to other pipeline stages.
    """
    meta = replace(context, device=torch.device("meta"), num_positions=1)
    elsewhere: Set[str] = frozenset()
    if context.pp.num_stages > 1:
        elsewhere = tensors_of_other_stages(model_config, meta)
    model = model_class(model_config.architecture)(model_config, meta)
    check_model(model, config, model_config, path, memory_bytes, elsewhere)
    return elsewhere


def check_model(
    model: nn.Module,
    config: EngineConfig,
    model_config: ModelConfig,
    path: Weights,
    memory_bytes: int,
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Raise `ValueError` unless `model` matches the files and its weights fit into memory.

    elsewhere: names of tensors that the files may also hold, for other pipeline stages.
    """
    path = _of_model(path, config, model_config)
    if config.load_format != "dummy" and not hasattr(model, "load_weights"):
        if model_config.quantization_config:
            check_quantized_weights(model, path, elsewhere)
        else:
            check_weights(model, path, elsewhere)
    num_bytes = kept_bytes(model)
    require(
        num_bytes <= memory_bytes,
        f"the weights take {num_bytes} bytes in {model_config.dtype}, but a rank has only "
        f"{memory_bytes} bytes of memory: choose a smaller dtype or quantization, or more ranks",
    )


def _of_model(path: Weights, config: EngineConfig, model_config: ModelConfig) -> Weights:
    """Return the weights under the names that the model has for them.

    The text model of a multimodal checkpoint has another prefix, and a base model has none.
    """
    if config.load_format == "dummy" or isinstance(path, TextWeights):
        return path
    if model_config.multimodal_architecture is not None:
        return text_weights(path)
    return path if model_config.pooling is None else base_weights(path)


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights, including those that have no memory yet.

    Quantized weights are counted without their scales.
    """
    bits = (p.numel() * getattr(p, "bits", 8 * p.element_size()) for p in model.parameters())
    return sum(bits) // 8


def second_model_memory(
    config: EngineConfig, model_config: ModelConfig, context: LayerContext
) -> SecondModelMemory:
    """Return the memory that a model will take, before it is allocated."""
    meta = replace(context, device=torch.device("meta"), num_positions=1)
    model = model_class(model_config.architecture)(model_config, meta)
    block_bytes = KVCacheLayout.of(config, model_config, context).block_bytes
    return SecondModelMemory(kept_bytes(model), block_bytes)


def allocate_caches(
    layout: KVCacheLayout, num_kv_blocks: int, device: torch.device
) -> list[LayerCache]:
    """Allocate the KV cache or the states of each layer here, in their order, all zeroed.

    num_kv_blocks: the number of usable blocks; dummy block 0 is added.
    """
    states: dict[int, LayerCache] = {**layout.states.allocate(device)}
    spec, groups, layers_here = layout.spec, layout.groups, layout.layers_here
    kv_caches = iter(allocate_kv_caches(spec, groups, layers_here, num_kv_blocks, device))
    return [states[layer] if layer in states else next(kv_caches) for layer in layers_here]


def allocate_pool(
    config: EngineConfig,
    model_config: ModelConfig,
    layout: KVCacheLayout,
    num_kv_blocks: int,
    device: torch.device,
) -> list[LayerCache]:
    """Allocate the KV caches of this rank's layers: `num_kv_blocks` blocks and dummy block 0.

    Layers with recurrent states get these instead.
    """
    kv_caches = allocate_caches(layout, num_kv_blocks, device)
    if config.num_kv_blocks or config.kv_cache_memory_bytes:
        for kv_cache in kv_caches:
            kv_cache.fill_(0.0)  # map all pages now: no step waits for the system
    pool = (num_kv_blocks + 1) * layout.block_bytes / 2**30
    name = model_config.checkpoint_architecture
    logger.info(
        f"{name}, {model_config.dtype}, {num_kv_blocks} KV blocks of "
        f"{config.block_size} tokens in {layout.spec.cache_key} ({pool:.2f} GiB)"
        f"{layout.states.describe()}"
    )
    return kv_caches


def with_one_block(
    make: Callable[[list[LayerCache], int, int], T],
    config: EngineConfig,
    model_config: ModelConfig,
    layout: KVCacheLayout,
    context: LayerContext,
) -> T:
    """Return a runner with one KV block, for steps of dummy rows, which share the dummy block.

    make: called with the KV caches, the number of blocks and the longest sequence. The runner's
    buffers are sized for the longest sequence that may turn out to fit.
    """
    longest = config.max_model_len or model_config.max_position_embeddings
    kv_caches = allocate_caches(layout, 1, context.device)
    return make(kv_caches, blocks_needed(longest, config.block_size), longest)


def tensors_of_other_stages(model_config: ModelConfig, context: LayerContext) -> Set[str]:
    """Return the names of the checkpoint's tensors that only other stages read.

    `context` is this stage's, on the meta device.
    """
    make = model_class(model_config.architecture)
    alone = replace(context, parallel=ParallelContext(context.tp))
    whole = possible_tensors(make(model_config, alone))
    return whole - possible_tensors(make(model_config, context))
