"""Describe a model before it is loaded, and find out whether `LLM(...)` would load it.

The checks of `LLM(...)` run in the same order and through the same functions. But an error is
recorded, and checks that do not depend on its result are still made. Only headers of weight files
are read, and the model is built on the meta device, to count parameters and bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from nanoserve.build import load_tokenizer
from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.headers import has_weights, stored_bytes
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.compat.options import engine_config
from nanoserve.config import EngineConfig
from nanoserve.engine.sequence_room import SequenceRoom
from nanoserve.features.recurrent_options import supported_options
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.registry import model_class, supported_architectures
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.build_executor import device_kind, make_context
from nanoserve.worker.kv_cache import (
    KVCacheLayout,
    decide_num_kv_blocks,
    longest_sequence,
    physical_memory_bytes,
)
from nanoserve.worker.load_model import check_model, kept_bytes

Facts = dict[str, Any]
_KV_DTYPES = ("auto", "int8", "fp8")


def describe(model: str, **options: Any) -> Facts:
    """Return the properties of a model with `options` of `LLM`. Unknown properties are missing.

    "refused" lists the reasons for which `LLM(model, **options)` would raise; the first one is its
    error message.
    """
    facts: Facts = {"model": model, "refused": []}
    with _noting(facts):
        config = engine_config(model, options)
        config = config.for_device(device_kind(config.device))
        checkpoint = Checkpoint.open(model, config, config.revision)
        facts["path"] = str(checkpoint.folder)
        model_config = None
        with _noting(facts):
            model_config = checkpoint.model_config(config, supported_architectures())
            facts |= _of_model(model_config)
            config = supported_options(config, model_config)
            SamplingParams(**model_config.default_sampling)
        if not config.skip_tokenizer_init:
            with _noting(facts):
                facts |= _of_tokenizer(config, checkpoint, model_config)
        with _noting(facts):
            facts |= _of_files(checkpoint)
        if model_config is not None:
            _describe_engine(facts, config, model_config, checkpoint)
    return facts


@contextmanager
def _noting(facts: Facts) -> Iterator[None]:
    """Record a `ValueError` of the `with` block in `facts["refused"]`, and go on after it."""
    try:
        yield
    except ValueError as error:
        if str(error) not in facts["refused"]:  # the same files may be opened twice
            facts["refused"].append(str(error))


def _of_model(config: ModelConfig) -> Facts:
    """Return the entries of config.json, under their names there."""
    names = (
        "architecture", "dtype", "num_hidden_layers", "hidden_size", "intermediate_size",
        "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "tie_word_embeddings", "multimodal_architecture",
    )  # fmt: skip
    facts = {name: getattr(config, name) for name in names}
    facts |= {"model_impl": "nanoserve", "architecture": config.checkpoint_architecture}
    if config.transformers_config is not None:  # transformers knows the positions
        facts |= {"model_impl": "transformers", "rope": None}
    else:
        usual = asdict(RopeConfig())
        rope = {k: v for k, v in asdict(config.rope).items() if v != usual[k]}
        facts["rope"] = {"rope_type": config.rope.rope_type, "theta": config.rope.theta} | rope
    facts["layers_without_rope"] = sorted(config.layers_without_rope)
    facts["sliding_windows"] = sorted({window for window in config.sliding_windows if window})
    facts["num_recurrent_layers"] = len(config.recurrent_layers)
    mla = config.mla
    facts["latent_dims"] = None if mla is None else [mla.kv_lora_rank, mla.qk_rope_head_dim]
    facts["num_experts"] = None if config.moe is None else config.moe.num_experts
    stored = config.quantization_config
    facts["quantization"] = None if stored is None else stored.get("quant_method")
    facts["eos_token_ids"] = sorted(config.eos_token_ids)
    facts["default_sampling"] = dict(config.default_sampling)
    facts["kv_bytes_per_token"] = {name: config.kv_bytes_per_token(name) for name in _KV_DTYPES}
    return facts


def _of_tokenizer(
    config: EngineConfig, checkpoint: Checkpoint, model_config: ModelConfig | None
) -> Facts:
    tokenizer: Any = load_tokenizer(config, checkpoint)
    eos = set() if model_config is None else set(model_config.eos_token_ids)
    eos |= {tokenizer.eos_token_id} - {None}
    return {
        "tokenizer": type(tokenizer.backend.model).__name__,
        "tokenizer_size": tokenizer.backend.get_vocab_size(),
        "chat_template": tokenizer.has_chat_template,
        "eos_token_ids": sorted(eos),
    }


def _of_files(checkpoint: Checkpoint) -> Facts:
    by_type = stored_bytes(checkpoint)
    return {"stored_bytes": sum(by_type.values()), "stored_bytes_by_type": by_type}


def _describe_engine(
    facts: Facts, config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> None:
    alone, make = ParallelContext(), model_class(model_config.architecture)
    with _noting(facts):
        plain = LayerContext(device=torch.device("meta"), num_positions=1)
        parameters = make(model_config, plain).parameters()
        facts["num_parameters"] = sum(parameter.numel() for parameter in parameters)
    with _noting(facts):
        context, host = make_context(config, model_config, alone)
        method: Any = context.linear_method
        if hasattr(method, "activations"):
            facts["rounding"] = {"weights": method.weights, "activations": method.activations}
        with _noting(facts):
            layout = KVCacheLayout.of(config, model_config, context)
            _describe_pool(facts, config, model_config, layout)
        meta = replace(context, device=torch.device("meta"), num_positions=1)
        model = make(model_config, meta)
        facts["kept_bytes"] = kept_bytes(model)
        if config.device == "cpu":  # the free memory of a GPU is known only once it is in use
            is_there = has_weights(checkpoint)
            known = config if is_there else replace(config, load_format="dummy")
            memory_bytes = host.memory_bytes(alone)
            check_model(model, known, model_config, checkpoint.folder, memory_bytes)


def _describe_pool(
    facts: Facts, config: EngineConfig, model_config: ModelConfig, layout: KVCacheLayout
) -> None:
    """Add the size of the KV block pool.

    On a GPU it is the memory that the weights leave, so it is unknown unless an option sets it.
    """
    block_size = config.block_size
    facts["block_size"], facts["kv_cache_dtype"] = block_size, config.kv_cache_dtype
    facts["kv_block_bytes"] = layout.block_bytes
    facts["state_bytes_per_sequence"] = layout.states.bytes_per_slot
    facts["state_bytes"] = layout.states.num_bytes
    memory_bytes = physical_memory_bytes()
    if config.device == "cuda":
        if config.num_kv_blocks is None and config.kv_cache_memory_bytes is None:
            return
        memory_bytes = torch.cuda.get_device_properties(None).total_memory
    memory_bytes = layout.states.rest_of(memory_bytes)
    num_blocks = decide_num_kv_blocks(config, model_config, layout.block_bytes, memory_bytes)
    room = SequenceRoom.of(config, model_config)
    facts["num_kv_blocks"] = num_blocks
    facts["num_kv_tokens"] = num_blocks * block_size // len(room.windows)
    max_model_len = longest_sequence(config, model_config, num_blocks)
    facts["max_model_len"] = max_model_len
    facts["num_full_sequences"] = num_blocks // room.num_blocks(max_model_len)
