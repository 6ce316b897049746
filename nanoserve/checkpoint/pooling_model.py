"""The `ModelConfig` of a model that pools: embeddings of a text, or scores of its classes.

A decoder becomes such a model if the hidden states of its last layer are used as they are, or pass
through a linear layer, instead of an LM head. Its `config.json` names

    Qwen3ForCausalLM                    the LM head, if there is one, is not read
    Qwen3Model                          a checkpoint of the layers alone
    Qwen3ForSequenceClassification      `score.weight` has a row for each class

Neither torch nor transformers is imported.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from nanoserve.checkpoint.config_json import architecture_of
from nanoserve.checkpoint.model_config import FOR_POOLING, ConfigFiles, ModelConfig
from nanoserve.checkpoint.overrides import config_with_overrides
from nanoserve.checkpoint.pooling_config import CLASSIFIER, OWN_ENTRIES, PoolingConfig
from nanoserve.checkpoint.unsupported_architectures import describe_unpooled
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import require

_CAUSAL = "ForCausalLM"
# Gemma3TextModel: the text part of a family that also has images.
_BASE = re.compile(rf"(\w+?)(?:Text)?(?:Model|{CLASSIFIER})")


def pooling_model_config(
    files: ConfigFiles, folder: Path | None, config: EngineConfig, supported: Collection[str]
) -> ModelConfig:
    """Return the configuration of a model that pools.

    folder: of the checkpoint; None for a GGUF file. Raises `ValueError` for an architecture that is
    not a decoder of nanoserve's own, by name for bidirectional encoders, and for settings that
    would change the result and are not supported.
    """
    overrides = config.hf_overrides or {}
    raw = {**files.config, **overrides}
    name = architecture_of(raw)
    decoder = decoder_of(name)
    require(
        files.multimodal_architecture is None,
        f"{files.multimodal_architecture} is multimodal, which runner='pooling' does not support",
    )
    reason = describe_unpooled(raw, decoder, supported, config.model_impl)
    require(reason is None, f"architecture {name!r:.99} cannot be used for pooling: {reason}")
    pooling = PoolingConfig.of(name, decoder, raw, folder, config.pooler_config or {})
    theirs = {name: value for name, value in overrides.items() if name not in OWN_ENTRIES}
    theirs.pop("architectures", None)
    as_decoder = files._replace(config={**files.config, "architectures": [decoder]})
    read = config_with_overrides(as_decoder, replace(config, hf_overrides=theirs), supported)
    return replace(read, architecture=FOR_POOLING, pooling=pooling)


def decoder_of(name: str) -> str:
    """Return the name that an architecture's decoder has with an LM head."""
    found = _BASE.fullmatch(name)
    return name if found is None else found[1] + _CAUSAL
