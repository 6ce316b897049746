"""Adds pooling to an engine: the collectors that finish its requests."""

from functools import partial
from typing import TYPE_CHECKING

from nanoserve.engine.extension import PreparedFeature
from nanoserve.features.pooling.collector import JOIN_OF, PoolingCollector
from nanoserve.features.pooling.heads import HEAD_OF
from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine


def prepare_pooling(config: "EngineConfig", model_config: "ModelConfig") -> PreparedFeature:
    """Return the feature of an engine that pools.

    Raises `ValueError`, before any weight is read, for options that only generating engines have.
    """
    unsupported = {
        "speculative_config": config.speculative_config is not None,
        "structured_outputs_config": config.structured_outputs_config is not None,
        "logits_processors": bool(config.logits_processors),
        "enable_return_routed_experts=True": config.enable_return_routed_experts,
        "capture_sampling=True": config.capture_sampling,
    }
    found = [name for name, is_set in unsupported.items() if is_set]
    require(not found, f"runner='pooling' samples no tokens: remove {', '.join(found)}")
    return PreparedFeature(partial(_add_collectors, activation=model_config.pooling.activation))


def _add_collectors(engine: "GuardedEngine", activation: str) -> None:
    for kind, join in JOIN_OF.items():
        collector = PoolingCollector(join, activation)
        engine.output_processor.collectors[HEAD_OF[kind]] = collector
