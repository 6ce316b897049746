"""Read and validate the parameters of each type of rotary position embedding.

In this module, a `RopeConfig` is any object with its fields. `nanoserve.models.layers.rope_scaling`
implements the types. Checkpoints of the default type need this module only to report errors.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from nanoserve.utils.checks import (
    check_bool,
    check_int,
    check_list,
    check_number,
    is_int,
    is_number,
    require,
    shown,
)

PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "short_factor",
        "long_factor",
        "attention_factor",
    ),
}
_OLD_NAMES = {"su": "longrope"}
# Entries that transformers does not read, at values without effect: the values in the code
# published with the first YaRN models, and parameters that the type does not use.
_NO_EFFECT: dict[str, Callable[[Any], bool]] = {
    "finetuned": lambda value: isinstance(value, bool),
    "attn_factor": lambda value: is_number(value) and value == 1,
    "extrapolation_factor": lambda value: is_number(value) and value == 1,
}
_NO_EFFECT_OF_TYPE: dict[str, dict[str, Callable[[Any], bool]]] = {
    "default": {"factor": lambda value: is_number(value) and value == 1},
    "linear": {"original_max_position_embeddings": lambda value: is_int(value) and value > 0},
}
_OPTIONAL = {"attention_factor", "mscale", "mscale_all_dim"}
# Smallest normal float32: tables are computed in float32, and smaller divisors would be 0.
_SMALLEST = 2.0**-126


def check_parameters(config: Any) -> None:
    """Raise `ValueError` for an unsupported type, and for parameters that do not fit it.

    Such parameters are missing, unknown to the type, or contradict each other.
    """
    require(
        config.rope_type in list(PARAMETERS),
        f"rope_type={shown(config.rope_type)} is not supported; supported are {list(PARAMETERS)}",
    )
    for field in fields(config)[2:]:
        value = getattr(config, field.name)
        if field.name == "partial_rotary_factor":  # of all types
            check_number(field.name, value, 0, 1, excludes_low=True)
            continue
        if field.name in PARAMETERS[config.rope_type]:
            _check_parameter(config, field.name, value)
        else:
            _check(config, value == field.default, field.name, "is not a parameter of this type")
    _check_pairs(config)


def _check(config: Any, condition: bool, name: str, rule: str) -> None:
    value = getattr(config, name)
    require(condition, f"rope_type={config.rope_type!r}: {name}={shown(value)} {rule}")


def _check_parameter(config: Any, name: str, value: Any) -> None:
    label = f"rope_type={config.rope_type!r}: {name}"
    if value is None and name in _OPTIONAL:
        return
    if name == "original_max_position_embeddings":
        check_int(label, value, 2, 2**31 - 1)
    elif name == "truncate":
        check_bool(label, value)
    elif name in ("short_factor", "long_factor"):
        check_list(label, value, _is_positive, "positive numbers")
    elif name == "factor":
        check_number(label, value, 1)
    else:
        check_number(label, value, 0, excludes_low=True)
        require(value >= _SMALLEST, f"{label}={value!r} is 0 in float32")


def _check_pairs(config: Any) -> None:
    """Check the parameters that depend on each other."""
    if config.rope_type == "llama3":
        rule = f"must be above low_freq_factor={shown(config.low_freq_factor)}"
        _check(config, config.high_freq_factor > config.low_freq_factor, "high_freq_factor", rule)
    rule = f"must not be below beta_slow={shown(config.beta_slow)}"
    _check(config, config.beta_fast >= config.beta_slow, "beta_fast", rule)
    rule = f"and mscale_all_dim={shown(config.mscale_all_dim)} must be set together"
    _check(config, (config.mscale is None) == (config.mscale_all_dim is None), "mscale", rule)
    rule = f"and mscale={shown(config.mscale)} set the same factor: set only one"
    exclusive = config.attention_factor is None or config.mscale is None
    _check(config, exclusive, "attention_factor", rule)


def read_settings(
    raw: Mapping[str, Any], settings: dict[str, Any], max_position_embeddings: int
) -> dict[str, Any]:
    """Return the fields of a `RopeConfig`; arguments are as in `RopeConfig.from_hf`."""
    nested = sorted(name for name, value in settings.items() if isinstance(value, dict))
    require(
        not nested,
        f"config.json: RoPE parameters per type of layer, {shown(nested)}, are not supported",
    )
    old_name = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", old_name)
    rope_type = rope_type if isinstance(rope_type, str) else shown(rope_type)
    rope_type = _OLD_NAMES.get(rope_type, rope_type)
    theta = settings.pop("rope_theta", raw.get("rope_theta"))
    share = settings.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rope_type not in PARAMETERS:
        settings = {}  # so that the error is about the type, not about its parameters
    harmless = _NO_EFFECT | _NO_EFFECT_OF_TYPE.get(rope_type, {})
    settings = {
        name: value
        for name, value in settings.items()
        if not (name in harmless and harmless[name](value))
    }
    _reject_unknown(rope_type, settings)
    _add_implied(rope_type, settings, raw, max_position_embeddings)
    settings["partial_rotary_factor"] = 1.0 if share is None else share
    return {"rope_type": rope_type, "theta": theta, **settings}


def check_head_dim(config: Any, head_dim: int) -> None:
    """Raise `ValueError` unless longrope's factors have `head_dim` / 2 numbers."""
    for name in ("short_factor", "long_factor") if config.rope_type == "longrope" else ():
        count = len(getattr(config, name))
        rule = f"has {count} numbers; head_dim={head_dim} needs {head_dim // 2}"
        _check(config, count == head_dim // 2, name, rule)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value >= _SMALLEST


def reject_partial(share: Any) -> None:
    """Raise `ValueError` unless the whole of each head is rotated."""
    require(
        is_number(share) and share == 1,
        f"partial_rotary_factor={shown(share)} is not supported; it must be 1",
    )


def _reject_unknown(rope_type: str, settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` for entries that may change the frequencies or attention in other code."""
    known = set(PARAMETERS.get(rope_type, ()))
    if rope_type == "dynamic":  # it is relative to max_position_embeddings, not to an own entry
        known.remove("original_max_position_embeddings")
    unknown = {name: settings[name] for name in sorted(settings.keys() - known)}
    require(
        not unknown,
        f"rope_type={shown(rope_type)}: {shown(unknown)} is not supported; parameters are "
        f"{sorted(known)}",
    )


def _add_implied(
    rope_type: str, settings: dict[str, Any], raw: Mapping[str, Any], max_position_embeddings: int
) -> None:
    """Add to `settings` what transformers takes from other entries of the file."""
    for name in ("short_factor", "long_factor"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    if "original_max_position_embeddings" not in PARAMETERS.get(rope_type, ()):
        return
    original = settings.get("original_max_position_embeddings", max_position_embeddings)
    if rope_type != "dynamic":  # Phi-3 has it next to the object, where it takes precedence
        original = raw.get("original_max_position_embeddings") or original
    settings["original_max_position_embeddings"] = original
    if rope_type == "longrope":
        is_size = is_number(original) and original > 0
        factor = max(1.0, max_position_embeddings / original) if is_size else 1.0
        settings.setdefault("factor", factor)
