"""The options that a model with recurrent states supports.

Such a state belongs to all tokens up to the last one that was computed. It cannot be taken from the
blocks of a prefix, and it cannot be set back when draft tokens are rejected. Options that are on by
default are turned off, with a message; others are rejected.
"""

import logging
from dataclasses import replace
from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import require

logger = logging.getLogger(__name__)


def supported_options(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Return the options with which the model runs: the same, unless it has recurrent states.

    Raises `ValueError`, with the option and what to do, for one that such a model does not support.
    """
    if not model_config.recurrent_layers:
        return config
    structured, events = config.structured_outputs_config, config.kv_events_config
    drafts = config.speculative_config
    unsupported = {
        "speculative_config": drafts is not None and "a state cannot be set back",
        "structured_outputs_config with jump_forward=True": structured is not None
        and structured.jump_forward
        and "its tokens are draft tokens, and a state cannot be set back",
        "kv_events_config with enable_kv_cache_events=True": events is not None
        and events.is_active
        and "there is no prefix cache, whose changes the events report",
        "kv_offloading_size": config.kv_offloading_size is not None
        and "there is no prefix cache, whose evicted blocks it keeps",
        "kv_offloading_path or kv_transfer_config": config.kv_connector is not None
        and "there is no prefix cache, whose blocks it stores",
        "batch_invariant=True": config.batch_invariant
        and "the bits of a state depend on how a prompt is cut into steps",
        "pipeline_parallel_size": config.pipeline_parallel_size > 1
        and "states of pipeline stages have not been tested; use tensor_parallel_size",
        "capture_sampling=True": config.capture_sampling and "its steps are not captured in graphs",
        "capture_mixed_steps=True": bool(config.capture_mixed_steps)
        and "its steps are not captured in graphs",
    }
    found = [f"{name} ({reason})" for name, reason in unsupported.items() if reason]
    require(
        not found,
        f"{model_config.checkpoint_architecture} has recurrent states, which do not support "
        f"{'; '.join(found)}: remove it",
    )
    changes: dict[str, Any] = {}
    if config.enable_prefix_caching:
        changes["enable_prefix_caching"] = False
    if config.device == "cuda" and not config.enforce_eager:
        changes["enforce_eager"] = True
    if changes:
        names = ", ".join(f"{name}={value}" for name, value in changes.items())
        logger.warning(
            f"{model_config.checkpoint_architecture} has recurrent states, hence {names}"
        )
    return replace(config, **changes)
