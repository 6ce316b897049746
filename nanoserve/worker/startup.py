"""How a runner comes to its weights, its KV cache and its buffers."""

import logging
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanoserve.checkpoint.loader import check_weights, load_weights
from nanoserve.checks import require
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.models.registry import model_class
from nanoserve.worker.heads import HEADS
from nanoserve.worker.kv_cache import KVCacheLayout, allocate_kv_caches, room_of_sequence

logger = logging.getLogger(__name__)


def start(runner: Any, path: Path) -> None:
    """Complete a `ModelRunner`, from the checkpoint in `path`.

    Whatever can be refused before the weights are read, is. A CPU's pool is known beforehand; a GPU
    gives it what the weights have left.
    """
    config, model_config, device = runner.config, runner.model_config, runner.device
    runner.kv_cache_layout = layout = KVCacheLayout.of(config, model_config, runner.context)
    with device.guard():
        num_kv_blocks = device.pool_before_loading(
            config, model_config, runner.context.parallel, layout.block_bytes
        )
        if num_kv_blocks is not None:
            make_room(runner, num_kv_blocks)
        is_known = num_kv_blocks is not None
        load_model(runner, path, runner.max_model_len if is_known else config.max_model_len)
        if num_kv_blocks is None:
            make_room(runner, device.pool_after_loading(runner))
        allocate_pool(runner)
        device.warm_up(runner)


def make_room(runner: Any, num_kv_blocks: int) -> None:
    """With so many blocks: the longest sequence, and the buffers for a step."""
    config = runner.config
    runner.num_kv_blocks = num_kv_blocks = runner.context.parallel.smallest(num_kv_blocks)
    room = room_of_sequence(config, runner.model_config)
    runner.max_model_len = config.resolve_max_model_len(
        runner.model_config.max_position_embeddings, num_kv_blocks, room.longest(num_kv_blocks)
    )
    runner.layout = BatchLayout(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        blocks_needed(runner.max_model_len, config.block_size),
        tuple(HEADS.names()),
        len(room.windows),
    )
    runner.device.make_room(runner.layout)
    runner.use_memory(runner.device.host_memory(2 * runner.layout.num_bytes))


def load_model(runner: Any, path: Path, num_positions: int | None) -> None:
    """No sequence is longer than `num_positions`; None if that is not known yet."""
    config, model_config = runner.config, runner.model_config
    # 1) A model without memory shows what would not fit, before any is taken.
    make, context = model_class(model_config.architecture), runner.context
    meta = replace(context, device=torch.device("meta"), num_positions=1)
    elsewhere: Set[str] = frozenset()
    if context.pp.num_stages > 1:
        from nanoserve.worker.pipeline_stage import tensors_of_other_stages

        elsewhere = tensors_of_other_stages(model_config, meta)
    check_model(runner, make(model_config, meta), path, elsewhere)
    # 2) The model; its tables are for positions that occur.
    context = replace(context, max_model_len=config.max_model_len, num_positions=num_positions)
    runner.model = make(model_config, context)
    is_deferred = any(hasattr(parameter, "bits") for parameter in runner.model.parameters())
    load = load_weights
    if is_deferred or model_config.quantization_config:
        from nanoserve.quantization.deferred import load_deferred as load
    shows_progress = context.tp.rank == 0
    load(runner.model, path, config.load_format, elsewhere, shows_progress=shows_progress)
    runner.sampler = runner.device.sampler_class(
        config.max_num_seqs,
        model_config.vocab_size,
        runner.context.device,
        config.logits_processors,
    )


def check_model(
    runner: Any, model: nn.Module, path: Path, elsewhere: Set[str] = frozenset()
) -> None:
    """Raise `ValueError` unless `model` is what the files hold, and its weights have room.

    Other stages of a pipeline have the tensors `elsewhere`, which the files may hold, too.
    """
    if runner.config.load_format != "dummy":
        check = check_weights
        if runner.model_config.quantization_config:
            from nanoserve.quantization.deferred import check_weights as check
        check(model, path, elsewhere)
    num_bytes = kept_bytes(model)
    memory_bytes = runner.device.memory_bytes(runner.context.parallel)
    require(
        num_bytes <= memory_bytes,
        f"the weights take {num_bytes} bytes in {runner.model_config.dtype}; a rank has "
        f"{memory_bytes} of memory",
    )


def kept_bytes(model: nn.Module) -> int:
    """Of its weights, those that have no memory yet included; of integers without their scales."""
    bits = (p.numel() * getattr(p, "bits", 8 * p.element_size()) for p in model.parameters())
    return sum(bits) // 8


def allocate_pool(runner: Any) -> None:
    """The KV cache of a runner that knows how many blocks it has."""
    config, model_config, block_size = runner.config, runner.model_config, runner.config.block_size
    layout, num_kv_blocks = runner.kv_cache_layout, runner.num_kv_blocks
    runner.kv_caches = allocate_kv_caches(*layout, num_kv_blocks, runner.context.device)
    if config.num_kv_blocks or config.kv_cache_memory_bytes:
        for kv_cache in runner.kv_caches:
            kv_cache.fill_(0.0)  # asked for, so taken now: no step waits for the system
    pool = (num_kv_blocks + 1) * layout.block_bytes / 2**30
    logger.info(
        f"{model_config.architecture}, {model_config.dtype}, {num_kv_blocks} KV blocks of "
        f"{block_size} tokens in {layout.spec.cache_key} ({pool:.2f} GiB), "
        f"max_model_len {runner.max_model_len}"
    )
