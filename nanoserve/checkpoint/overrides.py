"""What a user says in the place of a checkpoint's own files."""

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checks import require
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams


def read_with_overrides(
    folder: Path, config: EngineConfig, supported: Collection[str]
) -> ModelConfig:
    """`ModelConfig.from_checkpoint` with `hf_overrides`, `generation_config` and
    `override_generation_config` of `config`.

    Raises `ValueError` for a name that is no sampling parameter, besides what that raises.
    """
    overrides = config.hf_overrides or {}
    read = ModelConfig.from_checkpoint(folder, config.dtype, supported, overrides)
    chosen = dict(config.override_generation_config or {})
    if "max_new_tokens" in chosen:  # as generation_config.json calls it
        chosen["max_tokens"] = chosen.pop("max_new_tokens")
    unknown = sorted(chosen.keys() - {field.name for field in fields(SamplingParams)})
    require(not unknown, f"override_generation_config: {unknown} are no sampling parameters")
    recommended = {} if config.generation_config == "vllm" else read.default_sampling
    return replace(read, default_sampling={**recommended, **chosen})
