"""Layers of different types: with or without a sliding window, a rotary embedding, or another one.

Files that could describe such layers, and do not rule them out, are read here too.
"""

from collections.abc import Mapping
from typing import Any

from nanoserve.checkpoint.config_json import ConfigFile
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.utils.checks import check_int, require, shown


def read_layer_types(file: ConfigFile, head_dim: int, max_positions: int) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` that differ between such layers."""
    if file.has("rope_local_base_freq"):
        rope, local_rope = _ropes_by_type(file, head_dim, max_positions)
    else:
        rope, local_rope = file.rope(head_dim, max_positions), None
    windows = _sliding_windows(file)
    return {"rope": rope, "local_rope": local_rope, "sliding_windows": windows}


def layers_without_rope(file: ConfigFile) -> frozenset[int]:
    """Return the indices of SmolLM3's layers without RoPE.

    In files, `no_rope_layers` has a 1 for each layer with RoPE, and a 0 for each layer without it.
    """
    num_layers, flags = file.size("num_hidden_layers"), file.get("no_rope_layers")
    if flags is None:
        every = file.size("no_rope_layer_interval")
        return frozenset(range(every - 1, num_layers, every))
    require(
        isinstance(flags, list) and len(flags) >= num_layers and all(f in (0, 1) for f in flags),
        f"no_rope_layers={shown(flags)} must be a list of 0 and 1, one for each of the "
        f"num_hidden_layers={num_layers}",
    )
    return frozenset(i for i in range(num_layers) if not flags[i])


def _sliding_windows(file: ConfigFile) -> tuple[int | None, ...]:
    """Return each layer's window from `layer_types`, or from the rule of the architecture."""
    num_layers, window = file.size("num_hidden_layers"), file.get("sliding_window")
    # The family of a user's own class is unknown: Mistral's windows need no flag, Qwen's do.
    is_known = file.implied.get("use_sliding_window", False) is not None
    require(
        is_known or window is None or file.has("use_sliding_window") or file.has("layer_types"),
        f"config.json: sliding_window={shown(window)} without use_sliding_window: set that to true "
        f"or false, since a registered class such as {file.architecture} has no defaults",
    )
    if "use_sliding_window" in file.implied and not file.flag("use_sliding_window"):
        window = None
    if window is not None or file.architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        check_int("sliding_window", window, 1, 2**31 - 1)  # kernels count in 32 bits
    types = file.get("layer_types")
    if types is None:
        return tuple(window if _is_windowed(file, i) else None for i in range(num_layers))
    known: tuple[str, ...] = ("full_attention", "sliding_attention")
    if file.has("linear_num_value_heads"):
        known += ("linear_attention",)
    require(
        isinstance(types, list) and all(name in known for name in types),
        f"layer_types={shown(types)} must be a list of {known}: other types are not supported",
    )
    require(
        len(types) == num_layers and (window is not None or "sliding_attention" not in types),
        f"layer_types={shown(types)} does not match num_hidden_layers={num_layers}, "
        f"sliding_window={shown(file.get('sliding_window'))} and "
        f"use_sliding_window={shown(file.get('use_sliding_window'))}",
    )
    return tuple(window if name == "sliding_attention" else None for name in types)


def _is_windowed(file: ConfigFile, layer: int) -> bool:
    if file.architecture == "Gemma2ForCausalLM":
        return layer % 2 == 0
    if file.has("sliding_window_pattern"):  # Gemma 3: every sixth layer has no window
        return (layer + 1) % file.size("sliding_window_pattern") != 0
    if file.has("no_rope_layer_interval"):  # SmolLM3
        return layer in layers_without_rope(file)
    if file.get("max_window_layers") is not None:
        check_int("max_window_layers", file.get("max_window_layers"), 0)
        if file.architecture == "Qwen2MoeForCausalLM":
            return layer % 2 == 0 and layer < file.get("max_window_layers")
        return layer >= file.get("max_window_layers")
    return True


def _ropes_by_type(
    file: ConfigFile, head_dim: int, max_positions: int
) -> tuple[RopeConfig, RopeConfig]:
    """Return Gemma 3's two RoPEs, for full-attention layers and for layers with a window.

    In transformers 4, layers with a window have no object of their own.
    """
    by_type, scaling = _object(file.raw, "rope_parameters"), _object(file.raw, "rope_scaling")
    require(
        "type" not in scaling or "rope_type" in scaling,
        f"config.json: rope_scaling={shown(scaling)} takes effect in transformers 4, but not in 5, "
        f"which requires the entry 'rope_type'; rename 'type' to 'rope_type'",
    )
    full = {"rope_theta": file.get("rope_theta")} | _object(by_type, "full_attention") | scaling
    local = {"rope_theta": file.get("rope_local_base_freq")}
    local |= _object(by_type, "sliding_attention")
    share = file.raw.get("partial_rotary_factor")
    ropes = [{"rope_parameters": s, "partial_rotary_factor": share} for s in (full, local)]
    of_full, of_local = (RopeConfig.from_hf(rope, head_dim, max_positions) for rope in ropes)
    return of_full, of_local


def _object(parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name) or {}
    require(isinstance(value, dict), f"config.json: {name}={shown(value)} must be an object")
    return value
