"""Apply the user's overrides to the settings in a checkpoint's files."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from nanoserve.checkpoint.config_json import ConfigFile
from nanoserve.checkpoint.model_config import ConfigFiles, ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.utils.checks import require, shown

# Entries that are read for every architecture, in addition to its own.
_ALWAYS = {
    *("architectures", "model_type", "dtype", "torch_dtype", "eos_token_id"),
    *("quantization_config", "rope_theta", "rope_parameters", "rope_scaling"),
    "partial_rotary_factor",
}


def config_with_overrides(
    files: ConfigFiles, config: EngineConfig, supported: Collection[str]
) -> ModelConfig:
    """Return `ModelConfig.from_files` with the overrides of `config`.

    They are `hf_overrides`, `generation_config` and `override_generation_config`.

    Raises `ValueError` for an entry that the architecture does not read, for a name that is not a
    sampling parameter, and for the same reasons as `ModelConfig.from_files`.
    """
    changed = files._replace(config=_changed(files.config, config.hf_overrides or {}))
    read = ModelConfig.from_files(changed, config.dtype, supported)
    return with_sampling_overrides(read, config)


def with_sampling_overrides(read: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Return `read` with the recommended sampling parameters that `config` chooses."""
    chosen = dict(config.override_generation_config or {})
    if "max_new_tokens" in chosen:  # as generation_config.json calls it
        chosen["max_tokens"] = chosen.pop("max_new_tokens")
    unknown = sorted(chosen.keys() - {field.name for field in fields(SamplingParams)})
    require(not unknown, f"override_generation_config: {unknown} are not sampling parameters")
    recommended = {} if config.generation_config == "vllm" else read.default_sampling
    return replace(read, default_sampling={**recommended, **chosen})


def _changed(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**raw, **overrides}
    file = ConfigFile(changed)
    known = {*file.implied, *_ALWAYS}
    for name in overrides:
        near = get_close_matches(str(name), sorted(known), n=2)
        advice = f"did you mean {' or '.join(near)}?" if near else f"it reads {sorted(known)}"
        require(
            name in known, f"hf_overrides: {file.architecture} does not read {name!r}: {advice}"
        )
    if not overrides.get("rope_parameters") and overrides.keys() & {"rope_theta", "rope_scaling"}:
        _change_rope(changed, raw, overrides)
    return changed


def _change_rope(
    changed: dict[str, Any], raw: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
    """Apply an override of `rope_theta` or `rope_scaling` to the object that has theta.

    A file has theta in `rope_parameters`, in `rope_scaling` or next to them.
    """
    own = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    settings = overrides.get("rope_scaling") or own
    is_flat = isinstance(settings, Mapping) and not any(
        isinstance(value, Mapping) for value in own.values()
    )
    require(
        is_flat,
        f"hf_overrides: rope_theta and rope_scaling={shown(overrides.get('rope_scaling'))} cannot "
        f"change rope_parameters={shown(own)}: override rope_parameters instead",
    )
    theta = own.get("rope_theta", raw.get("rope_theta"))
    theta = settings.get("rope_theta", theta) if settings is not own else theta
    changed.pop("rope_parameters", None)
    changed["rope_scaling"] = {**settings, "rope_theta": overrides.get("rope_theta", theta)}
    if changed["rope_scaling"]["rope_theta"] is None:  # the architecture has a default
        del changed["rope_scaling"]["rope_theta"]
