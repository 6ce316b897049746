"""The configuration of a model that transformers computes with nanoserve's attention.

transformers reads the whole `config.json`. Only what the engine itself needs is taken from it: the
sizes of the KV cache and of the vocabulary, the data type and the end of a sequence. What the
engine's attention cannot compute is rejected by name. `nanoserve.models.transformers.model` has the
model.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoserve.checkpoint.config_json import architecture_of
from nanoserve.checkpoint.model_config import (
    THROUGH_TRANSFORMERS,
    ConfigFiles,
    ModelConfig,
    default_sampling,
    eos_token_ids,
)
from nanoserve.checkpoint.overrides import with_sampling_overrides
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.checkpoint.text_part import text_config
from nanoserve.checkpoint.unsupported_architectures import describe_unsupported, kind_of_model
from nanoserve.config import DTYPES, EngineConfig
from nanoserve.utils.checks import check_choice, check_int, require, shown

_NOT_TEXT = "ForConditionalGeneration"
# Types of layers that nanoserve's attention computes; a layer without RoPE is also one of these.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# A checkpoint of the same model, which a trainer has saved, may differ in these.
_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
# transformers chooses the frequencies by the longest sequence of a batch: one request would change
# the results of others.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}


def transformers_model_config(
    files: ConfigFiles, config: EngineConfig, supported: Collection[str]
) -> ModelConfig:
    """Return the configuration of a model that runs through transformers.

    Raises `ValueError` for a class that transformers does not have or that cannot run with paged
    attention, and for options that only nanoserve's own classes support.
    """
    text = text_config(files.config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if text is not None:
        files = ConfigFiles(text, files.generation, architecture_of(files.config))
    raw = {**files.config, **(config.hf_overrides or {})}
    name = architecture_of(raw)
    is_known = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not name.endswith(_NOT_TEXT)
    if not is_known or (name not in supported and kind_of_model(raw) is not None):
        raise ValueError(describe_unsupported(raw, supported))
    settings = read_settings(raw)
    reason = why_not(name, settings)
    if reason is not None and name in supported:
        raise ValueError(f"{name} does not run through transformers: {reason}")
    if reason is not None:
        raise ValueError(describe_unsupported(raw, supported, reason))
    _check_options(name, files, config, is_own=name in supported)
    read = _read(settings, raw, files.generation, config.dtype)
    read = replace(read, multimodal_architecture=files.multimodal_architecture)
    return with_sampling_overrides(read, config)


def read_settings(raw: Mapping[str, Any]) -> PretrainedConfig:
    """Return `config.json` as the configuration of transformers' class.

    Raises `ValueError` for settings that transformers rejects.
    """
    name = architecture_of(raw)
    config_class = getattr(transformers, name).config_class
    try:
        return config_class.from_dict(dict(raw))
    except Exception as error:  # each class of transformers has checks of its own
        raise ValueError(f"transformers rejects the config.json of {name}: {error}") from error


def why_not(name: str, settings: PretrainedConfig) -> str | None:
    """Return why a decoder class cannot run with nanoserve's attention; None if it may."""
    model_class = getattr(transformers, name)
    if getattr(model_class, "_is_stateful", False):
        return "its layers have recurrent states, which are no KV cache"
    if not model_class._supports_attention_backend:
        return "its class does not use transformers' attention interface"
    for size in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        try:
            getattr(settings, size, None)
        except Exception:  # whatever transformers raises where layers have their own settings
            return f"its layers differ in {size}, and all KV caches have one shape"
    if settings.get_text_config() is not settings:
        return "it is a multimodal model"
    if settings.is_encoder_decoder or getattr(settings, "add_cross_attention", False):
        return "it attends to an encoder"
    if getattr(settings, "is_decoder", True) is False:
        return "is_decoder is false, so its attention is bidirectional"
    for setting in ("use_bidirectional_attention", "kv_lora_rank", "attention_chunk_size"):
        if getattr(settings, setting, None):
            return f"{setting}={shown(getattr(settings, setting))}"
    types = set(getattr(settings, "layer_types", None) or ()) - _LAYER_TYPES
    if types:
        return f"it has layers of the types {sorted(types)}"
    rope_types = {str(rope.get("rope_type")) for rope in _rope_settings(settings)} & _ROPE_BY_LENGTH
    if rope_types:
        return f"transformers' {sorted(rope_types)} RoPE depends on the longest sequence of a batch"
    return None


def _rope_settings(settings: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Return the RoPE settings: one object, or one for each type of layers."""
    rope = getattr(settings, "rope_parameters", None) or {}
    objects = [one for one in rope.values() if isinstance(one, Mapping)]
    return objects or [rope]


def _check_options(name: str, files: ConfigFiles, config: EngineConfig, *, is_own: bool) -> None:
    advice = "use model_impl='nanoserve'" if is_own else "nanoserve has no class of its own for it"
    why = f"{name} runs through transformers ({advice}), which does not support"
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(config, option)
        require(size == 1, f"{why} {option}={size}")
    options = "batch_invariant", "enable_return_routed_experts", "enable_prompt_embeds"
    for option in options:
        value = getattr(config, option)
        require(not value, f"{why} {option}={shown(value)}")
    has_triton = config.device == "cuda" or config.attention_backend == "triton"
    require(
        not has_triton or not config.quantization,
        f"{why} quantization={config.quantization!r} with Triton's kernels or on a GPU",
    )
    quantized = files.config.get("quantization_config")
    require(not quantized, f"{why} quantized checkpoints: quantization_config={shown(quantized)}")
    known = getattr(transformers, name).config_class().to_dict().keys() | files.config.keys()
    unknown = sorted((config.hf_overrides or {}).keys() - known)
    require(not unknown, f"hf_overrides: the configuration of {name} has no {unknown}")


def _read(
    settings: PretrainedConfig, raw: Mapping[str, Any], generation: Mapping[str, Any], dtype: str
) -> ModelConfig:
    if dtype == "auto":
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    check_choice("dtype", dtype, DTYPES)
    heads = _size(settings, "num_attention_heads")
    hidden_size = _size(settings, "hidden_size")
    kv_heads = num_kv_heads(settings, heads)
    head_dim = getattr(settings, "head_dim", None) or hidden_size // heads
    layers = _size(settings, "num_hidden_layers")
    return ModelConfig(
        architecture=THROUGH_TRANSFORMERS,
        vocab_size=_size(settings, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=getattr(settings, "intermediate_size", None) or hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=check_int("head_dim", head_dim, 1),
        max_position_embeddings=_size(settings, "max_position_embeddings"),
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=bool(getattr(settings, "tie_word_embeddings", False)),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        attention_scale=head_dim**-0.5,
        # The windows are in the calls of attention. All blocks of a sequence are kept.
        sliding_windows=(None,) * layers,
        dtype=dtype,
        eos_token_ids=eos_token_ids(raw) | eos_token_ids(generation),
        default_sampling=default_sampling(generation),
        transformers_config={n: v for n, v in raw.items() if n not in _NOT_OF_THE_MODEL},
    )


def num_kv_heads(settings: PretrainedConfig, num_heads: int) -> int:
    """Return the number of KV heads, which some classes have under a name of their own."""
    if getattr(settings, "multi_query", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv"):
        if getattr(settings, name, None):
            return _size(settings, name)
    return num_heads


def _size(settings: PretrainedConfig, name: str) -> int:
    value = getattr(settings, name, None)
    require(value is not None, f"config.json has no {name!r} that transformers reads")
    return check_int(name, value, 1)
