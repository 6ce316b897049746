"""Validate `quantization_config`: a field that affects the result is supported or rejected.

This module does not import torch: `config.json` is checked before weights are read or downloaded.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoserve.checkpoint.formats.registry import FORMATS
from nanoserve.utils.checks import is_int, require, shown


class _Field(NamedTuple):
    """The supported values of a field, and the advice for any other value."""

    allowed: tuple[Any, ...]
    instead: str


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_DENSE = {"format": "dense"}
_ANOTHER = "use a checkpoint without it"
_KV = _Field(_NOTHING, "delete it: the KV cache then has the model's dtype")
# The fields that affect the result, and their supported values.
_FIELDS: dict[str, dict[str, _Field]] = {
    "compressed-tensors": {
        "kv_cache_scheme": _KV,
        "sparsity_config": _Field((*_NOTHING, _DENSE), _ANOTHER),
        "moe_sparsity_config": _Field(_NOTHING, _ANOTHER),
        "transform_config": _Field(_NOTHING, "use a checkpoint without rotations"),
        "quantization_status": _Field((None, "compressed"), "save it compressed"),
    },
    "fp8": {
        "activation_scheme": _Field(
            (None, "dynamic"), "use a checkpoint with dynamic activation scales"
        ),
        "fmt": _Field((None, "e4m3", "float8_e4m3fn"), "use an e4m3 checkpoint"),
        "scale_fmt": _Field((None, "float", "ue8m0"), "use float or ue8m0 scales"),
        "expert_dtype": _Field((None, "fp8"), "use a checkpoint whose experts are FP8"),
        "modules_to_convert": _Field(
            _NOTHING, "use a checkpoint in which only linear layers are quantized"
        ),
        "kv_cache_scheme": _KV,
    },
    "awq": {
        "bits": _Field((4,), "use a 4-bit checkpoint"),
        "version": _Field((None, "gemm", "GEMM"), "pack it as gemm, with AutoAWQ"),
        "format": _Field((None, "gemm", "GEMM"), "pack it as gemm, with AutoAWQ"),
        "checkpoint_format": _Field((None, "gemm", "GEMM"), "pack it as gemm, with AutoAWQ"),
        "desc_act": _Field(_NOTHING, "set it to false: AWQ has no act-order"),
        "pack_dtype": _Field((None, "int32"), "pack it in int32"),
        "method": _Field((None, "awq"), "use a checkpoint of one method"),
    },
    "gptq": {
        "bits": _Field((2, 4, 8), "use a 2-bit, 4-bit or 8-bit checkpoint"),
        "checkpoint_format": _Field((None, "gptq", "gptq_v2"), "save it as gptq, with GPTQModel"),
        "format": _Field((None, "gptq", "gptq_v2"), "save it as gptq, with GPTQModel"),
        "is_marlin_format": _Field(_NOTHING, "save it as gptq, with GPTQModel"),
        "pack_dtype": _Field((None, "int32"), "pack it in int32"),
        "method": _Field((None, "gptq"), "use a checkpoint of one method"),
        "rotation": _Field(_NOTHING, "use a checkpoint without rotations"),
        "adapter": _Field(_NOTHING, "merge the adapter first"),
        "desc_act": _Field((None, True, False), "write true or false"),
        "sym": _Field((None, True, False), "write true or false"),
    },
    "mxfp4": {},
    "bitsandbytes": {
        "llm_int8_has_fp16_weight": _Field(_NOTHING, "save the 8-bit weights"),
        "bnb_4bit_quant_type": _Field((None, "nf4", "fp4"), "quantize to nf4"),
    },
    "gguf": {},  # `nanoserve.checkpoint.gguf.config` writes no other fields
}
# Fields without effect: how the file was made, which kernel its authors used, or which modules are
# not quantized, which follows from the stored tensors.
_OF_GPTQ = {
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "dynamic",
    "exllama_config", "group_size", "lm_head", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "offload_to_disk", "pad_token_id", "quantizer",
    "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
}  # fmt: skip
_HARMLESS: dict[str, set[str]] = {
    "compressed-tensors": {
        "config_groups", "format", "global_compression_ratio", "ignore", "version",
    },
    "fp8": {"weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"},
    "awq": {
        *_OF_GPTQ, "zero_point", "sym", "modules_to_not_convert", "do_fuse", "modules_to_fuse",
        "fuse_max_seq_len",
    },
    "gptq": _OF_GPTQ,
    "mxfp4": {"modules_to_not_convert", "dequantize"},
    "bitsandbytes": {
        "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "llm_int8_threshold",
        "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "modules_to_not_convert",
    },
    "gguf": set(),
}  # fmt: skip


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return `quant_method`, which old files of bitsandbytes do not have."""
    if config.get("quant_method") is None and (
        "load_in_4bit" in config or "load_in_8bit" in config
    ):
        return "bitsandbytes"
    return config.get("quant_method")


def check_quantization_config(config: Any) -> dict[str, Any]:
    """Return the config as a dict.

    Raises `ValueError`, with the field and advice, for a setting that is not supported.
    """
    require(
        isinstance(config, Mapping),
        f"quantization_config={shown(config)} is not supported: it must be an object",
    )
    method = method_of(config)
    require(
        isinstance(method, str) and method in FORMATS.names(),
        f"quantization_config: quant_method={shown(method)} is not supported: use the "
        f"unquantized model, or one in {', '.join(FORMATS.names())}",
    )
    if method not in _FIELDS:
        return dict(config)
    for name in {**_FIELDS[method], **config}:
        _check_field(method, name, config.get(name))
    if method == "compressed-tensors":
        from nanoserve.checkpoint.formats.schemes import read_schemes

        read_schemes(config)
    elif method == "fp8":
        _check_blocks(config.get("weight_block_size"))
    elif method in ("awq", "gptq"):
        _check_groups(config)
    elif method == "bitsandbytes":
        is_one = bool(config.get("load_in_4bit")) != bool(config.get("load_in_8bit"))
        rule = "exactly one of load_in_4bit and load_in_8bit must be true"
        require(is_one, f"quantization_config: {rule}")
    return dict(config)


def _check_field(method: str, name: str, value: Any) -> None:
    problem = f"quantization_config: {shown(name)}={shown(value)} is not supported in {method}"
    field = _FIELDS[method].get(name)
    if field is not None:
        require(_is_among(value, field.allowed), f"{problem}: {field.instead}")
    elif name != "quant_method" and name not in _HARMLESS[method]:
        require(
            _is_among(value, _NOTHING),
            f"{problem}; if it does not affect the result, delete it from config.json",
        )


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return True if `allowed` has this value with the same type: 1 is not True, and 4.0 not 4."""
    return any(type(value) is type(one) and value == one for one in allowed)


def _check_blocks(block: Any) -> None:
    is_pair = isinstance(block, list) and len(block) == 2
    is_good = is_pair and all(is_int(size) and 0 < size < 2**18 for size in block)
    rule = f"quantization_config: weight_block_size={shown(block)} must be two positive sizes"
    require(block is None or is_good, rule)


def _check_groups(config: Mapping[str, Any]) -> None:
    size = config.get("group_size", 128)
    require(
        is_int(size) and (size == -1 or 0 < size < 2**18),
        f"quantization_config: group_size={shown(size)} must be a size, or -1 (a whole row)",
    )
    labels = [config.get(name) for name in ("checkpoint_format", "format")]
    is_clear = None in labels or labels[0] == labels[1]
    both = f"quantization_config: checkpoint_format={labels[0]!r} and format={labels[1]!r}"
    require(is_clear, f"{both} contradict each other: delete the wrong entry")
    overrides = config.get("dynamic") or {}
    is_object = isinstance(overrides, Mapping)
    changed = [key for key in overrides if not key.startswith("-:")] if is_object else overrides
    require(
        not changed,
        f"quantization_config: dynamic={shown(changed)} (modules with their own bits or groups) is "
        "not supported: use a checkpoint with one scheme",
    )
